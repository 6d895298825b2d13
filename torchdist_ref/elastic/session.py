"""Session of one agent with the coordinator of its job.

An agent and the coordinator prove to each other that they know the job token: the coordinator seals a random number of
its own for a random number of the agent's. Everything else is sealed with the session key, which follows from the token
and the coordinator's number. So neither an unauthenticated peer nor a replay of an earlier job is believed.

Anybody who reaches the store can delete what is in it. So each keep-alive repeats the state of the agent: its last
report, which replaces those before it, and the number of the decision for which it waits. The agent in the process of
the coordinator uses a `LocalLink` instead. Do not add decisions here: they belong to `coordinator` and
`roster`.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from torchdist_ref.elastic.roster import HostInfo, Rules, versions
from torchdist_ref.errors import (
    ArgumentError,
    AuthenticationError,
    DistError,
    DistNetworkError,
    StoreTimeoutError,
)
from torchdist_ref.membership.trust import SECRET_FILE
from torchdist_ref.stores import PrefixStore, Store, TCPStore
from torchdist_ref.stores.sealed import KEY_BYTES, SealedStore, message_code

PREFIX = "torchdist_ref.agents"
"""Prefix of all keys of agents."""
REPORTS, HELLOS, GONE = "events", "hellos", f"{PREFIX}/gone"
"""Queues of reports and of new agents, and prefix of the keys that the server sets when an agent disconnects."""
KEEP_ALIVE_SECONDS, SILENCE_SECONDS = 0.3, 1.0
"""Interval of an agent's keep-alive, and silence after which it is lost."""
WELCOME_SECONDS = 2.0
LONGEST_WAIT = timedelta(hours=1)

Message = dict[str, Any]


def derive_key(secret: bytes, purpose: bytes, nonce: str) -> bytes:
    """Return a key for one purpose within one session."""
    return message_code(secret, b"agents %b %b" % (purpose, nonce.encode()))


def hello_code(secret: bytes, nonce: str) -> str:
    """Return the code by which an agent proves to know the job token when it asks for the coordinator's number."""
    return derive_key(secret, b"hello", nonce).hex()


def session_store(store: Store, secret: bytes, nonce: str) -> SealedStore:
    """Return the part of a store that belongs to one session; a standby store may serve several, one after another."""
    part = PrefixStore(f"{PREFIX}/{nonce[:16]}", store)
    return SealedStore(part, derive_key(secret, b"session", nonce), bool(secret))


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


def open_store(host: str, port: int, seconds: float) -> TCPStore:
    """Connect to the store of a coordinator.

    Raises:
        CoordinatorLost: No coordinator accepts within that time.
    """
    try:
        return TCPStore(host, port, timeout=timedelta(seconds=seconds))
    except (DistNetworkError, StoreTimeoutError) as error:
        text = f"no agent answers at {host}:{port} ({_reason(error)})"
        raise CoordinatorLost(text, _has_refused(error)) from error


def _reason(error: DistError) -> str:
    """Return why a store is out of reach, in terms of agents: the text of the store is about ranks and keys."""
    cause = error.__cause__
    if _has_refused(error):
        return "no process listens there"
    if isinstance(error, StoreTimeoutError) or isinstance(cause, TimeoutError) or not str(cause or ""):
        return "it is stopped or overloaded, or cut off from this host"
    return str(getattr(cause, "strerror", None) or cause)


def _has_refused(error: DistError) -> bool:
    """Return whether the host of a store says that no process listens there."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ECONNREFUSED


@dataclass(frozen=True)
class LocalLink:
    """Queues between a coordinator and the agent of its process, which no other program reaches.

    Attributes:
        reports: Reports of the agent; an error stands for a thread of the coordinator that has failed.
        decisions: Decisions of the coordinator; None ends the session.
    """

    # Looked up when a link is made: on simulated hosts, the name means another class.
    reports: SimpleQueue[Message | Exception] = field(default_factory=lambda: SimpleQueue())
    decisions: SimpleQueue[Message | None] = field(default_factory=lambda: SimpleQueue())


class AgentSession:
    """Session of an agent with the coordinator: two threads send keep-alives and reports, and receive decisions.

    Args:
        store: Store of the coordinator.
        info: Description of this host.
        rules: Settings of the job here.
        secret: Job token; empty for none.
        where: Address of the coordinator, for messages.
        wake: Descriptor of an eventfd that is written when a decision has arrived, or the coordinator is lost.
        notify: Function that receives lines for the user.
        timeout: Longest time to wait for the coordinator's answer, in seconds.
        local: Link to the coordinator if it is in this process. Default: it is another process, which has to learn that
            this one runs.

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
        local: LocalLink | None = None,
    ) -> None:
        self.info = info
        self._store, self.where, self._wake, self._notify = store, where, wake, notify
        self._serial, self._local = time.time_ns(), local
        self._last_report: Message | None = None
        self._inbox: list[Message] = []
        self._lock = threading.Lock()
        self._lost: CoordinatorLost | None = None
        self._closed, self._beat_now = threading.Event(), threading.Event()
        self._nonce = authenticate(store, secret, info.host, where, timeout)
        store.set_timeout(timedelta(seconds=WELCOME_SECONDS))
        self._secret = secret
        self._sealed = session_store(store, secret, self._nonce)
        self._next, self._leader = 0, where
        self._pulse: TCPStore | None = None
        try:
            self._pulse = store.clone() if local is None else None
            self._next = self._join(rules)
        except AuthenticationError:
            raise
        except (StoreTimeoutError, DistNetworkError) as error:
            # Its host may end between any two requests.
            if self._pulse is not None:
                self._pulse.close()
            raise CoordinatorLost(f"the agent at {where} is lost ({_reason(error)})", _has_refused(error)) from error
        targets = [(self._read_decisions, "decisions")] + [(self._keep_alive, "keep-alive")] * (local is None)
        self._threads = [
            threading.Thread(target=target, name=f"torchdist_ref {name}", daemon=True) for target, name in targets
        ]
        for thread in self._threads:
            thread.start()

    def report(self, kind: str, **content: Any) -> None:
        """Push a report, which keep-alives repeat until the next one. If the coordinator is lost, `next` raises."""
        self._serial += 1
        self._last_report = message = content | {"kind": kind, "key": self.info.key, "serial": self._serial}
        if self._local is not None:
            self._local.reports.put(message)
            return
        try:
            self._sealed.queue_push(REPORTS, json.dumps(message))
        except DistError as error:
            self._lose(error)
        self._beat_now.set()

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
        self._beat_now.set()
        if self._pulse is not None:
            self._pulse.close()
        if self._local is not None:
            self._local.decisions.put(None)
        self._store.close()
        for thread in self._threads:
            thread.join()

    def attempt_secret(self, attempt: int) -> str:
        """Return the token of the workers of one attempt; empty without a job token."""
        return derive_key(self._secret, b"attempt %d" % attempt, self._nonce).hex() if self._secret else ""

    # Joining

    def _join(self, rules: Rules) -> int:
        self._store.set_on_disconnect(f"{GONE}/{self.info.key}", "1")
        if self._pulse is not None:
            self._sealed.set(f"alive/{self.info.key}", self._state(0))
            # A coordinator counts as lost `SILENCE_SECONDS` after its last answer. The next keep-alive is sent
            # `KEEP_ALIVE_SECONDS` after that, so it may wait for the rest of the time.
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
        self._leader = f"{self.where} ({reply['leader']}), which coordinates the job,"
        return int(reply["next"])

    def _state(self, beat: int) -> str:
        """Return the content of a keep-alive."""
        return json.dumps({"beat": beat, "next": self._next, "report": self._last_report})

    # Threads

    def _keep_alive(self) -> None:
        assert self._pulse is not None
        sealed = session_store(self._pulse, self._secret, self._nonce)
        beats = 0
        try:
            while True:
                self._beat_now.wait(KEEP_ALIVE_SECONDS)
                self._beat_now.clear()
                if self._closed.is_set():
                    return
                beats += 1
                sealed.set(f"alive/{self.info.key}", self._state(beats))
        except DistError as error:
            self._lose(error)

    def _read_decisions(self) -> None:
        try:
            while not self._closed.is_set():
                with suppress(StoreTimeoutError):
                    if (message := self._await_decision()) is None:
                        return
                    self._deliver(message)
                    if message["kind"] in ("end", "handover", "deposed", "moved"):
                        return
        except DistError as error:
            self._lose(error)

    def _await_decision(self) -> Message | None:
        """Return the next decision; None at the end of the session."""
        if self._local is not None:
            return self._local.decisions.get()
        self._sealed.wait([f"plan/{self._next}"], LONGEST_WAIT)
        # `get` waits again if another program has deleted the key: the coordinator writes it again.
        message: Message = json.loads(self._sealed.get(f"plan/{self._next}"))
        self._next += 1
        return message

    def _deliver(self, message: Message) -> None:
        if message["kind"] == "note":
            self._notify(message["text"])
            return
        # The agent reads the decision and starts workers, which stop when the eventfd is written. Write it before the
        # decision can be read: a later write would stop the workers that this decision has started.
        with self._lock:
            self._inbox.append(message)
            os.eventfd_write(self._wake, 1)

    def _lose(self, error: DistError) -> None:
        if self._lost is None and not self._closed.is_set():
            text = f"the agent at {self._leader} is lost ({_reason(error)})"
            with self._lock:
                self._lost = CoordinatorLost(text, _has_refused(error))
                os.eventfd_write(self._wake, 1)


def authenticate(store: TCPStore, secret: bytes, host: str, where: str, timeout: float) -> str:
    """Return the random number of the session with a coordinator that knows the job token.

    The answer to each request has a key of its own, so that a late answer is not taken for that to a later request.

    Args:
        store: Store of the coordinator.
        secret: Job token; empty for none.
        host: Name of this host.
        where: Address of the store, for messages.
        timeout: Longest time to wait for the answer, in seconds.
    """
    nonce = os.urandom(KEY_BYTES).hex()
    public = PrefixStore(PREFIX, store)
    store.set_timeout(timedelta(seconds=timeout))
    try:
        public.queue_push(HELLOS, f"{nonce} {hello_code(secret, nonce)}")
        opened = SealedStore(public, derive_key(secret, b"welcome", nonce))
        welcome = json.loads(opened.get(f"welcome/{nonce}"))
        public.delete_key(f"sealed/welcome/{nonce}")
    except AuthenticationError as error:
        have = "another job token than" if secret else "no job token, unlike"
        raise AuthenticationError(
            f"{host} has {have} the agent at {where}, or that one has none. On all hosts, name a file with "
            f"the same secret in {SECRET_FILE}."
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
