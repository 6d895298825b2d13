"""Hooks of a group: functions called before and after each of its calls on this rank, as torch 2.15 has them.

`HookedBackend` takes the place of a group's backend while the group has hooks, so groups without hooks pay nothing.
torch's own hooks are in its C++ groups, which groups of ours do not pass through. Do not add hooks of this library's
own parts here: backends that act at each call are `BackendWrapper` of their own.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchdist_ref.backends.base import Backend, BackendWrapper
from torchdist_ref.backends.operands import RowBlocks, flat_operands
from torchdist_ref.calls import Call, Recv, Send
from torchdist_ref.work import Work


class HookOpName(enum.Enum):
    """Operation of a call, with torch's names and numbers.

    Those that end in ``_BASE`` have all blocks in one tensor. Coalesced calls are several calls here.
    """

    SEND = 0
    RECV = 1
    BROADCAST = 2
    ALLREDUCE = 3
    REDUCE = 4
    ALLGATHER = 5
    REDUCE_SCATTER = 6
    ALLTOALL = 7
    BARRIER = 8
    SCATTER = 9
    GATHER = 10
    ALLGATHER_BASE = 14
    REDUCE_SCATTER_BASE = 17
    ALLTOALL_BASE = 19
    UNKNOWN = 20


@dataclass(frozen=True, slots=True)
class PreHookArgs:
    """Argument of a hook before a call.

    Attributes:
        name: Operation.
        async_op: Whether the caller gets a Work; always for messages, as in torch.
        input_tensors: Tensors that are read; of a call in place, its tensor.
        output_tensors: Tensors that are written; of a call in place, none.
        root: Group rank of the root, or of the other rank of a message; -1 for none.
        op_id: Number of the call among those of this group on this rank that hooks have seen, from 0.
    """

    name: HookOpName
    async_op: bool
    input_tensors: list[Tensor]
    output_tensors: list[Tensor]
    root: int
    op_id: int


@dataclass(frozen=True, slots=True)
class PostHookArgs:
    """Argument of a hook after a call was started; a synchronous call is complete then.

    Attributes:
        name: Operation.
        async_op: Whether the caller gets a Work; always for messages, as in torch.
        work: The call's Work.
        op_id: Number of the call, as in its `PreHookArgs`.
    """

    name: HookOpName
    async_op: bool
    work: Work | None
    op_id: int


_NAMES = {
    "send": "SEND",
    "recv": "RECV",
    "broadcast": "BROADCAST",
    "all_reduce": "ALLREDUCE",
    "reduce": "REDUCE",
    "all_gather": "ALLGATHER",
    "reduce_scatter": "REDUCE_SCATTER",
    "all_to_all": "ALLTOALL",
    "barrier": "BARRIER",
    "scatter": "SCATTER",
    "gather": "GATHER",
}


class HookedBackend(BackendWrapper):
    """Backend of a group with hooks, which calls them and runs the calls on another backend.

    Attributes:
        before: Hooks before a call, by the number that they were registered with, in the order of registration.
        after: Hooks after a call.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.before: dict[int, Callable[[PreHookArgs], Any]] = {}
        self.after: dict[int, Callable[[PostHookArgs], Any]] = {}
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        # What one kind of backend has beside the interface.
        return getattr(self.wrapped, name)

    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """See `Backend.submit`. An exception of a hook before the call is raised to the caller; the call is not made.

        So it has to be raised on all ranks, or the others wait for this one.
        """
        name, number = _name_of(call, inputs, outputs), next(self._numbers)
        async_op = not wait or isinstance(call, Send | Recv)
        if self.before:
            in_place = outputs is inputs or (len(inputs) == len(outputs) == 1 and inputs[0] is outputs[0])
            read, written = list(flat_operands(inputs)), [] if in_place else list(flat_operands(outputs))
            root = getattr(call, "root", getattr(call, "dst", getattr(call, "src", -1)))
            args = PreHookArgs(name, async_op, read, written, -1 if root is None else root, number)
            for before in list(self.before.values()):
                before(args)
        work = self.wrapped.submit(call, inputs, outputs, wait)
        for after in list(self.after.values()):
            after(PostHookArgs(name, async_op, work, number))
        return work


def _name_of(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> HookOpName:
    name = _NAMES.get(call.op, "UNKNOWN")
    whole = type(inputs) is RowBlocks or type(outputs) is RowBlocks
    return HookOpName.__members__.get(f"{name}_BASE" if whole else name) or HookOpName[name]
