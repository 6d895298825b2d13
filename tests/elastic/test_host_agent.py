"""Agents of several hosts: the hosts are processes of one machine, or network namespaces."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import Agents, is_running
from tests.elastic.scenarios import SCENARIOS, check_ranks, three_hosts
from tests.ports import reserve_port
from torchdist_ref.elastic import host_agent
from torchdist_ref.elastic.attempt import Assignment, AttemptOutcome
from torchdist_ref.elastic.host_agent import AgentSettings, _HostAgent, run_agent
from torchdist_ref.elastic.roster import HostInfo, Progress, Rules
from torchdist_ref.elastic.session import SILENCE_SECONDS, AgentSession, CoordinatorLost
from torchdist_ref.stores import TCPStore
from torchdist_ref.testing import namespaces
from torchdist_ref.timeouts import Deadline


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Agents on this host, whose rendezvous is on a free port."""
    with Agents(tmp_path, port=reserve_port()) as made:
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
        assert (
            code == 2
            and f"host-1 has {have} the agent at 127.0.0.1" in text
            and "in TORCHDIST_REF_TOKEN_FILE on all hosts" in text
        )
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
    # Seconds: on a busy machine, the host itself needs time to join.
    agents.start(0, min=2, max=2, node_rank=0, serves=True, join=3.0)
    code, text = agents.ends(["host-0"])["host-0"]
    assert code == 2
    assert text.startswith("1 of 2 hosts (--nnodes) are there (host-0), node rank 1 did not join within 3 s.")
    assert " Only this host reaches 127.0.0.1. For other hosts, give an address of the first host in " in text


def test_a_rendezvous_that_never_comes_is_named_at_the_time_out(agents: Agents) -> None:
    agents.start(0, serves=False, join=0.1)
    code, text = agents.ends(["host-0"])["host-0"]
    assert code == 2 and "host-0: no agent answers at 127.0.0.1" in text and "--rdzv-endpoint" in text


def test_a_store_without_an_agent(agents: Agents) -> None:
    with_no_agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A host waits two seconds for the answer anyway.
    agents.start(0, port=with_no_agent.port, join=2.0)
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


class NoWorkers:
    """Workers of an agent that never starts any, and gets no signal."""

    def __init__(self, quiet: socket.socket) -> None:
        self.socket = quiet

    @property
    def interrupts(self) -> NoWorkers:
        return self

    def received(self) -> bytes:
        return b""

    def run(self, assignment: Assignment, stop: int | None = None) -> AttemptOutcome:
        raise AssertionError(assignment)


@pytest.mark.parametrize("attempts", [0, 1], ids=["before the first attempt", "after it"])
def test_an_agent_whose_coordinators_are_lost_again_and_again_gives_up(
    attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may take each hello of an agent from the store. The agent once tried without an end."""

    def lose(*_: Any) -> None:
        raise CoordinatorLost("the hello was taken", certain=False)

    losses, enter, leave = list[float](), _HostAgent._enter, _HostAgent._leave_session

    class LossesAsTime(Deadline):
        """Deadline of which each loss takes a tenth of a second, however long this process is stopped."""

        def __init__(self, seconds: float) -> None:
            super().__init__(seconds)
            self.at = 0.1 * len(losses) + seconds

        def remaining(self) -> float:
            return max(0.0, self.at - 0.1 * len(losses))

        def passed(self) -> bool:
            return self.remaining() == 0.0

    def leave_in_time(agent: Any) -> None:
        leave(agent)
        losses.append(time.monotonic())
        assert len(losses) < 20, "it tries without an end"

    def enter_after_attempts(agent: Any, deadline: Deadline) -> AgentSession:
        if attempts:
            host = HostInfo("key", "host-1", "127.0.0.1", 1, 1)
            agent._progress, agent._attempt_lost = Progress(attempt=attempts, hosts=(host,)), attempts
        return enter(agent, deadline)

    lines = list[str]()
    monkeypatch.setattr(host_agent, "Deadline", LossesAsTime)
    monkeypatch.setattr(host_agent, "AgentSession", lose)
    monkeypatch.setattr(host_agent, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(_HostAgent, "_enter", enter_after_attempts)
    monkeypatch.setattr(_HostAgent, "_leave_session", leave_in_time)
    rules = Rules("job", 2, 2, join_seconds=0.3)
    settings = AgentSettings(rules, "127.0.0.1", reserve_port(), 1, serves=True)
    quiet, other = socket.socketpair()
    with quiet, other:
        end = run_agent(settings, NoWorkers(quiet), lines.append)
    assert any("the hello was taken; trying for 0 s more. Check --rdzv-endpoint" in line for line in lines)
    assert end.code == 2 and "the hello was taken; gave up after 0.3 s. Check --rdzv-endpoint" in end.text
    assert len(losses) > 2


# Hosts with networks of their own


def test_an_agent_that_is_killed_is_noticed_by_its_connection(agents: Agents) -> None:
    for number in range(2):
        agents.start(number, min=1, max=2, last_call=20.0, silence=5.0)
    # The agent that serves the rendezvous has the first rank.
    killed = agents.starts(2)[-1].name
    agents.kill(killed)
    # Its silence would be noticed later, and reported as such.
    assert f"{killed} has ended" in agents.log(f"{killed} has")
    check_ranks(agents.starts(1), (1,), 0)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 2], ids=["of_the_store", "another"])
def test_a_host_that_freezes_joins_again_when_it_continues(rank: int, agents: Agents) -> None:
    for number in range(3):
        agents.start(number, min=2, max=3, last_call=20.0, silence=SILENCE_SECONDS)
    frozen = agents.starts(3)[rank].name
    agents.kill(frozen, signal.SIGSTOP)
    check_ranks(agents.starts(2), (1, 1), 0)
    agents.kill(frozen, signal.SIGCONT)
    check_ranks(agents.starts(3), (1, 1, 1), 0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_back_at_work(name: str, hosts: Sequence[namespaces.Host], tmp_path: Path) -> None:
    silence = SILENCE_SECONDS if "cut_off" in name else 20.0
    with three_hosts(tmp_path, hosts, silence) as job:
        SCENARIOS[name](job)


def test_the_job_goes_on_when_every_host_in_turn_has_held_the_store(
    hosts: Sequence[namespaces.Host], tmp_path: Path
) -> None:
    with three_hosts(tmp_path, hosts, silence=20.0) as job:
        leaders = []
        for _ in range(2):
            leaders.append(job.leader)
            SCENARIOS["store_host_killed_and_joins"](job)
        assert leaders[0] == "host-0" != job.leader and leaders[1] != leaders[0]
