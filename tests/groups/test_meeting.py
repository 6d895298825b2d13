"""Ranks that meet: keys that go with their group, a rank claimed twice, world sizes that differ."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchdist_ref as dist
from torchdist_ref.groups.meeting import Meeting
from torchdist_ref.stores import HashStore, TCPStore
from torchdist_ref.stores.tcp.client import ConnectionPool
from torchdist_ref.testing import run

GROUPS, WORLD, SOON = 6, 3, 1.0
Gates = tuple[tuple[int, int], tuple[int, int]]
METHODS = ["env://", "tcp://", "file://", "store"]


def keys_of(store: Any) -> list[str]:
    """All keys but the counts of initializations and of splits, one a rank."""
    return sorted(key for key in store.list_keys() if not key.startswith("worlds/") and "split/rounds/" not in key)


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


def initialize(index: int, method: str, where: str, claims: list[tuple[int, int]]) -> tuple[str, str, float]:
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
    start = time.monotonic()
    try:
        dist.init_process_group("ref", **arguments)
    except (dist.DistError, RuntimeError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "no error", time.monotonic() - start


def outcomes(
    method: str, size: int, tmp_path: Path, program: Callable[..., Any], argument: Any
) -> list[tuple[str, str, float]]:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    where = {"env://": str(port), "tcp://": f"127.0.0.1:{port}", "file://": str(tmp_path / "file")}
    place = where.get(method, str(server.port))
    found: list[tuple[str, str, float]] = run(program, size, method, place, argument, ranks="processes", init=False)
    server.close()
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_two_processes_claim_is_named_on_all(method: str, tmp_path: Path) -> None:
    for kind, text, seconds in outcomes(method, 3, tmp_path, initialize, [(0, 3), (1, 3), (1, 3)]):
        assert kind == "RendezvousError" and "two processes claim rank 1 of 3" in text and seconds < SOON


@pytest.mark.parametrize("method", ["env://", "tcp://"])
def test_a_second_rank_0_is_named_where_the_first_one_waits(method: str, tmp_path: Path) -> None:
    found = sorted(outcomes(method, 2, tmp_path, initialize, [(0, 2), (0, 2)]))
    assert [kind for kind, _, _ in found] == ["DistNetworkError", "RendezvousError"]
    assert "cannot listen on" in found[0][1] and "two processes claim rank 0 of 2" in found[1][1]
    assert max(seconds for _, _, seconds in found) < SOON


@pytest.mark.parametrize("method", METHODS)
def test_world_sizes_that_differ_are_named_on_all(method: str, tmp_path: Path) -> None:
    for kind, text, seconds in outcomes(method, 2, tmp_path, initialize, [(0, 2), (1, 3)]):
        assert kind == "MismatchError" and "world sizes differ: rank 0 has 2, rank 1 has 3" in text and seconds < SOON


def claim_beside_a_complete_world(index: int, method: str, where: str, gates: Gates) -> tuple[str, str, float]:
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
    assert [kind for kind, _, _ in found] == ["", "", "RendezvousError"]
    assert "two processes claim rank 1 of 2" in found[2][1] and found[2][2] < SOON
    for descriptor in (*gates[0], *gates[1]):
        os.close(descriptor)


def count_round_trips(rank: int, port: int, token: str) -> tuple[int, int]:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("TORCHDIST_REF_TOKEN", token)
    trips, store, request = [0], TCPStore("127.0.0.1", port), ConnectionPool.request

    def counting(*arguments: Any) -> Any:
        trips[0] += 1
        return request(*arguments)

    monkeypatch.setattr(ConnectionPool, "request", counting)
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


@pytest.mark.parametrize(("token", "more"), [("0" * 64, 0), ("", 1)])
def test_round_trips_to_the_store(token: str, more: int) -> None:
    """Each costs a switch to the server and back. Waits longer than a check for failures add some."""
    server = TCPStore("127.0.0.1", 0, is_master=True)
    found = run(count_round_trips, 2, server.port, token, ranks="processes", init=False)
    assert min(created for created, _ in found) == 4 + more and min(grouped for _, grouped in found) == 3
    server.close()


def test_each_initialization_has_keys_of_its_own() -> None:
    store = HashStore()
    assert [Meeting(store, 0, 1).store.prefix for _ in range(2)] == ["world/0/1", "world/0/2"]
