"""Backend `fake`: one process acts as one rank of many, alone, and every call is recorded.

It is for tests of code that calls collectives: which calls it makes, in which order, at world size 512. Each call gives
the result as if every other rank had passed what this rank passed. So a sum is the tensor times the world size, an
average the tensor itself, and every block of a gather is this rank's. Tensors keep their values where only another rank
knows the result: a received message, or what another root scatters. No call waits.

Do not add communication here.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from torch import Tensor

from torchdist_ref.backends.base import Backend, Membership
from torchdist_ref.backends.observers import dispatched, profiled
from torchdist_ref.backends.operands import flat_operands, operands_of
from torchdist_ref.backends.reductions import reduction
from torchdist_ref.calls import (
    AllGather,
    AllReduce,
    AllToAll,
    Call,
    Gather,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
)
from torchdist_ref.recorder import END
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.work import Done, Work

Tensors = Sequence[Tensor]


class Fake(Backend):
    """Backend without communication; the calls are in `recorder`.

    >>> import torch, torchdist_ref as dist
    >>> dist.init_process_group("fake", rank=3, world_size=8)
    >>> tensor = torch.ones(2)
    >>> dist.all_reduce(tensor)
    >>> tensor.tolist(), dist.get_rank(), dist.get_world_size()
    ([8.0, 8.0], 3, 8)
    >>> group = dist.new_group([1, 3, 5])
    >>> dist.broadcast(tensor, src=5, group=group)
    >>> [str(event.call) for event in group.recorder]
    ['broadcast(root=2)']
    >>> dist.destroy_process_group()
    """

    name = "fake"

    def __init__(self, membership: Membership) -> None:
        self.recorder = membership.recorder
        self._rank, self._size = membership.rank, membership.size
        self._sequence = 0

    @dispatched
    @profiled
    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`. The work is always complete."""
        entry = self.recorder.begin((self._number(call), 0), call, operands_of(inputs, outputs))
        with outside_modes():
            self._run(call, [*inputs], [*outputs])
        entry[END] = perf_counter()
        work = Done(call.op, flat_operands(outputs))
        if isinstance(call, Recv):
            work.source = self._rank if call.src is None else call.src
        return work

    def _number(self, call: Call) -> int:
        """Return the number of a call: messages have none, which is -1."""
        if isinstance(call, Send | Recv):
            return -1
        number, self._sequence = self._sequence, self._sequence + 1
        return number

    def _run(self, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Write the results of a call."""
        match call:
            case AllReduce() | Reduce():
                self._reduce(call, inputs[0], outputs[0])
            case ReduceScatter():
                self._reduce(call, inputs[self._rank], outputs[0])
            case AllGather() | Gather():
                for output in outputs:
                    _copy(inputs[0], output)
            case AllToAll():
                for output in outputs:
                    _copy(inputs[self._rank], output)
            case Scatter() if inputs:
                _copy(inputs[self._rank], outputs[0])

    def _reduce(self, call: AllReduce | Reduce | ReduceScatter, source: Tensor, target: Tensor) -> None:
        """Reduce equal tensors of all ranks."""
        operation = reduction(call.reduction, source.dtype, call.op)
        total = source.clone()
        for _ in range(self._size - 1):
            operation.into(total, source)
        _copy(total / self._size if call.reduction == "avg" else total, target)

    def set_timeout(self, seconds: float) -> None:
        """See `Backend.set_timeout`. No call waits."""

    def close(self) -> None:
        """See `Backend.close`."""

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy a tensor, unless the sizes differ: then the values of the other rank's block are unknown."""
    if source.numel() == target.numel():
        target.copy_(source.reshape(target.shape))
