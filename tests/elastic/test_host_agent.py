"""Decisions of one host's agent, in virtual time: its connections, session and workers are fakes.

`test_agents_on_hosts` has agents that are processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from torchdist_ref.elastic.agent_settings import AgentSettings
from torchdist_ref.elastic.attempt import Assignment, AttemptOutcome, Exit
from torchdist_ref.elastic.host_agent import (
    CONNECT_SECONDS,
    FIRST_CONNECT_SECONDS,
    RETRY_SECONDS,
    HostAgent,
    JobEnd,
)
from torchdist_ref.elastic.roster import REPORT_SECONDS, HostInfo, Progress, Rules
from torchdist_ref.elastic.session import CoordinatorLost, CoordinatorMoved
from torchdist_ref.errors import ArgumentError, AuthenticationError
from torchdist_ref.testing.virtual_clock import VirtualClock

JOIN_SECONDS = 60.0
OWN = "10.0.0.2"
Message = dict[str, Any]
Script = list[Message | Exception]


def lost(certain: bool = False) -> CoordinatorLost:
    return CoordinatorLost("the agent at there is lost", certain)


def end(code: int = 0, text: str = "", **more: Any) -> Message:
    return {"kind": "end", "code": code, "text": text, **more}


class FakeSession:
    """Session whose coordinator sends a script, a message a second."""

    def __init__(self, world: World, script: Script, has_seat: bool = True) -> None:
        self._world, self._script, self.has_seat = world, script, has_seat
        self.inbox: Script = []

    def report(self, kind: str, **content: Any) -> None:
        self._world.events.append((kind, content))

    def has_news(self) -> bool:
        return bool(self.inbox)

    def next(self) -> Message | None:
        if self.inbox:
            found = self.inbox.pop(0)
            if isinstance(found, Exception):
                raise found
            return found
        if self._script:
            self._world.clock.at(self._world.clock.now() + 1.0, self._deliver)
        return None

    def attempt_secret(self, attempt: int) -> str:
        return f"secret {attempt}"

    def _deliver(self) -> None:
        message = self._script.pop(0)
        self.inbox.append(message() if callable(message) else message)
        os.eventfd_write(self._world.wake, 1)


class World:
    """All that an agent talks to: its clock, connections and workers.

    Attributes:
        leads: Session of this host at the job's first address; None if another process has to serve it.
        agents: Function that answers who joins at an address.
        outcomes: Outcomes of the next attempts.
        events: Calls of the agent: their kind, and what they say.
    """

    is_on_loopback = True

    def __init__(self) -> None:
        self.clock, self.wake = VirtualClock(1000.0), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.socket, self._signals = socket.socketpair()
        self.socket.setblocking(False)
        self.leads: FakeSession | Exception | None = None
        self.agents: Callable[[str, int], FakeSession] = self.no_agent
        self.outcomes: list[AttemptOutcome] = []
        self.events: list[tuple[str, Any]] = []
        self.lines: list[str] = []
        self.assignments: list[Assignment] = []
        self.agent = self.made()

    def made(self, **settings: Any) -> HostAgent:
        """Return an agent with other settings."""
        rules = Rules("job", 1, 3, join_seconds=JOIN_SECONDS)
        given = AgentSettings(rules, "10.0.0.1", 29400, 1, **settings)
        connections: Any = self
        self.agent = HostAgent(given, "host-2", self, connections, self.wake, self.lines.append, self.clock)
        return self.agent

    def close(self) -> None:
        os.close(self.wake)
        self.socket.close()
        self._signals.close()

    def session(self, *script: Any, has_seat: bool = True) -> FakeSession:
        return FakeSession(self, list(script), has_seat)

    def start(self, attempt: int = 1, hosts: tuple[HostInfo, ...] = (), restarts: int = 0) -> Callable[[], Message]:
        """Return what makes the decision to start an attempt; this host takes part by its key of that time."""

        def make() -> Message:
            default = (other(1), HostInfo(self.agent.key, "host-2", OWN, 7, 1), other(3))
            progress = Progress(attempt, restarts, hosts or default, "key 1")
            content = json.loads(json.dumps(asdict(progress)))
            return {"kind": "start", "master_addr": "10.0.0.1", "master_port": 4000 + attempt, **content}

        return make

    def interrupt(self, signum: int) -> None:
        self._signals.send(bytes([signum]))

    def no_agent(self, host: str, port: int) -> FakeSession:
        raise CoordinatorLost(f"no agent answers at {host}:{port}", False)

    # Connections

    def lead(self, key: str, is_new: bool) -> FakeSession | None:
        self.events.append(("lead", is_new))
        if isinstance(self.leads, Exception):
            raise self.leads
        return self.leads

    def join(self, host: str, port: int, key: str, seconds: float, welcome_seconds: float = 2.0) -> FakeSession:
        self.events.append(("join", f"{host}:{port}"))
        try:
            return self.agents(host, port)
        except CoordinatorLost:
            self.clock.sleep(seconds)
            raise

    def succeed(
        self, key: str, progress: Progress, gone: frozenset[str], attempt: Callable[[], int]
    ) -> tuple[HostInfo, FakeSession]:
        self.events.append(("succeed", sorted(gone)))
        assert progress.attempt == attempt()
        return HostInfo(key, "host-2", OWN, 7, 1), self.agents(OWN, 7)

    def forward(self, host: str, port: int) -> None:
        self.events.append(("forward", f"{host}:{port}"))

    def is_own(self, host: HostInfo) -> bool:
        return host.address == OWN

    def leave(self) -> None:
        self.events.append(("close", ""))

    # Workers

    @property
    def interrupts(self) -> World:
        return self

    def received(self) -> bytes:
        try:
            return self.socket.recv(64)
        except BlockingIOError:
            return b""

    def run(self, assignment: Assignment, stop: int | None = None) -> AttemptOutcome:
        self.assignments.append(assignment)
        return self.outcomes.pop(0)

    def seen(self, *kinds: str) -> list[Any]:
        """Return what the calls of these kinds say, in order."""
        return [content for kind, content in self.events if kind in kinds]


def other(number: int, workers: int = 1, role: str = "default") -> HostInfo:
    return HostInfo(f"key {number}", f"host-{number}", f"10.0.0.{number}", 7, workers, role=role)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_workers_get_their_ranks_and_the_job_ends(world: World) -> None:
    hosts = (other(1, 2), HostInfo(world.agent.key, "host-2", OWN, 7, 3, role="reader"), other(3, 4, "reader"))
    world.leads = world.session(world.start(3, hosts, restarts=2), end())
    world.outcomes = [AttemptOutcome(0, ())]
    assert world.agent.run() == JobEnd(0, "", AttemptOutcome(0, ()), {})
    [found] = world.assignments
    assert [*found.global_ranks] == [2, 3, 4] and [*found.role_ranks] == [0, 1, 2]
    assert (found.world_size, found.role_world_size, found.group_rank, found.group_world_size) == (9, 7, 1, 3)
    assert (found.master_addr, found.master_port, found.restart_count) == ("10.0.0.1", 4003, 2)
    assert (found.secret, found.environment) == ("secret 3", {"TORCHDIST_REF_TOKEN_FILE": ""})
    assert world.events == [
        ("lead", True),
        ("forward", "10.0.0.1:29400"),
        ("finish", {"attempt": 3}),
        ("leave", {"text": "the job has ended"}),
    ]


def test_a_stop_is_confirmed_and_the_stopped_attempt_is_not_reported(world: World) -> None:
    stop = {"kind": "stop", "attempt": 1, "text": "host-4 joins"}
    world.leads = world.session(world.start(1), stop, world.start(2), end())
    world.outcomes = [AttemptOutcome(143, (), stopped=True), AttemptOutcome(0, ())]
    assert world.agent.run().code == 0
    assert world.seen("ready", "finish") == [{"attempt": 1}, {"attempt": 2}] and world.lines == ["host-4 joins"]


def test_a_failure_is_reported_with_its_record(world: World, tmp_path: Path) -> None:
    record = tmp_path / "error.json"
    extra = {"py_callstack": "the stack", "timestamp": "7"}
    record.write_text(json.dumps({"message": {"message": "ValueError: boom", "extraInfo": extra}}))
    os.utime(record, ns=(5_000_000_000, 5_250_000_000))
    first = Exit(6, 2, 4711, 1, str(record))
    world.outcomes = [AttemptOutcome(1, (first,), first, cause_is_elsewhere=True)]
    world.leads = world.session(world.start(), lambda: end(1, "it failed", failure={"key": world.agent.key}))
    assert world.agent.run().is_own
    [report] = world.seen("fail")
    assert report == {
        "attempt": 1,
        "failure": {
            "code": 1,
            "time": 5.25,
            "host": "host-2",
            "key": world.agent.key,
            "text": "rank 6 on host-2 (process 4711) exited with code 1: ValueError: boom",
            "cause_is_elsewhere": True,
            "rank": 6,
            "local_rank": 2,
            "pid": 4711,
            "status": 1,
            "error_file": str(record),
            "stack": "the stack",
        },
    }


def test_a_failure_on_another_host_is_not_its_own(world: World) -> None:
    world.leads = world.session(world.start(), end(3, "rank 0 failed", failure={"key": "key 1", "rank": 0}))
    world.outcomes = [AttemptOutcome(143, (), stopped=True)]
    found = world.agent.run()
    assert (found.code, found.text, found.is_own) == (3, "rank 0 failed", False)


def test_a_start_that_is_outdated_is_not_run(world: World) -> None:
    stop = {"kind": "stop", "attempt": 1, "text": "host-4 joins"}
    session = world.session(world.start(1), world.start(2), end())
    world.leads = session
    world.outcomes = [AttemptOutcome(0, ())]
    # The stop arrives in the moment in which the start is read.
    deliver = session.next

    def with_the_stop() -> Message | None:
        message = deliver()
        if message and message.get("attempt") == 1 and message["kind"] == "start":
            session.inbox.append(stop)
        return message

    session.next = with_the_stop  # type: ignore[method-assign]
    assert world.agent.run().code == 0
    assert [each.master_port for each in world.assignments] == [4002] and world.seen("ready") == [{"attempt": 1}]


def test_a_spare_waits_for_an_attempt_with_it(world: World) -> None:
    without = (other(1), other(3))
    world.leads = world.session(world.start(1, without), world.start(2), end(), has_seat=False)
    world.outcomes = [AttemptOutcome(0, ())]
    assert world.agent.run().code == 0 and len(world.assignments) == 1


def test_a_host_that_was_taken_for_lost_joins_as_a_new_one_where_it_was(world: World) -> None:
    """A host that was frozen, for instance."""
    keys = [world.agent.key]

    def agents(host: str, port: int) -> FakeSession:
        keys.append(world.agent.key)
        if len(keys) == 2:
            return world.session(world.start(1, (other(1), other(3))))
        return world.session(world.start(2), end())

    world.agents = agents
    world.outcomes = [AttemptOutcome(0, ())]
    assert world.agent.run().code == 0
    assert keys[0] == keys[1] != keys[2] and world.seen("join") == ["10.0.0.1:29400"] * 2
    assert len(world.seen("lead")) == 1


def test_a_job_that_has_moved_is_joined_there(world: World) -> None:
    def agents(host: str, port: int) -> FakeSession:
        if port == 29400:
            raise CoordinatorMoved("10.0.0.9", 77)
        return world.session({"kind": "moved", "host": "10.0.0.8", "port": 78} if port == 77 else end())

    world.agents = agents
    assert world.agent.run().code == 0
    assert world.seen("join") == ["10.0.0.1:29400", "10.0.0.9:77", "10.0.0.8:78"]
    assert world.seen("forward") == ["10.0.0.9:77", "10.0.0.8:78"]


def test_a_job_that_has_moved_on_is_looked_for_at_its_first_address(world: World) -> None:
    found: list[str] = []

    def agents(host: str, port: int) -> FakeSession:
        found.append(host)
        if len(found) == 1:
            raise CoordinatorMoved("10.0.0.9", 77)
        return world.no_agent(host, port) if host == "10.0.0.9" else world.session(end())

    world.agents = agents
    assert world.agent.run().code == 0 and found == ["10.0.0.1", "10.0.0.9", "10.0.0.1"]


def test_a_rendezvous_that_never_comes_is_named_at_the_time_out(world: World) -> None:
    found = world.agent.run()
    assert found.code == 2 and found.text == (
        "host-2: no agent answers at 10.0.0.1:29400; gave up after 60 s. Check --rdzv-endpoint or --master-addr, "
        "that the launcher runs there, and that no firewall blocks the connection."
    )
    tries = len(world.seen("join"))
    assert tries == pytest.approx(JOIN_SECONDS / (FIRST_CONNECT_SECONDS + RETRY_SECONDS), abs=1)
    assert world.clock.now() == pytest.approx(1000.0 + JOIN_SECONDS, abs=RETRY_SECONDS)
    assert len(world.lines) == JOIN_SECONDS // (REPORT_SECONDS + FIRST_CONNECT_SECONDS)
    assert "no agent answers at 10.0.0.1:29400; trying for 49 s more. Check --rdzv-endpoint" in world.lines[0]


@pytest.mark.parametrize("attempts", [0, 1], ids=["before the first attempt", "after it"])
def test_an_agent_whose_coordinators_are_lost_again_and_again_gives_up(attempts: int, world: World) -> None:
    """Another program may take each hello of an agent from the store. The agent once tried without an end."""
    joined: list[float] = []

    def agents(host: str, port: int) -> FakeSession:
        joined.append(world.clock.now())
        assert len(joined) < 1000, "it tries without an end"
        if attempts and len(joined) == 1:
            return world.session(world.start(), lost())
        return world.session(lost())

    world.agents = agents
    world.outcomes = [AttemptOutcome(143, (), stopped=True)]
    found = world.agent.run()
    assert found.code == 2 and "host-2: the agent at there is lost; gave up after 60 s. Check" in found.text
    assert joined[-1] - joined[0] == pytest.approx(JOIN_SECONDS, abs=3.0)
    assert any("; trying for " in line for line in world.lines)
    # The first address is served at most once a loss, and a loss is logged once.
    assert world.lines.count("the agent at there is lost") == 1


def test_an_attempt_gives_the_next_succession_its_time(world: World) -> None:
    """Losses that are far apart do not add up."""
    joined: list[float] = []

    def agents(host: str, port: int) -> FakeSession:
        joined.append(world.clock.now())
        if len(joined) == 8:
            return world.session(end())
        world.clock.sleep(0.75 * JOIN_SECONDS)
        return world.session(world.start(len(joined)), lost())

    world.agents = agents
    world.outcomes = [AttemptOutcome(143, (), stopped=True)] * 7
    assert world.agent.run().code == 0 and len(world.assignments) == 7


@pytest.mark.parametrize("certain", [True, False])
def test_the_next_host_in_rank_order_is_joined(certain: bool, world: World) -> None:
    own = HostInfo(world.agent.key, "host-2", OWN, 7, 1)
    world.leads = world.session(world.start(1, (other(1), other(3), own)), lost(certain))
    world.outcomes = [AttemptOutcome(143, (), stopped=True)]
    world.agents = lambda host, port: world.session(end()) if host == "10.0.0.3" else world.no_agent(host, port)
    assert world.agent.run().code == 0
    assert world.seen("join") == ["10.0.0.3:7"] and world.seen("succeed") == []
    assert world.seen("forward")[-1] == "10.0.0.3:7"


@pytest.mark.parametrize(
    ("certain", "third", "gone"),
    [
        (True, True, ["key 1", "key 3"]),
        (True, False, ["key 1"]),
        (False, True, ["key 3"]),
        (False, False, []),
    ],
)
def test_this_host_succeeds_when_those_before_it_are_out_of_reach(
    certain: bool, third: bool, gone: list[str], world: World
) -> None:
    """Only hosts that have certainly ended count as gone: the others may go on as another part of the job."""
    own = HostInfo(world.agent.key, "host-2", OWN, 7, 1)
    world.leads = world.session(world.start(1, (other(1), other(3), own, other(4))), lost(certain))
    world.outcomes = [AttemptOutcome(143, (), stopped=True)]

    def agents(host: str, port: int) -> FakeSession:
        if host == OWN:
            return world.session(end())
        raise CoordinatorLost(f"no agent answers at {host}", third)

    world.agents = agents
    assert world.agent.run().code == 0
    assert world.seen("join") == ["10.0.0.3:7"] and world.seen("succeed") == [gone]
    assert world.seen("forward") == ["10.0.0.1:29400", f"{OWN}:7"]


def test_a_coordinator_that_leaves_has_certainly_ended(world: World) -> None:
    world.leads = world.session(world.start(), {"kind": "handover", "text": "the host that coordinates leaves"})
    world.outcomes = [AttemptOutcome(143, (), stopped=True)]
    world.agents = lambda host, port: world.session(end())
    assert world.agent.run().code == 0 and world.seen("succeed", "join") == [["key 1"]]


def test_after_a_succession_that_failed_any_agent_is_looked_for(world: World) -> None:
    """The heir is deposed, since it reaches too few hosts. It does not succeed a second time."""
    world.leads = world.session(world.start(), lost())
    world.outcomes = [AttemptOutcome(143, (), stopped=True)]
    answers = {OWN: {"kind": "deposed", "text": "2 of 3 hosts are out of reach"}, "10.0.0.3": end()}

    def agents(host: str, port: int) -> FakeSession:
        return world.session(answers[host]) if host in answers else world.no_agent(host, port)

    world.agents, key = agents, world.agent.key
    assert world.agent.run().code == 0
    assert world.seen("succeed", "join") == [[], "10.0.0.1:29400", "10.0.0.1:7", "10.0.0.3:7"]
    assert world.agent.key != key and CONNECT_SECONDS < world.clock.now() - 1000.0 < JOIN_SECONDS


def test_a_signal_while_it_waits_is_reported_as_a_leave(world: World) -> None:
    world.leads = world.session()
    world.clock.at(1007.0, lambda: world.interrupt(signal.SIGCHLD))
    world.clock.at(1008.0, lambda: world.interrupt(signal.SIGTERM))
    assert world.agent.run() == JobEnd(143) and world.clock.now() == 1008.0
    assert world.seen("leave") == [{"text": "SIGTERM"}]


def test_a_signal_while_it_looks_for_a_coordinator_ends_it(world: World) -> None:
    world.clock.at(1005.5, lambda: world.interrupt(signal.SIGINT))
    assert world.agent.run().code == 130 and world.clock.now() < 1009.0 and world.seen("leave") == []


def test_a_signal_that_ended_the_workers_ends_the_agent(world: World) -> None:
    outcome = AttemptOutcome(143, (), signal=15)
    world.leads, world.outcomes = world.session(world.start()), [outcome]
    assert world.agent.run() == JobEnd(143, outcome=outcome) and world.seen("leave") == [{"text": "SIGTERM"}]


def test_a_host_that_waits_alone_at_a_loopback_address_is_told_so(world: World) -> None:
    for alone, on_loopback in ((True, True), (False, True), (True, False)):
        world.leads = world.session(end(2, "1 of 2 hosts are there.", alone=alone))
        world.is_on_loopback = on_loopback
        text = world.made().run().text
        hint = " Only this host reaches 10.0.0.1. For other hosts, give an address of the first host in "
        assert text.startswith(f"1 of 2 hosts are there.{hint if alone and on_loopback else ''}")
        assert (hint in text) == (alone and on_loopback)


@pytest.mark.parametrize("kind", [ArgumentError, AuthenticationError])
def test_a_host_that_is_refused_ends_with_2(kind: type[Exception], world: World) -> None:
    world.leads = kind("--node-rank 0 of host-2 is that of host-1 already; give each its own.")
    found = world.agent.run()
    assert found.code == 2 and found.text.startswith("--node-rank 0 of host-2 is that of host-1 already;")
