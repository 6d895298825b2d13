"""Every transport keeps the contract of `testing.transport_contract`."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from torchdist_ref.stores import Store
from torchdist_ref.testing import fill, run
from torchdist_ref.testing.transport_contract import Connect, check_transport
from torchdist_ref.timeouts import CHECK_SECONDS
from torchdist_ref.transports import Link, selection, tcp
from torchdist_ref.transports.segment import QueueSemaphore


def one_rank_per_host(store: Store, rank: int, members: Sequence[int], name: str, timeout: float) -> Link:
    return tcp.connect(store, rank, members, name, timeout, members)


def first_rank_on_its_own_host(store: Store, rank: int, members: Sequence[int], name: str, timeout: float) -> Link:
    return tcp.connect(store, rank, members, name, timeout, [min(r, 1) for r in range(len(members))])


TRANSPORTS = {
    "threads": selection.connect_threads,
    "shared_memory": selection.connect_shared_memory,
    "tcp": one_rank_per_host,
    "mixed": first_rank_on_its_own_host,
}


@pytest.mark.parametrize("connect", TRANSPORTS.values(), ids=TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_transport_keeps_the_contract(connect: Connect, size: int) -> None:
    check_transport(connect, size)


@pytest.mark.parametrize(("size", "intervals"), [(2, 1), (48, 3)])
def test_a_waiting_rank_looks_at_many_peers_less_often(
    size: int, intervals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes time for each peer: with 128 thread ranks, such looks took all of it."""
    blocked, limits, waiting, acquire = threading.Event(), list[float](), set[int](), QueueSemaphore.acquire

    def recorded(self: QueueSemaphore, block: bool = True, timeout: float | None = None) -> bool:
        if block and timeout is not None and threading.get_ident() in waiting:
            limits.append(timeout)
            blocked.set()
        return acquire(self, block, timeout)

    def program(rank: int) -> Tensor:
        if rank == 0:
            assert blocked.wait(60)
        if rank == 1:
            waiting.add(threading.get_ident())
        dist.all_reduce(tensor := fill(rank, (1,), torch.float64))
        return tensor

    monkeypatch.setattr(QueueSemaphore, "acquire", recorded)
    torch.testing.assert_close(run(program, size)[1], sum(fill(rank, (1,), torch.float64) for rank in range(size)))
    assert limits[0] == pytest.approx(intervals * CHECK_SECONDS)
