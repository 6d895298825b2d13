"""Backend `ref`: collectives of this project's own schedules and messages, over its own transports.

Do not add algorithms (`schedules`), ways to move bytes (`transports`), or how collectives run (`collectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend, Membership
from torchdist_ref.backends.profiler_ranges import profiled
from torchdist_ref.backends.ref.collectives import CollectiveCalls
from torchdist_ref.backends.ref.point_to_point import Messages
from torchdist_ref.backends.worker_threads import CallbackThreads
from torchdist_ref.calls import Call, Number, Numbers, Recorder, Recv, Send
from torchdist_ref.errors import GroupAbortedError
from torchdist_ref.transports import connect, registered_memory
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]


class WorkFactory:
    """Makes the Works of one group, whose callbacks run on threads of the group."""

    def __init__(self, numbers: Numbers, callbacks: CallbackThreads) -> None:
        self._numbers, self._callbacks = numbers, callbacks

    def __call__(self, op: str, outputs: Tensors, number: Number) -> Work:
        """Return the Work of a call that is made now."""
        return Work(op, outputs, self._callbacks.runner(), self._numbers.scope(number))


class Ref(Backend):
    """Collectives on tensors of any strides, between threads, processes of one host, and hosts."""

    name = "ref"

    def __init__(self, membership: Membership) -> None:
        m = membership
        self.link = connect(m.store, m.rank, m.members, m.name, m.timeout)
        self.recorder = Recorder()
        self._callbacks, numbers = CallbackThreads(m.name), Numbers(m.name)
        make_work = WorkFactory(numbers, self._callbacks)
        self.collectives = CollectiveCalls(self.link, numbers, self.recorder, make_work)
        self._messages = Messages(self.link, m.timeout, self.recorder, make_work)
        self._submitters: dict[type[Call], Callable[..., Work]] = {
            Send: self._messages.send,
            Recv: self._messages.receive,
        }
        self._submit_collective = self.collectives.submit

    @profiled
    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        if self.link.broken is not None:
            self.link.check_usable(call.op)
        return self._submitters.get(type(call), self._submit_collective)(call, inputs, outputs, wait)

    @property
    def shares_memory(self) -> bool:
        """See `Backend.shares_memory`."""
        return self.link.hosts is None and self.link.size > 1

    def empty(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """See `Backend.empty`."""
        return registered_memory.empty(size, dtype) if self.shares_memory else super().empty(size, dtype)

    def failure(self, ranks: Sequence[int], description: str) -> BaseException | None:
        """See `Backend.failure`."""
        return self.link.process_failure(ranks, description)

    def close(self) -> None:
        """See `Backend.close`."""
        self.collectives.close()
        self._callbacks.close()
        self._messages.close()
        self.link.close()

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""
        self.link.abort(GroupAbortedError(reason), "abort")
