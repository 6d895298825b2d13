"""The coordinator of the agents of a job, and an agent's session with it, in one process."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch

import torchdist_ref
from tests.ports import reserve_port
from torchdist_ref.elastic import coordinator as coordination
from torchdist_ref.elastic import keep_alives
from torchdist_ref.elastic import session as agent_session
from torchdist_ref.elastic.agent_queues import Welcomes, read_queue
from torchdist_ref.elastic.coordinator import AgentCoordinator, Redirection
from torchdist_ref.elastic.keep_alives import Finding, KeepAlives
from torchdist_ref.elastic.roster import HostInfo, Progress, Roster, Rules, versions
from torchdist_ref.elastic.session import (
    AgentSession,
    CoordinatorLost,
    CoordinatorMoved,
    authenticate,
    hello_code,
    open_store,
    session_store,
)
from torchdist_ref.errors import ArgumentError, AuthenticationError, StoreTimeoutError
from torchdist_ref.stores import PrefixStore, Store, TCPStore
from torchdist_ref.stores.sealed import SealedStore
from torchdist_ref.stores.served_values import ArrivedValues
from torchdist_ref.timeouts import CLOCK

SECRET = b"0123456789abcdef"
RULES = Rules("job", 1, 3, join_seconds=20.0, last_call_seconds=20.0)


class Meeting:
    """A coordinator in this process, and sessions with it."""

    def __init__(
        self,
        now: float = 0.0,
        secret: bytes = SECRET,
        forward: tuple[str, int] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.secret = secret
        self.roster = Roster(RULES, now or time.monotonic(), "own", progress or Progress())
        self.coordinator = AgentCoordinator(self.store, self.roster, secret, "127.0.0.1", "own", forward)
        # Stores and descriptors of wake-ups by session.
        self.sessions: dict[AgentSession, tuple[TCPStore, int]] = {}

    def join(self, key: str) -> AgentSession:
        wake = os.eventfd(0)
        info = HostInfo(key, f"host of {key}", "127.0.0.1", 1, 1)
        store = open_store("127.0.0.1", self.store.port, 30.0)
        local = self.coordinator.local if key == "own" else None
        try:
            session = AgentSession(store, info, RULES, self.secret, "there", wake, print, 30.0, local)
        except BaseException:
            store.close()
            os.close(wake)
            raise
        self.sessions[session] = store, wake
        return session

    def next(self, session: AgentSession) -> dict[str, Any]:
        """Return the next decision."""
        while (message := session.next()) is None:
            _, wake = self.sessions[session]
            assert CLOCK.wait([wake], 30.0), "no decision arrives"
            os.eventfd_read(wake)
        return message

    def close(self) -> None:
        for session in self.sessions:
            session.report("leave", text="the end")
            session.close()
        self.coordinator.close()
        self.store.close()
        for _, wake in self.sessions.values():
            os.close(wake)


@pytest.fixture(autouse=True)
def allow_long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of one process share its interpreter: on a busy machine, an agent can be silent for a second."""
    for module in (coordination, agent_session):
        monkeypatch.setattr(module, "SILENCE_SECONDS", 20.0)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close()


FOREIGN_WRITES: dict[str, Callable[[TCPStore], None]] = {
    "number for a hello": lambda store: PrefixStore("torchdist_ref.agents", store).queue_push("hellos", "7"),
    "nested lists for a hello": lambda store: PrefixStore("torchdist_ref.agents", store).queue_push(
        "hellos", "[" * 100_000
    ),
    "endless number in a hello": lambda store: PrefixStore("torchdist_ref.agents", store).queue_push(
        "hellos", "ab" * 70_000
    ),
    "report": lambda store: store.queue_push(find(store, "sealed/alive/other", "sealed/events"), "no report"),
    "keep-alive": lambda store: store.set(find(store, "sealed/alive/other"), "no code of the job"),
}


def find(store: TCPStore, part: str, instead: str = "") -> str:
    """Return a key of the session, which each program that reaches the store can list."""
    key = next(key for key in store.list_keys() if part in key)
    return key.partition(part)[0] + instead if instead else key


@pytest.mark.parametrize("write", FOREIGN_WRITES)
def test_an_unauthenticated_program_does_not_end_the_coordinator(write: str, meeting: Meeting) -> None:
    own, other = meeting.join("own"), meeting.join("other")
    with_store = open_store("127.0.0.1", meeting.store.port, 30.0)
    FOREIGN_WRITES[write](with_store)
    with_store.close()
    meeting.join("third")
    assert {meeting.next(session)["kind"] for session in (own, other)} == {"start"}
    assert set(meeting.roster.seats) == {"own", "other", "third"}


@pytest.mark.parametrize(
    "report",
    [
        "7",
        "[]",
        "[" * 100_000,
        '{"key": "a", "serial": "x"}',
        '{"key": "a", "serial": 9, "kind": "join", "info": {}, "rules": 3}',
    ],
)
def test_a_malformed_report_is_ignored_without_authentication(report: str) -> None:
    meeting = Meeting(secret=b"")
    try:
        own = meeting.join("own")
        nonce = authenticate(meeting.store, b"", "host-0", "there", 30.0)
        session_store(meeting.store, b"", nonce).queue_push("events", report)
        meeting.join("other")
        meeting.join("third")
        assert meeting.next(own)["kind"] == "start"
    finally:
        meeting.close()


def test_a_welcome_after_the_time_out_is_not_taken_for_a_later_one() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    late, other = store.clone(), store.clone()
    with pytest.raises(CoordinatorLost, match="no agent that coordinates"):
        authenticate(late, SECRET, "host-0", "there", 0.01)
    coordinator = AgentCoordinator(store, Roster(RULES, time.monotonic(), "own"), SECRET, "127.0.0.1", "own")
    try:
        # Questions are answered in order: the first one has its answer then, which nobody has read.
        authenticate(other, SECRET, "host-0", "there", 30.0)
        coordinator.close()
        with pytest.raises(CoordinatorLost, match="no agent that coordinates"):
            authenticate(late, SECRET, "host-0", "there", 0.01)
    finally:
        for each in (late, other, store):
            each.close()


class OnePop(Store):
    """Store that lets the coordinator pop one value of a queue, and then end.

    Attributes:
        keys: Keys that the coordinator has set.
    """

    def __init__(self, store: TCPStore, closed: threading.Event) -> None:
        self._store, self._closed, self._pops = store, closed, 0
        self.keys: list[str] = []

    @property
    def server(self) -> Any:
        return self._store.server

    def queue_pop(self, key: Any, block: bool = True) -> bytes:
        self._pops += 1
        if self._pops > 1:
            self._closed.set()
            raise StoreTimeoutError("this is the end")
        return self._store.queue_pop(key)

    def set(self, key: Any, value: Any) -> None:
        self.keys.append(key.rpartition("/")[2])


@pytest.fixture
def flooded() -> Iterator[TCPStore]:
    """A store in which another program has written a thousand values to the queues of agents."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queues = PrefixStore("torchdist_ref.agents", store)
    for number in range(FLOOD):
        queues.queue_push("hellos", f"{number:064x}" if number % 2 else "junk")
        queues.queue_push(f"{NONCE[:16]}/sealed/events", "junk")
    yield store
    store.close()


NONCE, FLOOD = "0123456789abcdef" * 4, 500


def test_reports_do_not_wait_for_what_another_program_has_written(flooded: TCPStore) -> None:
    closed, found = threading.Event(), list[Any]()
    sent = [{"kind": "finish", "key": "agent", "serial": number} for number in (7, 8)]
    for report in sent:
        session_store(flooded, SECRET, NONCE).queue_push("events", json.dumps(report))
    pops: Any = OnePop(flooded, closed)
    reports = session_store(ArrivedValues(pops), SECRET, NONCE)
    read_queue(reports, "events", lambda report, is_first: found.append(json.loads(report)), closed)
    assert found == sent


def test_new_agents_do_not_wait_for_what_another_program_has_written(flooded: TCPStore) -> None:
    """Its questions get an answer when their turn comes, which is after the end here; a repeated one gets none."""
    closed = threading.Event()
    for _ in range(2):
        PrefixStore("torchdist_ref.agents", flooded).queue_push("hellos", f"{NONCE} {hello_code(SECRET, NONCE)}")
    pops: Any = OnePop(flooded, closed)
    hellos = PrefixStore("torchdist_ref.agents", ArrivedValues(pops))
    read_queue(hellos, "hellos", Welcomes(pops, SECRET, NONCE).answer, closed)
    assert pops.keys == [NONCE]


def test_an_agent_with_another_version_of_torch_is_refused(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_session, "versions", lambda: versions() | {"torch": "9.9.9"})
    message = r"host of other has torch 9\.9\.9, and the agent at there has .*pip install torch=="
    with pytest.raises(ArgumentError, match=message):
        meeting.join("other")


def test_the_versions_are_those_that_are_installed() -> None:
    assert versions() == {"torch": torch.__version__.partition("+")[0], "torchdist_ref": torchdist_ref.__version__}


def test_an_agent_of_another_job_is_answered_too(meeting: Meeting, caplog: pytest.LogCaptureFixture) -> None:
    """The first host says so once: its user would else see a host missing, and nothing more."""
    store = open_store("127.0.0.1", meeting.store.port, 30.0)
    for _ in range(2):
        with pytest.raises(AuthenticationError, match="host-0 has another job token than the agent at there"):
            authenticate(store, b"another token", "host-0", "there", 30.0)
    authenticate(store, SECRET, "host-1", "there", 30.0)
    store.close()
    [refused] = [line for line in caplog.messages if "token" in line]
    assert refused.startswith("refused a connection") and "same secret in TORCHDIST_REF_TOKEN_FILE" in refused


def test_each_question_is_new() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hellos = PrefixStore("torchdist_ref.agents", store)
    for _ in range(2):
        with pytest.raises(CoordinatorLost, match="no agent that coordinates"):
            authenticate(store, SECRET, "host-0", "there", 0.01)
    first, second = hellos.queue_pop("hellos"), hellos.queue_pop("hellos")
    store.close()
    assert first != second


@pytest.mark.parametrize("fails", ["tick of the roster", "events", "hellos"])
def test_agents_leave_a_coordinator_whose_thread_fails(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they waited for decisions that nobody made any more. A thread fails in the roster, or reading a queue."""
    meeting, pop = Meeting(), ArrivedValues.queue_pop

    def failing(*_: Any) -> None:
        raise RuntimeError("planted")

    def failing_pop(self: ArrivedValues, key: str, block: bool = True) -> bytes:
        value = pop(self, key, block)
        return failing() if key.endswith(fails) else value  # type: ignore[func-returns-value,return-value]

    try:
        own, other = meeting.join("own"), meeting.join("other")
        if fails == "tick of the roster":
            monkeypatch.setattr(meeting.roster, "tick", failing)
        monkeypatch.setattr(ArrivedValues, "queue_pop", failing_pop)
        # The threads wait in the former function: the first value that arrives from now on is the second that fails.
        for _ in range(2):
            other.report("ready", attempt=0)
            with suppress(CoordinatorLost):
                authenticate(meeting.store, SECRET, "host-0", "there", 0.01)
        for session in (own, other):
            message = meeting.next(session)
            assert (message["kind"], message["text"]) == (
                "deposed",
                "the coordinator of the agents has failed: planted",
            )
    finally:
        monkeypatch.undo()
        meeting.close()


def test_an_agent_names_the_host_that_it_has_lost(meeting: Meeting) -> None:
    """Once it named an address, and a key of the store in the place of a reason."""
    own, other = meeting.join("own"), meeting.join("other")
    meeting.coordinator.close()
    meeting.store.close()
    own.close()
    with pytest.raises(CoordinatorLost) as lost:
        meeting.next(other)
    assert str(lost.value) == (
        "the agent at there (host of own), which coordinates the job, is lost (no process listens there)"
    )


def test_an_agent_whose_coordinator_reaches_too_few_learns_which_hosts_are_out_of_reach() -> None:
    """Once it read that most hosts are out of reach, of a job of two, and no name."""
    hosts = tuple(HostInfo(key, f"host of {key}", "127.0.0.1", 1, 1) for key in ("former", "own", "third"))
    meeting = Meeting(progress=Progress(1, 0, hosts, "former"))
    lost = "2 of 3 hosts of the job are out of reach (host of former, host of third)"
    try:
        own = meeting.join("own")
        assert meeting.next(own) == {"kind": "deposed", "text": f"{lost}, and may go on without this one"}
    finally:
        meeting.close()


def test_a_server_that_does_not_answer_is_not_called_rank_0() -> None:
    """The store's own error names MASTER_ADDR, which the user of agents has not set."""
    port = reserve_port()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(CoordinatorLost) as silent:
        open_store("127.0.0.1", port, 0.05)
    assert str(silent.value) == (
        f"no agent answers at 127.0.0.1:{port} (it is stopped or overloaded, or cut off from this host)"
    )
    with pytest.raises(CoordinatorLost, match=rf"no agent answers at 127.0.0.1:{port} \(no process listens there\)"):
        open_store("127.0.0.1", port, 0.05)


def start_attempt(meeting: Meeting) -> dict[str, AgentSession]:
    """Return the sessions of three agents that have read the start of the first attempt."""
    sessions = {key: meeting.join(key) for key in ("own", "other", "third")}
    assert {meeting.next(session)["kind"] for session in sessions.values()} == {"start"}
    return sessions


def stop_pushes(meeting: Meeting, session: AgentSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no report of a session stay in the queue, as if another program popped each at once."""
    store, _ = meeting.sessions[session]
    monkeypatch.setattr(store, "queue_push", lambda queue, value: None)


@pytest.mark.parametrize("taken", ["own", "other"])
def test_the_job_ends_though_another_program_takes_a_report(
    taken: str, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = start_attempt(meeting)
    stop_pushes(meeting, sessions[taken], monkeypatch)
    for session in sessions.values():
        session.report("finish", attempt=1)
    ends = [meeting.next(session) for session in sessions.values()]
    assert [(end["kind"], end["code"]) for end in ends] == [("end", 0)] * 3


def test_the_first_failure_is_named_though_another_program_takes_its_report(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator looks at the keep-alives before it decides, though none of them is late."""
    monkeypatch.setattr(keep_alives, "LATE_SECONDS", 0.9)
    sessions, repeated, set_value = start_attempt(meeting), threading.Event(), SealedStore.set

    def seen_set(self: SealedStore, key: str, value: str) -> None:
        set_value(self, key, value)
        if key == "alive/other" and '"fail"' in value:
            repeated.set()

    monkeypatch.setattr(SealedStore, "set", seen_set)
    stop_pushes(meeting, sessions["other"], monkeypatch)
    sessions["other"].report("fail", attempt=1, failure={"code": 3, "text": "the cause", "time": 1.0})
    repeated.wait(10)
    sessions["third"].report("fail", attempt=1, failure={"code": 1, "text": "a later failure", "time": 2.0})
    ends = [meeting.next(session) for session in sessions.values()]
    assert [(end["code"], end["text"]) for end in ends] == [(3, "the cause")] * 3


def test_a_decision_that_another_program_deletes_is_written_again(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted, wait, once = list[str](), SealedStore.wait, threading.Lock()

    def wait_and_delete(self: SealedStore, keys: list[str], timeout: timedelta) -> None:
        wait(self, keys, timeout)
        if once.acquire(blocking=False):
            deleted.append(keys[0])
            assert self.delete_key(keys[0])

    monkeypatch.setattr(SealedStore, "wait", wait_and_delete)
    start_attempt(meeting)
    assert deleted == ["plan/0"]


def test_the_first_address_leads_agents_on_for_as_long_as_the_job_runs() -> None:
    long_ago = time.monotonic() - 2 * RULES.join_seconds
    meeting = Meeting(now=long_ago, forward=("10.9.9.9", 4242))
    try:
        for key in ("first", "second"):
            with pytest.raises(CoordinatorMoved, match=r"the job runs at 10\.9\.9\.9:4242"):
                meeting.join(key)
    finally:
        meeting.close()


def test_redirections_come_from_one_agent(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator remembers the last report of each agent: a redirection that repeats itself is one agent."""
    meeting.join("own")
    info = HostInfo("leader", "leader", "10.9.9.9", 4242, 1)
    several, push, seen = threading.Event(), SealedStore.queue_push, list[tuple[str, int]]()

    def seen_push(self: SealedStore, key: Any, value: Any) -> None:
        push(self, key, value)
        report = json.loads(value)
        seen.append((report["key"], report["serial"]))
        if len(seen) == 3:
            several.set()

    monkeypatch.setattr(coordination, "REDIRECTION_SECONDS", 0.0)
    monkeypatch.setattr(SealedStore, "queue_push", seen_push)
    redirection = Redirection("127.0.0.1", meeting.store.port, SECRET, info, lambda: 0)
    try:
        assert several.wait(30)
    finally:
        redirection.close()
    assert len({key for key, _ in seen}) == 1 and sorted({serial for _, serial in seen}) == [each for _, each in seen]


def test_a_decision_can_be_read_only_when_its_wake_up_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # A wake-up that came after its decision was read would stop the workers that this decision has started.
    rules, info = Rules("job", 1, 1), HostInfo("key", "host-0", "127.0.0.1", 1, 1)
    store, wake = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), os.eventfd(0, os.EFD_NONBLOCK)
    writing, go_on, write = threading.Event(), threading.Event(), os.eventfd_write
    found: list[str] = []

    def delayed(descriptor: int, value: int) -> None:
        writing.set()
        go_on.wait(30)
        write(descriptor, value)
        found.append("wake-up")

    monkeypatch.setattr(os, "eventfd_write", delayed)
    coordinator = AgentCoordinator(store, Roster(rules, time.monotonic(), "key"), b"", "127.0.0.1", "key")
    session = AgentSession(store.clone(), info, rules, b"", "here", wake, print, local=coordinator.local)
    try:
        assert writing.wait(30)
        reader = threading.Thread(target=lambda: found.append((session.next() or {})["kind"]))
        reader.start()
        reader.join(0.05)
        go_on.set()
        reader.join(30)
        # The end of the host wakes it up once more.
        in_order = found[:2]
    finally:
        go_on.set()
        session.report("leave", text="the end")
        session.close()
        coordinator.close()
        store.close()
        os.close(wake)
    assert in_order == ["wake-up", "start"]


def test_the_coordinator_sends_no_request_while_all_agents_keep_alive(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at their keep-alives in the memory of the server, five times here."""
    looks, five_looks, requests = list[float](), threading.Event(), list[str]()
    look, request = KeepAlives.look, TCPStore.multi_get
    start_attempt(meeting)

    def counted_look(self: KeepAlives, agent: str, beat: int, has_disconnected: bool, now: float) -> Finding:
        looks.append(now)
        if len(looks) == 10:
            five_looks.set()
        return look(self, agent, beat, has_disconnected, now)

    def counted_request(self: TCPStore, keys: Any) -> list[bytes]:
        requests.append(threading.current_thread().name)
        return request(self, keys)

    monkeypatch.setattr(keep_alives, "LATE_SECONDS", 0.06)
    monkeypatch.setattr(agent_session, "KEEP_ALIVE_SECONDS", 0.04)
    monkeypatch.setattr(KeepAlives, "look", counted_look)
    monkeypatch.setattr(TCPStore, "multi_get", counted_request)
    assert five_looks.wait(30) and "torchdist_ref coordinator" not in requests
