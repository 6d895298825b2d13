"""`ref` inside torch: a ProcessGroup of torch's whose every method is one of our calls, handed to the backend.

torch's DDP, DTensor, FSDP2, functional collectives and compiled functions call these methods, from Python and from
C++, under the names that torch gives them (in 2.13; older names stand beside). A method checks that the tensors fit,
reads every field of torch's options, and enters at `Ref.submit`. An option that we can't honour is an error: a
reduction that is silently another one gives gradients that look right and are not.

C++ keeps no reference to what is made here: torch's table of groups keeps the group, callers keep their Works.
How torch learns that there is a `ref` is in `_autoload`. Don't add collectives: this file only translates.
"""

# torch's stubs leave out some of its names, and give each collective several signatures.
# mypy: disable-error-code="attr-defined, override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame as compiler
from torch.distributed import distributed_c10d as options

from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.into_torch_group import Hosted, Request
from torchdist_ref.backends.into_torch_options import limit, only, reduction
from torchdist_ref.backends.into_torch_work import RefWork
from torchdist_ref.backends.ref import Ref
from torchdist_ref.backends.torch_stores import StoreFromTorch
from torchdist_ref.calls import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Gather,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
)
from torchdist_ref.errors import adopt_torch

Tensors = Sequence[Tensor]
Lists = Sequence[Sequence[Tensor]]
adopt_torch()


def create(made_by_torch: Any) -> RefProcessGroup:
    """What torch calls, with its options, on each member of a new group."""
    o = made_by_torch
    members = tuple(o.global_ranks_in_group) or tuple(range(o.group_size))
    store = StoreFromTorch(o.store, o.timeout)
    name = "world" if not o.global_ranks_in_group else f"group {o.group_id}"
    membership = Membership(store, o.group_rank, members, name, o.timeout.total_seconds())
    return RefProcessGroup(Ref(membership), members)


class RefProcessGroup(Hosted):
    """One group of torch's on the backend `ref`: torch's collectives, in the order of `calls`."""

    def allreduce(self, tensors: Tensors, opts: Any = None) -> RefWork:
        opts = opts or options.AllreduceOptions()
        tensor, word = only("all_reduce", "tensors", tensors), reduction("all_reduce", opts)
        if tensor.layout is torch.sparse_coo and word == "sum":
            return self._sum_sparse(tensor, limit(opts))
        return self._submit(opts, (AllReduce(word), (tensor,), (tensor,)))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> RefWork:
        opts = opts or options.AllreduceCoalescedOptions()
        call = AllReduce(reduction("all_reduce_coalesced", opts))
        return self._submit(opts, *((call, (tensor,), (tensor,)) for tensor in tensors))

    def reduce(self, tensors: Tensors, opts: Any = None) -> RefWork:
        opts = opts or options.ReduceOptions()
        tensor = only("reduce", "tensors", tensors)
        call = Reduce(self._root("reduce", opts), reduction("reduce", opts))
        return self._submit(opts, (call, (tensor,), (tensor,)))

    def broadcast(self, tensors: Tensors, opts: Any = None) -> RefWork:
        opts = opts or options.BroadcastOptions()
        tensor = only("broadcast", "tensors", tensors)
        return self._submit(opts, (Broadcast(self._root("broadcast", opts)), (tensor,), (tensor,)))

    def allgather(self, output_lists: Lists, inputs: Tensors, opts: Any = None) -> RefWork:
        opts = opts or options.AllgatherOptions()
        tensor, outputs = only("all_gather", "inputs", inputs), only("all_gather", "output_lists", output_lists)
        return self._submit(opts, self._gathering("all_gather", outputs, tensor))

    def allgather_coalesced(self, output_lists: Lists, inputs: Tensors, opts: Any = None) -> RefWork:
        opts = opts or options.AllgatherOptions()
        gatherings = (
            self._gathering("all_gather_coalesced", [outputs[i] for outputs in output_lists], tensor)
            for i, tensor in enumerate(inputs)
        )
        return self._submit(opts, *gatherings)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RefWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> RefWork:
        opts = opts or options.AllgatherOptions()
        op, pairs = "all_gather_single", zip(outputs, inputs, strict=True)
        return self._submit(opts, *(self._gathering(op, self._rows(op, "output", o), i) for o, i in pairs))

    def gather(self, output_lists: Lists, inputs: Tensors, opts: Any = None) -> RefWork:
        opts = opts or options.GatherOptions()
        tensor, call = only("gather", "inputs", inputs), Gather(self._root("gather", opts))
        outputs = only("gather", "output_lists", output_lists) if call.root == self.rank() else ()
        if outputs:
            self._fit("gather", "output_lists", outputs, tensor)
        return self._submit(opts, (call, (tensor,), outputs))

    def scatter(self, outputs: Tensors, input_lists: Lists, opts: Any = None) -> RefWork:
        opts = opts or options.ScatterOptions()
        tensor, call = only("scatter", "outputs", outputs), Scatter(self._root("scatter", opts))
        inputs = only("scatter", "input_lists", input_lists) if call.root == self.rank() else ()
        if inputs:
            self._fit("scatter", "input_lists", inputs, tensor)
        return self._submit(opts, (call, inputs, (tensor,)))

    def reduce_scatter(self, outputs: Tensors, input_lists: Lists, opts: Any = None) -> RefWork:
        opts = opts or options.ReduceScatterOptions()
        op = "reduce_scatter"
        tensor, inputs = only(op, "outputs", outputs), only(op, "input_lists", input_lists)
        return self._submit(opts, self._scattering(op, tensor, inputs, opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> RefWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> RefWork:
        opts = opts or options.ReduceScatterOptions()
        op, pairs = "reduce_scatter_single", zip(outputs, inputs, strict=True)
        return self._submit(opts, *(self._scattering(op, o, self._rows(op, "input", i), opts) for o, i in pairs))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> RefWork:
        opts = opts or options.AllToAllOptions()
        self._fit("all_to_all", "outputs", outputs, inputs[self.rank()])
        self._fit("all_to_all", "inputs", inputs, outputs[self.rank()])
        return self._exchange(opts, outputs, inputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> RefWork:
        op = "all_to_all_single"
        outputs = output.split(list(output_splits)) if output_splits else self._rows(op, "output", output)
        inputs = input.split(list(input_splits)) if input_splits else self._rows(op, "input", input)
        return self.alltoall(outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> RefWork:
        # The options' device says on which device NCCL would run it; ranks on CPU meet in shared memory.
        return self._submit(opts or options.BarrierOptions(), (Barrier(), (), ()))

    def send(self, tensors: Tensors, dst: int, tag: int) -> RefWork:
        tensor = only("send", "tensors", tensors)
        return self._submit(None, (Send(dst, tag), (tensor,), ()))

    def recv(self, tensors: Tensors, src: int | None, tag: int) -> RefWork:
        tensor = only("recv", "tensors", tensors)
        return self._submit(None, (Recv(src, tag), (), (tensor,)))

    def recv_anysource(self, tensors: Tensors, tag: int) -> RefWork:
        return self.recv(tensors, None, tag)

    # The names of the same methods before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _gathering(self, op: str, outputs: Tensors, tensor: Tensor) -> Request:
        self._fit(op, "outputs", outputs, tensor)
        return AllGather(), (tensor,), outputs

    def _scattering(self, op: str, tensor: Tensor, inputs: Tensors, opts: Any) -> Request:
        self._fit(op, "inputs", inputs, tensor)
        return ReduceScatter(reduction(op, opts)), inputs, (tensor,)

    def _exchange(self, opts: Any, outputs: Tensors, inputs: Tensors) -> RefWork:
        """All to all with blocks of any sizes, since other ranks' may be of others than this one's."""
        return self._submit(opts, (AllToAll(uneven=True), list(inputs), list(outputs)))


def _hide_from_compilers(*kinds: type) -> None:
    """Have torch's compiler pass over methods, and over what they call.

    C++ calls them while compiled programs run, DDP's for one, and the compiler looks at every Python function that
    begins then. It refuses to look into groups of processes, and the program with them.
    """
    over = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
    for kind in kinds:
        for method in vars(kind).values():
            if isfunction(method):
                compiler.set_code_exec_strategy(method.__code__, over)


_hide_from_compilers(Hosted, RefProcessGroup, RefWork)
