"""Agent of one host of a job on several hosts: when it joins, whom it follows, and when it runs its workers.

The coordinator of the job is one of the agents. When it ends or is cut off, the next host in rank order takes its
place: all agents know the progress of the job, and the next attempt has a new store, so that no key needs a copy.

An agent waits on a clock and communicates through `AgentConnections`. Both are arguments, so that tests can pass a
clock that jumps, and connections that fail on purpose. Do not add the rules of a job here: they belong to `roster`.
Stores and threads belong to `agent_connections`, workers to `torchdist_ref.launcher`.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchdist_ref.elastic.agent_connections import LOOPBACK_CURE, AgentConnections
from torchdist_ref.elastic.agent_settings import AgentSettings
from torchdist_ref.elastic.attempt import Assignment, AttemptOutcome
from torchdist_ref.elastic.roster import REPORT_SECONDS, Progress
from torchdist_ref.elastic.session import WELCOME_SECONDS, AgentSession, CoordinatorLost, CoordinatorMoved, Message
from torchdist_ref.errors import ArgumentError, AuthenticationError
from torchdist_ref.membership.trust import SECRET_FILE
from torchdist_ref.processes import failure_record
from torchdist_ref.processes.control import describe_exit, signal_name
from torchdist_ref.timeouts import CLOCK, Clock, Deadline, readable

BAD_INPUT_CODE = 2
CONNECT_SECONDS, FIRST_CONNECT_SECONDS = 0.5, 2.0
"""Time to connect to a coordinator of a job that this host has taken part in, and to the first one."""
RETRY_SECONDS = 0.2
# Characters of a traceback that all hosts receive; the last ones name the error.
_MAX_STACK = 20_000
_ENDPOINT_CURE = (
    "Check --rdzv-endpoint or --master-addr, that the launcher runs there, and that no firewall blocks the connection."
)


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
        outcome: Outcome of this host's last attempt; None if there was none.
        failure: First failure of the job, on any host: ``code``, ``text``, ``time`` and ``host``; if a worker failed,
            also ``rank``, ``local_rank``, ``pid``, ``status``, ``error_file`` and ``stack`` (its traceback).
        is_own: Whether that is the first failure of `outcome`.
    """

    code: int
    text: str = ""
    outcome: AttemptOutcome | None = None
    failure: Mapping[str, Any] | None = None
    is_own: bool = False


def run_agent(settings: AgentSettings, workers: Workers, log: Callable[[str], None], name: str = "") -> JobEnd:
    """Take part in a job until it ends.

    Args:
        settings: Settings of this host.
        workers: Workers of this host; the caller closes them.
        log: Function that receives lines for the user.
        name: Name of this host, for messages. Default: that of the environment, or of the system.

    Returns:
        The end of the job. Code 2 stands for a wrong option or a host that did not arrive.
    """
    name = name or os.environ.get("TORCHDIST_REF_HOST_ID") or socket.gethostname()
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    connections = AgentConnections(settings, name, wake, log)
    try:
        return HostAgent(settings, name, workers, connections, wake, log).run()
    finally:
        connections.close()
        os.close(wake)


class _Interrupted(Exception):
    """A signal asks this agent to leave."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal_name(signum))
        self.signum = signum


class _Removed(Exception):
    """An attempt begins without this host, which is not a spare."""


class HostAgent:
    """Agent of this host.

    Args:
        settings: Settings of this host.
        name: Name of this host, for messages.
        workers: Workers of this host.
        connections: Stores, coordinator and session of this host.
        wake: Descriptor of an eventfd that is written when a decision has arrived, or the coordinator is lost.
        log: Function that receives lines for the user.
        clock: Clock. Default: the monotonic clock.

    Attributes:
        key: Random name of this agent, replaced whenever a coordinator may consider its bearer lost.
        progress: State of the job as of the last attempt.
    """

    def __init__(
        self,
        settings: AgentSettings,
        name: str,
        workers: Workers,
        connections: AgentConnections,
        wake: int,
        log: Callable[[str], None],
        clock: Clock = CLOCK,
    ) -> None:
        self._settings, self._name, self._workers, self._connections = settings, name, workers, connections
        self._wake, self._log, self._clock = wake, log, clock
        self._poll = readable([wake, workers.interrupts.socket.fileno()])
        self.key, self.progress = os.urandom(8).hex(), Progress()
        self._outcome: AttemptOutcome | None = None
        self._session: AgentSession | None = None
        # Where the job has moved to, if not to the address that the user gave; and where the session's store is.
        self._moved_to: tuple[str, int] | None = None
        self._at = settings.host, settings.port
        self._logged, self._report_at = "", clock.now() + REPORT_SECONDS
        # Attempt in which the coordinator was lost: there is one succession, since another one reaches no more hosts.
        self._attempt_lost = 0

    def run(self) -> JobEnd:
        """Join, and join again when the coordinator is lost, until the job ends."""
        try:
            return self._run()
        except _Interrupted as error:
            if self._session is not None:
                self._session.report("leave", text=str(error))
            return JobEnd(128 + error.signum, outcome=self._outcome)
        except (ArgumentError, AuthenticationError) as error:
            return JobEnd(BAD_INPUT_CODE, str(error))

    def _run(self) -> JobEnd:
        lost: CoordinatorLost | None = None
        # An attempt that begins renews the time in which a coordinator has to be found. Losing the coordinator again
        # before the next attempt does not.
        deadline, attempt = self._new_deadline(), -1
        while True:
            try:
                if lost is not None and self.progress.hosts:
                    self._session = self._succeed(lost, deadline)
                else:
                    self._session = self._enter(deadline)
                self._connections.forward(*self._at)
                return self._follow(self._session)
            except CoordinatorMoved as error:
                self._leave_session()
                self._moved_to = error.host, error.port
            except _Removed:
                # The coordinator considers this host lost, perhaps because it was frozen. It joins as a new host.
                self._leave_session()
                self._renew_key()
                self._moved_to, lost, deadline = self._at, None, self._new_deadline()
            except CoordinatorLost as error:
                if str(error) != self._logged:
                    self._logged, self._report_at = str(error), self._clock.now() + REPORT_SECONDS
                    self._log(self._logged)
                self._report_retries(self._logged, deadline)
                self._leave_session()
                if self.progress.attempt > attempt:
                    deadline, attempt = self._new_deadline(), self.progress.attempt
                self._require_time(deadline, self._logged)
                lost = error

    # Rendezvous

    def _enter(self, deadline: Deadline) -> AgentSession:
        """Serve the rendezvous if that is this host's part, and join it."""
        self._drain()
        if self._moved_to is None:
            session = self._connections.lead(self.key, is_new=not self.progress.attempt)
            if session is not None:
                self._at = self._settings.host, self._settings.port
                return session
        while True:
            try:
                return self._join(*self._target, min(FIRST_CONNECT_SECONDS, deadline.remaining()))
            except CoordinatorLost as error:
                self._require_time(deadline, str(error))
                # The job may have moved again, so ask at the first address.
                self._moved_to = None
                self._report_retries(str(error), deadline)
                self._pause(RETRY_SECONDS)
                # A coordinator that answered too late counts this key as that of a host that has left.
                self._renew_key()

    def _succeed(self, lost: CoordinatorLost, deadline: Deadline) -> AgentSession:
        """Join the next coordinator, or become it; if neither is possible, any agent that can be reached again."""
        if self.progress.attempt > self._attempt_lost:
            self._attempt_lost = self.progress.attempt
            with suppress(CoordinatorLost):
                return self._join_successor(lost)
        self._require_time(deadline, str(lost))
        self._pause(RETRY_SECONDS)
        self._renew_key()
        with suppress(CoordinatorLost):
            return self._join(*self._target, CONNECT_SECONDS)
        for host in self.progress.hosts:
            if not self._connections.is_own(host):
                with suppress(CoordinatorLost):
                    return self._join(host.address, host.port, CONNECT_SECONDS, CONNECT_SECONDS)
        raise lost

    def _join_successor(self, lost: CoordinatorLost) -> AgentSession:
        """Join the next host in rank order; this host becomes the coordinator if it is that one.

        All survivors know the hosts of the last attempt and go through them in the same order, so they meet at the same
        host without communicating. A host that refuses the connection has certainly ended; one that does not
        answer may run on as a part of the job of its own. The new coordinator has to know the difference: see
        `Roster.gone`.
        """
        gone = {self.progress.leader} if lost.certain else set[str]()
        for candidate in self.progress.hosts:
            if candidate.key == self.progress.leader:
                continue
            if self._connections.is_own(candidate):
                return self._coordinate(frozenset(gone))
            try:
                return self._join(candidate.address, candidate.port, CONNECT_SECONDS)
            except CoordinatorLost as error:
                gone |= {candidate.key} if error.certain else set()
        raise lost

    def _coordinate(self, gone: frozenset[str]) -> AgentSession:
        self._drain()
        own, session = self._connections.succeed(self.key, self.progress, gone, lambda: self.progress.attempt)
        self._at = own.address, own.port
        return session

    @property
    def _target(self) -> tuple[str, int]:
        return self._moved_to or (self._settings.host, self._settings.port)

    def _join(self, host: str, port: int, seconds: float, welcome_seconds: float = WELCOME_SECONDS) -> AgentSession:
        self._drain()
        session = self._connections.join(host, port, self.key, seconds, welcome_seconds)
        self._at = host, port
        return session

    def _leave_session(self) -> None:
        self._connections.leave()
        self._session = None

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
                is_own = failure.get("key") == self.key
                text = message["text"]
                if message.get("alone") and self._connections.is_on_loopback:
                    text += f" Only this host reaches {self._settings.host}. {LOOPBACK_CURE}"
                return JobEnd(message["code"], text, self._outcome, failure, is_own)
            elif kind == "moved":
                raise CoordinatorMoved(message["host"], message["port"])
            else:
                raise CoordinatorLost(message["text"], certain=kind == "handover")

    def _run_attempt(self, session: AgentSession, message: Message) -> None:
        self._drain()
        if session.has_news():
            return
        self.progress = Progress.from_message(message)
        assignment = self._assignment(session, message)
        if assignment is None:
            if session.has_seat:
                raise _Removed
            return
        session.has_seat = True
        self._outcome = outcome = self._workers.run(assignment, stop=self._wake)
        attempt = self.progress.attempt
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
        hosts = self.progress.hosts
        index = next((index for index, host in enumerate(hosts) if host.key == self.key), None)
        if index is None:
            return None
        own, before = hosts[index], hosts[:index]
        first = sum(host.workers for host in before)
        first_of_role = sum(host.workers for host in before if host.role == own.role)
        secret = session.attempt_secret(self.progress.attempt)
        return Assignment(
            range(first, first + own.workers),
            sum(host.workers for host in hosts),
            message["master_addr"],
            message["master_port"],
            group_rank=index,
            group_world_size=len(hosts),
            role_ranks=range(first_of_role, first_of_role + own.workers),
            role_world_size=sum(host.workers for host in hosts if host.role == own.role),
            restart_count=self.progress.restarts,
            secret=secret,
            # Each attempt has a token of its own, so workers must not read the job's from the file.
            environment={SECRET_FILE: ""} if secret else {},
        )

    def _failure(self, outcome: AttemptOutcome) -> Message:
        """Describe the first failure of this host's workers."""
        first = outcome.first_failure
        failure = {"code": outcome.code, "time": time.time(), "host": self._name, "key": self.key}
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
            self._clock.wait(self._poll)
            self._raise_signal()
            self._drain()
        return message

    def _pause(self, seconds: float) -> None:
        """Wait, unless a signal arrives."""
        self._clock.wait([self._workers.interrupts.socket.fileno()], seconds)
        self._raise_signal()

    def _raise_signal(self) -> None:
        for signum in self._workers.interrupts.received():
            if signum != signal.SIGCHLD:
                raise _Interrupted(signum)

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _renew_key(self) -> None:
        self.key = os.urandom(8).hex()

    def _new_deadline(self) -> Deadline:
        return Deadline(self._settings.rules.join_seconds, self._clock)

    def _require_time(self, deadline: Deadline, text: str) -> None:
        if deadline.passed():
            raise ArgumentError(f"{self._name}: {text}; gave up after {deadline.seconds:g} s. {_ENDPOINT_CURE}")

    def _report_retries(self, text: str, deadline: Deadline) -> None:
        if self._clock.now() >= self._report_at:
            self._report_at = self._clock.now() + REPORT_SECONDS
            self._log(f"{text}; trying for {deadline.remaining():.0f} s more. {_ENDPOINT_CURE}")
