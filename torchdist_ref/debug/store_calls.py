"""Recorder of calls that meet in the store: new_group, split_group, shrink_group, monitored_barrier, init and destroy.

Such a call has no backend that could record it, and may be the one in which a job hangs. Each kind of call of each
group has a recorder of its own, with its own numbers, so that ranks agree on the number whatever else they call. The
flight recorder shows it as a group, whose name is that of the operation and the group.

The calls take milliseconds, so the caller's stack is recorded with each. Do not add calls of backends here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter

from torchdist_ref.calls import Call
from torchdist_ref.debug.call_sites import frames_of
from torchdist_ref.debug.flight_recorder import STORE, RecordedGroup, include
from torchdist_ref.recorder import END, Entry, Recorder

_CAPACITY = 64
"""Calls that are kept of each kind and group: each has a stack."""


@dataclass(frozen=True, slots=True)
class StoreCall(Call):
    """Call that meets other ranks in the store.

    Attributes:
        op: Name of the operation.
        arguments: The arguments that all ranks must agree on, as text.
        awaited: Global ranks that this rank waits for.

    >>> str(StoreCall("new_group", "ranks=[0, 2]", (0, 2)))
    'new_group(ranks=[0, 2])'
    """

    op: str  # type: ignore[misc]
    arguments: str
    awaited: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op}({self.arguments})"


class StoreCalls:
    """Calls of one rank that meet in the store, in a recorder for each operation and group.

    >>> calls = StoreCalls()
    >>> with calls.recorded(StoreCall("new_group", "ranks=[0]", (0,)), "new_group", (0,), 0, 1.0):
    ...     [event.state for event in calls.recorder("new_group", (0,)).events()]
    ['started']
    >>> [event.state for event in calls.recorder("new_group", (0,)).events()]
    ['completed']
    """

    def __init__(self) -> None:
        self._recorders: dict[tuple[str, tuple[int, ...]], tuple[Recorder, list[int]]] = {}

    def recorder(self, name: str, members: Sequence[int]) -> Recorder:
        """Return the recorder of the calls of some name that some ranks make."""
        return self._recorders[name, tuple(members)][0]

    def initialization(self, rank: int, size: int, timeout: float) -> AbstractContextManager[None]:
        """Return a context in which init_process_group is recorded, as `recorded` does."""
        members = tuple(range(size))
        call = StoreCall("init_process_group", f"world_size={size}", members)
        return self.recorded(call, call.op, members, rank, timeout)

    @contextmanager
    def recorded(self, call: StoreCall, name: str, members: Sequence[int], rank: int, timeout: float) -> Iterator[None]:
        """Record a call while the context is open, and its failure if an exception ends the context.

        Args:
            call: The call.
            name: Name of the calls that are numbered together, for readers of the dump.
            members: Global ranks that make them.
            rank: Position of this rank among the members.
            timeout: Time-out of the call in seconds.
        """
        key = name, tuple(members)
        if key not in self._recorders:
            group = RecordedGroup(name, STORE, key[1], rank, timeout, threading.get_ident(), "")
            self._recorders[key] = include(Recorder(_CAPACITY), group), [0]
        recorder, count = self._recorders[key]
        frames = frames_of(sys._getframe(1))  # noqa: SLF001, the documented way to the caller's frame
        entry: Entry = [(count[0], 0), call, ((), ()), perf_counter(), 0.0, "", frames]
        count[0] += 1
        recorder.record(entry)
        try:
            yield
        except BaseException as failure:
            recorder.fail(entry, failure)
            raise
        entry[END] = perf_counter()
