"""Elastic job on simulated hosts: one agent a host, and workers that the agents start, stop and start again.

Agents, coordinator, roster and the decisions about workers are those of a real job (`torchdist_ref.elastic`,
`launcher.supervision`). The rest of a host is simulated: its processes are threads, and its stores use the
connections of the simulation. Each agent and each worker of each attempt is a rank of the run with its own number.
"""

from __future__ import annotations

import contextvars
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchdist_ref import groups
from torchdist_ref.elastic.agent_settings import AgentSettings
from torchdist_ref.elastic.attempt import Assignment, AttemptOutcome, Exit
from torchdist_ref.elastic.host_agent import JobEnd, run_agent
from torchdist_ref.elastic.roster import Rules
from torchdist_ref.groups import world as worlds
from torchdist_ref.launcher.supervision import Act, Supervision, WorkerState
from torchdist_ref.processes import failure_record
from torchdist_ref.ranks.outcomes import Outcome, RankError, RankTimeoutError
from torchdist_ref.simulation.connections import address_of_host
from torchdist_ref.simulation.faults import Cut, EndHost, Fault, Kill, check_job
from torchdist_ref.simulation.network import Network
from torchdist_ref.simulation.one_run import OneRun
from torchdist_ref.simulation.scheduler import Task
from torchdist_ref.simulation.world import FIRST_PID
from torchdist_ref.stores import TCPStore
from torchdist_ref.timeouts import CLOCK

_PORT = 29400
_SECRET = bytes(32)
"""Token of the job: agents need not warn that there is none."""
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


@dataclass(frozen=True)
class SimulatedJob:
    """Outcome of an elastic job that has succeeded on one host or more.

    Attributes:
        values: Result of the program on each rank of the last attempt.
        attempts: All starts of the workers.
        codes: Exit code of each host's agent; None for a host that has ended. A host that was cut off for good gives up
            with 2, while the others go on.
        log: Lines of the agents: virtual time in seconds, host and text.
        seconds: Virtual time at which the job ended.
        digest: Text that two runs share if and only if they had the same order of events and the same times.
        seed: Seed of the run.
        operations: Number of operations of each host's agent, as `EndHost` counts them.
    """

    values: list[Any]
    attempts: tuple[SimulatedAttempt, ...]
    codes: tuple[int | None, ...]
    log: tuple[tuple[float, int, str], ...] = field(repr=False)
    seconds: float
    digest: str = field(repr=False)
    seed: int
    operations: list[int] = field(repr=False)

    def __str__(self) -> str:
        return "\n".join(f"{at:>10.3f} s  host-{host}  {text}" for at, host, text in self.log)


@dataclass(eq=False)
class _Worker:
    """One worker: its number in the run, its host, and its state as its agent sees it."""

    owner: int
    host: int
    state: WorkerState
    has_ended: Callable[[], None]


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

    def __init__(self, job: OneJob, host: int, descriptors: Sequence[int]) -> None:
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


class OneJob(OneRun):
    """One run of an elastic job. The first ranks of the run are the hosts' agents; each worker is a further one."""

    def __init__(
        self,
        fn: Callable[..., Any],
        hosts: int,
        args: tuple[object, ...],
        workers: int,
        rules: Rules,
        seed: int,
        network: Network | None,
        faults: Sequence[Fault],
        timeout: float | None,
    ) -> None:
        check_job(faults, hosts, workers)
        own = replace(network or Network(0.0, 0.0, 0.0, None, 0.0, 0.0), hosts=tuple(range(hosts)))
        super().__init__(fn, hosts, args, seed, own, 0.0, (), timeout, None, False, None)
        self.faults = faults
        self.workers, self.rules = workers, rules
        # By the token of the attempt: the stores of two attempts may have one port.
        self.attempts: dict[str, SimulatedAttempt] = {}
        self.values: dict[str, dict[int, Any]] = {}
        self.lines: list[tuple[float, int, str]] = []
        self.ends: dict[int, JobEnd] = {}
        self.errors: dict[int, Outcome] = {}
        self._running: dict[int, _Worker] = {}
        self._records = ""

    # The run

    def job(self) -> SimulatedJob:
        """Run, and return the outcome of the job or raise the error of one that failed."""
        found: Any = self.result()
        assert isinstance(found, SimulatedJob)
        return found

    def _run(self) -> None:
        with TemporaryDirectory(prefix="torchdist_ref") as self._records:
            super()._run()

    def _rank(self, rank: int) -> None:
        """Run the agent of a host."""
        self.world.place(rank)
        address = address_of_host(rank)
        settings = AgentSettings(
            self.rules, address_of_host(0), _PORT, self.workers, local_addr=address, secret=_SECRET
        )
        try:
            with ExitStack() as undo:
                descriptors = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
                for descriptor in descriptors:
                    undo.callback(os.close, descriptor)
                workers = SimulatedWorkers(self, rank, descriptors)
                self.ends[rank] = run_agent(settings, workers, partial(self.log, rank), f"host-{rank}")
        except Exception as error:
            self.outcomes[rank] = Outcome(rank, error=error)
        self.times[rank] = self.scheduler.now
        if all(task.has_ended or task.owner == rank or self.scheduler.is_dead(task.owner) for task in self.main):
            self.scheduler.stop_run()

    def log(self, host: int, text: str) -> None:
        """Note a line of an agent."""
        self.lines.append((self.scheduler.now, host, text))

    # Workers

    def note_attempt(self, assignment: Assignment, host: int) -> None:
        """Note that a host starts its workers of an attempt."""
        key = assignment.secret
        known = self.attempts.get(key)
        if known is None:
            known = SimulatedAttempt(self.scheduler.now, assignment.world_size, (), assignment.restart_count)
        hosts = dict(zip(known.hosts, known.hosts, strict=True)) | {host: host}
        self.attempts[key] = replace(known, hosts=tuple(hosts))

    def start_worker(
        self, assignment: Assignment, rank: int, host: int, has_ended: Callable[[WorkerState], None]
    ) -> _Worker:
        """Start a worker, whose process is a rank of the run."""
        owner = self.world.add_rank(host)
        self.operations.append(0)
        state = WorkerState(rank, FIRST_PID + owner)
        worker = _Worker(owner, host, state, partial(has_ended, state))
        self._running[rank] = worker
        run = partial(contextvars.copy_context().run, self._worker, worker, assignment)
        self.scheduler.spawn(owner, f"rank {rank}", run)
        return worker

    def _worker(self, worker: _Worker, assignment: Assignment) -> None:
        """Run the program on one rank of an attempt."""
        self.world.place(worker.owner)
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
            value = self.fn(rank, *self.args)
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
        return str(Path(self._records, f"{pid}.json"))

    def _ended(self, worker: _Worker, status: int) -> None:
        """Let the process of a worker end."""
        if worker.state.status is None:
            worker.state.status = status
            # Once its last thread has left: what is left of it does nothing any more.
            self.scheduler.at(self.scheduler.now, partial(self._exited, worker))
            worker.has_ended()

    def _exited(self, worker: _Worker) -> None:
        self.scheduler.kill(worker.owner)
        self.ports.end_process(worker.owner)

    def signal(self, worker: _Worker, signum: int) -> None:
        """End a worker by a signal, which its program does not catch."""
        if worker.state.status is None and worker.owner not in self.wires.silent:
            worker.state.status = -signum
            self.world.kill(worker.owner)
            worker.has_ended()

    # The plan

    def _step(self, task: Task) -> None:
        super()._step(task)
        for fault in self.faults:
            if (
                isinstance(fault, EndHost)
                and fault.operation == self.operations[task.owner]
                and fault.host == task.owner
            ):
                self._apply(fault)

    def _apply(self, fault: Fault) -> None:
        self._came.append(fault)
        if isinstance(fault, EndHost):
            self.log(fault.host, "the host ends")
            self.world.end_host(fault.host)
        elif isinstance(fault, Kill):
            worker = self._running.get(fault.rank)
            if worker is not None:
                self.signal(worker, signal.SIGKILL)
        elif isinstance(fault, Cut):
            others = set(range(self.size)) - set(fault.some)
            pairs = {(one, other) for one in fault.some for other in others}
            self.wires.cut_hosts = pairs | {(other, one) for one, other in pairs}
            for host in fault.some:
                self.log(host, "the host is cut off")
            if fault.seconds is not None:
                self.scheduler.at(self.scheduler.now + fault.seconds, partial(self._heal, fault))

    def _heal(self, fault: Cut) -> None:
        self.wires.cut_hosts = set()
        super()._heal(fault)

    def _quiet(self) -> None:
        """Have the waits look again; agents that keep alive never come to an end by waiting."""
        if self._activity != self.scheduler.activity:
            self._activity = self.scheduler.activity
            self.scheduler.alarm()

    def _conclude(self) -> Any:
        """Return the result, or raise the error of the job."""
        left = [host for host in range(self.size) if not self.scheduler.is_dead(host)]
        failed = next((self.outcomes[host] for host in left if host in self.outcomes), None)
        if failed is not None:
            raise RankError(f"the agent of host-{failed.rank} {failed}", failed.rank) from failed.error
        running = [f"host-{host}" for host in left if host not in self.ends]
        if running:
            limit = f"did not end within {self.timeout:g} s of virtual time" if self.timeout else "cannot continue"
            raise RankTimeoutError(f"the agents of {', '.join(running)} {limit}:\n{self._text()}", 0)
        codes = tuple(self.ends[host].code if host in left else None for host in range(self.size))
        if 0 not in codes:
            end = next((self.ends[host] for host in left), JobEnd(1, "all hosts have ended"))
            rank = int((end.failure or {}).get("rank", 0))
            error = self.errors[rank].error if rank in self.errors else None
            raise RankError(f"the job failed: {end.text}\n{self._text()}", rank, self.errors) from error
        values = self.values[[*self.attempts][-1]]
        order = sha256(repr((self.lines, self.scheduler.order.hexdigest(), self.times)).encode()).hexdigest()
        return SimulatedJob(
            [values[rank] for rank in sorted(values)],
            tuple(self.attempts.values()),
            codes,
            tuple(self.lines),
            max(self.times[host] for host in left),
            order,
            self.seed,
            self.operations[: self.size],
        )

    def _text(self) -> str:
        return "\n".join(f"  {at:.3f} s  host-{host}  {text}" for at, host, text in self.lines[-_MOST_LINES:])


_MOST_LINES = 24
