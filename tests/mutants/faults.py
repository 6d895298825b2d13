"""The planted faults: what a hand might get wrong, one line each, and which tests must notice.

A fault is a piece of a file and what stands there instead. The piece must occur exactly once, so that a
change of the library that moves it is noticed. Name the tests that ought to see it, the quickest first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: What is wrong, in words.
        file: Where, from the package's folder.
        old: What stands there.
        new: What is put in its place.
        tests: Arguments for pytest: the tests that must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


ENGINE = "tests/backends/test_every_algorithm.py -k direct-3"
CONTRACT = "tests/backends/test_conformance.py -k ref-threads-3"
FAULTS = "tests/backends/test_faults.py"
LENT = "tests/backends/test_registered.py"
SCHEDULES = "tests/schedules"

PLANTED = (
    Fault("the opening does not wait for the other ranks", "backends/executor.py",
          "if not token.acquire(False):\n                    link.wait(", "if False:\n                    link.wait(",
          "tests/backends/test_every_algorithm.py -k barrier"),
    Fault("an average is not divided", "backends/planner.py",
          'self._link.size if name == "avg" else 0', "0", CONTRACT),
    Fault("an average is divided once more", "backends/planner.py",
          'self._link.size if name == "avg" else 0', 'self._link.size**2 if name == "avg" else 0', CONTRACT),
    Fault("the roots of schedules are all rank 0", "backends/planner.py",
          'getattr(call, "root", 0), hosts=hosts)', "0, hosts=hosts)", CONTRACT),
    Fault("the last chunk of a tensor is lost", "backends/operands.py",
          "return max(0, min(self.stride, self.blocks[0] - index * self.stride))",
          "return self.stride if (index + 1) * self.stride <= self.blocks[0] else 0", CONTRACT),
    Fault("the last window of a tensor is lost", "backends/plan.py",
          "return tuple(range(0, self.sizes.largest, self.window)) or (0,)",
          "return tuple(range(0, self.sizes.largest - self.window + 1, self.window)) or (0,)", CONTRACT),
    Fault("ranks don't compare their calls", "backends/executor.py",
          "if theirs.count(mine) < len(theirs):", "if False:",
          f"{FAULTS} -k mismatch"),
    Fault("a mismatch ends the group", "backends/executor.py",
          "if isinstance(error, (MismatchError, OutOfTurnError)):", "if isinstance(error, OutOfTurnError):",
          f"{FAULTS} -k mismatch"),
    Fault("a stage is laid out again while it is read", "backends/executor.py",
          "turns.make_room(turns.number, doing)\n", "pass\n",
          "tests/backends/test_stage.py"),
    Fault("readers of a round are forgotten", "backends/turns.py",
          "while self.readers and self.readers[0][0] <=", "while self.readers and self.readers[0][0] ==",
          "tests/backends/test_stage.py"),
    Fault("a call that fails in its opening takes of the ring", "backends/executor.py",
          "turns.head = head\n            self._failed(plan, error)", "self._failed(plan, error)",
          "tests/backends/test_stage.py -k failed"),
    Fault("places on a ring overlap", "transports/layout.py",
          "return -(-place // taken) * taken % (self.turns * self.window)",
          "return place // taken * taken % (self.turns * self.window)", "tests/backends/test_stage.py -k overlap"),
    Fault("a refused message takes nothing of the mailbox", "transports/mailbox.py",
          "        self._begin_of(route)\n        self._put(_REPLY", "        self._put(_REPLY",
          "tests/transports/test_transports.py -k contract"),
    Fault("a lent tensor is given back while others work on it", "backends/executor.py",
          "step(tensors, 0)\n                hear_all()\n", "step(tensors, 0)\n", f"{LENT} -k overwritten"),
    Fault("a rank that does not lend is not waited for", "backends/executor.py",
          "prepared.staged(tensors, False)", "prepared.staged(tensors, True)", f"{LENT} -k one_rank_lends"),
    Fault("where freed memory lay is remembered", "backends/lent.py",
          "if changes != self._changes or len", "if len", f"{LENT} -k comes_and_goes"),
    Fault("outputs that others read are written", "backends/lent.py",
          "return at >= end or at + nbytes <= lent[0] or (at == own and alone)", "return True",
          f"{LENT} -k outputs_may_lie"),
    Fault("the child of a fork frees its parent's memory", "transports/registered.py",
          "self.arena is not None and self.arena.pid == os.getpid()", "self.arena is not None",
          "tests/transports/test_registered.py -k fork"),
    Fault("views of registered tensors begin where these do", "transports/registered.py",
          "region[0] + tensor.data_ptr() - address", "region[0]", "tests/transports/test_registered.py -k views"),
    Fault("the second operand of a fused step is the first", "backends/plan.py",
          "steps.combine(into, sources[0], sources[1], count, reduction)",
          "steps.combine(into, *sources[:1] * 2, count, reduction)",
          "tests/backends/test_every_algorithm.py -k direct"),
    Fault("a strided result is not copied back", "backends/staging.py",
          "tensor.detach().copy_(result, non_blocking=True)", "pass", CONTRACT),
    Fault("a call with a device's tensors does not wait for what is still done to them", "backends/staging.py",
          "        settle(tensors)\n        run(hosts", "        run(hosts", "tests/backends/test_staging.py"),
    Fault("a message from a device does not wait for what is still done to it", "backends/staging.py",
          "    settle((found,))\n    return host", "    return host", "tests/backends/test_staging.py -k messages"),
    Fault("a call on its way comes before what the caller's stream has begun", "backends/staging.py",
          "                stream.wait_event(event)\n", "", "tests/backends/test_staging.py"),
    Fault("after a call on another thread its results are not waited for", "backends/staging.py",
          "                entered.callback(stream.synchronize)\n", "", "tests/backends/test_staging.py"),
    Fault("a factor is forgotten", "groups/premultiplied.py",
          "if plain.itemsize == 1 else plain * factor", "if plain.itemsize == 1 else plain.clone()", CONTRACT),
    Fault("a sum of truth values on Gloo is their number", "backends/torch_operands.py",
          '{"sum": "max", "product": "min"}', "{}", "tests/backends/test_conformance.py -k gloo-processes-3"),
    Fault("large numbers without a sign are negative on Gloo", "backends/torch_operands.py",
          "tensor.dtype is torch.uint64 and", "False and", "tests/backends/test_types.py -k without_a_sign"),
    Fault("maximum is minimum", "backends/reductions.py",
          '"max": Reduction(_into(torch.maximum), torch.maximum)', '"max": Reduction(_into(torch.minimum), torch.max)',
          CONTRACT),
    Fault("tags are ignored", "backends/point_to_point.py",
          "return self.call.src in (None, source) and self.call.tag == tag", "return self.call.src in (None, source)",
          "tests/backends/test_conformance.py -k ref-threads-2"),
    Fault("messages of any sender are taken", "backends/point_to_point.py",
          "return self.call.src in (None, source) and self.call.tag == tag", "return self.call.tag == tag",
          "tests/backends/test_messages.py"),
    Fault("a message of another size is taken", "backends/point_to_point.py",
          "if box.look()[1] == record.fingerprint:", "if True:", f"{FAULTS} -k wrong_size"),
    Fault("long messages lose their later windows", "transports/mailbox.py",
          "self._send_rest(route, begin, address, timeout)", "None", CONTRACT),
    Fault("a dead rank is not noticed", "transports/base.py",
          "if dead:", "if False:", f"{FAULTS} -k dead"),
    Fault("a rank that gave up is not noticed", "transports/base.py",
          "if gave_up:", "if False:", f"{FAULTS} -k ctrl_c"),
    Fault("a rank that has finished a call may not leave", "transports/base.py",
          "return self.lines[rank].done < self.line.announced", "return True",
          "tests/transports/test_transports.py"),
    Fault("waits have no deadline", "transports/base.py",
          "if trouble is None and monotonic() >= deadline:", "if False:", f"{FAULTS} -k deadline"),
    Fault("group ranks are taken for global ranks", "groups/group.py",
          "found = self._position.get(rank)", "found = rank if rank in self._position else None", CONTRACT),
    Fault("a group's ranks are not in ascending order", "groups/lifecycle.py",
          "return tuple(sorted(given) if in_order else given)", "return tuple(given)",
          "tests/groups/test_subgroups.py"),
    Fault("blocks of any size have their takers' sizes", "backends/operands.py",
          'self.pairs[rank][index] if buffer == "in"', 'self.pairs[index][rank] if buffer == "in"',
          "tests/groups/test_exchanges.py -k blocks_of_any_size"),
    Fault("an object that can't be pickled is an error on one rank", "groups/parcels.py",
          "return sorry(error, count)", "raise error", "tests/groups/test_objects.py -k cannot_be_pickled"),
    Fault("one missing rank is named, the others not", "debug/monitored.py",
          '",".join(absent) or _ALL_CAME', "absent[0] if absent else _ALL_CAME", "tests/groups/test_monitoring.py"),
    Fault("a joined work forgets that a part failed", "groups/joined.py",
          "self.finish() if error is None else self.fail(error)", "self.finish()",
          "tests/groups/test_exchanges.py -k joined"),
    Fault("tensors of one rank are summed where a mean is asked", "groups/tensor_lists.py",
          "return total / len(tensors) if word", "return total if word",
          "tests/groups/test_multigpu.py -k two_tensors"),
    Fault("the lines of a mesh run across", "groups/mesh_lines.py",
          "ranks.movedim(dimension, -1)", "ranks.movedim(dimension, 0)", "tests/groups/test_mesh.py -k carry"),
    Fault("a broadcast of objects replaces the source's list", "groups/objects.py",
          "if own is None:", "if True:", "tests/groups/test_objects.py -k formulas"),
    Fault("sizes of an exchange may add up to anything", "groups/exchanges.py",
          "if sum(sizes) != length:", "if False:", "tests/groups/test_exchanges.py -k misuse"),
    Fault("sizes of an exchange that differ are no error", "backends/uneven.py",
          "if not torch.equal(given, wanted.t()):", "if False:",
          "tests/groups/test_exchanges.py -k sizes_that_pairs_see_differently"),
    Fault("a wait in the store does not look for trouble", "stores/watched.py",
          "trouble = self._trouble()", "trouble = None", f"{FAULTS} -k waits_in_the_store"),
    Fault("a late rank passes a barrier that failed", "debug/monitored.py",
          "if verdict != _ALL_CAME:", "if verdict != _ALL_CAME and str(rank) not in verdict:",
          "tests/groups/test_monitoring.py -k late"),
    Fault("a sync call overtakes queued ones", "backends/progress.py",
          "return self._queued == 0 and self._running.acquire(False)", "return self._running.acquire(False)",
          "tests/backends/test_async.py"),
    Fault("callbacks run on the progress thread", "backends/ref.py",
          "self._callbacks.runner(), ", "lambda job: job(), ",
          "tests/backends/test_async.py"),
    Fault("calls of callbacks are numbered like the program's", "numbers.py",
          "return (next(self._program), 0) if scope is None else scope.next(self._group)",
          "return (next(self._program), 0)", "tests/backends/test_async.py -k callbacks"),
    Fault("callbacks that are late have no scope", "numbers.py",
          "super().add_done_callback(lambda _: self._within(lambda: callback(self)))",
          "super().add_done_callback(lambda _: callback(self))", "tests/backends/test_async.py -k callbacks"),
    Fault("the largest number goes first", "backends/executor.py",
          "OutOfTurnError(min(numbers))", "OutOfTurnError(max(numbers))", "tests/backends/test_async.py -k callbacks"),
    Fault("frames forget their last range", "transports/mesh.py",
          "for begin, size in ranges)])\n", "for begin, size in ranges[:-1])])\n",
          "tests/transports/test_transports.py -k tcp"),
    Fault("a peer may write anywhere", "transports/mesh.py",
          "inside(frame.ranges, allowed)", "allowed.clear()", "tests/transports"),
    Fault("ranks are strangers to one another's scheduler", "launcher/worker.py",
          "process_group=0", "start_new_session=True", "tests/launcher/test_terminal.py"),
    Fault("a terminal stops the rank that reads it", "launcher/worker.py",
          "fcntl.ioctl(terminal, termios.TIOCNOTTY)", "fcntl.fcntl(terminal, fcntl.F_GETFD)",
          "tests/launcher/test_terminal.py"),
    Fault("the choice for large reductions is the one for small ones", "schedules/choose.py",
          '((ONE_ROUND, "direct"), (float("inf"), "two_shot"))', '((ONE_ROUND, "two_shot"), (float("inf"), "direct"))',
          "tests/schedules/test_choose.py -k few_rounds"),
    Fault("the choice for large exchanges is the one for small ones", "schedules/choose.py",
          '((2 * MIB, "direct"), (float("inf"), "pairwise"))', '((2 * MIB, "pairwise"), (float("inf"), "direct"))',
          "tests/schedules/test_choose.py -k exchange"),
    Fault("threads are all one rank", "groups/world.py",
          "return _of_context.get() or _of_process", "return _of_process", ENGINE),
)  # fmt: skip
