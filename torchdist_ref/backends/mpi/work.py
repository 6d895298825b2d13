"""A Work that is polled: MPI makes progress, and says so, only when it is asked.

Whoever waits asks. For works that nobody waits for, and for futures, a poller asks, on a thread that lives while
there is something to ask for. Pauses grow to a millisecond, so that ranks that wait leave the cores to others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple

from torchdist_ref.backends.worker_threads import WorkerThread
from torchdist_ref.errors import RankStalledError
from torchdist_ref.work import Runner, Work

LONGEST = 0.001
LOOK_AROUND = 0.2

# Brings results to where the caller wants them; raises what is wrong with them.
Finish = Callable[[Work, Any], None]
# Told of the end of a call; gives the error that the caller gets.
Ended = Callable[[BaseException | None], BaseException | None]


class Started(NamedTuple):
    """A call that MPI has begun.

    Attributes:
        request: MPI's request.
        memory: What MPI works on. mpi4py does not keep all of it alive (for reduce_scatter it does not).
        finish: Brings the result to where the caller wants it.
    """

    request: Any
    memory: tuple[Any, ...]
    finish: Finish


class Pauses:
    """How long to pause before asking again: hardly at first, then longer."""

    def __init__(self) -> None:
        self._asked = 0

    def pause(self) -> None:
        """Leave the core to others for a while."""
        self._asked += 1
        time.sleep(0.0 if self._asked < 50 else min(LONGEST, 2e-6 * self._asked))


class MpiWork(Work):
    """A request of MPI's.

    Args:
        name: The call.
        outputs: What it writes.
        started: What MPI has begun.
        status: An empty status of mpi4py's, filled when MPI is done.
        ended: Called at the end, with the error if there is one.
        callbacks: What runs callbacks of the future.
        seconds: How long the call may take.
        trouble: What is known to keep the group from going on.
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
        trouble: Callable[[], BaseException | None],
    ) -> None:
        super().__init__(name, outputs, callbacks)
        self._started, self._status = started, status
        self._ended, self._trouble = ended, trouble
        self._seconds, self._deadline, self._look = seconds, monotonic() + seconds, monotonic() + LOOK_AROUND
        self._once = threading.Lock()

    def is_completed(self) -> bool:
        """Ask MPI."""
        if not self._over and self._once.acquire(False):
            try:
                if not self._over:
                    self._ask()
            finally:
                self._once.release()
        return self._over

    def _ask(self) -> None:
        try:
            if not self._started.request.Test(self._status):
                self._look_around()
                return
            self._started.finish(self, self._status)
        except Exception as error:
            translated = self._ended(error)
            self.fail(error if translated is None else translated)
        else:
            self._ended(None)
            self.finish()

    def _look_around(self) -> None:
        """MPI does not tell why a call takes long; now and then, see what else is known."""
        now = monotonic()
        if now > self._look and (trouble := self._trouble()) is not None:
            raise trouble
        if now > self._deadline:
            raise RankStalledError(
                f"{self.name}: not done within {self._seconds:g} s; a rank did not come, and MPI doesn't say which. "
                f"Look for a rank that makes another call, or pass a longer timeout to init_process_group or new_group."
            )
        self._look = now + LOOK_AROUND if now > self._look else self._look

    def _await(self, seconds: float | None) -> bool:
        end, pauses = None if seconds is None else monotonic() + seconds, Pauses()
        while not self.is_completed():
            if end is not None and monotonic() >= end:
                return False
            pauses.pause()
        return True


class Poller:
    """Asks for the works that nobody else may be asking for, and keeps them and their memory until they end."""

    def __init__(self, name: str) -> None:
        self._lane = WorkerThread(f"{name} progress")
        self._works: list[MpiWork] = []
        # MPI may still write into the tensors of a call that failed.
        self._failed: list[MpiWork] = []
        self._lock = threading.Lock()
        self._closed = False

    def watch(self, work: MpiWork) -> None:
        """Ask for this one until it ends."""
        with self._lock:
            self._works.append(work)
            if len(self._works) == 1:
                self._lane.put(self._loop)

    def _loop(self) -> None:
        pauses = Pauses()
        while self._open():
            pauses.pause()

    def _open(self) -> bool:
        """Ask for each; whether there is anything left to ask for."""
        ended = [work for work in list(self._works) if work.is_completed()]
        self._failed += [work for work in ended if work.exception() is not None]
        with self._lock:
            self._works = [work for work in self._works if work not in ended]
            return bool(self._works) and not self._closed

    def close(self) -> None:
        """End, whatever is still open."""
        self._closed = True
        self._lane.close()
