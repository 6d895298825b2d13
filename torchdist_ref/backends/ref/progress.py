"""Order: calls of a group run one after the other, in one order on all ranks.

A call that may block its caller runs right there, on the caller's thread, if nothing is before it. Any
other call goes to the group's progress thread, which is started by the first of them and ends with the
group. Completed futures run their callbacks elsewhere (`callbacks`), so that a callback may wait on a new
collective: the progress thread is free to carry it out. Don't add knowledge of calls here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic

import torch

from torchdist_ref.numbers import Number
from torchdist_ref.timeouts import CHECK_SECONDS

log = logging.getLogger("torchdist_ref.backends")

Job = Callable[[], None]


class Lane:
    """A thread that does jobs in order, from the first job on until it is closed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._waiting = 0

    @property
    def idle(self) -> bool:
        """Whether every job that was put is done."""
        return self._waiting == 0

    def put(self, job: Job) -> None:
        """Do this after everything that was put before."""
        with self._lock:
            self._waiting += 1
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        # A new thread computes on all cores until it is told the number of threads that this process chose.
        torch.set_num_threads(torch.get_num_threads())
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:
                log.exception("%s: a job raised", self._name)
            with self._lock:
                self._waiting -= 1

    def close(self, timeout: float = 5.0) -> None:
        """Do what is queued, then end. From a job of the lane itself, only ask for the end."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        self._jobs.put(None)
        if thread is not threading.current_thread():
            thread.join(timeout)


class OutOfTurnError(Exception):
    """Not for users: the ranks are at different calls, and this one has to come first on all of them."""

    def __init__(self, number: Number) -> None:
        super().__init__(f"call number {number} comes first")
        self.number = number


class Order:
    """Decides for each call when it runs: here and now, after the others, or before the one that is running.

    Ranks may come to calls in different orders where callbacks make some of them. They notice when they open a call,
    and then all carry out the one with the smallest number, as soon as they have made it themselves.

    Args:
        name: The group's, for the names of threads.
        patience: Called while a rank waits to make a call that another has begun; raises when it is in vain.

    Attributes:
        done: To call when the call that `try_now` allowed has ended.
    """

    def __init__(self, name: str, patience: Callable[[Number, float], None]) -> None:
        # Calls that wait to be carried out, by the progress thread or by whoever must let them go first.
        self._waiting: dict[Number, Job] = {}
        self._queued = 0
        self._made = threading.Condition()
        self._running = threading.Lock()
        self.done = self._running.release
        self._patience = patience
        self.progress = Lane(f"{name} progress")

    def try_now(self) -> bool:
        """Whether the caller may run its call now; then it must call `done`.

        No lock: a thread sees its own earlier `later`, and calls of several threads at once have no order.
        """
        return self._queued == 0 and self._running.acquire(False)

    def carry_out(self, number: Number, job: Job, turn: OutOfTurnError | None = None) -> None:
        """Run a call; where the ranks are at different ones, run those first that come first.

        Args:
            number: The call's.
            job: Runs it.
            turn: What it was told already, if it has been tried.
        """
        while True:
            if turn is not None and turn.number != number:
                self._let_first(turn.number)
            try:
                return job()
            except OutOfTurnError as told:
                turn = told

    def _let_first(self, number: Number) -> None:
        since = monotonic()
        with self._made:
            while number not in self._waiting:
                self._made.wait(CHECK_SECONDS)
                self._patience(number, monotonic() - since)
            job = self._waiting.pop(number)
        job()

    def later(self, number: Number, job: Job) -> None:
        """Run this on the progress thread, after all earlier calls.

        The job raises nothing: whoever comes to run it, which may be a call that must let it go first, is not the one
        to hear of its failure. So it is to `carry_out` its call by itself, and to settle what comes of that.
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
