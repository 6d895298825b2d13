"""Every transport keeps the contract of `testing.transport_contract`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torchdist_ref.stores import Store
from torchdist_ref.testing.transport_contract import Connect, check_transport
from torchdist_ref.transports import Link, selection, tcp


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
