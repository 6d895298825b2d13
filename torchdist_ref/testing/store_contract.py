"""What every store promises, as tests that anybody can run on a store of his own.

`check_store` puts one implementation through all the clauses; each says in a comment what it asks for. The meaning
is that of torch 2.13's stores, and where those differ among themselves, of its TCPStore. A clause belongs here if
all stores must hold it; sockets, files and torch's peers are tested beside those stores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, QueueEmptyError, StoreTimeoutError
from torchdist_ref.stores import Store
from torchdist_ref.testing import store_contract_together as together
from torchdist_ref.testing.store_contract_together import SHORT, raises

MakeStore = Callable[[], Store]
LONG = timedelta(seconds=20)


def check_store(make_store: MakeStore) -> None:
    """Run every clause on fresh stores.

    Args:
        make_store: gives a new, empty store each time; its ``clone`` must see the same keys. The store is closed
            afterwards if it has a ``close``.

    Raises:
        AssertionError: a clause does not hold; the traceback shows which.

    >>> from torchdist_ref.stores import HashStore
    >>> check_store(HashStore)
    """
    for clause in CLAUSES:
        _run(clause, make_store)
    store = make_store()
    extended = store.has_extended_api()
    _close(store)
    for clause in QUEUE_CLAUSES if extended else [_lacks_queues]:
        _run(clause, make_store)


def _run(clause: Callable[[Store], None], make_store: MakeStore) -> None:
    store = make_store()
    store.set_timeout(LONG)
    try:
        clause(store)
    finally:
        _close(store)


def _close(store: Store) -> None:
    close = getattr(store, "close", None)
    if close is not None:
        close()


def _values(store: Store) -> None:
    # What was set is what comes back, as bytes: text, bytes, nothing at all, and every byte there is.
    for value in ("v", b"v", "", "größer", bytes(range(256)), bytearray(b"ab")):
        store.set("key", value)
        assert store.get("key") == (value.encode() if isinstance(value, str) else bytes(value))
    # Large values arrive whole.
    big = bytes(i * i % 251 for i in range(300_000))
    store.set("big", big)
    assert store.get("big") == big


def _keys(store: Store) -> None:
    # A key may be any text: empty, with slashes, dashes, zero bytes, letters of any language.
    keys = ["", "/", "a/b", "-/x", "nul\0nul", "schlüssel", "refcount/", "init/", " "]
    for number, key in enumerate(keys):
        store.set(key, str(number))
    assert store.multi_get(keys) == [str(number).encode() for number in range(len(keys))]
    assert sorted(store.list_keys()) == sorted(keys)
    # The same key as text or as bytes is one key.
    store.set(b"both", "1")
    assert store.get("both") == b"1"


def _adding(store: Store) -> None:
    # A missing counter starts at 0; the new value is returned, and stands there as decimal text.
    assert [store.add("n", amount) for amount in (3, -10, 0, 2**40)] == [3, -7, -7, 2**40 - 7]
    assert store.get("n") == str(2**40 - 7).encode()
    # Text set by hand counts as a number if it is one.
    store.set("m", "41")
    assert store.add("m", 1) == 42
    # What is no number is refused, and stays; so is a sum that does not fit in 64 bits.
    store.set("text", "12abc")
    raises(ArgumentError, store.add, "text", 1, naming="text")
    assert store.get("text") == b"12abc"
    store.set("full", str(2**63 - 1))
    raises(ArgumentError, store.add, "full", 1, naming="full")
    # A refusal does no harm to the store.
    assert store.add("n", 7) == 2**40


def _comparing(store: Store) -> None:
    # A missing key matches an empty expectation only; else the expectation comes back and nothing is stored.
    assert store.compare_set("k", "old", "new") == b"old"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    # A present key is exchanged if it matches; else what is there comes back.
    assert store.compare_set("k", "wrong", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"
    assert store.get("k") == b"second"


def _deleting(store: Store) -> None:
    # True for a key that was there, once; afterwards it is missing for everybody.
    store.set("k", "v")
    before = store.num_keys()
    assert store.delete_key("k") is True
    assert store.delete_key("k") is False
    assert store.num_keys() == before - 1
    assert not store.check(["k"]) and "k" not in store.list_keys()


def _checking(store: Store) -> None:
    # True only if all are there; an empty list is all there.
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.check(["a", "b"]) and store.check([])
    assert not store.check(["a", "c"])


def _several(store: Store) -> None:
    # Values come in the order asked for, repeated keys included; the last value of a repeated key stays.
    store.multi_set(["x", "y", "x"], ["1", "2", "3"])
    assert store.multi_get(["y", "x", "y"]) == [b"2", b"3", b"2"]
    assert store.multi_get([]) == []
    store.multi_set([], [])
    # Lists of different lengths are refused and nothing is stored.
    raises(ArgumentError, store.multi_set, ["p", "q"], ["1"], naming="values")
    assert not store.check(["p"])


def _appending(store: Store) -> None:
    # To what is there, or to nothing.
    for piece in ("a", "", "bc"):
        store.append("k", piece)
    assert store.get("k") == b"abc"


def _timing_out(store: Store) -> None:
    # A missing key: the error comes on time and names the operation and the key, and only what is missing.
    store.set("there", "1")
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    start = time.monotonic()
    raises(StoreTimeoutError, store.get, "absent", naming="get: wait timeout after 60ms, keys: ")
    raises(StoreTimeoutError, store.multi_get, ["there", "absent"], naming="absent'", sparing="there'")
    raises(StoreTimeoutError, store.wait, ["there", "absent"], naming="absent'", sparing="there'")
    # A time-out given to `wait` wins over the store's.
    store.set_timeout(LONG)
    raises(StoreTimeoutError, store.wait, ["absent"], SHORT, naming="absent")
    assert 4 * 0.06 <= time.monotonic() - start < 3.0
    # Zero means to look once: what is there is found, what is not is reported.
    store.set_timeout(timedelta(0))
    assert store.get("there") == b"1"
    raises(StoreTimeoutError, store.get, "absent")
    # Nothing to wait for is there at once. After all this the store still works.
    store.wait([])
    store.set("absent", "2")
    assert store.get("absent") == b"2"


def _misuse(store: Store) -> None:
    # Keys and values of odd kinds, and bare strings for lists, name the operation and the argument.
    odd: Any
    for odd in (None, 1, 1.5, ["k"]):
        raises(ArgumentTypeError, store.set, odd, "v", naming="set: argument 'key'")
        raises(ArgumentTypeError, store.set, "k", odd, naming="set: argument 'value'")
        raises(ArgumentTypeError, store.get, odd, naming="get: argument 'key'")
    raises(ArgumentTypeError, store.add, "n", 1.5, naming="value")
    raises(ArgumentTypeError, store.add, "n", 2**63, naming="value")
    for many in (store.wait, store.check, store.multi_get):
        raises(ArgumentTypeError, many, "bare", naming="keys")
        raises(ArgumentTypeError, many, ["good", 7], naming="keys[1]")
    raises(ArgumentError, store.set_timeout, timedelta(seconds=-1), naming="timeout")
    raises(ArgumentTypeError, store.set_timeout, 5, naming="timeout")
    # None of this left a trace.
    assert store.list_keys() == []


def _cloning(store: Store) -> None:
    # A clone sees the same keys and keeps a time-out of its own, which starts as the original's.
    other = store.clone()
    store.set("k", "v")
    assert other.get("k") == b"v" and other.timeout == store.timeout
    _close(other)
    assert store.get("k") == b"v"


def _queues(store: Store) -> None:
    # First in, first out; apart from values, but `check` sees a queue that holds something.
    before = store.num_keys()
    for value in ("a", "", "c"):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3 and store.check(["q"]) and store.num_keys() == before
    assert [store.queue_pop("q"), store.queue_pop("q", block=False), store.queue_pop("q")] == [b"a", b"", b"c"]
    assert store.queue_len("q") == 0 and not store.check(["q"]) and store.queue_len("never") == 0
    assert store.delete_key("q") is False
    # Empty: at once without blocking, after the time-out with.
    raises(QueueEmptyError, store.queue_pop, "q", False, naming="queue is empty")
    store.set_timeout(SHORT)
    raises(StoreTimeoutError, store.queue_pop, "q", naming="queue_pop")


def _lacks_queues(store: Store) -> None:
    # A store without queues says so, in torch's type, and names those that have them.
    for call in (lambda: store.queue_push("q", "v"), lambda: store.queue_pop("q"), lambda: store.queue_len("q")):
        raises(NotImplementedError, call, naming="TCPStore")


CLAUSES: list[Callable[[Store], None]] = [
    _values,
    _keys,
    _adding,
    _comparing,
    _deleting,
    _checking,
    _several,
    _appending,
    _timing_out,
    together.waiting,
    together.threads,
    together.blocked_thread,
    together.barrier,
    _misuse,
    _cloning,
]
QUEUE_CLAUSES: list[Callable[[Store], None]] = [_queues, together.queue_shared]
