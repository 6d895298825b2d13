"""`TCPStore` on simulated ranks: its own client and requests, over connections in virtual time."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref import simulation
from torchdist_ref.errors import DistNetworkError, StoreTimeoutError
from torchdist_ref.simulation import Cut, EndHost, Kill, Network
from torchdist_ref.stores import TCPStore

NETWORK = Network(alpha=1e-3)
_kept: list[TCPStore] = []
FIRST, PORT = "10.0.0.1", 29500


def on_ranks(program: Any, size: int = 3, *faults: Any, network: Network = NETWORK, **options: Any) -> list[Any]:
    _kept.clear()
    return simulation.run(program, size, init=False, network=network, faults=faults, **options).values


def joined(rank: int, world_size: int | None = None, **options: Any) -> TCPStore:
    """Return a store that stays open: that of rank 0 is the server, which ends when nothing refers to it."""
    store = TCPStore(FIRST, PORT, world_size, is_master=rank == 0, **options)
    _kept.append(store)
    return store


def test_every_operation_means_what_it_means_over_sockets() -> None:
    def program(rank: int) -> Any:
        store = joined(rank, 3)
        store.multi_set([f"a{rank}", f"b{rank}"], [str(rank), "x" * 100_000])
        store.wait([f"b{each}" for each in range(3)])
        values = store.multi_get([f"a{each}" for each in range(3)])
        counted = store.add("count", rank + 1)
        store.barrier("all", 3)
        if rank == 0:
            store.queue_push("queue", "job")
        popped = store.queue_pop("queue") if rank == 2 else b""
        swapped = store.compare_set(f"new{rank}", "", "mine")
        store.append("text", "ab")
        store.barrier("appended", 3)
        return values, counted, store.add("count", 0), popped, swapped, store.get("text"), len(store.get("b1"))

    for seed in (0, 1, 2):
        found = on_ranks(program, seed=seed)
        assert [each[0] for each in found] == [[b"0", b"1", b"2"]] * 3
        assert max(each[1] for each in found) == 6 and [each[2] for each in found] == [6] * 3
        assert [each[3] for each in found] == [b"", b"", b"job"]
        assert [each[4:] for each in found] == [(b"mine", b"ababab", 100_000)] * 3


def test_a_request_takes_a_message_there_and_one_back() -> None:
    def program(rank: int) -> float:
        store = joined(rank)
        store.set("connected", "")
        began = time.monotonic()
        store.get("connected")
        return time.monotonic() - began

    own, *others = on_ranks(program)
    assert own == 0.0 and others == pytest.approx([2e-3] * 2)


def test_a_missing_key_costs_its_time_out_and_no_more() -> None:
    def program(rank: int) -> float:
        store = joined(rank)
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="'never'"):
            store.wait(["never"], timedelta(days=3))
        return time.monotonic() - began

    assert on_ranks(program) == pytest.approx([3 * 86400.0] * 3, abs=0.1)


def test_ranks_meet_by_a_url() -> None:
    def program(rank: int) -> float:
        dist.init_process_group("ref", init_method=f"tcp://{FIRST}:{PORT}", rank=rank, world_size=4)
        tensor = torch.tensor([rank * rank + 0.5])
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return float(tensor)

    assert on_ranks(program, 4) == [16.0] * 4


def test_the_death_of_the_server_is_noticed_by_all_who_wait() -> None:
    def program(rank: int) -> tuple[str, float]:
        store = joined(rank)
        with pytest.raises(DistNetworkError, match=f"{FIRST}:{PORT}") as caught:
            store.get("never")
        return type(caught.value).__name__, time.monotonic()

    _, *others = on_ranks(program, 3, Kill(rank=0, at=5.0))
    assert all(kind == "DistNetworkError" and 5.0 < at < 6.0 for kind, at in others)


def test_the_end_of_the_servers_host_is_noticed_at_the_time_out() -> None:
    """Its system closes no connection."""

    def program(rank: int) -> float:
        store = joined(rank)
        with pytest.raises(StoreTimeoutError, match="does not respond at all"):
            store.wait(["never"], timedelta(seconds=20))
        return time.monotonic()

    _, *others = on_ranks(program, 3, EndHost(host=0, at=5.0))
    assert all(20.0 < at < 22.0 for at in others)


def test_the_will_of_a_killed_client_is_executed() -> None:
    def program(rank: int) -> Any:
        store = joined(rank)
        if rank == 1:
            store.set_on_disconnect("rank 1", "gone")
            time.sleep(60)
        return store.get("rank 1"), time.monotonic()

    first, dead, last = on_ranks(program, 3, Kill(rank=1, at=2.0))
    assert dead is None and first[0] == last[0] == b"gone" and 2.0 < first[1] < 2.2


def test_a_request_waits_until_the_network_is_whole_again() -> None:
    def program(rank: int) -> Any:
        store = joined(rank)
        time.sleep(2.0)
        value = store.add("count", 1)
        return value, time.monotonic()

    found = on_ranks(program, 3, Cut(some=(2,), at=1.0, seconds=10.0))
    assert sorted(value for value, _ in found) == [1, 2, 3] and found[2][1] == pytest.approx(11.0, abs=0.1)


@pytest.mark.parametrize("hosts", [None, (0, 0, 0, 0), (0, 0, 1, 1)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_shrunk_group_continues_without_the_rank_that_served_the_store(hosts: Any, seed: int) -> None:
    def program(rank: int) -> Any:
        store, tensor = joined(rank, 4), torch.ones(1)
        dist.init_process_group("ref", store=store, rank=rank, world_size=4)
        try:
            while True:
                time.sleep(0.1)
                dist.all_reduce(tensor)
        except dist.RankDiedError as error:
            dist.shrink_group(list(error.ranks), shrink_flags=1)
            values: list[Any] = [None] * 3
            dist.all_gather_object(values, rank)
            sub = dist.new_group([0, 2])
            return values, dist.get_rank(), None if sub is None else dist.get_world_size(sub)

    found = on_ranks(program, 4, Kill(rank=0, at=5.0), network=Network(alpha=1e-3, hosts=hosts), seed=seed)
    assert found == [None, ([1, 2, 3], 0, 2), ([1, 2, 3], 1, -1), ([1, 2, 3], 2, 2)]


def test_a_store_that_nobody_serves_is_named() -> None:
    def program(rank: int) -> float:
        with pytest.raises(DistNetworkError, match="Connection refused"):
            TCPStore(FIRST, 1, timeout=timedelta(seconds=3))
        with pytest.raises(DistNetworkError, match="Connection timed out"):
            TCPStore("10.9.9.9", 1, timeout=timedelta(seconds=4))
        with pytest.raises(DistNetworkError, match=r"this simulated host has the address 10\.0\.0\.1"):
            TCPStore("10.9.9.9", 1, is_master=True)
        first = TCPStore("localhost", 0, is_master=True)
        with pytest.raises(DistNetworkError, match=f"cannot listen on localhost:{first.port}.*in use"):
            TCPStore("localhost", first.port, is_master=True)
        port = first.port
        del first
        TCPStore("localhost", port, is_master=True).close()
        return time.monotonic()

    assert on_ranks(program, 1) == pytest.approx([7.0], abs=0.1)


def test_a_deadlock_over_a_tcp_store_is_named_at_once() -> None:
    def program(rank: int) -> None:
        store = joined(rank, timeout=timedelta(days=1))
        dist.init_process_group("ref", store=store, rank=rank, world_size=3)
        if rank != 1:
            dist.barrier()
        else:
            dist.recv(torch.zeros(1), 0)

    with pytest.raises(simulation.RankError) as caught:
        on_ranks(program)
    assert "recv" in str(caught.value) and "barrier" in str(caught.value)
