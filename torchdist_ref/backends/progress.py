"""Order: calls of a group run one after the other, in the order in which this rank made them.

A call that may block its caller runs right there, on the caller's thread, if nothing is before it. Any
other call goes to the group's progress thread, which is started by the first of them. Completed futures
run their callbacks on a second thread, so that a callback may wait on a new collective: the progress
thread is free to carry it out. Both threads end with the group. Don't add knowledge of calls here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

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


class Order:
    """Decides for each call where it runs: here and now, or after the others."""

    def __init__(self, name: str) -> None:
        self._queued = 0
        self._state = threading.Lock()
        self._running = threading.Lock()
        self.progress = Lane(f"{name} progress")
        self.callbacks = Lane(f"{name} callbacks")

    def try_now(self) -> bool:
        """Whether the caller may run its call now; then it must call `done`.

        No lock: a thread sees its own earlier `later`, and calls of several threads at once have no order.
        """
        return self._queued == 0 and self._running.acquire(False)

    def done(self) -> None:
        """The call that `try_now` allowed has ended."""
        self._running.release()

    def later(self, job: Job) -> None:
        """Run this on the progress thread, after all earlier calls."""
        with self._state:
            self._queued += 1
            self.progress.put(lambda: self._run(job))

    def _run(self, job: Job) -> None:
        try:
            with self._running:
                job()
        finally:
            with self._state:
                self._queued -= 1

    def close(self) -> None:
        """End both threads."""
        self.progress.close()
        self.callbacks.close()
