"""Rendezvous of the agents of a job on a store: the coordinator, and an agent's session with it.

One agent serves the store and runs the coordinator. Each agent pushes reports to a queue; the coordinator gives them to
a `Roster` and publishes its decisions under numbered keys, for which all agents wait. So nothing is polled but the
keep-alive keys, in the memory of the server, and a decision arrives within a millisecond. The server sets a key when
the connection of an agent ends; the coordinator looks for it when a keep-alive is late. It wakes only when one may be.

Everything is sealed with a session key, which follows from the job token and a random number of the coordinator. It
proves to each agent that it knows the token by sealing that number for a random number of the agent's. So neither a
stranger nor a recording of an earlier job is believed. Do not add rules here: they belong to `roster`.
"""

from __future__ import annotations

import errno
import json
import logging
import operator
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from torchdist_ref.authentication import SECRET_FILE
from torchdist_ref.elastic.roster import Decision, HostInfo, Roster, Rules, versions
from torchdist_ref.errors import (
    ArgumentError,
    AuthenticationError,
    DistError,
    DistNetworkError,
    StoreTimeoutError,
)
from torchdist_ref.stores import PrefixStore, Store, TCPStore
from torchdist_ref.stores.sealed import KEY_BYTES, SealedStore, message_code
from torchdist_ref.stores.tcp.server import TCPServer
from torchdist_ref.stores.tcp.store import ServedValues

_PREFIX = "torchdist_ref.agents"
_EVENTS, _HELLOS, _GONE = "events", "hellos", f"{_PREFIX}/gone"
KEEP_ALIVE_SECONDS, LATE_SECONDS, SILENCE_SECONDS = 0.3, 0.45, 1.0
"""Interval of an agent's keep-alive; silence after which it is lost if it has disconnected, and in any case."""
REDIRECTION_SECONDS = 1.0
WELCOME_SECONDS = 2.0
_FAREWELL_SECONDS = 5.0
_LONGEST_WAIT = timedelta(hours=1)
_MEBIBYTE_OF_KEYS = 1024
log = logging.getLogger("torchdist_ref.elastic")

Message = dict[str, Any]


def _derive(secret: bytes, purpose: bytes, nonce: str) -> bytes:
    return message_code(secret, b"agents %b %b" % (purpose, nonce.encode()))


def _session_store(store: Store, secret: bytes, nonce: str) -> SealedStore:
    """Return the part of a store that belongs to one session; a standby store may serve several, one after another."""
    part = PrefixStore(f"{_PREFIX}/{nonce[:16]}", store)
    return SealedStore(part, _derive(secret, b"session", nonce), bool(secret))


class AgentCoordinator:
    """Coordinator of the agents of a job, on a thread of its own.

    Args:
        store: Store that this process serves.
        roster: Rules and state of the job.
        secret: Job token; empty for none.
        address: Address of this host at which the others reach it, for the store of each attempt.
        own: Key of the agent of this process.
        forward: Host and port to which this coordinator sends all agents, since another one leads the job.
    """

    def __init__(
        self,
        store: TCPStore,
        roster: Roster,
        secret: bytes,
        address: str,
        own: str,
        forward: tuple[str, int] | None = None,
    ) -> None:
        self._forward = forward
        self._store, self._roster, self._address, self._own = store.clone(), roster, address, own
        self._secret, self._nonce = secret, os.urandom(KEY_BYTES).hex()
        self._sealed = _session_store(self._store, secret, self._nonce)
        self._pulses = _session_store(ServedValues(self._store), secret, self._nonce)
        self._hellos_store, self._reports_store = store.clone(), store.clone()
        for waiting in (self._hellos_store, self._reports_store):
            waiting.set_timeout(_LONGEST_WAIT)
        self._hellos = PrefixStore(_PREFIX, self._hellos_store)
        self._gone = PrefixStore(_GONE, self._store)
        # A thread waits for reports: a wait of the store that ends by its time-out costs a request each time.
        self._reports: SimpleQueue[Message] = SimpleQueue()
        self._plans = 0
        self._serials: dict[str, int] = {}
        self._alive: dict[str, tuple[bytes, float]] = {}
        self._checked_at = 0.0
        self._own_joined, self._early = False, list[tuple[str, str, Message]]()
        self._job_store: TCPServer | None = None
        self._closing, self._closed = False, threading.Event()
        targets = {"welcome": self._welcome_agents, "coordinator": self._run, "reports": self._read_reports}
        self._threads = [
            threading.Thread(target=target, name=f"torchdist_ref {name}", daemon=True)
            for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def deposed(self) -> bool:
        """Whether another agent may coordinate most hosts now."""
        return self._roster.deposed

    def close(self) -> None:
        """End the coordinator once it has handled all reports; if the job has ended, once all agents know that."""
        own = self._store.clone()
        with suppress(DistError):
            message = {"kind": "close", "key": "", "serial": 1}
            _session_store(own, self._secret, self._nonce).queue_push(_EVENTS, json.dumps(message))
        own.close()
        self._threads[1].join(_FAREWELL_SECONDS)
        self._closed.set()
        for store in (self._hellos_store, self._reports_store, self._store):
            store.close()
        if self._job_store is not None:
            self._job_store.close()

    # Authentication

    def _welcome_agents(self) -> None:
        """Tell each new agent this session's random number, and prove to know the job token."""
        with suppress(DistError):
            while not self._closed.is_set():
                with suppress(StoreTimeoutError, ValueError, LookupError):
                    hello = json.loads(self._hellos.queue_pop(_HELLOS))
                    key, nonce = str(hello["key"]), str(hello["nonce"])
                    welcome = SealedStore(self._hellos, _derive(self._secret, b"welcome", nonce))
                    welcome.set(f"welcome/{key}", json.dumps({"nonce": self._nonce, "versions": versions()}))

    # Reports and decisions

    def _run(self) -> None:
        try:
            while not self._closed.is_set() and not self._roster.deposed and not self._is_over():
                until = min(self._roster.next_time(), self._next_check())
                self._receive(max(until - time.monotonic(), 0.0))
                now = time.monotonic()
                if now >= self._next_check():
                    self._check_agents(now)
                self._roster.tick(now)
                self._publish_decisions()
        except DistError as error:
            if not self._closed.is_set():
                log.error("the coordinator of the agents has failed: %s", error)
        if self._roster.deposed:
            self._publish("deposed", {"text": "most hosts of the job are out of reach"})

    def _is_over(self) -> bool:
        """Return whether no agent needs the coordinator any more."""
        if self._roster.ended:
            return not self._roster.seats and not self._roster.waiting
        return self._closing

    def _read_reports(self) -> None:
        reports = _session_store(self._reports_store, self._secret, self._nonce)
        while not self._closed.is_set():
            try:
                self._reports.put(json.loads(reports.queue_pop(_EVENTS)))
            except StoreTimeoutError:
                continue
            except (AuthenticationError, ValueError):
                log.warning("ignored a report that no agent of this job has written")
            except DistError as error:
                if not self._closed.is_set():
                    log.error("the coordinator of the agents receives no reports any more: %s", error)
                return

    def _receive(self, seconds: float) -> None:
        """Handle the reports that arrive within a time, and all that are there already."""
        while not self._closed.is_set():
            try:
                event = self._reports.get(timeout=seconds)
            except Empty:
                break
            seconds = 0.0
            key, serial = event["key"], event["serial"]
            if serial > self._serials.get(key, 0):
                self._serials[key] = serial
                self._roster.now = time.monotonic()
                self._handle(event["kind"], key, event)

    def _handle(self, kind: str, key: str, event: Message) -> None:
        if kind == "join" and self._forward is not None:
            host, port = self._forward
            self._sealed.set(f"reply/{key}", json.dumps({"kind": "moved", "host": host, "port": port}))
        elif kind == "join" and not self._own_joined and key != self._own:
            # Its own host comes first, so that it is never refused in favor of another one.
            self._early.append((kind, key, event))
        elif kind == "join":
            self._roster.join(HostInfo(**event["info"]), Rules(**event["rules"]))
            early, self._early, self._own_joined = self._early, [], True
            for each in early:
                self._handle(*each)
        elif kind == "ready":
            self._roster.ready(key, event["attempt"])
        elif kind == "finish":
            self._roster.finish(key, event["attempt"])
        elif kind == "fail":
            self._roster.fail(key, event["attempt"], event["failure"])
        elif kind == "close":
            self._closing = True
        elif kind == "moved" and self._forward is None and event["attempt"] > self._roster.progress.attempt:
            self._forward = str(event["host"]), int(event["port"])
            self._publish("moved", {"host": event["host"], "port": event["port"]})
        elif kind == "leave" and self._roster.ended:
            self._roster.lose(key, "has left")
        elif kind == "leave" and key == self._own and self._roster.can_spare_one:
            self._publish("handover", {"text": "the host that coordinates the job leaves"})
            self._closing = True
        elif kind == "leave":
            self._roster.leave(key, event["text"])

    def _present(self) -> list[str]:
        """Return the agents to check. That of this process ends with the coordinator."""
        return [key for key in (*self._roster.seats, *self._roster.waiting) if key != self._own]

    def _next_check(self) -> float:
        """Return when an agent is late next, or silent for too long. A new one is looked at right away."""
        due = time.monotonic() + _LONGEST_WAIT.total_seconds()
        for key in self._present():
            since = self._alive.get(key, (b"", float("-inf")))[1]
            was_late = self._checked_at - since >= LATE_SECONDS
            due = min(due, since + (SILENCE_SECONDS if was_late else LATE_SECONDS))
        return due

    def _check_agents(self, now: float) -> None:
        """Remove agents that have disconnected, or whose keep-alive does not arrive any more."""
        present, self._checked_at = self._present(), now
        values = self._pulses.multi_get([f"alive/{key}" for key in present])
        known = [self._alive.get(key, (b"", 0.0))[0] for key in present]
        gone = set(self._gone.list_keys()) if any(map(operator.eq, values, known)) else set[str]()
        for key, value in zip(present, values, strict=True):
            before, since = self._alive.get(key, (b"", now))
            if value != before:
                self._alive[key] = (value, now)
            # A connection may end because the network is slow: only an agent that is silent too has ended.
            elif key in gone and now - since >= LATE_SECONDS:
                ended = self._has_ended(key)
                self._roster.lose(key, "has ended" if ended else "has left", certain=ended)
            elif now - since >= SILENCE_SECONDS:
                self._roster.lose(key, f"has sent no keep-alive for {now - since:.1f} s", certain=False)

    def _has_ended(self, key: str) -> bool:
        """Return whether an agent that has disconnected runs no more; it may have gone to another coordinator."""
        seat = self._roster.seats.get(key)
        if seat is None:
            return False
        try:
            open_store(seat.info.address, seat.info.port, KEEP_ALIVE_SECONDS).close()
        except CoordinatorLost as error:
            return error.certain
        return False

    def _publish_decisions(self) -> None:
        decisions, self._roster.decisions = self._roster.decisions, []
        for decision in decisions:
            decision = self._with_job_store(decision) if decision.kind == "start" else decision
            if decision.key:
                reply = decision.content | {"kind": decision.kind, "next": self._plans}
                self._sealed.set(f"reply/{decision.key}", json.dumps(reply))
            else:
                self._publish(decision.kind, decision.content)

    def _with_job_store(self, decision: Decision) -> Decision:
        """Serve a new store to the workers of each attempt, so that they find no key of an earlier one."""
        former, self._job_store = self._job_store, TCPServer(self._address, 0)
        if former is not None:
            former.close()
        where = {"master_addr": self._address, "master_port": self._job_store.port}
        return Decision("start", decision.content | where)

    def _publish(self, kind: str, content: Message) -> None:
        self._sealed.set(f"plan/{self._plans}", json.dumps(content | {"kind": kind}))
        self._plans += 1
        if self._plans > _MEBIBYTE_OF_KEYS:
            self._sealed.delete_key(f"plan/{self._plans - _MEBIBYTE_OF_KEYS}")


def _authenticate(store: TCPStore, secret: bytes, key: str, host: str, where: str, timeout: float) -> str:
    """Return the random number of the session with a coordinator that knows the job token.

    Args:
        store: Store of the coordinator.
        secret: Job token; empty for none.
        key: Key of this agent.
        host: Name of this host.
        where: Address of the store, for messages.
        timeout: Longest time to wait for the answer, in seconds.
    """
    nonce = os.urandom(KEY_BYTES).hex()
    public = PrefixStore(_PREFIX, store)
    store.set_timeout(timedelta(seconds=timeout))
    try:
        public.queue_push(_HELLOS, json.dumps({"key": key, "nonce": nonce}))
        opened = SealedStore(public, _derive(secret, b"welcome", nonce))
        welcome = json.loads(opened.get(f"welcome/{key}"))
        public.delete_key(f"sealed/welcome/{key}")
    except AuthenticationError as error:
        have = "another job token than" if secret else "no job token, unlike"
        raise AuthenticationError(
            f"{host} has {have} the agent at {where}, or that one has none. Give all hosts the same file by "
            f"--token-file or {SECRET_FILE}."
        ) from error
    except (StoreTimeoutError, DistNetworkError) as error:
        raise CoordinatorLost(f"the store at {where} has no agent that coordinates a job", False) from error
    for name, other in welcome["versions"].items():
        if (own := versions()[name]) != other:
            raise ArgumentError(
                f"{host} has {name} {own}, and the agent at {where} has {other}. Install the same version on all "
                f"hosts (pip install {name}=={other})."
            )
    return str(welcome["nonce"])


class Redirection:
    """Thread that leads agents which come to the first address of a job to the present one.

    An agent that is started again where the first coordinator ran would serve a rendezvous of its own there.

    Args:
        host: First address.
        port: Its port.
        secret: Job token; empty for none.
        info: Host that coordinates the job now.
        attempt: Function that returns the number of the present attempt.
    """

    def __init__(self, host: str, port: int, secret: bytes, info: HostInfo, attempt: Callable[[], int]) -> None:
        self._host, self._port, self._secret, self._info, self._attempt = host, port, secret, info, attempt
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchdist_ref redirection", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(REDIRECTION_SECONDS):
            with suppress(CoordinatorLost, ArgumentError, DistError):
                self._redirect(open_store(self._host, self._port, KEEP_ALIVE_SECONDS))

    def _redirect(self, store: TCPStore) -> None:
        key, info = os.urandom(8).hex(), self._info
        try:
            where = f"{self._host}:{self._port}"
            nonce = _authenticate(store, self._secret, key, info.host, where, WELCOME_SECONDS)
            message = {"kind": "moved", "key": key, "serial": 1, "host": info.address, "port": info.port}
            message["attempt"] = self._attempt()
            _session_store(store, self._secret, nonce).queue_push(_EVENTS, json.dumps(message))
        finally:
            store.close()


class CoordinatorLost(Exception):
    """The coordinator has ended or is out of reach.

    Attributes:
        certain: Whether it has certainly ended.
    """

    def __init__(self, text: str, certain: bool) -> None:
        super().__init__(text)
        self.certain = certain


class CoordinatorMoved(Exception):
    """Another agent coordinates the job.

    Attributes:
        host: Its address.
        port: Port of its store.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"the job runs at {host}:{port}")
        self.host, self.port = host, port


class AgentSession:
    """Session of an agent with the coordinator: it keeps alive, reports, and receives decisions on two threads.

    Args:
        store: Store of the coordinator.
        info: Description of this host.
        rules: Settings of the job here.
        secret: Job token; empty for none.
        where: Address of the coordinator, for messages.
        wake: Descriptor of an eventfd that is written when a decision has arrived, or the coordinator is lost.
        notify: Function that receives lines for the user.
        timeout: Longest time to wait for the coordinator's answer, in seconds.
        keeps_alive: Whether the coordinator is another process, which has to learn that this one runs.

    Attributes:
        has_seat: Whether this host takes part in each attempt; False for a spare.

    Raises:
        AuthenticationError: The tokens differ.
        ArgumentError: The versions or settings differ, or the coordinator refuses this host.
        CoordinatorLost: There is no coordinator at that store.
        CoordinatorMoved: Another agent coordinates the job.
    """

    def __init__(
        self,
        store: TCPStore,
        info: HostInfo,
        rules: Rules,
        secret: bytes,
        where: str,
        wake: int,
        notify: Callable[[str], None],
        timeout: float = WELCOME_SECONDS,
        keeps_alive: bool = True,
    ) -> None:
        self.info = info
        self._store, self.where, self._wake, self._notify = store, where, wake, notify
        self._serial = time.time_ns()
        self._inbox: list[Message] = []
        self._lock = threading.Lock()
        self._lost: CoordinatorLost | None = None
        self._closed = threading.Event()
        self._nonce = _authenticate(store, secret, info.key, info.host, where, timeout)
        store.set_timeout(timedelta(seconds=WELCOME_SECONDS))
        self._secret = secret
        self._sealed = _session_store(store, secret, self._nonce)
        self._pulse = store.clone() if keeps_alive else None
        self._next = self._join(rules)
        targets = [(self._read_decisions, "decisions")] + [(self._keep_alive, "keep-alive")] * keeps_alive
        self._threads = [
            threading.Thread(target=target, name=f"torchdist_ref {name}", daemon=True) for target, name in targets
        ]
        for thread in self._threads:
            thread.start()

    def report(self, kind: str, **content: Any) -> None:
        """Push a report. If the coordinator is lost, `next` says so."""
        self._serial += 1
        message = content | {"kind": kind, "key": self.info.key, "serial": self._serial}
        try:
            self._sealed.queue_push(_EVENTS, json.dumps(message))
        except DistError as error:
            self._lose(error)

    def has_news(self) -> bool:
        """Return whether `next` would return a decision or raise."""
        with self._lock:
            return bool(self._inbox) or self._lost is not None

    def next(self) -> Message | None:
        """Return the next decision, or None if there is none yet.

        Raises:
            CoordinatorLost: All decisions are read, and there will be no other.
        """
        with self._lock:
            if self._inbox:
                return self._inbox.pop(0)
            if self._lost is not None:
                raise self._lost
            return None

    def close(self) -> None:
        """End the session and its threads."""
        self._closed.set()
        if self._pulse is not None:
            self._pulse.close()
        self._store.close()
        for thread in self._threads:
            thread.join()

    def attempt_secret(self, attempt: int) -> str:
        """Return the token of the workers of one attempt; empty without a job token."""
        return _derive(self._secret, b"attempt %d" % attempt, self._nonce).hex() if self._secret else ""

    # Joining

    def _join(self, rules: Rules) -> int:
        self._store.set_on_disconnect(f"{_GONE}/{self.info.key}", "1")
        if self._pulse is not None:
            self._sealed.set(f"alive/{self.info.key}", "0")
            # Silence counts from the last answer on, so the time-out is what is left of it.
            self._pulse.set_timeout(timedelta(seconds=SILENCE_SECONDS - KEEP_ALIVE_SECONDS))
        self.report("join", info=asdict(self.info), rules=asdict(rules))
        try:
            reply = json.loads(self._sealed.get(f"reply/{self.info.key}"))
        except StoreTimeoutError as error:
            raise CoordinatorLost(f"the agent at {self.where} does not answer", False) from error
        self._sealed.delete_key(f"reply/{self.info.key}")
        if reply["kind"] == "moved":
            raise CoordinatorMoved(reply["host"], reply["port"])
        if reply["kind"] == "reject":
            raise ArgumentError(f"{reply['text']}.")
        self.has_seat = not reply["spare"]
        return int(reply["next"])

    # Threads

    def _keep_alive(self) -> None:
        assert self._pulse is not None
        sealed = _session_store(self._pulse, self._secret, self._nonce)
        beats = 0
        try:
            while not self._closed.wait(KEEP_ALIVE_SECONDS):
                beats += 1
                sealed.set(f"alive/{self.info.key}", str(beats))
        except DistError as error:
            self._lose(error)

    def _read_decisions(self) -> None:
        try:
            while not self._closed.is_set():
                with suppress(StoreTimeoutError):
                    self._sealed.wait([f"plan/{self._next}"], _LONGEST_WAIT)
                    message = json.loads(self._sealed.get(f"plan/{self._next}"))
                    self._next += 1
                    self._deliver(message)
                    if message["kind"] in ("end", "handover", "deposed", "moved"):
                        return
        except DistError as error:
            self._lose(error)

    def _deliver(self, message: Message) -> None:
        if message["kind"] == "note":
            self._notify(message["text"])
            return
        # Once a decision can be read, its wake-up is there: a later one would stop the workers that it starts.
        with self._lock:
            self._inbox.append(message)
            os.eventfd_write(self._wake, 1)

    def _lose(self, error: DistError) -> None:
        if self._lost is None and not self._closed.is_set():
            text = f"the agent at {self.where} is lost ({error.__cause__ or error})"
            with self._lock:
                self._lost = CoordinatorLost(text, _has_refused(error))
                os.eventfd_write(self._wake, 1)


def open_store(host: str, port: int, seconds: float) -> TCPStore:
    """Connect to the store of a coordinator.

    Raises:
        CoordinatorLost: There is none within that time.
    """
    try:
        return TCPStore(host, port, timeout=timedelta(seconds=seconds))
    except (DistNetworkError, StoreTimeoutError) as error:
        raise CoordinatorLost(f"no agent answers at {host}:{port} ({error})", _has_refused(error)) from error


def _has_refused(error: DistError) -> bool:
    """Return whether the host of a store says that no process listens there."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ECONNREFUSED
