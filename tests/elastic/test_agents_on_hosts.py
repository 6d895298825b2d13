"""Agents of several hosts, end to end: the hosts are processes of one machine, or network namespaces.

What an agent decides is tested in virtual time (`test_host_agent`), and so are the rules of a job (`test_roster`).
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.elastic.agents import Agents, is_running
from tests.elastic.scenarios import SCENARIOS, check_ranks, three_hosts
from tests.ports import reserve_port
from torchdist_ref.elastic.session import SILENCE_SECONDS
from torchdist_ref.testing import namespaces


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


# The others are in the nightly soak.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("host_cut_off_and_back", marks=pytest.mark.long),
        "store_host_leaves_and_joins",
        "store_host_cut_off_and_back",
    ],
)
def test_back_at_work(name: str, hosts: Sequence[namespaces.Host], tmp_path: Path) -> None:
    silence = SILENCE_SECONDS if "cut_off" in name else 20.0
    with three_hosts(tmp_path, hosts, silence) as job:
        SCENARIOS[name](job)


@pytest.mark.long
def test_the_job_goes_on_when_every_host_in_turn_has_held_the_store(
    hosts: Sequence[namespaces.Host], tmp_path: Path
) -> None:
    with three_hosts(tmp_path, hosts, silence=20.0) as job:
        leaders = []
        for _ in range(2):
            leaders.append(job.leader)
            SCENARIOS["store_host_killed_and_joins"](job)
        assert leaders[0] == "host-0" != job.leader and leaders[1] != leaders[0]
