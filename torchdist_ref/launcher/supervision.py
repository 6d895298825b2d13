"""Decisions about the workers of one attempt: which one failed first, when the others are stopped, and when killed.

A `Supervision` turns events into actions. It has no process, descriptor or clock: `supervisor` calls a method for each
event, with the present time, and performs the actions that follow. So tests need neither workers nor seconds. Do not
add system calls here.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from torchdist_ref.elastic.worker_blame import Evidence, blame
from torchdist_ref.processes.control import describe_exit, name_ranks, signal_name
from torchdist_ref.processes.failure_record import FailureRecord

DRAIN_SECONDS = 2.0
"""Time to continue reading after all ranks have ended, while processes that they started hold their output open."""
CAUSE_SECONDS = 0.5
"""Time from the end of a worker because of another one to the end of that one."""
DUMP_SECONDS = 0.5
"""Time that workers have to write dumps of their last calls, where the environment asks for dumps."""


@dataclass(eq=False)
class WorkerState:
    """State of one worker.

    Attributes:
        rank: Global rank.
        pid: Process id.
        status: Exit code, or the negative number of the signal that killed it. None while it runs.
        record: Record of its failure, which it may write before it ends. None without one.
        is_consequence: Whether it has named a failure of another rank as the cause of its own.
        wants_dumps: Whether its environment asks for dumps of its last calls.
    """

    rank: int
    pid: int
    status: int | None = None
    record: FailureRecord | None = None
    is_consequence: bool = False
    wants_dumps: bool = False

    def evidence(self) -> Evidence:
        """Return what is known of its failure."""
        if self.record is None:
            return Evidence(self.is_consequence, (self.status or 0) >= 0)
        return Evidence(False, (self.status or 0) >= 0, self.record.time_ns)


class Act(Enum):
    """Kind of an action.

    Attributes:
        SIGNAL: Send the signal `Action.signum` to workers.
        DUMP: Ask workers to dump their last calls.
        REPORT: Write `Action.text` as a line of the launcher.
        FORWARD: Forward what the workers have written so far.
        CLOSE: Stop reading: processes that the workers started hold the pipes open.
    """

    SIGNAL, DUMP, REPORT, FORWARD, CLOSE = (auto() for _ in range(5))


class Action(NamedTuple):
    """Action of a supervisor.

    Attributes:
        act: Kind.
        workers: Workers that it concerns.
        signum: Signal to send.
        text: Line to write.
    """

    act: Act
    workers: tuple[WorkerState, ...] = ()
    signum: int = 0
    text: str = ""


@dataclass
class Supervision:
    """Workers of one attempt, and the decisions about them.

    Args:
        grace: Time from asking workers to stop to killing them, in seconds.

    Attributes:
        stop_signal: Signal that asks workers to stop when the caller wants to end them.
        workers: State of each worker; the caller keeps it up to date.
        code: Exit code of the attempt; None while neither a failure nor a request ends it.
        first_failure: First worker that failed by itself. None if all is well, or if a signal ended the attempt.
        signal: Number of the signal to the launcher that ended the attempt; 0 for none.
        stopped: Whether the caller has ended the attempt.
        deadline: Time of the next `tick` that has something to do; None for none.
        actions: Actions since the caller last emptied the list.
    """

    grace: float
    stop_signal: int = signal.SIGTERM
    workers: list[WorkerState] = field(default_factory=list)
    code: int | None = None
    first_failure: WorkerState | None = None
    signal: int = 0
    stopped: bool = False
    deadline: float | None = None
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Workers that have ended because of another one, which still runs or which another host runs.
        self._consequences: list[WorkerState] = []
        # The signal that is due at the deadline, and the workers that may write dumps until then.
        self._after_dumps: tuple[int, tuple[WorkerState, ...]] | None = None

    @property
    def running(self) -> tuple[WorkerState, ...]:
        """Workers that run."""
        return tuple(worker for worker in self.workers if worker.status is None)

    @property
    def cause_is_elsewhere(self) -> bool:
        """Whether the first worker that failed has ended because of a rank that runs on another host."""
        return self.first_failure in self._consequences

    # Events

    def ended(self, now: float, workers: Sequence[WorkerState]) -> None:
        """Record that workers have ended; their state, and the records of all workers, are up to date."""
        failed = [worker for worker in workers if worker.status]
        if self.code is None and (failed or self._consequences):
            self._on_failed(now, failed)
        if workers and not self.running:
            self.deadline = now + DRAIN_SECONDS

    def signalled(self, now: float, signum: int) -> None:
        """Record a signal to the launcher: the first one is forwarded, and a second one kills."""
        if self.code is not None:
            self._send(signal.SIGKILL, self.running)
            return
        self.signal = signum
        self._report(f"got {signal_name(signum)}: forwarding it to {self._running_names()}")
        self._stop(now, signum, 128 + signum, self.running)

    def stop_requested(self, now: float) -> None:
        """Record that the caller wants to end the attempt."""
        self.stopped = True
        if self.code is None:
            self._stop_after_dumps(now, self.stop_signal, 128 + self.stop_signal, self.running)
        elif self.deadline is not None:
            self.deadline = min(self.deadline, now + self.grace)

    def output_closed(self, now: float) -> None:
        """Record that nothing reads the launcher's output any more (``| head``): the job ends without a message."""
        self.signal = self.signal or signal.SIGPIPE
        self._stop(now, signal.SIGTERM, 128 + signal.SIGPIPE, self.running)

    def tick(self, now: float) -> None:
        """Decide what is due."""
        if self.deadline is None or now < self.deadline:
            return
        self.deadline = None
        if self.code is None and self._consequences:
            self._on_failure(now, self._blamed(self._consequences))
        elif self._after_dumps and self.running:
            (signum, chosen), self._after_dumps = self._after_dumps, None
            self._stop(now, signum, 0, chosen)
        elif self.running:
            self._report(f"{self._running_names()} did not stop within {self.grace:g} s: killing")
            self._send(signal.SIGKILL, self.running)
        else:
            self.actions.append(Action(Act.CLOSE))

    # Decisions

    def _blamed(self, failed: Iterable[WorkerState]) -> WorkerState:
        """Return the worker that made these fail. It may still run: a record is written before a traceback."""
        recorded = [worker for worker in self.workers if worker.record is not None]
        return blame([*failed, *recorded], WorkerState.evidence)

    def _on_failed(self, now: float, failed: Sequence[WorkerState]) -> None:
        """Report the first failure at once if its worker has ended, else when it ends, or when the time is over.

        A worker that ends because of another one often ends before it: the other one still prints its traceback, or
        runs its exit handlers. The line of the launcher would appear in the middle of that traceback.
        """
        blamed = self._blamed([*failed, *self._consequences])
        by_itself = blamed.status is not None and not blamed.evidence().follows
        self._consequences += [] if by_itself else failed
        if by_itself or not self.running:
            self._on_failure(now, blamed)
        elif self.deadline is None:
            self.deadline = now + CAUSE_SECONDS

    def _on_failure(self, now: float, worker: WorkerState) -> None:
        # Tracebacks precede the report of a failure.
        self.actions.append(Action(Act.FORWARD))
        self.first_failure = worker
        others = tuple(one for one in self.running if one is not worker)
        status, record = worker.status, worker.record
        how = describe_exit(status) if status else "failed"
        how += f" with {record.message}" if record and not status else f": {record.message}" if record else ""
        stopping = f"; stopping {name_ranks(one.rank for one in others)}" if others else ""
        self._report(f"rank {worker.rank} (process {worker.pid}) {how}{stopping}")
        # A rank that has recorded its failure is still printing its traceback: it ends by itself.
        code = 1 if not status else status if status > 0 else 128 - status
        self._stop_after_dumps(now, signal.SIGTERM, code, others)

    def _stop_after_dumps(self, now: float, signum: int, code: int, workers: tuple[WorkerState, ...]) -> None:
        """Stop workers; where failures are dumped, not before they have had time for that."""
        if not any(worker.wants_dumps for worker in workers):
            self._stop(now, signum, code, workers)
            return
        self.code, self._after_dumps, self.deadline = code, (signum, workers), now + DUMP_SECONDS
        self.actions.append(Action(Act.DUMP, workers))

    def _stop(self, now: float, signum: int, code: int, workers: tuple[WorkerState, ...]) -> None:
        self.code = code if self.code is None else self.code
        self.deadline = now + self.grace
        self._send(signum, workers)

    def _send(self, signum: int, workers: tuple[WorkerState, ...]) -> None:
        self.actions += [Action(Act.SIGNAL, workers, signum)] if workers else []

    def _report(self, text: str) -> None:
        self.actions.append(Action(Act.REPORT, text=text))

    def _running_names(self) -> str:
        return name_ranks(worker.rank for worker in self.running)
