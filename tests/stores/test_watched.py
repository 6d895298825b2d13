"""WatchedStore over stores of ours and of torch's, whose errors are of other types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as theirs

from torchdist_ref.errors import DistNetworkError, StoreTimeoutError
from torchdist_ref.stores import HashStore, PrefixStore
from torchdist_ref.stores.prefix import WatchedStore


def torchs_tcp() -> Any:
    return theirs.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]


STORES: dict[str, Callable[[], Any]] = {
    "ours": HashStore,
    "torch's in memory": theirs.HashStore,
    "torch's over TCP": torchs_tcp,
    "torch's behind a prefix of ours": lambda: PrefixStore("part", torchs_tcp()),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield STORES[request.param]()


def test_it_goes_on_waiting_while_there_is_no_trouble(store: Any) -> None:
    looks: list[int] = []

    def trouble() -> None:
        looks.append(1)
        if len(looks) == 3:
            store.set("a/late", "here")

    assert WatchedStore("a", store, trouble).get("late") == b"here" and len(looks) == 3


def test_its_time_out_is_one_of_ours_and_names_the_key(store: Any) -> None:
    watched = WatchedStore("a", store, lambda: None)
    with pytest.raises(StoreTimeoutError, match="wait timeout after 113ms, keys: 'never'"):
        watched.wait(["never"], timedelta(seconds=0.1129))


def test_what_came_before_the_trouble_is_taken(store: Any) -> None:
    def trouble() -> Exception:
        store.set("a/last", "word")
        return RuntimeError("died after it had spoken")

    assert WatchedStore("a", store, trouble).get("last") == b"word"


def test_trouble_of_the_store_itself_is_not_waited_out() -> None:
    class Broken(HashStore):
        def wait(self, *_: Any) -> None:
            raise DistNetworkError("the line is cut")

    with pytest.raises(DistNetworkError, match="the line is cut"):
        WatchedStore("a", Broken(), lambda: None).get("key")
