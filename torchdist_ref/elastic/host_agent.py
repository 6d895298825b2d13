"""Agent of one host of a job on several hosts: it joins the rendezvous, and runs the workers of each attempt.

The coordinator of the job is one of the agents. When it ends or is cut off, the next host in rank order takes its
place: all agents know the progress of the job, and the next attempt has a new store, so that no key needs a copy. Do
not add the rules of a job here: they belong to `roster`; workers belong to `torchdist_ref.launcher`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from torchdist_ref.elastic.attempt import Assignment, AttemptOutcome
from torchdist_ref.elastic.coordinator import AgentCoordinator, Redirection
from torchdist_ref.elastic.roster import REPORT_SECONDS, HostInfo, Progress, Roster, Rules
from torchdist_ref.elastic.session import (
    WELCOME_SECONDS,
    AgentSession,
    CoordinatorLost,
    CoordinatorMoved,
    Message,
    open_store,
)
from torchdist_ref.errors import ArgumentError, AuthenticationError, DistNetworkError
from torchdist_ref.membership.trust import CURES, SECRET_FILE, job_secret
from torchdist_ref.processes import failure_record
from torchdist_ref.processes.control import describe_exit, signal_name
from torchdist_ref.stores import TCPStore
from torchdist_ref.stores.addresses import is_loopback, local_ends, parse_endpoint, parse_host
from torchdist_ref.timeouts import Deadline

T = TypeVar("T")
BAD_INPUT_CODE = 2
_PORT = 29400
_CONNECT_SECONDS = 0.5
_FIRST_CONNECT_SECONDS = 2.0
# Time in which all survivors notice that the coordinator is silent.
_SUCCESSION_SECONDS = 0.9
_RETRY_SECONDS = 0.2
# Characters of a traceback that all hosts receive; the last ones name the error.
_MAX_STACK = 20_000
_ENDPOINT_CURE = "Check --rdzv-endpoint or --master-addr, and that the launcher runs there and no firewall is between."

_LOOPBACK_CURE = "For other hosts, give an address of the first host in --rdzv-endpoint or --master-addr."


@dataclass(frozen=True)
class AgentSettings:
    """Settings of one host's agent.

    Attributes:
        rules: Settings that are the same on all hosts.
        host: Host of the rendezvous, as all hosts reach it.
        port: Its port.
        workers: Number of workers on this host.
        node_rank: Rank of this host; -1 if the order of joining decides.
        serves: Whether this host serves the rendezvous; None if it does where `host` is its own address.
        role: Role of the workers.
        local_addr: Address of this host for the others. Default: that of its route to `host`.
        secret: Job token; empty for none.
    """

    rules: Rules
    host: str
    port: int
    workers: int
    node_rank: int = -1
    serves: bool | None = None
    role: str = "default"
    local_addr: str = ""
    secret: bytes = field(default=b"", repr=False)


def agent_settings(
    rules: Rules,
    endpoint: str,
    workers: int,
    backend: str = "c10d",
    options: Mapping[str, Any] = MappingProxyType({}),
    role: str = "default",
    local_addr: str | None = None,
) -> AgentSettings:
    """Return the settings that the options of a launcher mean.

    Args:
        rules: Name of the job, numbers of hosts and restarts; time-outs are taken from `options`.
        endpoint: ``HOST:PORT`` of the rendezvous; without a port it is 29400.
        workers: Number of workers on this host.
        backend: ``c10d``, where hosts come and go, or ``static``, where each has the rank ``rank`` of `options`.
        options: Options of the rendezvous: ``join_timeout`` (600) or, if static, ``timeout``; ``last_call_timeout``
            (30), both in seconds; ``is_host``.
        role: Role of the workers.
        local_addr: Address of this host for the others.

    Raises:
        ArgumentError: A value is wrong.
        AuthenticationError: The job token cannot be read.

    >>> found = agent_settings(Rules("job", 2, 2), "[fd77::1]:400", 4, "static", {"rank": 1, "timeout": 60})
    >>> found.host, found.port, found.node_rank, found.serves, found.rules.join_seconds
    ('fd77::1', 400, 1, False, 60.0)
    """
    if backend not in ("c10d", "static"):
        raise ArgumentError(f"--rdzv-backend {backend!r} is not available; give c10d, or static with --node-rank.")
    host, port = _parsed("--rdzv-endpoint", endpoint, lambda text: parse_endpoint(text, _PORT))
    is_static = backend == "static"
    node_rank = _number(options, "rank", 0) if is_static else -1
    join = _number(options, "timeout", 900.0) if is_static else _number(options, "join_timeout", rules.join_seconds)
    last_call = _number(options, "last_call_timeout", rules.last_call_seconds)
    is_host = options.get("is_host")
    serves = node_rank == 0 if is_static else None
    if is_host is not None:
        serves = str(is_host).lower() in ("1", "true", "t", "yes", "y")
    return AgentSettings(
        replace(rules, join_seconds=float(join), last_call_seconds=float(last_call)),
        host,
        port,
        workers,
        int(node_rank),
        serves,
        role,
        _parsed("--local-addr", local_addr, parse_host) if local_addr else "",
        job_secret(),
    )


def _parsed(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ArgumentError(f"{option} {text!r}: {error}.") from None


def _number(options: Mapping[str, Any], name: str, default: float) -> float:
    try:
        return float(options.get(name, default))
    except ValueError:
        raise ArgumentError(f"--rdzv-conf {name}={options[name]!r} is not a number.") from None


class Interruptions(Protocol):
    """Signals to this process: see `launcher.supervisor.Interrupts`."""

    @property
    def socket(self) -> socket.socket:
        """Socket that becomes readable when a signal has arrived."""

    def received(self) -> bytes:
        """Return the numbers of the signals that have arrived."""


class Workers(Protocol):
    """Workers of one host: see `launcher.local_workers.LocalWorkers`."""

    @property
    def interrupts(self) -> Interruptions:
        """Signals to this process."""

    def run(self, assignment: Assignment, stop: int | None = None) -> AttemptOutcome:
        """Start the workers, and return when none is left."""


@dataclass(frozen=True)
class JobEnd:
    """End of a job, as an agent learned it.

    Attributes:
        code: Exit code of the agent.
        text: Reason; empty for success.
        outcome: AttemptOutcome of this host's last attempt; None if there was none.
        failure: First failure of the job, on any host: ``code``, ``text``, ``time`` and ``host``; if a worker failed,
            also ``rank``, ``local_rank``, ``pid``, ``status``, ``error_file`` and ``stack`` (its traceback).
        is_own: Whether that is the first failure of `outcome`.
    """

    code: int
    text: str = ""
    outcome: AttemptOutcome | None = None
    failure: Mapping[str, Any] | None = None
    is_own: bool = False


def run_agent(settings: AgentSettings, workers: Workers, log: Callable[[str], None]) -> JobEnd:
    """Take part in a job until it ends.

    Args:
        settings: Settings of this host.
        workers: Workers of this host; the caller closes them.
        log: Function that receives lines for the user.

    Returns:
        The end of the job. Code 2 stands for a wrong option or a host that did not come.
    """
    agent = _HostAgent(settings, workers, log)
    try:
        return agent.run()
    except (ArgumentError, AuthenticationError) as error:
        return JobEnd(BAD_INPUT_CODE, str(error))
    finally:
        agent.close()


class _Interrupted(Exception):
    """A signal asks this agent to leave."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal_name(signum))
        self.signum = signum


class _Removed(Exception):
    """An attempt begins without this host, which is no spare."""


class _HostAgent:
    """Agent of this host."""

    def __init__(self, settings: AgentSettings, workers: Workers, log: Callable[[str], None]) -> None:
        self._settings, self._workers, self._log = settings, workers, log
        self._name = os.environ.get("TORCHDIST_REF_HOST_ID") or socket.gethostname()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(workers.interrupts.socket, select.POLLIN)
        self._key = os.urandom(8).hex()
        self._served: TCPStore | None = None
        self._standby: TCPStore | None = None
        self._coordinator: AgentCoordinator | None = None
        self._forwarder: AgentCoordinator | None = None
        self._redirection: Redirection | None = None
        # As the user gave them; a job that moves has another address.
        self._given = settings
        self._logged, self._report_at = "", time.monotonic() + REPORT_SECONDS
        self._own_address = settings.local_addr
        # Attempt in which the coordinator was lost: there is one succession, since another one reaches no more hosts.
        self._attempt_lost = 0
        self._session: AgentSession | None = None
        self._progress = Progress()
        self._outcome: AttemptOutcome | None = None

    def run(self) -> JobEnd:
        """Join, and join again when the coordinator is lost, until the job ends."""
        lost: CoordinatorLost | None = None
        # Each attempt that has begun gives the next succession its time; a repeated loss does not.
        deadline, attempt = Deadline(self._settings.rules.join_seconds), -1
        try:
            while True:
                try:
                    if lost is not None and self._progress.hosts:
                        self._session = self._succeed(lost, deadline)
                    else:
                        self._session = self._enter(deadline)
                    self._forward(self._session)
                    return self._follow(self._session)
                except CoordinatorMoved as error:
                    self._leave_session()
                    self._settings = replace(self._settings, host=error.host, port=error.port, serves=False)
                except _Removed:
                    # The coordinator took this host for lost, such as one that was frozen: it joins as a new one.
                    host, _, port = self._session.where.rpartition(":") if self._session else ("", "", "0")
                    self._leave_session()
                    self._key, lost = os.urandom(8).hex(), None
                    self._settings = replace(self._settings, host=host, port=int(port), serves=False)
                    deadline = Deadline(self._settings.rules.join_seconds)
                except CoordinatorLost as error:
                    if str(error) != self._logged:
                        self._logged, self._report_at = str(error), time.monotonic() + REPORT_SECONDS
                        self._log(self._logged)
                    self._report_retries(self._logged, deadline)
                    self._leave_session()
                    if self._progress.attempt > attempt:
                        deadline, attempt = Deadline(self._settings.rules.join_seconds), self._progress.attempt
                    self._require_time(deadline, self._logged)
                    lost = error
        except _Interrupted as error:
            if self._session is not None:
                self._session.report("leave", text=str(error))
            return JobEnd(128 + error.signum, outcome=self._outcome)

    def close(self) -> None:
        """End all threads and close the stores."""
        self._leave_session()
        if self._standby is not None:
            self._standby.close()
        os.close(self._wake)

    # Rendezvous

    def _enter(self, deadline: Deadline) -> AgentSession:
        """Serve the rendezvous if that is this host's part, and join it."""
        settings = self._settings
        if settings is self._given and (store := self._serve()) is not None:
            self._log_reach()
            info = self._describe(settings.host)
            roster = Roster(settings.rules, time.monotonic(), info.key)
            self._coordinator = AgentCoordinator(store, roster, settings.secret, settings.host, info.key)
            return self._join(store.clone(), info, f"{settings.host}:{settings.port}")
        while True:
            try:
                seconds = min(_FIRST_CONNECT_SECONDS, deadline.remaining())
                return self._join_at(settings.host, settings.port, seconds)
            except CoordinatorLost as error:
                self._require_time(deadline, str(error))
                # The job may have moved on from where it had moved to.
                settings = self._settings = self._given
                self._report_retries(str(error), deadline)
                self._pause(_RETRY_SECONDS)
                # A coordinator that was late takes this host for one that has come and left.
                self._key = os.urandom(8).hex()

    def _serve(self) -> TCPStore | None:
        """Return the store at the job's first address; None if another process has to serve it."""
        settings = self._given
        if settings.serves is False:
            return None
        try:
            self._served = TCPStore(settings.host, settings.port, is_master=True, wait_for_workers=False)
        except DistNetworkError as error:
            if settings.serves and not self._progress.attempt:
                raise ArgumentError(f"{self._name} cannot serve the rendezvous: {error}") from error
        return self._served

    def _forward(self, session: AgentSession) -> None:
        """Lead agents that come to the job's first address to its coordinator, if the address is this host's."""
        if self._served is None and (store := self._serve()) is not None:
            host, _, port = session.where.rpartition(":")
            roster, secret = Roster(self._settings.rules, time.monotonic()), self._settings.secret
            self._forwarder = AgentCoordinator(store, roster, secret, host, "", (host, int(port)))

    def _succeed(self, lost: CoordinatorLost, deadline: Deadline) -> AgentSession:
        """Join the next coordinator, or become it; if neither is possible, any agent that can be reached again."""
        if self._progress.attempt > self._attempt_lost:
            self._attempt_lost = self._progress.attempt
            with suppress(CoordinatorLost):
                return self._join_successor(lost)
        self._require_time(deadline, str(lost))
        self._pause(_RETRY_SECONDS)
        self._key = os.urandom(8).hex()
        with suppress(CoordinatorLost):
            return self._join_at(self._settings.host, self._settings.port, _CONNECT_SECONDS)
        for host in self._others():
            with suppress(CoordinatorLost):
                return self._join_at(host.address, host.port, _CONNECT_SECONDS, _CONNECT_SECONDS)
        raise lost

    def _join_successor(self, lost: CoordinatorLost) -> AgentSession:
        """Join the next host in rank order; this host becomes the coordinator if it is that one."""
        leader, others = self._progress.leader, self._others()
        gone = {leader} if lost.certain else set[str]()
        for candidate in self._progress.hosts:
            if candidate not in others and candidate.key != leader:
                return self._coordinate(frozenset(gone))
            try:
                if candidate.key != leader:
                    return self._join_at(candidate.address, candidate.port, _CONNECT_SECONDS)
            except CoordinatorLost as error:
                gone |= {candidate.key} if error.certain else set()
        raise lost

    def _others(self) -> list[HostInfo]:
        """Return the other hosts of the last attempt."""
        own = self._standby.port if self._standby is not None else 0
        return [host for host in self._progress.hosts if (host.address, host.port) != (self._address(), own)]

    def _coordinate(self, gone: frozenset[str]) -> AgentSession:
        assert self._standby is not None
        info = self._describe(self._address())
        rules, now = self._settings.rules, time.monotonic()
        roster = Roster(rules, now, info.key, self._progress, gone, _SUCCESSION_SECONDS)
        self._coordinator = AgentCoordinator(self._standby, roster, self._settings.secret, info.address, info.key)
        given, secret = self._given, self._settings.secret
        self._redirection = Redirection(given.host, given.port, secret, info, lambda: self._progress.attempt)
        self._log(f"{self._name} coordinates the job now")
        return self._join(self._standby.clone(), info, f"{info.address}:{info.port}")

    def _join_at(self, host: str, port: int, seconds: float, timeout: float = WELCOME_SECONDS) -> AgentSession:
        info = self._describe(self._address())
        return self._join(open_store(host, port, seconds), info, f"{host}:{port}", timeout)

    def _join(self, store: TCPStore, info: HostInfo, where: str, timeout: float = WELCOME_SECONDS) -> AgentSession:
        rules, secret = self._settings.rules, self._settings.secret
        self._drain()
        local = self._coordinator.local if self._coordinator is not None else None
        try:
            return AgentSession(store, info, rules, secret, where, self._wake, self._log, timeout, local)
        except BaseException:
            # A server of this process would keep its port for as long as a store of it is open.
            store.close()
            raise

    def _describe(self, address: str) -> HostInfo:
        settings = self._settings
        if self._standby is None:
            self._standby = TCPStore(self._address(), 0, is_master=True, wait_for_workers=False)
        return HostInfo(
            self._key, self._name, address, self._standby.port, settings.workers, settings.node_rank, settings.role
        )

    def _address(self) -> str:
        """Return the address of this host at which the others reach it."""
        if not self._own_address:
            found = [address for _, address in local_ends(self._settings.host)]
            # /etc/hosts may map the name of this host to loopback and to an interface.
            self._own_address = next((each for each in found if not is_loopback(each)), *found[:1] or [""])
        if not self._own_address:
            raise CoordinatorLost(f"{self._name} has no route to {self._settings.host}, or cannot resolve it", False)
        return self._own_address

    @property
    def _is_on_loopback(self) -> bool:
        """Whether only this host reaches the address that it was given, which may be a name that /etc/hosts maps so."""
        return is_loopback(self._given.host) or (not self._given.local_addr and is_loopback(self._address()))

    def _log_reach(self) -> None:
        host = self._settings.host
        if not self._is_on_loopback:
            if not self._settings.secret:
                self._log(f"without a job token, any program that reaches {host} can join this job. {CURES}")
        elif not is_loopback(host):
            self._log(f"{host} is a loopback address here, which only this host reaches. {_LOOPBACK_CURE}")

    # Attempts

    def _follow(self, session: AgentSession) -> JobEnd:
        """Do what the coordinator decides until the job ends."""
        while True:
            message = self._next_message(session)
            kind = message["kind"]
            if kind == "start":
                self._run_attempt(session, message)
            elif kind == "stop":
                self._log(message["text"])
                session.report("ready", attempt=message["attempt"])
            elif kind == "end":
                session.report("leave", text="the job has ended")
                failure = message.get("failure") or {}
                is_own = failure.get("key") == self._key
                text = message["text"]
                if message.get("alone") and self._is_on_loopback:
                    text += f" Only this host reaches {self._given.host}. {_LOOPBACK_CURE}"
                return JobEnd(message["code"], text, self._outcome, failure, is_own)
            elif kind == "moved":
                raise CoordinatorMoved(message["host"], message["port"])
            else:
                raise CoordinatorLost(message["text"], certain=kind == "handover")

    def _run_attempt(self, session: AgentSession, message: Message) -> None:
        self._drain()
        if session.has_news():
            return
        self._progress = Progress.from_message(message)
        assignment = self._assignment(session, message)
        if assignment is None:
            if session.has_seat:
                raise _Removed
            return
        session.has_seat = True
        self._outcome = outcome = self._workers.run(assignment, stop=self._wake)
        attempt = self._progress.attempt
        if outcome.signal:
            raise _Interrupted(outcome.signal)
        if outcome.stopped:
            return
        if outcome.succeeded:
            session.report("finish", attempt=attempt)
        else:
            session.report("fail", attempt=attempt, failure=self._failure(outcome))

    def _assignment(self, session: AgentSession, message: Message) -> Assignment | None:
        """Return the ranks of this host's workers; None for a spare host."""
        hosts = self._progress.hosts
        index = next((index for index, host in enumerate(hosts) if host.key == self._key), None)
        if index is None:
            return None
        own, before = hosts[index], hosts[:index]
        first = sum(host.workers for host in before)
        first_of_role = sum(host.workers for host in before if host.role == own.role)
        secret = session.attempt_secret(self._progress.attempt)
        return Assignment(
            range(first, first + own.workers),
            sum(host.workers for host in hosts),
            message["master_addr"],
            message["master_port"],
            group_rank=index,
            group_world_size=len(hosts),
            role_ranks=range(first_of_role, first_of_role + own.workers),
            role_world_size=sum(host.workers for host in hosts if host.role == own.role),
            restart_count=self._progress.restarts,
            secret=secret,
            # The workers' token is that of their attempt.
            environment={SECRET_FILE: ""} if secret else {},
        )

    def _failure(self, outcome: AttemptOutcome) -> Message:
        """Describe the first failure of this host's workers."""
        first = outcome.first_failure
        failure = {"code": outcome.code, "time": time.time(), "host": self._name, "key": self._key}
        if first is None:
            return failure | {"text": f"the workers of {self._name} exited with code {outcome.code}"}
        record = failure_record.read(Path(first.error_file)) if first.error_file else None
        how = describe_exit(first.status) + (f": {record.message}" if record else "")
        failure["text"] = f"rank {first.rank} on {self._name} (process {first.pid}) {how}"
        failure["cause_is_elsewhere"] = outcome.cause_is_elsewhere
        failure |= {name: getattr(first, name) for name in ("rank", "local_rank", "pid", "status")}
        failure["error_file"] = first.error_file if first.keeps_record else failure_record.NO_FILE
        if record:
            failure |= {"time": record.time_ns / 1e9, "stack": record.stack[-_MAX_STACK:]}
        return failure

    # Waiting

    def _next_message(self, session: AgentSession) -> Message:
        while (message := session.next()) is None:
            self._poll.poll()
            self._raise_signal()
            self._drain()
        return message

    def _pause(self, seconds: float) -> None:
        """Wait, unless a signal arrives."""
        select.select([self._workers.interrupts.socket], [], [], seconds)
        self._raise_signal()

    def _raise_signal(self) -> None:
        for signum in self._workers.interrupts.received():
            if signum != signal.SIGCHLD:
                raise _Interrupted(signum)

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _require_time(self, deadline: Deadline, text: str) -> None:
        if deadline.passed():
            raise ArgumentError(f"{self._name}: {text}; gave up after {deadline.seconds:g} s. {_ENDPOINT_CURE}")

    def _report_retries(self, text: str, deadline: Deadline) -> None:
        if time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + REPORT_SECONDS
            self._log(f"{text}; trying for {deadline.remaining():.0f} s more. {_ENDPOINT_CURE}")

    def _leave_session(self) -> None:
        """End everything that belongs to the present coordinator."""
        for part in (self._session, self._forwarder, self._coordinator, self._redirection, self._served):
            if part is not None:
                part.close()
        self._session = self._forwarder = self._coordinator = self._redirection = self._served = None
