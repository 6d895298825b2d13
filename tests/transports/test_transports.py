"""All transports keep one contract, and say clearly where they can't work."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref import transports
from torchdist_ref.errors import StoreTimeoutError, UnsupportedError
from torchdist_ref.stores import HashStore, PrefixStore, Store
from torchdist_ref.stores.base import Text
from torchdist_ref.testing import RankError, run
from torchdist_ref.testing.transport_contract import Connect, check_transport
from torchdist_ref.transports import Link, segment_layout, selection, shared_memory, tcp, threads
from torchdist_ref.transports.status_table import ROW_BYTES


def each_on_a_host(store: Store, rank: int, members: Sequence[int], name: str, timeout: float) -> Link:
    return tcp.connect(store, rank, members, name, timeout, members)


def first_alone(store: Store, rank: int, members: Sequence[int], name: str, timeout: float) -> Link:
    return tcp.connect(store, rank, members, name, timeout, [min(r, 1) for r in range(len(members))])


TRANSPORTS = {
    "threads": threads.connect,
    "shared_memory": shared_memory.connect,
    "tcp": each_on_a_host,
    "mixed": first_alone,
}


@pytest.mark.parametrize("connect", TRANSPORTS.values(), ids=TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_transport_keeps_the_contract(connect: Connect, size: int) -> None:
    check_transport(connect, size)


def test_the_parts_of_a_segment_do_not_overlap() -> None:
    layout = segment_layout.SegmentLayout(3, window=8192, cells=4)
    parts = [(0, segment_layout.SEGMENT_HEADER_BYTES)]
    parts += [(layout.status_row(r), ROW_BYTES) for r in range(3)]
    pairs = [(a, b) for a in range(3) for b in range(3)]
    parts += [
        (layout.semaphore(kind, a, b), segment_layout.CACHE_LINE)
        for kind in segment_layout.SEMAPHORE_KINDS
        for a, b in pairs
    ]
    parts += [(layout.eager_buffer(r, cell), segment_layout.EAGER_BYTES) for r in range(3) for cell in range(4)]
    parts += [(layout.ring(r, offset), 8192) for r in range(3) for offset in range(0, 4 * 8192, 8192)]
    parts += [(layout.message_header(a, b), segment_layout.MESSAGE_HEADER_BYTES) for a, b in pairs]
    parts += [(layout.mailbox_ring(a, b), layout.mailbox_ring_bytes) for a, b in pairs]
    parts.sort()
    for (begin, size), (following, _) in pairwise(parts):
        assert begin + size <= following
    assert parts[-1][0] + parts[-1][1] <= layout.nbytes


def test_the_default_backend_is_gloo_where_ranks_share_no_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
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

    with pytest.raises(RankError, match=r"process 999999999.*not accessible.*namespaces.*gloo"):
        run(program, 2, HashStore(), init=False)


class Asked(PrefixStore):
    """A store that takes down what it is asked."""

    def __init__(self, store: Store) -> None:
        super().__init__("asked", store)
        self.questions: list[str] = []

    def set(self, key: Text, value: Text) -> None:
        self.questions.append("set")
        super().set(key, value)

    def get(self, key: Text) -> bytes:
        self.questions.append("get")
        return super().get(key)

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        self.questions.append("wait")
        super().wait(keys, timeout)

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        self.questions.append("multi_get")
        return super().multi_get(keys)


def asked(rank: int, path: str, ready: int) -> list[str]:
    selection._MAX_PREPARED_RANKS = ready
    store = Asked(dist.FileStore(path, 3))
    link = transports.connect(store, rank, range(3), "world", 1000.0)
    assert link.segment.kind == "shared_memory"
    link.close()
    return store.questions


def test_ranks_of_one_host_say_where_they_are_and_ask_once(tmp_path: Path) -> None:
    """Every question costs a turn of the server and of the rank, and these are most of what making a group takes."""
    assert (
        run(partial(asked, path=str(tmp_path / "a"), ready=3), 3, ranks="processes", init=False)
        == [["set", "multi_get"]] * 3
    )
    # A segment for more ranks is made when it is known that they share a host.
    found = run(partial(asked, path=str(tmp_path / "b"), ready=2), 3, ranks="processes", init=False)
    assert found == [["set", "multi_get", "set"], *[["set", "multi_get", "get"]] * 2]


def test_a_group_may_be_more_patient_than_its_store() -> None:
    came_to_nothing = threading.Event()

    class Impatient(HashStore):
        def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
            try:
                return super().multi_get(keys)
            except StoreTimeoutError:
                came_to_nothing.set()
                raise

    store = Impatient()
    store.set_timeout(timedelta(seconds=0.01))

    def program(rank: int) -> int:
        if rank:
            assert came_to_nothing.wait(10)
        return transports.connect(store, rank, range(2), "world", 20.0).size

    assert run(program, 2, init=False) == [2, 2]
