"""Workers of an elastic job on simulated hosts: each is a rank of the run, and ends as a process does.

`SimulatedWorkers` is what an agent starts and stops, by the decisions of `launcher.supervision`. Do not add hosts or
agents here: they belong to `elastic_job`.
"""

from __future__ import annotations

import contextvars
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchdist_ref import groups
from torchdist_ref.elastic.attempt import Assignment, AttemptOutcome, Exit
from torchdist_ref.groups import world as worlds
from torchdist_ref.launcher.supervision import Act, Supervision, WorkerState
from torchdist_ref.processes import failure_record
from torchdist_ref.ranks.outcomes import Outcome
from torchdist_ref.simulation.world import FIRST_PID, SimulatedWorld
from torchdist_ref.stores import TCPStore
from torchdist_ref.timeouts import CLOCK

_GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class SimulatedAttempt:
    """One start of the workers of a simulated job.

    Attributes:
        began: Virtual time at which the first worker started, in seconds.
        world_size: Number of workers.
        hosts: Hosts in the order of their ranks.
        restarts: Number of restarts after failures of workers so far. Changes of the hosts do not count.
    """

    began: float
    world_size: int
    hosts: tuple[int, ...]
    restarts: int


@dataclass(eq=False)
class _Worker:
    """One worker: its number in the run, its host, and its state as its agent sees it."""

    owner: int
    host: int
    state: WorkerState
    has_ended: Callable[[], None]


class JobWorkers:
    """Workers of all hosts in all attempts.

    Args:
        world: World of the run.
        program: Function to call with the rank.
        operations: Number of operations of each rank of the run, to which those of workers are added.
        log: Function that receives a host and a line.

    Attributes:
        records: Folder of failure records.
        attempts: Attempts, by their token: the stores of two attempts may have one port.
        values: Results by token and rank.
        errors: First exception of each rank that another one has not caused.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        program: Callable[[int], Any],
        operations: list[int],
        log: Callable[[int, str], None],
    ) -> None:
        self._world, self._program, self._operations, self.log = world, program, operations, log
        self.records = ""
        self.attempts: dict[str, SimulatedAttempt] = {}
        self.values: dict[str, dict[int, Any]] = {}
        self.errors: dict[int, Outcome] = {}
        self._running: dict[int, _Worker] = {}

    def note_attempt(self, assignment: Assignment, host: int) -> None:
        """Note that a host starts its workers of an attempt."""
        key = assignment.secret
        known = self.attempts.get(key)
        if known is None:
            known = SimulatedAttempt(self._world.scheduler.now, assignment.world_size, (), assignment.restart_count)
        hosts = dict(zip(known.hosts, known.hosts, strict=True)) | {host: host}
        self.attempts[key] = replace(known, hosts=tuple(hosts))

    def start_worker(
        self, assignment: Assignment, rank: int, host: int, has_ended: Callable[[WorkerState], None]
    ) -> _Worker:
        """Start a worker, whose process is a rank of the run."""
        owner = self._world.add_rank(host)
        self._operations.append(0)
        state = WorkerState(rank, FIRST_PID + owner)
        worker = _Worker(owner, host, state, partial(has_ended, state))
        self._running[rank] = worker
        run = partial(contextvars.copy_context().run, self._worker, worker, assignment)
        self._world.scheduler.spawn(owner, f"rank {rank}", run)
        return worker

    def _worker(self, worker: _Worker, assignment: Assignment) -> None:
        """Run the program on one rank of an attempt."""
        self._world.place(worker.owner)
        rank = worker.state.rank
        try:
            with worlds.thread_rank():
                value = self._called(rank, assignment)
        except Exception as error:
            self._failed(worker, error)
        else:
            self.values.setdefault(assignment.secret, {})[rank] = value
            self._ended(worker, 0)

    def _called(self, rank: int, assignment: Assignment) -> Any:
        try:
            store = TCPStore(assignment.master_addr, assignment.master_port)
            groups.init_process_group("ref", store=store, rank=rank, world_size=assignment.world_size)
            value = self._program(rank)
            if groups.is_initialized():
                groups.destroy_process_group()
            return value
        except Exception as error:
            worlds.abort(f"rank {rank} {Outcome(rank, error=error)}")
            raise

    def _failed(self, worker: _Worker, error: Exception) -> None:
        state = worker.state
        state.is_consequence = failure_record.is_caused_by_another_rank(error)
        if not state.is_consequence:
            path = Path(self.error_file(state.pid))
            failure_record.write_whole(path, failure_record.content_of(error))
            record = failure_record.read(path)
            # The file's time is real.
            state.record = replace(record, time_ns=round(time.time() * 1e9)) if record else None
            self.errors.setdefault(state.rank, Outcome(state.rank, error=error))
        self._ended(worker, 1)

    def error_file(self, pid: int) -> str:
        """Return the path of a worker's failure record, which need not exist."""
        return str(Path(self.records, f"{pid}.json"))

    def _ended(self, worker: _Worker, status: int) -> None:
        """Let the process of a worker end."""
        if worker.state.status is None:
            worker.state.status = status
            # Once this thread has left it.
            self._world.scheduler.at(self._world.scheduler.now, partial(self._world.exit, worker.owner))
            worker.has_ended()

    def signal(self, worker: _Worker, signum: int) -> None:
        """End a worker by a signal, which its program does not catch."""
        if worker.state.status is None and worker.owner not in self._world.wires.silent:
            worker.state.status = -signum
            self._world.kill(worker.owner)
            worker.has_ended()

    def end(self, rank: int, signum: int) -> None:
        """End the worker that has a rank now by a signal, if there is one."""
        if (worker := self._running.get(rank)) is not None:
            self.signal(worker, signum)


class _NoSignals:
    """Signals to an agent: none arrive. As `host_agent.Interruptions`, with itself as the socket."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def socket(self) -> Any:
        return self

    def fileno(self) -> int:
        return self._descriptor

    def received(self) -> bytes:
        return b""


class SimulatedWorkers:
    """Workers of one simulated host, as `host_agent.Workers`."""

    def __init__(self, job: JobWorkers, host: int, descriptors: Sequence[int]) -> None:
        self._job, self._host = job, host
        self.interrupts, self._wake = _NoSignals(descriptors[0]), descriptors[1]

    def run(self, assignment: Assignment, stop: int | None = None) -> AttemptOutcome:
        """Start the workers, and return when none is left."""
        job, decisions = self._job, Supervision(_GRACE_SECONDS)
        ended: list[WorkerState] = []

        def has_ended(state: WorkerState) -> None:
            ended.append(state)
            os.eventfd_write(self._wake, 1)

        job.note_attempt(assignment, self._host)
        workers: dict[WorkerState, _Worker] = {}
        for rank in assignment.global_ranks:
            worker = job.start_worker(assignment, rank, self._host, has_ended)
            workers[worker.state] = worker
            decisions.workers.append(worker.state)
        while decisions.running or ended:
            watched = [self._wake] if stop is None or decisions.stopped else [self._wake, stop]
            due = decisions.deadline
            ready = CLOCK.wait(watched, None if due is None else max(0.0, due - time.monotonic()))
            now = time.monotonic()
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if stop is not None and stop in ready:
                decisions.stop_requested(now)
            if ended:
                each, ended = [*ended], []
                decisions.ended(now, each)
            decisions.tick(now)
            while decisions.actions:
                action = decisions.actions.pop(0)
                if action.act is Act.REPORT:
                    job.log(self._host, action.text)
                elif action.act is Act.SIGNAL:
                    for state in action.workers:
                        job.signal(workers[state], action.signum)
        return self._outcome(decisions, assignment)

    def _outcome(self, end: Supervision, assignment: Assignment) -> AttemptOutcome:
        exits = {
            state: Exit(state.rank, local_rank, state.pid, state.status or 0, self._job.error_file(state.pid))
            for local_rank, state in enumerate(end.workers)
        }
        first = exits[end.first_failure] if end.first_failure else None
        return AttemptOutcome(
            end.code or 0,
            tuple(exits.values()),
            first,
            end.signal,
            end.stopped,
            assignment=assignment,
            cause_is_elsewhere=end.cause_is_elsewhere,
        )
