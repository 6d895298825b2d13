"""Server with two thousand clients: all are served, and all pass a barrier together."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator

import psutil
import pytest

from tests.stores.store_helpers import server
from torchdist_ref.stores import TCPStore

HOST = "127.0.0.1"
CLIENTS = 2000
MB = 2**20


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Raise the limit of descriptors to one for each client, here and in the forked server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, CLIENTS + 500)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
@pytest.mark.usefixtures("descriptors")
def test_two_thousand_clients() -> None:
    """Takes seconds: each client connects, sets, reads its neighbor's value, and passes two barriers."""
    with server() as (port, process):
        view = psutil.Process(process.pid)
        before = view.memory_info().rss
        stores = [TCPStore(HOST, port) for _ in range(CLIENTS)]
        assert len(view.net_connections("tcp")) == CLIENTS + 3  # both ends of the master's own, and what listens
        for number, store in enumerate(stores):
            store.set(f"key {number}", f"value {number**2}")
        for number, store in enumerate(stores):
            neighbor = (number + 1) % CLIENTS
            assert store.get(f"key {neighbor}") == f"value {neighbor**2}".encode()
        assert sorted(store.add("all", 1) for store in stores) == list(range(1, CLIENTS + 1))
        for barrier in ("first", "second"):
            _pass_barrier(stores, barrier)
        assert view.memory_info().rss - before < 64 * MB
        for store in stores[1:]:
            store.close()
        stores[0].barrier("alone", 1)
        assert stores[0].num_keys() == CLIENTS + 1 + 2 + 1
        stores[0].close()


def _pass_barrier(stores: list[TCPStore], barrier: str) -> None:
    left: list[int] = []

    def enter(number: int) -> None:
        stores[number].barrier(barrier, CLIENTS)
        left.append(number)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(1, CLIENTS)]
    for thread in threads:
        thread.start()
    assert left == []
    enter(0)
    for thread in threads:
        thread.join()
    assert sorted(left) == list(range(CLIENTS))
