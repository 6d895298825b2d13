"""Time-outs of the library: the defaults, the interval of a wait's checks, `Clock`, `Deadline` and `LongWait`.

Python runs signal handlers on the main thread, between two bytecode instructions. A main thread that sleeps in one long
system call can miss the wake-up, because the kernel may deliver the signal to another thread. So a blocking wait wakes
up every `CHECK_SECONDS`. Other threads run no handlers and may sleep until their deadline.

Do not add waits here: each kind of wait belongs to the object that is waited for. `found_soon` repeats any look.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from math import inf
from typing import Any

from torchdist_ref.errors import ArgumentTypeError, BackendArgumentError, explain, on_rank

STORE_TIMEOUT = timedelta(minutes=5)
"""Default time that an operation of a store waits for a missing key."""

GROUP_TIMEOUT = timedelta(minutes=30)
"""Default time that a rank waits for the others in a rendezvous or a call of a process group."""

MAX_TIMEOUT = timedelta(days=36500)
"""Longest time-out; longer ones mean the same, and exceed what clocks and system calls accept."""

MIN_GRACE_SECONDS = 0.09


def from_torch(timeout: timedelta) -> timedelta:
    """Return a time-out that passed through torch's C++, at most `MAX_TIMEOUT`.

    C++ counts microseconds in 64 bits, so one of more than 292,000 years, such as `timedelta.max`, arrives negative.

    >>> from_torch(timedelta(days=-67519912)) == MAX_TIMEOUT, from_torch(timedelta(seconds=-1)).total_seconds()
    (True, -1.0)
    """
    return MAX_TIMEOUT if timeout < -MAX_TIMEOUT else min(timeout, MAX_TIMEOUT)


def timeout_of(operation: str, timeout: Any, default: timedelta = GROUP_TIMEOUT) -> timedelta:
    """Return the time-out that an argument specifies, or the default for None; at most `MAX_TIMEOUT`.

    Raises:
        ArgumentTypeError: Not a timedelta.
        BackendArgumentError: Not positive.
    """
    timeout = default if timeout is None else timeout
    if not isinstance(timeout, timedelta):
        raise ArgumentTypeError(
            f"{operation}: Expected timeout argument to be of type datetime.timedelta, got {timeout!r}{on_rank()}."
        )
    if timeout <= timedelta(0):
        raise BackendArgumentError(explain(operation, "timeout", "more than zero", timeout))
    return min(timeout, MAX_TIMEOUT)


# Waits look in slices, though being woken would be more elegant. A wait on a semaphore in shared memory ends when
# somebody posts the semaphore. A rank that is killed posts nothing, and neither does a signal that the kernel delivers
# to another thread. To wake such a wait, every process would need a thread that polls the pidfds of its peers and a
# descriptor for signals, a table of the semaphores on which its threads wait, and a way to take back a post that came
# from no peer: a post allows the reader of a ring buffer to read. A rank that aborts or leaves would have to post every
# semaphore on which another rank may wait. A loop of twenty lines (`Link._acquire_blocking`) does without all of that.
#
# Its price was measured with 4 ranks of which one comes 10 seconds late, on a host with other work. Each of the others
# used 0.13 s of processor time in a barrier and 0.26 s in a receive, which is 1.3 and 2.6 % of a core; a look at the
# peers takes 17 us. A death is noticed 20 ms later at most.
CHECK_SECONDS = 0.02
"""Interval at which a blocked wait checks for Ctrl-C and for failed peers, in seconds."""

LONG_WAIT_SECONDS = 60.0
"""Wait after which a rank logs for whom it waits: few calls take a minute."""

MAX_SLEEP_SECONDS = 3600.0


class Clock:
    """The monotonic clock, and the two ways to let its time pass.

    Code that waits takes a clock as an argument, so that its tests take no time: they pass
    `torchdist_ref.testing.virtual_clock.VirtualClock`, whose waits end at once and add their seconds to `now`.

    >>> clock = Clock()
    >>> began = clock.now()
    >>> clock.sleep(0.001)
    >>> clock.now() - began >= 0.001, clock.wait([], 0.001)
    (True, [])
    """

    def now(self) -> float:
        """Return the present time in seconds, from an arbitrary origin."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        time.sleep(seconds)

    def wait(self, descriptors: select.poll | Iterable[int], seconds: float | None = None) -> list[int]:
        """Return the descriptors that are ready, as soon as one is.

        Args:
            descriptors: Descriptors that may become readable, or a `select.poll` at which they are registered.
            seconds: Longest time to wait. Default None: no limit.

        Returns:
            The descriptors that are ready; none after the time-out.
        """
        poll = readable(descriptors) if isinstance(descriptors, Iterable) else descriptors
        return [descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0.0, seconds) * 1000)]


def readable(descriptors: Iterable[int]) -> select.poll:
    """Return a poll object that reports which descriptors are readable or closed by their peer."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return poll


CLOCK = Clock()
"""Default of arguments that take a clock."""


class Deadline:
    """A moment on a clock.

    Args:
        seconds: time from now, in seconds; 0 for a single check without waiting.
        clock: clock. Default: the monotonic clock.
    """

    __slots__ = ("_now", "at", "seconds")

    def __init__(self, seconds: float, clock: Clock | None = None) -> None:
        self.seconds = seconds
        self._now = time.monotonic if clock is None else clock.now
        self.at = self._now() + seconds

    def extended(self, seconds: float) -> Deadline:
        """Return a deadline this many seconds after this one."""
        other = Deadline(self.seconds + seconds)
        other.at, other._now = self.at + seconds, self._now
        return other

    def remaining(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self.at - self._now())

    def passed(self) -> bool:
        """Return whether no time is left."""
        return self._now() >= self.at

    def sleep_seconds(self) -> float:
        """Return how long to sleep before the next check, in seconds."""
        return min(self.remaining(), max_sleep())


def grace(seconds: float) -> float:
    """Return how long after its time-out a call of a store may still wait for the server's report, in seconds."""
    return MIN_GRACE_SECONDS + min(0.04 * seconds, 2.0)


def without_grace(seconds: float) -> float:
    """Return the time-out whose grace ends soon after so many seconds.

    >>> [round(each + grace(each), 2) for each in map(without_grace, (0.0, 1.0, 3.0))]
    [0.09, 1.05, 3.05]
    """
    return max(0.0, (seconds - 0.04) / 1.04)


class LongWait:
    """A wait that is worth a line of the log when it has become long, once.

    Attributes:
        seconds: duration from which it is long.
    """

    __slots__ = ("_at", "seconds")

    def __init__(self) -> None:
        self.seconds = LONG_WAIT_SECONDS
        self._at = time.monotonic() + self.seconds

    def is_due(self) -> bool:
        """Return whether the wait has become long since the last call of this method."""
        if time.monotonic() < self._at:
            return False
        self._at = inf
        return True


def max_sleep() -> float:
    """Return the longest uninterrupted sleep that is safe on the calling thread, in seconds."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    return CHECK_SECONDS if on_main_thread else MAX_SLEEP_SECONDS


END_SECONDS = 0.08
"""Time from the close of a process's descriptors until its end is known, here or to the store's server."""


def found_soon(find: Callable[[], BaseException | None]) -> BaseException | None:
    """Return a failure that is found soon: a process closes its descriptors before it counts as ended."""
    deadline = time.monotonic() + END_SECONDS
    while (failure := find()) is None and time.monotonic() < deadline:
        time.sleep(0.002)
    return failure
