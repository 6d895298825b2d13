"""Elastic job on simulated hosts: one agent a host, and workers that the agents start, stop and start again.

Agents, coordinator, roster and the decisions about workers are those of a real job (`torchdist_ref.elastic`,
`launcher.supervision`). The rest of a host is simulated: its processes are threads, and its stores use the
connections of the simulation. Each agent and each worker of each attempt is a rank of the run with its own number.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from tempfile import TemporaryDirectory
from typing import Any

from torchdist_ref.elastic.agent_settings import AgentSettings
from torchdist_ref.elastic.host_agent import JobEnd, run_agent
from torchdist_ref.elastic.roster import Rules
from torchdist_ref.ranks.outcomes import Outcome, RankError, RankTimeoutError
from torchdist_ref.simulation.connections import address_of_host
from torchdist_ref.simulation.faults import Cut, EndHost, Fault, Kill, check_job
from torchdist_ref.simulation.job_workers import JobWorkers, SimulatedAttempt, SimulatedWorkers
from torchdist_ref.simulation.network import Network
from torchdist_ref.simulation.one_run import OneRun

_PORT = 29400
_SECRET = bytes(32)
"""Token of the job: agents need not warn that there is none."""


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
        self.lines: list[tuple[float, int, str]] = []
        self.ends: dict[int, JobEnd] = {}
        self.staff = JobWorkers(self.world, self._call, self.operations, self.log)

    # The run

    def job(self) -> SimulatedJob:
        """Run, and return the outcome of the job or raise the error of one that failed."""
        found: Any = self.result()
        assert isinstance(found, SimulatedJob)
        return found

    def _run(self) -> None:
        with TemporaryDirectory(prefix="torchdist_ref") as self.staff.records:
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
                workers = SimulatedWorkers(self.staff, rank, descriptors)
                self.ends[rank] = run_agent(settings, workers, partial(self.log, rank), f"host-{rank}")
        except Exception as error:
            self.outcomes[rank] = Outcome(rank, error=error)
        self.times[rank] = self.scheduler.now
        if all(task.has_ended or task.owner == rank or self.scheduler.is_dead(task.owner) for task in self.main):
            self.scheduler.stop_run()

    def _call(self, rank: int) -> Any:
        return self.fn(rank, *self.args)

    def log(self, host: int, text: str) -> None:
        """Note a line of an agent."""
        self.lines.append((self.scheduler.now, host, text))

    # The plan

    def _apply(self, fault: Fault) -> None:
        self._came.append(fault)
        if isinstance(fault, EndHost):
            self.log(fault.host, "the host ends")
            self.world.end_host(fault.host)
        elif isinstance(fault, Kill):
            self.staff.end(fault.rank, signal.SIGKILL)
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
            error = self.staff.errors[rank].error if rank in self.staff.errors else None
            raise RankError(f"the job failed: {end.text}\n{self._text()}", rank, self.staff.errors) from error
        values = self.staff.values[[*self.staff.attempts][-1]]
        order = sha256(repr((self.lines, self.scheduler.order.hexdigest(), self.times)).encode()).hexdigest()
        return SimulatedJob(
            [values[rank] for rank in sorted(values)],
            tuple(self.staff.attempts.values()),
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
