"""Worker threads of a group: calls that must not block their caller, and callbacks of completed calls.

The calls of a group run one after the other, in one order on all ranks (`CallOrder`). A call that may block its caller
runs on the caller's thread, if no other call is ahead of it, and holds the lock of the calls meanwhile. Any other
call goes to the group's progress thread, which starts with the first such call and ends with the group.

Completed futures run their callbacks on such threads, one for each depth. A callback may make a new call and wait for
that call's future; the callbacks of that future run one thread further down, since the first one is occupied. On each
thread callbacks run one after the other, in the order in which their calls completed. So the progress thread is free to
run the calls of callbacks. Do not add knowledge of what calls do.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from time import monotonic
from typing import Any

import torch

from torchdist_ref.calls import Number, Numbers
from torchdist_ref.timeouts import CHECK_SECONDS, Deadline
from torchdist_ref.work import Awaited, Work

log = logging.getLogger("torchdist_ref.backends")
END_SECONDS = 0.5
"""Longest wait for threads to end. Calls that wait for peers end at their next check, a callback perhaps never."""

Job = Callable[[], None]


class WorkerThread:
    """Thread that runs jobs in order. It starts with the first job, and ends when it is closed.

    A job that comes after that runs on the thread that puts it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._pending = 0

    @property
    def idle(self) -> bool:
        """Whether every job that was put is done."""
        return self._pending == 0

    def start(self) -> None:
        """Start the thread if it has yet to run, so that no later `put` can fail.

        Raises:
            RuntimeError: The system has no room for one more thread.
        """
        if self._thread is None:
            with self._lock:
                self._start()

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def put(self, job: Job) -> None:
        """Run a job after all that were put before.

        Raises:
            RuntimeError: As `start`; the job will not run.
        """
        with self._lock:
            if self._thread is None:
                self._start()
            self._pending += 1
            if not self._closed:
                self._jobs.put(job)
                return
        self._run(job)

    def _loop(self) -> None:
        # A new thread computes on all cores until it gets the number of threads that this process chose.
        torch.set_num_threads(torch.get_num_threads())
        while (job := self._jobs.get()) is not None:
            self._run(job)

    def _run(self, job: Job) -> None:
        try:
            job()
        except BaseException:
            log.exception("%s: a job raised", self._name)
        with self._lock:
            self._pending -= 1

    def end(self) -> threading.Thread | None:
        """Ask the thread to end after the jobs in its queue, and return it; None if there is none."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        if thread is not None:
            self._jobs.put(None)
        return thread

    def close(self) -> None:
        """Run the jobs in the queue, then end. From a job of this thread, only ask for the end."""
        end_threads([self])


def end_threads(workers: Iterable[WorkerThread]) -> None:
    """End threads after the jobs in their queues, and wait for all of them together, for a short time.

    Threads in whose jobs the caller is are only asked to end.
    """
    threads = [(worker, worker.end()) for worker in workers]
    deadline = Deadline(END_SECONDS)
    for worker, thread in threads:
        if thread is not None and thread is not threading.current_thread() and worker not in _callers.get():
            thread.join(deadline.remaining())


# Threads that run the callbacks that the running code is inside of, the outermost first.
_callers: contextvars.ContextVar[tuple[WorkerThread, ...]] = contextvars.ContextVar(
    "torchdist_ref_callback_threads", default=()
)


class CallbackRunner:
    """Function that runs the callbacks of one call on a thread for callbacks, in the context of the call's caller."""

    __slots__ = ("_context", "_thread")

    def __init__(self, thread: WorkerThread, context: contextvars.Context) -> None:
        self._thread, self._context = thread, context

    def __call__(self, job: Job) -> None:
        """Run a callback after all that were put before."""
        # In a copy: once the thread is closed, a job may run within another one of the same context.
        self._thread.put(lambda: self._context.copy().run(job))

    def start(self) -> None:
        """Start the thread; see `WorkerThread.start`."""
        self._thread.start()

    def is_occupied_by_caller(self) -> bool:
        """Return whether the calling code is in a callback of the thread, or in one below that."""
        return self._thread in _callers.get()


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

    def runner(self) -> CallbackRunner:
        """Return a function that runs the callbacks of a call made now, in the context of the caller."""
        callers, context = _callers.get(), contextvars.copy_context()
        thread = self._threads.setdefault(len(callers), WorkerThread(f"{self._name} callbacks"))
        context.run(_callers.set, (*callers, thread))
        return CallbackRunner(thread, context)

    @property
    def idle(self) -> bool:
        """Whether all callbacks have run, but for those that the caller is inside of."""
        return all(thread.idle or thread in _callers.get() for thread in self.threads)

    @property
    def threads(self) -> list[WorkerThread]:
        """All threads."""
        return list(self._threads.values())

    def close(self) -> None:
        """End all threads; from a callback, only ask for the end."""
        end_threads(self.threads)


class WorkFactory:
    """Makes the Works of one group, whose callbacks run on threads of the group.

    Args:
        numbers: Numbers of the group's calls.
        callbacks: Threads for callbacks.
        awaited: Function that returns the ranks that the running call waits for.
    """

    def __init__(self, numbers: Numbers, callbacks: CallbackThreads, awaited: Awaited) -> None:
        self._numbers, self._callbacks, self._awaited = numbers, callbacks, awaited

    def __call__(self, op: str, outputs: Sequence[Any], number: Number) -> Work:
        """Return the Work of a call that is made now."""
        work = Work(op, outputs, self._callbacks.runner(), self._numbers.scope(number))
        work.awaited = self._awaited
        return work


def settle(work: Work, act: Job) -> None:
    """Run something and complete its Work, with the error that it raises if it does."""
    try:
        act()
    except BaseException as error:
        work.fail(error)
    else:
        work.finish()


# ---- order


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
        running: Lock that a call holds while it runs.
        check_wait: Called while this rank waits to make a call that a peer has begun; raises when the wait is in vain.

    Attributes:
        queued: Number of calls that the progress thread has yet to run. Read without a lock: a thread sees its own
            earlier `later`, and calls of several threads at once have no order.
    """

    def __init__(self, name: str, running: threading.Lock, check_wait: Callable[[Number, float], None]) -> None:
        # Calls that the progress thread will run, or a call that must let them run first.
        self._waiting: dict[Number, Job] = {}
        self.queued = 0
        self._made = threading.Condition()
        self._running, self._check_wait = running, check_wait
        self.progress = WorkerThread(f"{name} progress")

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
            # The callback that makes this call may be behind another one, whose call waits here and comes first.
            while (smallest := min(self._waiting, default=None)) is None or smallest > number:
                self._made.wait(CHECK_SECONDS)
                self._check_wait(number, monotonic() - since)
            job = self._waiting.pop(smallest)
        job()

    def later(self, number: Number, job: Job) -> None:
        """Run a call on the progress thread, after all earlier calls.

        The job must not raise: a call that lets it run first has no use for its error. So the job uses `run_in_order`
        itself and settles the call's Work.

        Raises:
            RuntimeError: The progress thread cannot be started; the call will not run.
        """
        with self._made:
            # Before the call is in the queue, where nobody would run it.
            self.progress.start()
            self.queued += 1
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
                self.queued -= 1

    def close(self) -> None:
        """End the progress thread."""
        self.progress.close()
