"""All transports keep one contract, and say clearly where they can't work."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.errors import UnsupportedError
from torchdist_ref.stores import HashStore, Store
from torchdist_ref.testing import RankError, run
from torchdist_ref.testing.transport_contract import Connect, check_transport
from torchdist_ref.transports import Link, layout, shared_memory, tcp, threads


def each_on_a_host(store: Store, rank: int, members: Sequence[int], name: str, timeout: float) -> Link:
    return tcp.connect(store, rank, members, name, timeout, members)


def first_alone(store: Store, rank: int, members: Sequence[int], name: str, timeout: float) -> Link:
    return tcp.connect(store, rank, members, name, timeout, [min(r, 1) for r in range(len(members))])


TRANSPORTS = {
    "threads": threads.connect, "shared_memory": shared_memory.connect, "tcp": each_on_a_host, "mixed": first_alone,
}  # fmt: skip


@pytest.mark.parametrize("connect", TRANSPORTS.values(), ids=TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_transport_keeps_the_contract(connect: Connect, size: int) -> None:
    check_transport(connect, size)


def test_the_parts_of_a_segment_do_not_overlap() -> None:
    plan = layout.Layout(3, window=8192, turns=4)
    parts = [(0, layout.HEADER)]
    parts += [(plan.board(r), layout.BOARD_LINE) for r in range(3)]
    pairs = [(a, b) for a in range(3) for b in range(3)]
    parts += [(plan.token(kind, a, b), layout.CACHE_LINE) for kind in layout.KINDS for a, b in pairs]
    parts += [(plan.pocket(r, turn), layout.POCKET) for r in range(3) for turn in range(4)]
    parts += [(plan.ring(r, place), 8192) for r in range(3) for place in range(0, 4 * 8192, 8192)]
    parts += [(plan.envelope(a, b), layout.ENVELOPE) for a, b in pairs]
    parts += [(plan.mailbox(a, b), plan.box) for a, b in pairs]
    parts.sort()
    for (begin, size), (following, _) in pairwise(parts):
        assert begin + size <= following
    assert parts[-1][0] + parts[-1][1] <= plan.nbytes




def test_the_default_engine_is_gloo_where_ranks_share_no_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "file")

    def program(rank: int, hosts: list[str]) -> tuple[str, float]:
        os.environ["TORCHDIST_REF_HOST_ID"] = hosts[rank]
        dist.init_process_group(store=dist.FileStore(path + "".join(hosts), 2), rank=rank, world_size=2)
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        name = dist.get_backend()
        dist.destroy_process_group()
        return name, tensor.item()

    assert run(program, 2, ["a", "a"], ranks="processes", init=False) == [("ref", 3.0)] * 2
    assert run(program, 2, ["a", "b"], ranks="processes", init=False) == [("gloo", 3.0)] * 2


def test_shared_memory_says_where_it_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match=r"needs Linux.*darwin.*gloo"):
        shared_memory.connect(HashStore(), 0, [0, 1], "world", 1.0)


def test_an_out_of_sight_segment_is_explained() -> None:
    def program(rank: int, store: HashStore) -> None:
        if rank == 1:
            store.set("segment", b"999999999 3 00")
            shared_memory.connect(store, 1, [0, 1], "world", 1.0)

    with pytest.raises(RankError, match=r"process 999999999.*out of sight.*namespaces.*gloo"):
        run(program, 2, HashStore(), init=False)
