"""Groups over torch's store servers: ours with our client, and torch's on `ref`."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as c10d

import torchdist_ref as dist
from tests.backends.inside_torch import kept
from tests.ports import reserve_port
from torchdist_ref.backends.torch_native.stores import AddressStore, StoreForTorch, StoreFromTorch
from torchdist_ref.testing import fill, run

HOST, TIMEOUT = "127.0.0.1", timedelta(seconds=20)


@pytest.fixture
def torchs_server() -> Iterator[int]:
    """The port of a server of torch's."""
    store = c10d.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    yield store.port


def on_our_client(rank: int, backend: str, port: int) -> tuple[list[float], str, int]:
    store = dist.TCPStore(HOST, port, timeout=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    tensor, evens = fill(rank, (5,)), dist.new_group([1, 0], sort_ranks=False)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=evens)
    place = dist.get_rank(evens)
    dist.destroy_process_group()
    store.close()
    return tensor.tolist(), dist.Backend(backend), place


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_our_groups_over_torchs_server(torchs_server: int, backend: str) -> None:
    twice = ((fill(0, (5,)) + fill(1, (5,))) * 2).tolist()
    results = run(on_our_client, 2, backend, torchs_server, init=False, ranks="processes")
    assert results == [(twice, backend, 1), (twice, backend, 0)]


def on_torchs_client(rank: int, port: int) -> tuple[list[float], int]:
    """Rank 0 serves, as torch has it under tcp://."""
    where = f"tcp://{HOST}:{port}"
    c10d.init_process_group("ref", init_method=where, rank=rank, world_size=2, timeout=TIMEOUT)
    tensor, group = fill(rank, (5,)), c10d.group.WORLD
    kept.append(group)
    c10d.all_reduce(tensor)
    pair = c10d.new_group([0, 1])
    c10d.all_reduce(tensor, group=pair)
    c10d.barrier()
    seen = len(group.recorder)
    c10d.destroy_process_group()
    return tensor.tolist(), seen


def test_ref_inside_torch_over_torchs_server() -> None:
    port = reserve_port()
    twice = ((fill(0, (5,)) + fill(1, (5,))) * 2).tolist()
    assert run(on_torchs_client, 2, port, init=False, ranks="processes") == [(twice, 2)] * 2


def on_a_store_of_theirs(rank: int, path: str, ours: bool) -> list[float]:
    """One rank of torch's FileStore, one of ours, on one file: the backend meets over either."""
    store: Any = dist.FileStore(path, 2) if ours is bool(rank) else c10d.FileStore(path, 2)
    c10d.init_process_group("ref", store=store_for_torch(store), rank=rank, world_size=2, timeout=TIMEOUT)
    kept.append(c10d.group.WORLD)
    tensor = fill(rank, (5,))
    c10d.all_reduce(tensor)
    c10d.destroy_process_group()
    return tensor.tolist()


def store_for_torch(store: Any) -> Any:
    kept.append(StoreForTorch(store) if isinstance(store, dist.Store) else store)
    return kept[-1]


@pytest.mark.parametrize("ours", [True, False], ids=["ours is rank 1", "ours is rank 0"])
def test_ref_inside_torch_over_one_file_of_both(tmp_path: Any, ours: bool) -> None:
    total = (fill(0, (5,)) + fill(1, (5,))).tolist()
    assert run(on_a_store_of_theirs, 2, str(tmp_path / "meet"), ours, init=False, ranks="processes") == [total] * 2


class CountedStore(dist.HashStore):
    """Store that counts the waits that read."""

    reads = 0

    def wait_get(self, *arguments: Any, **options: Any) -> list[bytes]:
        self.reads += 1
        return super().wait_get(*arguments, **options)


def test_gloo_reads_each_address_once() -> None:
    shared, names = CountedStore(), ["address of 0", "address of 1", "address of 2"]
    shared.multi_set(names, [f"host {3 * rank**2 + 1}" for rank in range(3)])
    store = AddressStore(shared)
    store.set(names[1], list(b"this host"))
    for name in names:
        store.wait([name], TIMEOUT)
    shared.set(names[0], "later")
    assert [store.get(name) for name in names] == [b"host 1", b"this host", b"host 13"]
    assert shared.reads == 2 and shared.get(names[1]) == b"this host"
    assert store.get(names[0]) == b"later"


def test_a_wait_on_a_store_of_torchs_prints_nothing(torchs_server: int, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own wait prints two lines at each time-out, and a rank that meets others waits in parts of 20 ms."""
    store = StoreFromTorch(c10d.TCPStore(HOST, torchs_server, timeout=TIMEOUT))
    with pytest.raises(dist.StoreTimeoutError, match="missing"):
        store.wait(["missing"], timedelta(seconds=0.05))
    threading.Timer(0.05, lambda: store.set("late", "here")).start()
    assert store.get("late") == b"here"
    assert capfd.readouterr().err == ""


def test_ctrl_c_interrupts_a_wait_on_a_store_of_torchs() -> None:
    store = StoreFromTorch(c10d.HashStore())
    with pytest.raises(KeyboardInterrupt):
        # In the block: on a busy machine the signal may come before the wait.
        threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGINT)).start()
        store.wait(["missing"], timedelta(hours=1))


def test_cpp_clones_our_stores() -> None:
    """torch's split_group and NCCL's shrink do; it was "Tried to call pure virtual function c10d::Store::clone"."""
    below = dist.HashStore()
    ours = StoreForTorch(below)
    clone = c10d.PrefixStore("part", ours).clone()
    clone.set("color", "red")
    gc.collect()
    assert clone.get("color") == b"red" and below.get("part/color") == b"red"
