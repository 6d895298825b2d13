"""PrefixStore and WatchedStore: the contract on several stores, torch's physical keys, and waits that fail early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed

from torchdist_ref.errors import DistNetworkError, StoreTimeoutError
from torchdist_ref.stores import HashStore, PrefixStore, TCPStore
from torchdist_ref.stores.prefix import WatchedStore
from torchdist_ref.testing.store_contract import check_store


def test_store_contract_over_a_hash_store() -> None:
    check_store(lambda: PrefixStore("group", HashStore()))


@pytest.mark.usefixtures("clients_with_long_timeouts")
def test_store_contract_nested_over_tcp() -> None:
    check_store(lambda: PrefixStore("a/b", PrefixStore("", TCPStore("127.0.0.1", 0, is_master=True))))


def test_underlying_keys_are_torchs() -> None:
    whole = torch.distributed.HashStore()
    theirs = torch.distributed.PrefixStore("outer", torch.distributed.PrefixStore("in/ner", whole))
    ours = PrefixStore("outer", PrefixStore("in/ner", whole))
    for number, key in enumerate(["k", "", "a/b", "/lead", "ü"]):
        ours.set(key, str(number * number))
        assert theirs.get(key) == str(number * number).encode()
        theirs.set(key, "back")
        assert ours.get(key) == b"back"
    assert ours.add("n", 5) + theirs.add("n", 5) == 15
    assert sorted(ours.list_keys()) == sorted(theirs.list_keys())


def test_prefixes_are_separate_namespaces() -> None:
    whole = HashStore()
    one, two = PrefixStore("1", whole), PrefixStore("2", whole)
    one.set("k", "one")
    two.set("k", "two")
    assert (one.get("k"), two.get("k")) == (b"one", b"two")
    assert one.list_keys() == ["k"] and sorted(whole.list_keys()) == ["1/k", "2/k"]
    assert one.num_keys() == 2


def test_timeout_and_underlying_stores() -> None:
    whole = HashStore()
    inner = PrefixStore("in", whole)
    outer = PrefixStore("out", inner)
    outer.set_timeout(timedelta(seconds=7))
    assert whole.timeout == outer.timeout == timedelta(seconds=7)
    assert outer.underlying_store is inner and outer._underlying_non_prefix_store is whole
    assert repr(outer) == "PrefixStore('out', PrefixStore('in', HashStore()))"


def test_misuse() -> None:
    with pytest.raises(ValueError, match="PrefixStore: argument 'store' must be a store"):
        PrefixStore("p", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="argument 'prefix'"):
        PrefixStore(3, HashStore())  # type: ignore[arg-type]


# WatchedStore


def torchs_tcp() -> Any:
    return torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]


STORES: dict[str, Callable[[], Any]] = {
    "ours": HashStore,
    "torch's in memory": torch.distributed.HashStore,
    "torch's over TCP": torchs_tcp,
    "torch's behind a prefix of ours": lambda: PrefixStore("part", torchs_tcp()),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield STORES[request.param]()


def test_wait_continues_without_a_failure(store: Any) -> None:
    checks: list[int] = []

    def failure() -> None:
        checks.append(1)
        if len(checks) == 3:
            store.set("a/late", "here")

    assert WatchedStore("a", store, failure).get("late") == b"here" and len(checks) == 3


def test_timeout_is_our_type_and_names_the_key(store: Any) -> None:
    watched = WatchedStore("a", store, lambda: None)
    with pytest.raises(StoreTimeoutError, match="wait timeout after 113ms, keys: 'never'"):
        watched.wait(["never"], timedelta(seconds=0.1129))


def test_key_set_before_the_failure_is_returned(store: Any) -> None:
    def failure() -> Exception:
        store.set("a/last", "word")
        return RuntimeError("died after it had spoken")

    assert WatchedStore("a", store, failure).get("last") == b"word"


@pytest.mark.timeout(20)
def test_keys_at_a_server_slower_than_each_check_are_returned_at_the_deadline() -> None:
    """Once the wait went on for ever: no check had a response in time, and the keys were there."""

    class Slow(HashStore):
        def wait_get(self, *_: Any) -> list[bytes]:
            raise StoreTimeoutError("the server does not respond at all")

        def wait(self, *_: Any) -> None:
            raise StoreTimeoutError("the server does not respond at all")

    store = Slow()
    store.set("a/key", "value")
    watched = WatchedStore("a", store, lambda: None)
    assert watched.wait_get(["key"], timedelta(seconds=0.01)) == [b"value"]
    watched.wait(["key"], timedelta(seconds=0.01))


def test_network_error_of_the_store_is_raised_at_once() -> None:
    class Broken(HashStore):
        def wait(self, *_: Any) -> None:
            raise DistNetworkError("the line is cut")

    with pytest.raises(DistNetworkError, match="the line is cut"):
        WatchedStore("a", Broken(), lambda: None).get("key")
