"""Works of backend `mpi`, which are polled: MPI makes progress, and reports it, only inside its own calls.

A thread that waits for a work polls it. `RequestPoller` polls works that no thread waits for, and futures, on a thread
that runs while there is such a work. Pauses grow to a millisecond, so that waiting ranks leave the cores to others.

Do not add knowledge of calls here: starting them is in `backend`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple

from torchdist_ref.backends.worker_threads import WorkerThread
from torchdist_ref.errors import RankStalledError
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.work import Runner, Work, refuse_inherited

MAX_PAUSE_SECONDS = 0.001
FAILURE_CHECK_SECONDS = 0.2

# Copies results to the caller's tensors, and raises if they are wrong.
Finish = Callable[[Work, Any], None]
# Records the end of a call, and returns the error that the caller gets.
Ended = Callable[[BaseException | None], BaseException | None]


class Started(NamedTuple):
    """A call that MPI has started.

    Attributes:
        request: MPI's request.
        memory: The operands, which have to stay alive. mpi4py does not keep all of them (for reduce_scatter).
        finish: Copies the result to the caller's tensors.
    """

    request: Any
    memory: tuple[Any, ...]
    finish: Finish


class Pauses:
    """Pauses between polls: hardly any at first, then longer."""

    def __init__(self) -> None:
        self._polls = 0

    def pause(self) -> None:
        """Sleep, so that other processes can use the core."""
        self._polls += 1
        time.sleep(0.0 if self._polls < 50 else min(MAX_PAUSE_SECONDS, 2e-6 * self._polls))


class MpiWork(Work):
    """Work of a request of MPI's.

    Args:
        name: The call, for messages.
        outputs: The tensors that it writes.
        started: The started call.
        status: An empty status of mpi4py's, filled when the request completes.
        ended: Called at the end with the error, if any.
        callbacks: Runner of the future's callbacks.
        seconds: Time-out of the call in seconds.
        failure: Returns the error that keeps the group from continuing, if one is known.
    """

    def __init__(
        self,
        name: str,
        outputs: Sequence[Any],
        started: Started,
        status: Any,
        ended: Ended,
        callbacks: Runner,
        seconds: float,
        failure: Callable[[], BaseException | None],
    ) -> None:
        super().__init__(name, outputs, callbacks)
        self._started, self._status = started, status
        self._ended, self._failure = ended, failure
        self._seconds, self._deadline = seconds, monotonic() + seconds
        self._next_check = monotonic() + FAILURE_CHECK_SECONDS
        self._once = threading.Lock()

    def is_over(self) -> bool:
        """See `Work.is_over`; polls MPI."""
        if not self._over and self._once.acquire(False):
            try:
                if not self._over:
                    self._poll()
            finally:
                self._once.release()
        return self._over

    def _poll(self) -> None:
        """Complete this work if the request has completed or failed."""
        try:
            if not self._started.request.Test(self._status):
                self._check_failure()
                return
            with outside_modes():
                self._started.finish(self, self._status)
        except Exception as error:
            translated = self._ended(error)
            self.fail(error if translated is None else translated)
        else:
            self._ended(None)
            self.finish()

    def _check_failure(self) -> None:
        """Raise if the group has failed or the deadline has passed, of which MPI reports nothing."""
        now = monotonic()
        if now > self._next_check and (failure := self._failure()) is not None:
            raise failure
        if now > self._deadline:
            raise RankStalledError(
                f"{self.name}: not done within {self._seconds:g} s; a rank is missing, and MPI does not report which. "
                f"Look for a rank that makes another call, or pass a longer timeout to init_process_group or new_group."
            )
        if now > self._next_check:
            self._next_check = now + FAILURE_CHECK_SECONDS

    def await_over(self, seconds: float | None) -> bool:
        """See `Work.await_over`; polls MPI."""
        if not self._over:
            refuse_inherited(self.name, self._forks)
        end, pauses = None if seconds is None else monotonic() + seconds, Pauses()
        while not self.is_over():
            if end is not None and monotonic() >= end:
                return False
            pauses.pause()
        return True


class RequestPoller:
    """Poller of works that no thread may be waiting for. It keeps them and their memory until they end.

    Args:
        name: The group's name.
    """

    def __init__(self, name: str) -> None:
        self._lane = WorkerThread(f"{name} progress")
        self._works: list[MpiWork] = []
        # MPI may still write into the tensors of a call that failed.
        self._failed: list[MpiWork] = []
        self._lock = threading.Lock()
        self._closed = False

    def watch(self, work: MpiWork) -> None:
        """Poll a work until it ends."""
        with self._lock:
            self._works.append(work)
            if len(self._works) == 1:
                self._lane.put(self._loop)

    def _loop(self) -> None:
        """Poll until all works have ended."""
        pauses = Pauses()
        while self._poll_all():
            pauses.pause()

    def _poll_all(self) -> bool:
        """Poll each work, and return whether there is one left."""
        ended = [work for work in list(self._works) if work.is_over()]
        self._failed += [work for work in ended if work.exception() is not None]
        with self._lock:
            self._works = [work for work in self._works if work not in ended]
            return bool(self._works) and not self._closed

    def close(self) -> None:
        """End the thread, even if works have not ended."""
        self._closed = True
        self._lane.close()
