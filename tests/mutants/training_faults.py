"""Planted faults of what stands beside the engine: stores, buckets, hooks, optimizers, functions with gradients.

The rules are those of `tests.mutants.faults`, which has the faults of calls and groups.
"""

from __future__ import annotations

from tests.mutants.faults import Fault

HOOKS = "algorithms/ddp_comm_hooks"
DEFAULT = "tests/algorithms/test_default_hooks.py"
POWER = "tests/algorithms/test_powersgd.py"
GRADIENTS = "tests/nn/test_functional.py"
LABORATORY = "tests/benchmark/test_hooks.py"

PLANTED = (
    Fault("a counter that is missing counts as one", "stores/table.py",
          'text = self.values.get(key, b"0")', 'text = self.values.get(key, b"1")', "tests/stores/test_hash.py"),
    Fault("compare_set takes any expectation for a missing key", "stores/table.py",
          "(current is None and not expected)", "current is None", "tests/stores/test_hash.py"),
    Fault("queues give the newest first", "stores/table.py",
          "value = queue.popleft()", "value = queue.pop()", "tests/stores/test_hash.py"),
    Fault("a deleted key stays in the file", "stores/file.py",
          'name = b"-" + key if value is None else key', "name = key", "tests/stores/test_file.py"),
    Fault("a prefix forgets to prefix what it waits for", "stores/prefix.py",
          'self._store.wait(self._keys("wait", keys),', "self._store.wait(keys,", "tests/stores/test_prefix.py"),
    Fault("buckets before the first backward run with the forward pass", "parallel/bucketing.py",
          "key=min, reverse=True)", "key=min)", "tests/parallel/test_bucketing.py"),
    Fault("a bucket closes one tensor late", "parallel/bucketing.py",
          "if box.size >= limits[", "if box.size > limits[", "tests/parallel/test_bucketing.py"),
    Fault("buckets launch as they fill, not in order", "parallel/reducer.py",
          "while self._launched < len(self.buckets) and not self.buckets[self._launched].waiting:\n"
          "            self._launch(self.buckets[self._launched])",
          "for bucket in [b for b in self.buckets if not b.waiting and b.started is None]:\n"
          "            self._launch(bucket)",
          "tests/parallel"),
    Fault("the last bucket is summed, not averaged", "parallel/in_place.py",
          "travelling.mul_(1.0 / divisor)", "travelling", "tests/parallel/test_in_place.py"),
    Fault("one rank alone decides that its hook need not see the last bucket", "parallel/in_place.py",
          "return bool(vote.item())", "return suits(exchange, options, parameters)",
          "tests/parallel/test_in_place.py -k hooks"),
    Fault("unused parameters are those that this rank did not use", "parallel/reducer.py",
          "groups.all_reduce(used, group=self.group)", "pass", "tests/parallel/test_modes.py"),
    Fault("gradients that travel in 16 bits are summed before they are divided", f"{HOOKS}/default_hooks.py",
          "small = peers.divided(bucket, rounded(bucket, dtype))", "small = rounded(bucket, dtype)", DEFAULT),
    Fault("the wrapper forgets to convert back", f"{HOOKS}/default_hooks.py",
          "return hook(state, bucket).then(lambda future: restored(bucket, buffer, future.value()))",
          "return hook(state, bucket)", DEFAULT),
    Fault("PowerSGD forgets its error", f"{HOOKS}/low_rank.py", "error[rows] -= out[rows]", "error.zero_()", POWER),
    Fault("PowerSGD's first factors are drawn in another order than torch's", f"{HOOKS}/low_rank.py",
          "matrices.setdefault((n, m), [])", "matrices.setdefault((start, m), [])", POWER),
    Fault("PowerSGD's vectors are summed, not averaged", f"{HOOKS}/powerSGD_hook.py",
          "_unload(first[: layout.rest_size].div_(world), out, layout)",
          "_unload(first[: layout.rest_size], out, layout)", POWER),
    Fault("PowerSGD's memory stays where it was when parameters change places", f"{HOOKS}/powerSGD_hook.py",
          "dict(zip(starts, numbers, strict=False))", "dict(zip(starts, range(len(numbers)), strict=False))", POWER),
    Fault("an optimizer behind a hook steps on gradients from before it", f"{HOOKS}/optimizer_overlap_hooks.py",
          "buffer.copy_(value.reshape(-1))", "pass", "tests/algorithms/test_optimizers_in_backward.py"),
    Fault("Gram and Schmidt forget the columns before", f"{HOOKS}/low_rank.py",
          "rest -= column * (column * rest).sum(0, keepdim=True)", "pass", POWER),
    Fault("the byte budget goes to the layer that loses least", f"{HOOKS}/layer_ranks.py",
          "return -layer.energies[rank] / layer.cost, place", "return layer.energies[rank] / layer.cost, place", POWER),
    Fault("levels are cut off, not rounded", f"{HOOKS}/quantization_hooks.py",
          "levels = torch.round(matrix / scale[:, None])", "levels = torch.trunc(matrix / scale[:, None])",
          "tests/algorithms"),
    Fault("local SGD goes on averaging over all ranks", f"{HOOKS}/post_localSGD_hook.py",
          "return average(Peers(state.subgroup, bucket), bucket)",
          "return average(Peers(state.process_group, bucket), bucket)", "tests/algorithms"),
    Fault("the gradient of a broadcast stays where it is", "nn/transposes.py",
          "return Reduce(self.group, self.root, groups.ReduceOp.SUM)", "return Broadcast(self.group, self.root)",
          GRADIENTS),
    Fault("the gradient of an average is a sum", "nn/transposes.py",
          "return Scaled(AllGather(self.group), 1 / self.group.size())", "return AllGather(self.group)", GRADIENTS),
    Fault("rows go back as they came", "nn/transposes.py",
          "return AllToAllSingle(self.group, self.come_back, self.shape, self.send, self.receive)",
          "return AllToAllSingle(self.group, self.come_back, self.shape, self.receive, self.send)", GRADIENTS),
    Fault("shards are given out smallest first", "optim/shards.py",
          "sorted(parameters, key=torch.Tensor.numel, reverse=True)", "sorted(parameters, key=torch.Tensor.numel)",
          "tests/optim"),
    Fault("the laboratory counts a gather as one rank's bytes", "benchmark/hooks_watch.py",
          "whole = max(sum(tensor.nbytes for tensor in side) for side in (inputs, outputs))",
          "whole = sum(tensor.nbytes for tensor in inputs)", f"{LABORATORY} -k gloo"),
    Fault("the laboratory takes one rank's gradients for the average", "benchmark/hooks_trainee.py",
          ".double().mean(0)", ".double()[0]", f"{LABORATORY} -k plain"),
    Fault("the laboratory's modelled link costs nothing", "benchmark/hooks_results.py",
          "one + link.seconds(self.sent_bytes)", "one", f"{LABORATORY} -k table"),
)  # fmt: skip
