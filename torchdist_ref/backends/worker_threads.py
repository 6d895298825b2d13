"""Worker threads: jobs of a group that must not block the thread that makes them.

Completed futures run their callbacks on such threads, one for each depth. A callback may make a new call and wait for
that call's future; the callbacks of that future run one thread further down, since the first one is occupied. On each
thread callbacks run one after the other, in the order in which their calls completed. `ref.order` decides which calls
run on its progress thread. Do not add knowledge of calls.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from torchdist_ref.work import Runner

log = logging.getLogger("torchdist_ref.backends")

Job = Callable[[], None]


class WorkerThread:
    """Thread that runs jobs in order. It starts with the first job, and ends when it is closed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._pending = 0

    @property
    def idle(self) -> bool:
        """Whether every job that was put is done."""
        return self._pending == 0

    def put(self, job: Job) -> None:
        """Run a job after all that were put before."""
        with self._lock:
            self._pending += 1
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        # A new thread computes on all cores until it gets the number of threads that this process chose.
        torch.set_num_threads(torch.get_num_threads())
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:
                log.exception("%s: a job raised", self._name)
            with self._lock:
                self._pending -= 1

    def close(self, timeout: float = 5.0) -> None:
        """Run the jobs in the queue, then end. From a job of this thread, only ask for the end."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        self._jobs.put(None)
        if thread is not threading.current_thread():
            thread.join(timeout)


# Number of callbacks that the running code is inside of.
_depth: contextvars.ContextVar[int] = contextvars.ContextVar("torchdist_ref_callback_depth", default=0)


class CallbackThreads:
    """Threads for the callbacks of one group's futures.

    >>> import threading
    >>> callbacks, done = CallbackThreads("a group"), threading.Event()
    >>> def outer():
    ...     inner = threading.Event()
    ...     callbacks.runner()(inner.set)
    ...     if inner.wait(5):
    ...         done.set()
    >>> callbacks.runner()(outer)
    >>> done.wait(5)
    True
    >>> callbacks.close()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: dict[int, WorkerThread] = {}

    def runner(self) -> Runner:
        """Return a function that runs the callbacks of a call made now, in the context of the caller."""
        depth, context = _depth.get(), contextvars.copy_context()
        context.run(_depth.set, depth + 1)
        thread = self._threads.setdefault(depth, WorkerThread(f"{self._name} callbacks"))
        return lambda job: thread.put(lambda: context.run(job))

    def close(self) -> None:
        """End all threads; from a callback, only ask for the end."""
        for thread in list(self._threads.values()):
            thread.close()
