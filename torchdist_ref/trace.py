"""CallRecord and Recorder: one record of what a rank did, for the flight recorder, timelines and tests.

A `Recorder` keeps the last events of one process group in a ring and costs one append per call.
It never formats: whoever reads it does. The simulator writes events of its own (it knows no torch
and no clock). Don't add counters here: fold over the events instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

from torchdist_ref.calls import Call


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One finished (or failed) call of one rank.

    Attributes:
        sequence: The number of the call in its group, from 0; point-to-point calls have -1.
        call: What was called.
        nbytes: Bytes of the largest operand on this rank. A list of tensors is one operand.
        start: When the backend began, in seconds of `time.perf_counter`.
        end: When it ended.
        error: The name of the exception that ended it, or the empty string.
    """

    sequence: int
    call: Call
    nbytes: int
    start: float
    end: float
    error: str = ""

    @property
    def seconds(self) -> float:
        """How long the backend took."""
        return self.end - self.start


class Recorder:
    """The last `capacity` events of one group on one rank, oldest first.

    >>> from torchdist_ref.calls import Barrier
    >>> recorder = Recorder(capacity=2)
    >>> for sequence in range(3):
    ...     recorder.add(sequence, Barrier(), 0, start=0.0)
    >>> [event.sequence for event in recorder], recorder.total
    ([1, 2], 3)
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._ring: deque[tuple[int, Call, int, float, float, str]] = deque(maxlen=capacity)
        self.total = 0

    def add(self, sequence: int, call: Call, nbytes: int, start: float, error: str = "") -> None:
        """Write down a call that has just ended."""
        self._ring.append((sequence, call, nbytes, start, perf_counter(), error))
        self.total += 1

    def __iter__(self) -> Iterator[CallRecord]:
        return (CallRecord(*entry) for entry in list(self._ring))

    def __len__(self) -> int:
        return len(self._ring)
