"""Clock whose time passes only when something waits, so that tests of time-outs take no time."""

from __future__ import annotations

import heapq
import itertools
import select
from collections.abc import Callable, Iterable

from torchdist_ref.timeouts import Clock, readable


class VirtualClock(Clock):
    """Clock whose waits jump to their end instead of waiting.

    A test plans what happens meanwhile: `at` calls a function when the time arrives, such as one that writes to a pipe
    for which the code under test waits. All runs on the thread that waits.

    Args:
        now: Time at the beginning, in seconds.

    >>> clock = VirtualClock(100.0)
    >>> clock.at(160.0, lambda: print("a minute later"))
    >>> clock.sleep(3600.0)
    a minute later
    >>> clock.now()
    3700.0
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def now(self) -> float:
        """Return the present time in seconds."""
        return self._now

    def at(self, time: float, event: Callable[[], object]) -> None:
        """Call a function during the first wait that reaches a time; of equal times, in the order of these calls."""
        heapq.heappush(self._events, (time, next(self._order), event))

    def sleep(self, seconds: float) -> None:
        """Advance the time by so many seconds, with the events until then."""
        end = self._now + seconds
        while self._events and self._events[0][0] <= end:
            self._next_event()
        self._now = max(self._now, end)

    def wait(self, descriptors: select.poll | Iterable[int], seconds: float | None = None) -> list[int]:
        """Return the descriptors that are ready, after as many events as it takes for one to be.

        Raises:
            RuntimeError: No event is left, and the wait has no limit: it would never end.
        """
        poll = readable(descriptors) if isinstance(descriptors, Iterable) else descriptors
        end = None if seconds is None else self._now + max(0.0, seconds)
        while not (ready := [descriptor for descriptor, _ in poll.poll(0)]):
            if self._events and (end is None or self._events[0][0] <= end):
                self._next_event()
            elif end is None:
                raise RuntimeError(f"at {self._now:g} s a wait without limit begins, and no event is left to end it")
            else:
                self._now = max(self._now, end)
                break
        return ready

    def _next_event(self) -> None:
        time, _, event = heapq.heappop(self._events)
        self._now = max(self._now, time)
        event()
