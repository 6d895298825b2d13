"""Deadlines, and waiting in short slices so that Ctrl-C is answered.

Python runs signal handlers on the main thread, between two of its steps. A main thread that sleeps in one
long system call may miss the wake-up (the system may hand the signal to another thread), so it sleeps in
slices. Other threads never run handlers and sleep as long as they may.
"""

from __future__ import annotations

import threading
import time

SLICE = 0.05
LONGEST = 3600.0


class Deadline:
    """A moment on the monotonic clock after which waiting is over.

    Args:
        seconds: how long from now; 0 means that everything is looked at once and never waited for.
    """

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = time.monotonic() + seconds

    def later(self, seconds: float) -> Deadline:
        """The moment so many seconds after this one."""
        other = Deadline(self.seconds + seconds)
        other.at = self.at + seconds
        return other

    def left(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at - time.monotonic())

    def passed(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() >= self.at

    def slice(self) -> float:
        """How long to sleep now, in seconds: not past the deadline, and shortly on the main thread."""
        longest = SLICE if threading.current_thread() is threading.main_thread() else LONGEST
        return min(self.left(), longest)
