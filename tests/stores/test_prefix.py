"""PrefixStore: the contract on several stores, torch's physical keys, and what passes through."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed

from torchdist_ref.stores import HashStore, PrefixStore, TCPStore
from torchdist_ref.testing.store_contract import check_store


def test_holds_the_contract_over_a_hash_store() -> None:
    check_store(lambda: PrefixStore("group", HashStore()))


def test_holds_the_contract_nested_over_tcp() -> None:
    check_store(lambda: PrefixStore("a/b", PrefixStore("", TCPStore("127.0.0.1", 0, is_master=True))))


def test_keys_underneath_are_torchs() -> None:
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


def test_parts_do_not_see_each_other() -> None:
    whole = HashStore()
    one, two = PrefixStore("1", whole), PrefixStore("2", whole)
    one.set("k", "one")
    two.set("k", "two")
    assert (one.get("k"), two.get("k")) == (b"one", b"two")
    assert one.list_keys() == ["k"] and sorted(whole.list_keys()) == ["1/k", "2/k"]
    assert one.num_keys() == 2


def test_time_out_and_stores_underneath() -> None:
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
