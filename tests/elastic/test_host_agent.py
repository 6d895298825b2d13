"""Agents of several hosts: the hosts are processes of one machine, or network namespaces."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.elastic.agents import Agents, is_running
from tests.elastic.scenarios import SCENARIOS, check_ranks, three_hosts
from torchdist_ref.elastic import coordinator as coordination
from torchdist_ref.elastic.bootstrap import get_free_port
from torchdist_ref.elastic.coordinator import AgentCoordinator, AgentSession
from torchdist_ref.elastic.roster import HostInfo, Roster, Rules
from torchdist_ref.stores import TCPStore
from torchdist_ref.stores.tcp.protocol import Request
from torchdist_ref.stores.tcp.requests import RequestHandler, StoreClient
from torchdist_ref.testing import namespaces


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Agents on this host, whose rendezvous is on a free port."""
    with Agents(tmp_path, port=get_free_port()) as made:
        yield made


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[namespaces.Host]]:
    if reason := namespaces.missing():
        pytest.skip(reason)
    with namespaces.hosts(3) as made:
        yield made


def test_workers_of_all_hosts_get_their_ranks_and_the_job_ends_when_all_have_finished(agents: Agents) -> None:
    for number, workers in enumerate((2, 1, 3)):
        agents.start(number, min=3, max=3, workers=workers, node_rank=number, serves=number == 0, task="end")
    starts = agents.starts(6)
    check_ranks(starts, (2, 1, 3), 0)
    assert agents.ends(["host-0", "host-1", "host-2"]) == dict.fromkeys(("host-0", "host-1", "host-2"), (0, ""))


def test_a_failure_restarts_all_workers_once_and_the_last_one_names_rank_and_host(agents: Agents) -> None:
    for number in range(2):
        agents.start(number, min=2, max=2, workers=2, restarts=1, node_rank=number, serves=number == 0)
    first = agents.starts(4)
    os.kill(first[3].pid, signal.SIGKILL)
    second = agents.starts(4)
    check_ranks(second, (2, 2), 1)
    assert {start.port for start in first}.isdisjoint(start.port for start in second)
    os.kill(second[1].pid, signal.SIGKILL)
    text = f"rank 1 on host-0 (process {second[1].pid}) was killed by SIGKILL"
    assert agents.ends(["host-0", "host-1"]) == dict.fromkeys(("host-0", "host-1"), (137, text))
    assert not any(is_running(start.pid) for start in (*first, *second))


def test_the_token_of_the_workers_is_new_for_each_attempt(agents: Agents, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(secrets.token_hex())
    for number in range(2):
        agents.start(number, {"TORCHDIST_REF_TOKEN_FILE": str(path)}, min=2, max=2, restarts=1)
    first = agents.starts(2)
    check_ranks(first, (1, 1), 0)
    os.kill(first[0].pid, signal.SIGKILL)
    second = agents.starts(2)
    check_ranks(second, (1, 1), 1)
    tokens = {first[0].token, second[0].token}
    assert len(tokens) == 2 and all(len(token) == 64 for token in tokens)
    assert path.read_text() not in tokens


def test_a_host_with_another_token_is_refused_and_the_job_goes_on(agents: Agents, tmp_path: Path) -> None:
    environments = []
    for name in ("ours", "theirs"):
        path = tmp_path / name
        path.touch(0o600)
        path.write_text(secrets.token_hex())
        environments.append({"TORCHDIST_REF_TOKEN_FILE": str(path)})
    agents.start(0, environments[0], max=2, task="wait")
    agents.starts(1)
    for environment, have in ((environments[1], "another job token than"), ({}, "no job token, unlike")):
        agents.start(1, environment, max=2)
        code, text = agents.ends(["host-1"])["host-1"]
        assert code == 2 and f"host-1 has {have} the agent at 127.0.0.1" in text and "--token-file" in text
    agents.start(2, environments[0], max=2)
    check_ranks(agents.starts(2), (1, 1), 0)


def test_two_hosts_with_one_node_rank(agents: Agents) -> None:
    agents.start(0, min=2, max=2, node_rank=0, serves=True)
    agents.start(1, min=2, max=2, node_rank=0, serves=False)
    code, text = agents.ends(["host-1"])["host-1"]
    assert code == 2 and text == "--node-rank 0 of host-1 is that of host-0 already; give each its own."
    agents.start(2, min=2, max=2, node_rank=1, serves=False)
    check_ranks(agents.starts(2), (1, 1), 0)


def test_hosts_that_never_come_are_named_at_the_time_out(agents: Agents) -> None:
    agents.start(0, min=2, max=2, node_rank=0, serves=True, join=0.5)
    code, text = agents.ends(["host-0"])["host-0"]
    assert code == 2
    assert text.startswith("1 of 2 hosts (--nnodes) are there (host-0), node rank 1 did not join within 0.5 s.")


def test_a_rendezvous_that_never_comes_is_named_at_the_time_out(agents: Agents) -> None:
    agents.start(0, serves=False, join=0.1)
    code, text = agents.ends(["host-0"])["host-0"]
    assert code == 2 and "host-0: no agent answers at 127.0.0.1" in text and "--rdzv-endpoint" in text


def test_a_store_without_an_agent(agents: Agents) -> None:
    with_no_agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents.start(0, port=with_no_agent.port, join=0.1)
    code, text = agents.ends(["host-0"])["host-0"]
    with_no_agent.close()
    assert code == 2 and "has no agent that coordinates a job" in text


def test_other_versions_of_torch_or_of_this_library_are_refused(agents: Agents, tmp_path: Path) -> None:
    agents.start(0, max=2)
    agents.starts(1)
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text("__version__ = '9.9.9+cpu'\n")
    own = str(Path(__file__).parents[2])
    agents.start(1, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{own}"}, max=2)
    code, text = agents.ends(["host-1"])["host-1"]
    assert code == 2 and text.startswith("host-1 has torch 9.9.9, and the agent at 127.0.0.1")
    assert "pip install torch==" in text


# Hosts with networks of their own


def test_an_agent_that_is_killed_is_noticed_by_its_connection(agents: Agents) -> None:
    for number in range(2):
        agents.start(number, min=1, max=2, last_call=20.0)
    # The agent that serves the rendezvous has the first rank.
    killed = agents.starts(2)[-1].name
    agents.kill(killed)
    # Its silence would be noticed later, and reported as such.
    assert f"{killed} has ended" in agents.log(f"{killed} has")
    check_ranks(agents.starts(1), (1,), 0)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 2], ids=["of_the_store", "another"])
def test_a_host_that_freezes_joins_again_when_it_continues(rank: int, agents: Agents) -> None:
    for number in range(3):
        agents.start(number, min=2, max=3, last_call=20.0)
    frozen = agents.starts(3)[rank].name
    agents.kill(frozen, signal.SIGSTOP)
    check_ranks(agents.starts(2), (1, 1), 0)
    agents.kill(frozen, signal.SIGCONT)
    check_ranks(agents.starts(3), (1, 1, 1), 0)


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
    session = AgentSession(store.clone(), info, rules, b"", "here", wake, print, keeps_alive=False)
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


def test_the_coordinator_sends_no_request_while_all_agents_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    handled, five_checks = list[str](), threading.Event()
    check, handle = AgentCoordinator._check_agents, RequestHandler.handle

    def counted_check(self: AgentCoordinator, now: float) -> None:
        check(self, now)
        handled.append("check")
        if handled.count("check") == 5:
            five_checks.set()

    def counted_handle(self: RequestHandler, client: StoreClient, request: Request) -> None:
        handled.append(request.operation.name)
        handle(self, client, request)

    monkeypatch.setattr(coordination, "KEEP_ALIVE_SECONDS", 0.04)
    monkeypatch.setattr(coordination, "LATE_SECONDS", 0.06, raising=False)
    monkeypatch.setattr(AgentCoordinator, "_check_agents", counted_check)
    monkeypatch.setattr(RequestHandler, "handle", counted_handle)
    rules, wake = Rules("job", 2, 2), os.eventfd(0, os.EFD_NONBLOCK)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    coordinator = AgentCoordinator(store, Roster(rules, time.monotonic(), "own"), b"", "127.0.0.1", "own")
    infos = [HostInfo(key, key, "127.0.0.1", 1, 1) for key in ("own", "other")]
    sessions = [
        AgentSession(store.clone(), info, rules, b"", "here", wake, print, keeps_alive=info.key == "other")
        for info in infos
    ]
    try:
        assert five_checks.wait(30)
    finally:
        for session in sessions:
            session.report("leave", text="the end")
            session.close()
        coordinator.close()
        store.close()
        os.close(wake)
    assert "SET" in handled and "WAIT_GET_ALL" not in handled


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("begin", [100.0 + 0.013 * step for step in range(0, 24, 4)])
def test_a_lost_agent_is_noticed_in_time_by_two_checks_a_second(begin: float, gone: bool) -> None:
    for death in (109.801, 109.95, 110.099):
        lost, checks = checks_until_lost(begin, death, gone)
        assert 0.14 < lost - death < (0.91 if gone else 1.46)
        assert checks <= (death - begin) / 0.45 + 4


def checks_until_lost(now: float, death: float, gone: bool) -> tuple[float, int]:
    """Return when the coordinator notices the death of an agent that kept alive until then, and its checks so far."""
    lost: list[float] = []
    coordinator = AgentCoordinator.__new__(AgentCoordinator)
    roster: Any = SimpleNamespace(seats={}, waiting={"agent": None})

    def lose(key: str, reason: str, certain: bool) -> None:
        lost.append(now)
        roster.waiting.clear()

    roster.lose = lose
    coordinator._roster, coordinator._own, coordinator._alive, coordinator._checked_at = roster, "own", {}, 0.0
    pulses: Any = SimpleNamespace(multi_get=lambda keys: [b"%d" % (min(now, death) / 0.3)])
    keys: Any = SimpleNamespace(list_keys=lambda: ["agent"] if gone and now > death else [])
    coordinator._pulses, coordinator._gone = pulses, keys
    checks = 0
    while roster.waiting:
        now = max(now, coordinator._next_check())
        coordinator._check_agents(now)
        checks += 1
    return lost[0], checks


@pytest.mark.parametrize("name", SCENARIOS)
def test_back_at_work(name: str, hosts: Sequence[namespaces.Host], tmp_path: Path) -> None:
    with three_hosts(tmp_path, hosts) as job:
        SCENARIOS[name](job)


def test_the_job_goes_on_when_every_host_in_turn_has_held_the_store(
    hosts: Sequence[namespaces.Host], tmp_path: Path
) -> None:
    with three_hosts(tmp_path, hosts) as job:
        leaders = []
        for _ in range(2):
            leaders.append(job.leader)
            SCENARIOS["store_host_killed_and_joins"](job)
        assert leaders[0] == "host-0" != job.leader and leaders[1] != leaders[0]
