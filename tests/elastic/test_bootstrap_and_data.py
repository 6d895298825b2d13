"""Helpers of launchers, beside torch's: same results, and stores that processes of both meet at."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed.elastic.utils as theirs
import torch.distributed.elastic.utils.distributed as their_distributed
import torch.distributed.elastic.utils.store as their_store
from torch.distributed.elastic.utils.data import CyclingIterator as TheirIterator
from torch.distributed.elastic.utils.data import ElasticDistributedSampler as TheirSampler
from torchdist_ref.elastic.utils import distributed, log_level, store
from torchdist_ref.elastic.utils.data import CyclingIterator, ElasticDistributedSampler
from torchdist_ref.elastic.utils.logging import get_logger

import torchdist_ref as dist
from tests.ports import reserve_port
from torchdist_ref.elastic import utils
from torchdist_ref.stores import HashStore, TCPStore
from torchdist_ref.testing import run


def together(*parts: Callable[[], Any]) -> list[Any]:
    """Run each part on a thread; what they return."""
    found: list[Any] = [None] * len(parts)

    def fill_in(place: int) -> None:
        found[place] = parts[place]()

    threads = [threading.Thread(target=fill_in, args=(place,)) for place in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_a_missing_environment_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "yes")
    monkeypatch.delenv("NOT_HERE", raising=False)
    assert utils.get_env_variable_or_raise("HERE") == theirs.get_env_variable_or_raise("HERE") == "yes"
    with pytest.raises(ValueError, match="Environment variable NOT_HERE expected, but not set"):
        utils.get_env_variable_or_raise("NOT_HERE")


@pytest.mark.parametrize("args", [["a", "${local_rank}-x", 3, None], ["$local_rank", "$$", "${other}", "${local_rank"]])
def test_macros_equal_torchs(args: list[Any]) -> None:
    assert utils.macros.substitute(args, "5") == theirs.macros.substitute(args, "5")
    assert utils.macros.local_rank == theirs.macros.local_rank


def test_a_reserved_port_cannot_be_bound() -> None:
    with utils.get_socket_with_port() as held, socket.socket(held.family) as other:
        with pytest.raises(OSError):
            other.bind(held.getsockname()[:2])
    assert 1023 < distributed.get_free_port() < 65536


def test_no_port_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "bind", lambda self, address: (_ for _ in ()).throw(OSError("none left")))
    with pytest.raises(dist.DistNetworkError, match="none left"):
        utils.get_socket_with_port()


def test_loggers_have_the_callers_name_and_the_environments_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    assert (get_logger().name, get_logger("x.y").level) == (__name__, logging.DEBUG)
    monkeypatch.delenv("LOGLEVEL")
    assert get_logger("x.y").level == logging.getLevelName(log_level.get_log_level()) == logging.WARNING


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("start", [0, 1])
def test_epochs_follow_each_other_as_torchs(n: int, start: int) -> None:
    def make(epoch: int) -> Any:
        return iter(range(epoch))

    assert list(CyclingIterator(n, make, start)) == list(TheirIterator(n, make, start))


def test_many_empty_epochs_are_skipped() -> None:
    # torch's calls itself for each, and runs out of stack.
    assert list(CyclingIterator(5000, lambda epoch: iter([7] if epoch == 4999 else []))) == [7]


@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("epoch", [0, 2])
def test_samples_equal_torchs(ranks: int, start: int, epoch: int) -> None:
    data = list(range(11))
    for rank in range(ranks):
        ours, right = ElasticDistributedSampler(data, ranks, rank, start), TheirSampler(data, ranks, rank, start)
        ours.set_epoch(epoch)
        right.set_epoch(epoch)
        assert list(ours) == list(right) and len(ours) == len(right)


def test_fewer_samples_than_ranks_are_repeated() -> None:
    # torch's fails an assertion where less than half as many are left as there are ranks.
    assert [list(ElasticDistributedSampler([0, 1, 2], 5, rank, 2)) for rank in range(5)] == [[2]] * 5


def test_a_sampler_takes_its_ranks_from_the_group() -> None:
    def program(rank: int) -> tuple[int, int]:
        sampler = ElasticDistributedSampler(list(range(4)))
        return sampler.rank, sampler.num_replicas

    assert run(program, 2) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ElasticDistributedSampler(iter([1]), 1, 0), "'dataset' must be something with a length"),
        (lambda: ElasticDistributedSampler([1, 2], 2, 2), "'rank' must be from 0 to 1, got 2"),
        (lambda: ElasticDistributedSampler([1, 2], 2, 0, 2), "'start_index' must be from 0 to 1.*got 2"),
        (lambda: ElasticDistributedSampler([1, 2], 2, 0, -1), "'start_index' must be from 0 to 1.*got -1"),
    ],
)
def test_misuse_of_a_sampler_is_an_error(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_ours_and_torchs_synchronize_through_one_store() -> None:
    with_port = TCPStore("127.0.0.1", 0, is_master=True)
    other = torch_store(with_port.port)
    found = together(
        lambda: store.synchronize(with_port, b"ours", 0, 2, "who", 10),
        lambda: their_store.synchronize(other, b"theirs", 1, 2, "who", 10),
    )
    assert found == [[b"ours", b"theirs"]] * 2
    assert with_port.timeout == timedelta(seconds=300)
    with_port.close()


def torch_store(port: int) -> Any:
    return theirs_tcp(host_name="127.0.0.1", port=port, is_master=False, timeout=timedelta(seconds=10))


def theirs_tcp(**options: Any) -> Any:
    import torch.distributed

    return torch.distributed.TCPStore(**options)


@pytest.mark.parametrize("ours_serves", [True, False])
def test_ours_and_torchs_create_one_store(ours_serves: bool) -> None:
    port = reserve_port()
    make = [distributed.create_c10d_store, their_distributed.create_c10d_store]
    server, client = make if ours_serves else reversed(make)
    found = together(
        lambda: server(True, "127.0.0.1", port, 2, timeout=10), lambda: client(False, "127.0.0.1", port, 2, timeout=10)
    )
    found[0].set("key", "value")
    assert found[1].get("key") == b"value"


def test_several_processes_require_a_port() -> None:
    for options in ({"is_server": True, "world_size": 2}, {"is_server": False, "world_size": 1}):
        with pytest.raises(ValueError, match="'server_port' must be given"):
            distributed.create_c10d_store(server_addr="127.0.0.1", **options)


def test_no_process_leaves_a_barrier_before_the_last_arrives() -> None:
    shared, order = HashStore(), []

    def come(rank: int) -> None:
        if rank == 1:
            shared.wait(["first is waiting"])
            order.append("last comes")
        else:
            shared.set("first is waiting", "")
        store.barrier(shared, 2, "gate", 10)
        order.append("through")

    together(lambda: come(0), lambda: come(1))
    assert order == ["last comes", "through", "through"]


class Rank0LooksLast(HashStore):
    """Store in which rank 0 looks for those that are missing once rank 2 has told that it is there."""

    def __init__(self) -> None:
        super().__init__()
        self._rank_2 = threading.Event()

    def set(self, key: Any, value: Any) -> None:
        if key.startswith("gate0"):
            assert self._rank_2.wait(20)
        super().set(key, value)
        if key.startswith("gate2"):
            self._rank_2.set()


def barrier_error(rank: int, shared: HashStore, trace_timeout: float = 0.2, **options: Any) -> str:
    try:
        store.barrier(shared, 4, "gate", 0.05, rank, trace_timeout=trace_timeout, **options)
    except dist.StoreTimeoutError as error:
        return str(error)
    return "through"


def test_a_barrier_timeout_names_missing_ranks() -> None:
    shared = Rank0LooksLast()
    first, second = together(
        lambda: barrier_error(0, shared, rank_tracing_decoder=lambda rank: f"host{rank}"),
        lambda: barrier_error(2, shared, trace_timeout=20.0),
    )
    assert first == "barrier 'gate': not all 4 processes arrived within 0.05 s; missing: host1, host3 (this is rank 0)."
    assert second.endswith("; rank 0 (0) names the missing ones (this is rank 2).")


def test_a_barrier_timeout_names_a_missing_rank_0() -> None:
    assert barrier_error(1, HashStore()).endswith("; rank 0 (0) is missing (this is rank 1).")


def test_a_barrier_timeout_without_ranks_gives_the_count() -> None:
    with pytest.raises(dist.StoreTimeoutError, match="not all 2 processes arrived"):
        store.barrier(HashStore(), 2, "gate", 0.01)
    with pytest.raises(ValueError, match="'rank' must be given"):
        store.barrier(HashStore(), 2, "gate", 0.01, rank_tracing_decoder=str)
