"""HashStore: the contract, random programs, and what threads see."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch.distributed

from tests.stores.store_model import machine
from torchdist_ref.stores import HashStore, Store
from torchdist_ref.testing.store_contract import check_store

TestModel = machine(HashStore).TestCase


def test_store_contract() -> None:
    check_store(HashStore)


def test_woken_reader_gets_a_value_that_is_deleted_at_once() -> None:
    store, results = HashStore(), []
    thread = threading.Thread(target=lambda: results.append(store.get("k")))
    with store._changed:
        thread.start()
    store.set("k", "v")
    thread.join()
    assert store.delete_key("k") and results == [b"v"]


def test_ctrl_c_interrupts_a_wait() -> None:
    store = HashStore()

    def interrupt() -> None:
        store.get("go")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        store.set("go", "1")
        store.get("never")
    thread.join()


def test_custom_store_needs_seven_operations() -> None:
    class Own(Store):
        """Basic operations forwarded; all others inherited from Store."""

        def __init__(self) -> None:
            self.inner = HashStore()
            for name in ("set", "get", "add", "check", "compare_set", "delete_key", "num_keys"):
                setattr(self, name, getattr(self.inner, name))

    store = Own()
    store.multi_set(["a", "b"], ["1", "2"])
    store.append("a", "x")
    store.append("new", "y")
    assert store.multi_get(["a", "b", "new"]) == [b"1x", b"2", b"y"]
    store.wait(["a", "b"])
    store.barrier("alone", 1)
    with pytest.raises(RuntimeError, match=r"wait: wait timeout after 30ms, keys: 'c', on"):
        store.wait(["a", "c"], timedelta(milliseconds=30))
    with pytest.raises(RuntimeError, match="1 of 2 callers arrived"):
        store.barrier("two", 2, timedelta(milliseconds=30))
    with pytest.raises(NotImplementedError, match="Own has no such operation"):
        store.queue_push("q", "v")
    assert store.has_extended_api() is False


def test_concurrent_generic_appends_lose_nothing() -> None:
    class Own(HashStore):
        append = Store.append

    store = Own()
    threads = [threading.Thread(target=store.append, args=("k", letter)) for letter in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.get("k").decode()) == list("abcdef")


@pytest.mark.parametrize("text", ["12abc", "3.7", "1_000", "abc", "0x10", "--1"])
def test_add_to_a_value_that_is_not_an_integer(text: str) -> None:
    store = HashStore()
    store.set("n", text)
    with pytest.raises(ValueError, match="one that holds a number, got 'n'"):
        store.add("n", 1)
    assert store.get("n") == text.encode()


def test_add_to_an_empty_value() -> None:
    ours, theirs = HashStore(), torch.distributed.HashStore()
    for store in (ours, theirs):
        store.set("n", "")
        assert store.add("n", 7) == 7 and store.get("n") == b"7"


def test_keys_in_any_collection() -> None:
    ours, theirs = HashStore(), torch.distributed.HashStore()
    for store in (ours, theirs):
        store.set("a", "1")
        assert store.check({"a"}) and store.check({"a": 5}.keys()) and not store.check({"a", "b"})
        store.wait({"a"}, timedelta(seconds=1))
        assert store.multi_get({"a": 5}.keys()) == [b"1"]


def test_the_longest_timeout_is_accepted() -> None:
    store = HashStore()
    store.set_timeout(timedelta.max)
    assert store.timeout == timedelta.max
