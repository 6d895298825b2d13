"""Rules of a job on several hosts: which hosts take part, when their workers start and stop, and when the job ends.

A `Roster` turns reports of agents into decisions for all of them. It has no thread, socket or clock, so that tests can
run years of a job in milliseconds: `coordinator` passes reports and the time to it. Do not add communication here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from torchdist_ref.elastic.worker_blame import Evidence, blame

REPORT_SECONDS = 10.0
"""Interval of the lines about hosts that are missing."""
SETTLE_SECONDS = 0.05
"""Time in which reports that belong together arrive: failures with one cause, hosts that join together."""
CAUSE_SECONDS = 0.5
"""Longest wait for the report of a failure after those of ranks that have ended because of it."""


def _follows(failure: Mapping[str, Any]) -> bool:
    """Return whether a worker has failed because of one on another host."""
    return bool(failure.get("cause_is_elsewhere"))


def _evidence(failure: Mapping[str, Any]) -> Evidence:
    return Evidence(_follows(failure), failure["code"] < 128, failure["time"])


def versions() -> dict[str, str]:
    """Return the versions that have to be equal on all hosts, without importing torch."""
    found = find_spec("torch")
    text = ""
    if found is not None and found.origin is not None:
        with suppress(OSError):
            text = Path(found.origin).with_name("version.py").read_text("utf-8")
    torch = re.search(r"__version__ = '([^'+]*)", text)
    own = sys.modules["torchdist_ref"].__version__
    return {"torchdist_ref": str(own), "torch": torch[1] if torch else "none"}


@dataclass(frozen=True)
class HostInfo:
    """Host that takes part in a job, as its agent describes it.

    Attributes:
        key: Random name of the agent.
        host: Name of the host, for messages.
        address: Address at which the other hosts reach it.
        port: Port of its standby store.
        workers: Number of its workers.
        node_rank: Rank that its user gave it; -1 for none.
        role: Role of its workers.
    """

    key: str
    host: str
    address: str
    port: int
    workers: int
    node_rank: int = -1
    role: str = "default"


@dataclass(frozen=True)
class Rules:
    """Settings of a job that are the same on all hosts.

    Attributes:
        run_id: Name of the job.
        min_hosts: Smallest number of hosts.
        max_hosts: Largest number of hosts.
        max_restarts: Largest number of restarts after failures of workers. Changes of the hosts do not count.
        join_seconds: Longest time to wait for `min_hosts`.
        last_call_seconds: Time to wait for more hosts before the first start.
    """

    run_id: str
    min_hosts: int
    max_hosts: int
    max_restarts: int = 0
    join_seconds: float = 600.0
    last_call_seconds: float = 30.0


@dataclass(frozen=True)
class Progress:
    """State of a job that outlives the host that coordinates it.

    Attributes:
        attempt: Number of starts so far.
        restarts: Number of restarts after failures of workers.
        hosts: Hosts of the last attempt, in rank order.
        leader: Key of the agent that coordinates.
    """

    attempt: int = 0
    restarts: int = 0
    hosts: tuple[HostInfo, ...] = ()
    leader: str = ""

    @staticmethod
    def from_message(message: Mapping[str, Any]) -> Progress:
        """Return the progress that a message contains."""
        hosts = tuple(HostInfo(**host) for host in message["hosts"])
        return Progress(message["attempt"], message["restarts"], hosts, message["leader"])


class Decision(NamedTuple):
    """Message to one agent, or to all.

    Attributes:
        kind: ``start``, ``stop``, ``note`` or ``end`` to all; ``accept`` or ``reject`` to the agent `key`.
        content: Its content, ready for JSON.
        key: Agent; empty for all.
    """

    kind: str
    content: dict[str, Any]
    key: str = ""


@dataclass
class _Seat:
    """Agent that has joined.

    Attributes:
        info: Its description.
        ready: Whether no worker of an earlier attempt runs on its host.
        finished: Whether all workers of this attempt have succeeded there.
    """

    info: HostInfo
    ready: bool = True
    finished: bool = False


@dataclass
class Roster:
    """Hosts of a job, and the decisions about them.

    Args:
        rules: Settings.
        now: Present time in seconds, on any clock.
        leader: Key of the agent that coordinates; it gets the first rank if no rank is given.
        progress: State that an earlier coordinator left. Default: a new job.
        gone: Keys of the hosts of `progress` that have certainly ended.
        grace: Time to wait for the other hosts of `progress`, in seconds.

    Attributes:
        seats: Agents that have joined, by key.
        waiting: Agents that joined when the job had `max_hosts`.
        decisions: Decisions since the caller last emptied the list.
        running: Whether workers run.
        ended: Whether the job has ended.
        deposed: Whether most hosts are out of reach, so that another agent may coordinate those.
    """

    rules: Rules
    now: float
    leader: str = ""
    progress: Progress = field(default_factory=Progress)
    gone: frozenset[str] = frozenset()
    grace: float = 0.0
    seats: dict[str, _Seat] = field(default_factory=dict)
    waiting: dict[str, HostInfo] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    running: bool = False
    ended: bool = False
    deposed: bool = False

    def __post_init__(self) -> None:
        self._inherited = bool(self.progress.hosts)
        self._give_up_at = self.now + self.rules.join_seconds
        self._report_at = self.now + REPORT_SECONDS
        # Until this time, an attempt starts only with the largest number of hosts.
        self._waits_until = self.now + (self.grace if self._inherited else self.rules.join_seconds)
        self._actions: list[tuple[float, Callable[[], None]]] = []
        self._failures: list[dict[str, Any]] = []
        self._leader_host = ""
        # Hosts that have joined since the last start, and are lost.
        self._lost: list[str] = []

    # Reports of agents

    def join(self, info: HostInfo, rules: Rules) -> None:
        """Add a host, or refuse it with one sentence."""
        if refusal := self._refusal(info, rules):
            self._decide("reject", key=info.key, text=refusal)
            return
        full = info.key not in self.seats and len(self.seats) >= self.rules.max_hosts
        if info.key == self.leader:
            self._leader_host = info.host
        self._decide("accept", key=info.key, spare=full, leader=self._leader_host)
        if full:
            self.waiting[info.key] = info
            self._note(
                f"{info.host} is a spare: the job has its {self.rules.max_hosts} hosts, and takes it when one leaves"
            )
            return
        self._seat(info)

    def ready(self, key: str, attempt: int) -> None:
        """Record that no worker runs on a host after a ``stop``."""
        if key in self.seats and attempt == self.progress.attempt and not self.running:
            self.seats[key].ready = True

    def finish(self, key: str, attempt: int) -> None:
        """Record that all workers of a host have succeeded."""
        if key in self.seats and attempt == self.progress.attempt and self.running:
            self.seats[key].finished = True
            if all(seat.finished for seat in self.seats.values()):
                self._end(0, "")

    def fail(self, key: str, attempt: int, failure: dict[str, Any]) -> None:
        """Record that a worker has failed. The first failure of all hosts counts as the reason.

        Args:
            key: Agent.
            attempt: Attempt in which the worker ran.
            failure: Code ``code`` and text ``text``, the time ``time`` of the failure in seconds since 1970, and
                ``cause_is_elsewhere`` if the worker has ended because of one on another host.
        """
        if key not in self.seats or attempt != self.progress.attempt or not self.running:
            return
        follows = _follows(failure)
        if not self._failures or (not follows and all(map(_follows, self._failures))):
            self._after(CAUSE_SECONDS if follows else SETTLE_SECONDS, self._on_failures)
        self._failures.append(failure)

    def lose(self, key: str, reason: str, certain: bool = True) -> None:
        """Remove a host whose agent has ended or is out of reach.

        Args:
            key: Agent.
            reason: Reason, to follow the name of the host.
            certain: Whether its agent has ended; otherwise it may still run.
        """
        self.waiting.pop(key, None)
        seat = self.seats.pop(key, None)
        if seat is None or self.ended:
            return
        took_part = any(host.key == key for host in self.progress.hosts)
        self.gone |= {key} if certain and took_part else set()
        self._lost += [] if took_part else [seat.info.host]
        if took_part and not self._has_quorum(leads=True):
            self.deposed = True
            self._note(f"{seat.info.host} {reason}, and most hosts of the job are out of reach")
            return
        self._promote_spare()
        if self.running:
            self._restart(f"{seat.info.host} {reason}")
        else:
            self._note(f"{seat.info.host} {reason}")

    def leave(self, key: str, reason: str) -> None:
        """Remove a host that leaves on request; the job ends if too few remain."""
        seat = self.seats.get(key)
        if seat is None or self.ended or self.can_spare_one or not self.progress.attempt:
            self.lose(key, f"has left ({reason})")
            return
        left, least = len(self.seats) - 1, self.rules.min_hosts
        del self.seats[key]
        self._end(1, f"{seat.info.host} has left ({reason}), and {left} of {least} hosts (--nnodes) are too few")

    @property
    def out_of_reach(self) -> list[str]:
        """Names of the hosts of the last attempt that no longer take part."""
        return [host.host for host in self.progress.hosts if host.key not in self.seats]

    @property
    def can_spare_one(self) -> bool:
        """Whether enough hosts remain if one leaves."""
        return len(self.seats) + len(self.waiting) > self.rules.min_hosts

    # Time

    def next_time(self) -> float:
        """Return the time of the next `tick` that has something to do."""
        times = [at for at, _ in self._actions]
        if not self.running and not self.ended:
            times += [self._report_at] if self._is_enough() else [self._report_at, self._give_up_at]
            times += [self._waits_until] if self._waits_until > self.now else []
        return min(times, default=float("inf"))

    def tick(self, now: float) -> None:
        """Make the decisions that are due."""
        self.now = now
        due = [action for at, action in self._actions if at <= now]
        self._actions = [(at, action) for at, action in self._actions if at > now]
        for action in due:
            action()
        if self.ended or self.running:
            return
        if self._may_start():
            self._start()
        elif self._inherited and now >= self._waits_until and not self._has_quorum(leads=False):
            self.deposed = True
        elif now >= self._give_up_at and not self._is_enough():
            alone = len(self.seats) == 1 and not self.progress.hosts and not self._lost
            self._end(2, f"{self._missing()} within {self.rules.join_seconds:g} s. {_CURE}", alone=alone)
        elif now >= self._report_at:
            self._report_at = now + REPORT_SECONDS
            left = max(0.0, (self._give_up_at if not self._is_enough() else self._waits_until) - now)
            self._note(f"{self._missing()} yet; waiting for {left:.0f} s more. {_CURE}")

    # Decisions

    def _refusal(self, info: HostInfo, rules: Rules) -> str:
        own = asdict(self.rules)
        for name, value in asdict(rules).items():
            if value != own[name]:
                return f"{_OPTIONS[name]} is {value} on {info.host} and {own[name]} on the others; pass the same on all"
        taken = [seat.info for seat in self.seats.values() if seat.info.node_rank == info.node_rank >= 0]
        if taken and taken[0].key != info.key:
            return f"--node-rank {info.node_rank} of {info.host} is already used by {taken[0].host}; give each its own"
        if info.node_rank >= self.rules.max_hosts:
            return f"--node-rank {info.node_rank} of {info.host} is not below --nnodes {self.rules.max_hosts}"
        return ""

    def _seat(self, info: HostInfo) -> None:
        self.seats[info.key] = _Seat(info)
        first = not self.progress.attempt
        if first and len(self.seats) == self.rules.min_hosts:
            self._waits_until = self.now + self.rules.last_call_seconds
        if self.running:
            # Wait a moment, so that hosts that join at about the same time cause one restart.
            self._after(SETTLE_SECONDS, lambda: self._restart(f"{info.host} joins"))

    def _promote_spare(self) -> None:
        if self.waiting and len(self.seats) < self.rules.max_hosts:
            key = next(iter(self.waiting))
            self.seats[key] = _Seat(self.waiting.pop(key))

    def _may_start(self) -> bool:
        """Return whether all is ready for an attempt: enough hosts, none expected, and no worker of the last one."""
        if not self._is_enough() or not all(seat.ready for seat in self.seats.values()):
            return False
        # Do not expect the former coordinator: this one replaces it because it was lost.
        expected = {host.key for host in self.progress.hosts} - self.gone - {self.progress.leader}
        known = self._inherited and expected <= self.seats.keys()
        complete = len(self.seats) == self.rules.max_hosts
        if self._inherited and not self._has_quorum(leads=False):
            return False
        return complete or known or self.now >= self._waits_until

    def _is_enough(self) -> bool:
        return len(self.seats) >= self.rules.min_hosts

    def _has_quorum(self, leads: bool) -> bool:
        """Return whether no other part of the last attempt's hosts can go on as this job.

        Hosts that are out of reach may still run workers. So only the larger part continues the job; of two equal
        parts, the one with the coordinator.
        """
        hosts = self.progress.hosts
        reached = sum(host.key in self.seats for host in hosts)
        return 2 * reached + leads > len(hosts) - len(self.gone)

    def _start(self) -> None:
        ordered = self._in_order()
        attempt, restarts = self.progress.attempt + 1, self.progress.restarts
        self.progress = Progress(attempt, restarts, tuple(ordered), self.leader)
        self.running, self._inherited, self.gone = True, False, frozenset()
        self._failures.clear()
        self._lost.clear()
        self._actions.clear()
        for seat in self.seats.values():
            seat.ready = seat.finished = False
        self._decide("start", **asdict(self.progress))

    def _in_order(self) -> list[HostInfo]:
        """Return the hosts in rank order: given ranks, else those of the last attempt, then in the order of joining."""
        former = {host.key: rank for rank, host in enumerate(self.progress.hosts)} | {self.leader: -1}
        infos = [seat.info for seat in self.seats.values()]
        return sorted(infos, key=lambda info: (info.node_rank, former.get(info.key, len(former))))

    def _restart(self, reason: str) -> None:
        """Stop all workers; the next attempt starts when none is left."""
        if not self.running or self.ended:
            return
        self.running = False
        self._actions.clear()
        self._waits_until = self.now
        self._give_up_at, self._report_at = self.now + self.rules.join_seconds, self.now + REPORT_SECONDS
        self._decide("stop", attempt=self.progress.attempt, text=reason)

    def _on_failures(self) -> None:
        if not self.running:
            return
        first = blame(self._failures, _evidence)
        if self.progress.restarts >= self.rules.max_restarts:
            self._end(first["code"], first["text"], failure=first)
            return
        restarts = self.progress.restarts + 1
        self.progress = replace(self.progress, restarts=restarts)
        self._restart(f"{first['text']}; restarting all workers ({restarts} of {self.rules.max_restarts})")

    def _end(self, code: int, text: str, **more: Any) -> None:
        self.ended, self.running = True, False
        self._decide("end", code=code, text=text, **more)

    def _missing(self) -> str:
        """Name the hosts that are missing."""
        if self._is_enough():
            slow = [seat.info.host for seat in self.seats.values() if not seat.ready]
            if slow:
                return f"the workers of {', '.join(slow)} have not stopped"
            return f"no more than {len(self.seats)} of {self.rules.max_hosts} hosts have joined"
        there = {seat.info.node_rank for seat in self.seats.values()} - {-1}
        absent = [str(rank) for rank in range(self.rules.min_hosts) if there and rank not in there]
        which = f"node rank {', '.join(absent)} did not join" if absent else "the others did not join"
        present = [seat.info.host for seat in self.seats.values()]
        joined = ", ".join(present) or "none"
        lost = self.out_of_reach + [host for host in dict.fromkeys(self._lost) if host not in present]
        lost_text = f"; lost: {', '.join(lost)}" if lost else ""
        return (
            f"{len(self.seats)} of {self.rules.min_hosts} hosts (--nnodes) have joined ({joined}{lost_text}), {which}"
        )

    def _note(self, text: str) -> None:
        self._decide("note", text=text)

    def _decide(self, kind: str, key: str = "", **content: Any) -> None:
        self.decisions.append(Decision(kind, content, key))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._actions.append((self.now + seconds, action))


_CURE = "Start the launcher there with the same --rdzv-endpoint or --master-addr, and the same --rdzv-id."
_OPTIONS = {
    "run_id": "--rdzv-id",
    "min_hosts": "the smaller number of --nnodes",
    "max_hosts": "the larger number of --nnodes",
    "max_restarts": "--max-restarts",
    "join_seconds": "join_timeout of --rdzv-conf",
    "last_call_seconds": "last_call_timeout of --rdzv-conf",
}
