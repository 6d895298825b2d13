"""Selection of a transport, and the requests to the store that it takes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref import simulation, transports
from torchdist_ref.errors import StoreTimeoutError
from torchdist_ref.ranks.outcomes import RankError
from torchdist_ref.stores import HashStore, PrefixStore, Store
from torchdist_ref.stores.base import Text
from torchdist_ref.testing import fill, run
from torchdist_ref.transports import selection


def test_the_default_backend_is_gloo_if_ranks_share_no_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
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


class RecordingStore(PrefixStore):
    """Store that records the requests made to it."""

    def __init__(self, store: Store) -> None:
        super().__init__("recorded", store)
        self.requests: list[str] = []

    def set(self, key: Text, value: Text) -> None:
        self.requests.append("set")
        super().set(key, value)

    def get(self, key: Text) -> bytes:
        self.requests.append("get")
        return super().get(key)

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        self.requests.append("wait")
        super().wait(keys, timeout)

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        self.requests.append("multi_get")
        return super().multi_get(keys)

    def wait_get(
        self, keys: Sequence[Text], timeout: timedelta, publish: Mapping[str, Text] | None = None
    ) -> list[bytes]:
        self.requests.append("set and get")
        return super().wait_get(keys, timeout, publish)


def connect_and_record(rank: int, path: str, prepared: int) -> list[str]:
    selection.MAX_PREPARED_RANKS = prepared
    store = RecordingStore(dist.FileStore(path, 3))
    link = transports.connect(store, rank, range(3), "world", 1000.0)
    assert link.segment.kind == "shared_memory"
    link.close()
    return store.requests


def test_ranks_of_one_host_connect_with_one_request(tmp_path: Path) -> None:
    """Every request costs a context switch to the server and back, most of the cost of creating a group."""
    assert (
        run(partial(connect_and_record, path=str(tmp_path / "a"), prepared=3), 3, ranks="processes", init=False)
        == [["set and get"]] * 3
    )
    # For more ranks the segment is created once it is known that they share a host, and rank 0 publishes all endpoints.
    found = run(partial(connect_and_record, path=str(tmp_path / "b"), prepared=2), 3, ranks="processes", init=False)
    assert found == [["set and get", "set", "set"], *[["set and get", "get"]] * 2]


MANY = selection.MAX_PREPARED_RANKS + 2
"""Ranks of which rank 0 alone reads each endpoint."""


def test_many_ranks_connect_in_shared_memory() -> None:
    def program(rank: int) -> tuple[str, list[float]]:
        gathered = torch.zeros(MANY * 2)
        dist.all_gather_into_tensor(gathered, fill(rank, (2,)))
        return dist.get_backend(), gathered.tolist()

    expected = torch.cat([fill(rank, (2,)) for rank in range(MANY)]).tolist()
    assert run(program, MANY, ranks="processes") == [("ref", expected)] * MANY


def test_many_ranks_name_the_one_that_dies_before_it_has_published_its_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = 5

    def program(rank: int) -> None:
        if rank == victim:
            # It is read for the endpoint.
            monkeypatch.setattr(selection, "host_identity", lambda: os.kill(os.getpid(), signal.SIGKILL))
        try:
            dist.init_process_group(store=dist.FileStore(str(tmp_path / "file"), MANY), rank=rank, world_size=MANY)
        except dist.RankDiedError as error:
            (tmp_path / str(rank)).write_text(str(error.ranks))

    with pytest.raises(RankError, match=f"rank {victim}"):
        run(program, MANY, ranks="processes", init=False)
    survivors = [rank for rank in range(MANY) if rank != victim]
    assert [(tmp_path / str(rank)).read_text() for rank in survivors] == [f"({victim},)"] * len(survivors)


@pytest.mark.parametrize("absent", [0, MANY - 1])
def test_many_ranks_name_the_one_that_never_publishes_its_endpoint(absent: int) -> None:
    def program(rank: int) -> tuple[int, ...] | None:
        if rank == absent:
            return None
        with pytest.raises(dist.RankStalledError, match=f"rank {absent} of {MANY} did not join in time") as caught:
            transports.connect(simulation.simulated_store(), rank, range(MANY), "world", 1800.0)
        return caught.value.ranks

    result = simulation.run(program, MANY, init=False)
    assert result.values == [None if rank == absent else (absent,) for rank in range(MANY)]


def test_many_ranks_name_rank_0_if_it_publishes_no_others() -> None:
    def program(rank: int) -> tuple[int, ...] | None:
        store = simulation.simulated_store()
        if rank == 0:
            store.set("link/endpoint/0", "a host|1000|")
            return None
        with pytest.raises(dist.RankStalledError, match=f"rank 0 of {MANY} did not join in time") as caught:
            transports.connect(store, rank, range(MANY), "world", 1800.0)
        return caught.value.ranks

    assert simulation.run(program, MANY, init=False).values == [None, *[(0,)] * (MANY - 1)]


def test_the_timeout_of_a_group_may_exceed_that_of_its_store() -> None:
    store, waiting = HashStore(), threading.Event()
    store.set_timeout(timedelta(seconds=0.01))

    def program(rank: int) -> int:
        if rank:
            assert waiting.wait(10)
            with pytest.raises(StoreTimeoutError):
                store.get("never")
        else:
            waiting.set()
        return transports.connect(store, rank, range(2), "world", 20.0).size

    assert run(program, 2, init=False) == [2, 2]
