"""Recorder of the calls of one rank, for the flight recorder, timelines and tests.

A `Recorder` keeps the last calls of one process group in a ring buffer, which costs one append per call. It formats
nothing. The simulator has events of its own (`schedules.events`), since it has neither torch nor a clock. Do not add
counters here: compute them from the records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

from torchdist_ref.calls import Call


@dataclass(frozen=True, slots=True)
class CallRecord:
    """Completed or failed call of one rank.

    Attributes:
        sequence: Number of the call in its group, from 0; -1 for point-to-point calls.
        call: The call.
        nbytes: Size of the largest operand on this rank, in bytes. A list of tensors is one operand.
        start: Time at which the backend began, in seconds of `time.perf_counter`.
        end: Time at which it ended.
        error: Name of the exception that ended it, or the empty string.
    """

    sequence: int
    call: Call
    nbytes: int
    start: float
    end: float
    error: str = ""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start


class Recorder:
    """Ring buffer of the last calls of one group on one rank, oldest first.

    Args:
        capacity: Number of calls to keep.

    Attributes:
        total: Number of calls ever recorded.

    >>> from torchdist_ref.calls import Barrier
    >>> recorder = Recorder(capacity=2)
    >>> for sequence in range(3):
    ...     recorder.add(sequence, Barrier(), 0, start=0.0)
    >>> [record.sequence for record in recorder], recorder.total
    ([1, 2], 3)
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._ring: deque[tuple[int, Call, int, float, float, str]] = deque(maxlen=capacity)
        self.total = 0

    def add(self, sequence: int, call: Call, nbytes: int, start: float, error: str = "") -> None:
        """Record a call that has just ended."""
        self._ring.append((sequence, call, nbytes, start, perf_counter(), error))
        self.total += 1

    def __iter__(self) -> Iterator[CallRecord]:
        return (CallRecord(*entry) for entry in list(self._ring))

    def __len__(self) -> int:
        return len(self._ring)
