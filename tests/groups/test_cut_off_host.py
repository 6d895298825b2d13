"""A host that is cut off from the store: operations end by their own time-outs, not by those of store requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

import torchdist_ref as dist
from tests.outcomes import NEVER
from tests.stores.store_helpers import LossyRelay
from torchdist_ref.debug.monitored import run_monitored_barrier
from torchdist_ref.stores import PrefixStore, TCPStore
from torchdist_ref.stores.base import limit_requests, request_limit
from torchdist_ref.stores.prefix import WatchedStore

SHORT = timedelta(seconds=0.2)
# A request alone would wait for an hour. The 100 ms after the time-out are measured between network namespaces.
LONG, BOUND_SECONDS = NEVER, 10.0


@pytest.fixture
def relay() -> Iterator[LossyRelay]:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    with LossyRelay(server.port) as relay:
        yield relay
    server.close()


def barrier(store: TCPStore) -> None:
    run_monitored_barrier(PrefixStore("group", store), 1, (4, 6), SHORT, "world", lambda *_: None)


@pytest.mark.parametrize("begun", [False, True], ids=["before_the_barrier", "in_the_barrier"])
def test_monitored_barrier_ends_by_its_timeout(relay: LossyRelay, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", relay.port, timeout=LONG)
    relay.cut_off = not begun
    appeared_at_last = WatchedStore._appeared_at_last

    def cut_off_after_a_look(watched: WatchedStore, *arguments: Any) -> bool:
        # Here, and not on another thread, which may be too late. An answer means that this rank has arrived.
        if (limit := request_limit()) is not None and limit.silent_since is None:
            relay.cut_off = True
        return appeared_at_last(watched, *arguments)

    monkeypatch.setattr(WatchedStore, "_appeared_at_last", cut_off_after_a_look)
    errors: list[BaseException] = []

    def program() -> None:
        try:
            barrier(store)
        except dist.DistError as error:
            errors.append(error)

    thread = threading.Thread(target=program)
    thread.start()
    thread.join(BOUND_SECONDS)
    ended = not thread.is_alive()
    if begun:
        # This request goes another way.
        TCPStore("127.0.0.1", relay._to).wait(["group/monitored/1/1"], LONG)
    store.close()
    assert ended
    [error] = errors
    assert isinstance(error, dist.RankStalledError)
    assert "Rank 6 failed to pass monitoredBarrier in 200 ms (group 'world'): it cannot reach the store" in str(error)
    assert "the server does not respond at all" in str(error)


FUNCTIONS: dict[str, Callable[[], object]] = {
    "new_group": lambda: dist.new_group([0], timeout=SHORT),
    "new_group of members": lambda: dist.new_group([0], timeout=SHORT, use_local_synchronization=True),
    "split_group": lambda: dist.split_group(split_ranks=[[0]], timeout=SHORT),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_creation_of_groups_ends_by_its_timeout(relay: LossyRelay, function: str) -> None:
    store = TCPStore("127.0.0.1", relay.port, timeout=LONG)
    dist.init_process_group("ref", store=store, rank=0, world_size=1)
    relay.cut_off = True
    try:
        with pytest.raises(dist.DistStoreError, match="the server does not respond at all"):
            FUNCTIONS[function]()
    finally:
        store.set_timeout(timedelta(0))
        with suppress(dist.DistError):
            dist.destroy_process_group()


def test_init_process_group_ends_by_its_timeout(relay: LossyRelay) -> None:
    store = TCPStore("127.0.0.1", relay.port, timeout=LONG)
    relay.cut_off = True
    with pytest.raises(dist.DistStoreError, match="the server does not respond at all"):
        dist.init_process_group("ref", store=store, rank=0, world_size=2, timeout=SHORT)
    assert not dist.is_initialized()


def test_a_request_after_the_limit_is_still_answered() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    with limit_requests(0.0):
        server.set("a", "1")
        assert server.get("a") == b"1"
    server.close()


def test_the_earlier_limit_holds() -> None:
    with limit_requests(5.0) as first, limit_requests(50.0):
        limit = request_limit()
        assert limit is not None and limit.deadline is first and limit.within(300.0) <= 5.0
    with limit_requests(50.0), limit_requests(5.0) as second:
        limit = request_limit()
        assert limit is not None and limit.deadline is second
    assert request_limit() is None
