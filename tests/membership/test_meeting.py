"""Ranks that meet: keys that go with their group, a rank claimed twice, world sizes that differ."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.ports import reserve_port
from tests.stores.store_helpers import server, torch_tcp
from torchdist_ref import timeouts
from torchdist_ref.membership.events import DIED, Published, encode
from torchdist_ref.membership.meeting import Meeting
from torchdist_ref.membership.rounds import OPEN, Round
from torchdist_ref.processes.identity import host_identity
from torchdist_ref.stores import HashStore, TCPStore
from torchdist_ref.stores.tcp.client import ConnectionPool
from torchdist_ref.testing import run

GROUPS, WORLD = 6, 3
SOON = 20.0
"""Much less than the default time-out, and more than a busy machine takes, in seconds."""
Gates = tuple[tuple[int, int], tuple[int, int]]
METHODS = ["env://", "tcp://", "file://", "store"]


def keys_of(store: Any) -> list[str]:
    """All keys but the counts of initializations."""
    counts = "world/round", "world/last"
    return sorted(key for key in store.list_keys() if not any(count in key for count in counts))


def groups_come_and_go(rank: int, port: int) -> list[str]:
    store = TCPStore("127.0.0.1", port) if port else shared
    dist.init_process_group("ref", store=store, rank=rank, world_size=WORLD)
    dist.barrier()
    before = keys_of(store)
    dist.barrier()
    for number in range(GROUPS):
        groups = [
            dist.new_group(),
            dist.new_group([0, 2]),
            dist.new_group([number % WORLD], use_local_synchronization=True),
            dist.split_group(split_ranks=[[0, 1]]),
        ]
        dist.monitored_barrier(groups[0])
        if isinstance(groups[3], dist.ProcessGroup):
            groups.append(dist.split_group(groups[3], split_ranks=[[0], [1]]))
        for group in groups:
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
    dist.barrier()
    left = [key for key in keys_of(store) if key not in before]
    dist.barrier()
    dist.destroy_process_group()
    return left


shared = HashStore()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_nothing_is_left_of_groups_that_were_destroyed(ranks: str) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    port = 0 if ranks == "threads" else server.port
    assert run(groups_come_and_go, WORLD, port, ranks=ranks, init=False) == [[]] * WORLD
    assert keys_of(server if port else shared) == []
    server.close()


def parts_outlive_their_parent(rank: int) -> list[int]:
    parent = dist.new_group()
    part = dist.split_group(parent, split_ranks=[[0, 1], [2]])
    dist.destroy_process_group(parent)
    dist.barrier()
    again = [dist.split_group(part, split_ranks=[[0], [1]] if rank < 2 else [[0]]) for _ in range(2)]
    return [dist.get_world_size(group) for group in again]


def test_a_part_can_be_split_when_its_parent_is_destroyed() -> None:
    assert run(parts_outlive_their_parent, WORLD) == [[1, 1]] * WORLD


def initialize(index: int, method: str, where: str, claims: list[tuple[int, int]]) -> tuple[str, str]:
    rank, size = claims[index]
    monkeypatch = pytest.MonkeyPatch()
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    arguments: dict[str, Any] = {"rank": rank, "world_size": size}
    if method == "env://":
        values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": where, "RANK": str(rank), "WORLD_SIZE": str(size)}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        arguments = {"init_method": method}
    elif method == "store":
        arguments["store"] = TCPStore("127.0.0.1", int(where))
    else:
        arguments["init_method"] = f"{method}{where}"
    try:
        dist.init_process_group("ref", **arguments)
    except (dist.DistError, RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", "no error"


def outcomes(
    method: str, size: int, tmp_path: Path, program: Callable[..., Any], argument: Any
) -> list[tuple[str, str]]:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    port = reserve_port()
    where = {"env://": str(port), "tcp://": f"127.0.0.1:{port}", "file://": str(tmp_path / "file")}
    place = where.get(method, str(server.port))
    found: list[tuple[str, str]] = run(program, size, method, place, argument, ranks="processes", init=False)
    server.close()
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_two_processes_claim_is_named_on_all(method: str, tmp_path: Path) -> None:
    for kind, text in outcomes(method, 3, tmp_path, initialize, [(0, 3), (1, 3), (1, 3)]):
        assert kind == "RendezvousError" and "two processes claim rank 1 of 3" in text, (kind, text)


@pytest.mark.parametrize("method", ["env://", "tcp://"])
def test_a_second_rank_0_is_named_where_the_first_one_waits(method: str, tmp_path: Path) -> None:
    found = sorted(outcomes(method, 2, tmp_path, initialize, [(0, 2), (0, 2)]))
    assert [kind for kind, _ in found] == ["DistNetworkError", "RendezvousError"]
    assert "cannot listen on" in found[0][1] and "two processes claim rank 0 of 2" in found[1][1]


@pytest.mark.parametrize("method", METHODS)
def test_world_sizes_that_differ_are_named_on_all(method: str, tmp_path: Path) -> None:
    for kind, text in outcomes(method, 2, tmp_path, initialize, [(0, 2), (1, 3)]):
        assert kind == "MismatchError" and "world sizes differ: rank 0 has 2, rank 1 has 3" in text, (kind, text)


def claim_beside_a_complete_world(index: int, method: str, where: str, gates: Gates) -> tuple[str, str]:
    complete, tried = gates
    if index == 2:
        os.read(complete[0], 1)
    found = initialize(index, method, where, [(0, 2), (1, 2), (1, 2)])
    if index == 2:
        os.write(tried[1], b"xx")
        return found
    dist.barrier()
    if index == 0:
        os.write(complete[1], b"x")
    os.read(tried[0], 1)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_of_a_complete_world_is_named(method: str, tmp_path: Path) -> None:
    gates = os.pipe(), os.pipe()
    found = outcomes(method, 3, tmp_path, claim_beside_a_complete_world, gates)
    assert [kind for kind, _ in found] == ["", "", "RendezvousError"]
    assert "two processes claim rank 1 of 2" in found[2][1]
    for descriptor in (*gates[0], *gates[1]):
        os.close(descriptor)


def count_round_trips(rank: int, port: int, token: str) -> tuple[int, int]:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("TORCHDIST_REF_TOKEN", token)
    trips, store, request = [0], TCPStore("127.0.0.1", port), ConnectionPool.request

    def counting(*arguments: Any, await_response: bool = True) -> Any:
        trips[0] += await_response
        return request(*arguments, await_response=await_response)

    monkeypatch.setattr(ConnectionPool, "request", counting)
    # A wait for a rank that is late is one request then.
    monkeypatch.setattr("torchdist_ref.stores.prefix.CHECK_SECONDS", 20.0)
    created, grouped = [], []
    for _ in range(4):
        trips[0] = 0
        dist.init_process_group("ref", store=store, rank=rank, world_size=2)
        created.append(trips[0])
        dist.new_group()
        grouped.append(trips[0] - created[-1])
        dist.barrier()
        dist.destroy_process_group()
    monkeypatch.undo()
    return min(created), min(grouped)


@pytest.mark.parametrize("token", ["0" * 64, ""])
def test_round_trips_to_the_store(token: str) -> None:
    """Each costs a switch to the server and back; those of the session key are those of the meeting.

    Waits longer than a check for failures would add some.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True)
    found = run(count_round_trips, 2, server.port, token, ranks="processes", init=False)
    assert min(created for created, _ in found) == 3 and min(grouped for _, grouped in found) == 2
    server.close()


def test_each_initialization_has_keys_of_its_own() -> None:
    store, prefixes = HashStore(), set()
    for _ in range(3):
        meeting = Meeting(store, 0, 1)
        with meeting.watched(5.0):
            prefixes.add(meeting.store.prefix)
    assert len(prefixes) == 3


def test_a_rank_learns_the_nonce_of_rank_0_before_it_greets() -> None:
    """It connects to rank 0 then, which finds it in its queue when all have met."""
    store, seen = HashStore(), []

    def learn(nonce: str) -> None:
        seen.append((nonce, store.check([f"world/{nonce}/present/1"])))

    def meet(meeting: Meeting) -> None:
        with meeting.watched(SOON, on_round=learn):
            pass

    meetings = [Meeting(store, rank, 2) for rank in range(2)]
    threads = [threading.Thread(target=meet, args=(meeting,)) for meeting in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(meetings[0].seat.nonce, False)]


def initialize_under_agents(rank: int, port: int, restarts: int, world: int = 2) -> None:
    monkeypatch = pytest.MonkeyPatch()
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHDIST_REF_HOST_ID": f"host {rank}",
    }.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("ref", rank=rank, world_size=world, timeout=timedelta(seconds=20))


def start_last_as_rank_0(rank: int, port: int) -> float:
    """Initialize on torch's server; rank 0 begins when the others have begun, and have had time to look for it."""
    store = TCPStore("127.0.0.1", port)
    store.set(f"rank {rank} begins", "")
    if rank == 0:
        store.wait([f"rank {other} begins" for other in range(1, WORLD)])
        for _ in range(500):
            store.num_keys()
    initialize_under_agents(rank, port, 0, WORLD)
    tensor = torch.tensor([2.5 * (rank + 1) ** 2])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return float(tensor)


def test_ranks_under_torchrun_wait_for_a_late_rank_0() -> None:
    with server(torch_tcp) as (port, _):
        assert run(start_last_as_rank_0, WORLD, port, ranks="processes", init=False) == [2.5 * (1 + 4 + 9)] * WORLD


def wait_for_keys(store: TCPStore, *ends: str) -> None:
    while not all(any(key.endswith(end) for key in store.list_keys()) for end in ends):
        time.sleep(0.001)


def kill_an_attempt(store: TCPStore, port: int, ranks: range) -> None:
    """Start these ranks, and kill them while they wait for the others, or once all have met."""
    children = []
    for rank in ranks:
        if (child := os.fork()) == 0:
            initialize_under_agents(rank, port, 0)
            store.set(f"rank {rank} has met", "")
            signal.pause()
        children.append(child)
    wait_for_keys(store, *(f"rank {rank} has met" if len(ranks) == 2 else f"present/{rank}" for rank in ranks))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def restart(rank: int, port: int, started: int) -> float:
    """Follow a dead attempt, with restart counts that differ, as those of torchrun's agents do."""
    store = TCPStore("127.0.0.1", port)
    if rank == 0:
        kill_an_attempt(store, port, range(started))
        # The server has seen the end of rank 0 before the next attempt begins.
        wait_for_keys(store, *["/failure"] * (started == 1))
        store.set("attempt 0 has ended", "")
        wait_for_keys(store, "present/1")
    store.wait(["attempt 0 has ended"])
    initialize_under_agents(rank, port, 1 - rank)
    tensor = torch.tensor([2.5 * (rank + 1) ** 2])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


@pytest.mark.parametrize("started", [1, 2])
def test_restarted_ranks_meet_whatever_the_attempt_before_has_left(started: int) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    assert run(restart, 2, server.port, started, ranks="processes", init=False) == [12.5, 12.5]
    server.close()


@pytest.mark.parametrize(
    ("key", "value"), [("met", "nonce another"), ("failure", encode(Published(0, DIED, text="killed")))]
)
def test_a_rank_waits_for_the_next_round_if_an_old_one_is_not_its_own(key: str, value: str) -> None:
    """Under an agent rank 1 doubts the failure of a round that was there before it, and rank 0 replaces the round."""
    store, prefixes, entered = HashStore(), {}, threading.Event()
    store.multi_set(["world/round", f"world/old/{key}"], [Round("old", OPEN, 2, 1, "elsewhere").encode(), value])

    def meet(rank: int) -> None:
        meeting = Meeting(store, rank, 2, has_agent=True)
        with meeting.watched(SOON, on_round=lambda nonce: entered.set()):
            prefixes[rank] = meeting.store.prefix

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (1, 0)]
    threads[0].start()
    assert entered.wait(SOON)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert prefixes[0] == prefixes[1] != "world/old"


def test_the_end_of_a_living_rank_0_is_believed_at_once() -> None:
    """With an agent a rank doubts the failures of older rounds for ever. The round of a living process is none."""
    store = HashStore()
    opened = Round("new", OPEN, 2, os.getpid(), host_identity()).encode()
    store.multi_set(
        ["world/round", "world/new/failure"], [opened, encode(Published(0, DIED, text="its process has ended"))]
    )
    with pytest.raises(dist.RankDiedError) as raised, Meeting(store, 1, 2, has_agent=True).watched(SOON):
        pass
    assert str(raised.value) == "init_process_group on rank 1: rank 0 failed: its process has ended"


def test_a_rank_other_than_0_names_those_that_did_not_join() -> None:
    store, errors = HashStore(), {}

    def meet(rank: int, seconds: float) -> None:
        try:
            with Meeting(store, rank, 3).watched(seconds):
                pass
        except dist.RankStalledError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=meet, args=each) for each in ((0, 20.0), (2, 0.2))]
    threads[0].start()
    while not any(key.endswith("present/0") for key in store.list_keys()):
        time.sleep(0.001)
    threads[1].start()
    for thread in threads:
        thread.join()
    text = "on rank 2: rank 1 of 3 did not join in time. Every rank has to call it."
    assert errors[2] == f"init_process_group {text}"
    assert errors[0] == f"init_process_group on rank 0: rank 2 failed: init_process_group {text}"


class Enough(Exception):
    """End of a test's wait."""


class FewWaits(HashStore):
    """Store that ends the eleventh wait: the first ones took longer than one that is long in the test."""

    waits = 0

    def wait_get(self, *arguments: Any) -> list[bytes]:
        self.waits += 1
        if self.waits > 10:
            raise Enough
        return super().wait_get(*arguments)


def test_a_rank_that_waits_long_logs_once_who_is_absent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the time-out, half an hour by default, nothing was seen of a rank that nobody had started."""
    monkeypatch.setattr(timeouts, "LONG_WAIT_SECONDS", 0.01)

    for rank in (0, 2):
        with pytest.raises(Enough), Meeting(FewWaits(), rank, 3).watched(300.0):
            pass
    assert caplog.messages == [
        f"init_process_group on {waits}. Each of its 3 ranks has to call it."
        for waits in ("rank 0 has waited 0.01 s for ranks 1, 2", "rank 2 has waited 0.01 s for rank 0")
    ]
