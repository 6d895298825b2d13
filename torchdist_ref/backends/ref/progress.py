"""Progress: the calls of a group run one after the other, in one order on all ranks.

A call that may block its caller runs on the caller's thread, if no other call is ahead of it. Any other call goes to
the group's progress thread, which starts with the first such call and ends with the group. Callbacks of completed
futures run on other threads, so that a callback may wait for a new collective: the progress thread is free to run it.
Do not add knowledge of what calls do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from torchdist_ref.backends.worker_threads import Job, WorkerThread
from torchdist_ref.calls import Number
from torchdist_ref.timeouts import CHECK_SECONDS


class OutOfOrderError(Exception):
    """Internal signal: the ranks are at different calls, and call `number` comes first on all of them."""

    def __init__(self, number: Number) -> None:
        super().__init__(f"call number {number} comes first")
        self.number = number


class CallOrder:
    """Decides for each call when it runs: at once, after the calls before it, or ahead of the one that is running.

    Ranks may make calls in different orders where callbacks make some of them. The handshake of a call detects that,
    and then all ranks run the call with the smallest number, as soon as they have made it themselves.

    Args:
        name: The group's name, for the names of threads.
        check_wait: Called while this rank waits to make a call that a peer has begun; raises when the wait is in vain.

    Attributes:
        done: Function to call when a call that `try_now` allowed has ended.
    """

    def __init__(self, name: str, check_wait: Callable[[Number, float], None]) -> None:
        # Calls that the progress thread will run, or a call that must let them run first.
        self._waiting: dict[Number, Job] = {}
        self._queued = 0
        self._made = threading.Condition()
        self._running = threading.Lock()
        self.done = self._running.release
        self._check_wait = check_wait
        self.progress = WorkerThread(f"{name} progress")

    def try_now(self) -> bool:
        """Return whether the caller may run its call now; if so, it must call `done` afterwards.

        No lock: a thread sees its own earlier `later`, and calls of several threads at once have no order.
        """
        return self._queued == 0 and self._running.acquire(False)

    def run_in_order(self, number: Number, job: Job, first: OutOfOrderError | None = None) -> None:
        """Run a call; where the ranks are at different ones, run those with smaller numbers first.

        Args:
            number: The call's number.
            job: Runs the call.
            first: The error of an attempt that has been made already.
        """
        while True:
            if first is not None and first.number != number:
                self._run_first(first.number)
            try:
                return job()
            except OutOfOrderError as error:
                first = error

    def _run_first(self, number: Number) -> None:
        since = monotonic()
        with self._made:
            while number not in self._waiting:
                self._made.wait(CHECK_SECONDS)
                self._check_wait(number, monotonic() - since)
            job = self._waiting.pop(number)
        job()

    def later(self, number: Number, job: Job) -> None:
        """Run a call on the progress thread, after all earlier calls.

        The job must not raise: a call that lets it run first has no use for its error. So the job uses `run_in_order`
        itself and settles the call's Work.
        """
        with self._made:
            self._queued += 1
            self._waiting[number] = job
            self.progress.put(lambda: self._next(number))
            self._made.notify_all()

    def _next(self, number: Number) -> None:
        try:
            with self._running:
                with self._made:
                    job = self._waiting.pop(number, None)
                if job is not None:
                    job()
        finally:
            with self._made:
                self._queued -= 1

    def close(self) -> None:
        """End the progress thread."""
        self.progress.close()
