"""Contract of stores, as a test that anyone can run on a store of their own.

`check_store` runs all clauses on one implementation. The meaning is that of torch 2.13's stores; where those differ
from each other, that of its TCPStore. Do not add a clause that not every store must hold: sockets, files and clients
of torch are tested with their stores.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, QueueEmptyError, StoreTimeoutError
from torchdist_ref.stores import Store

MakeStore = Callable[[], Store]
LONG = timedelta(seconds=20)
SHORT = timedelta(milliseconds=60)


def check_store(make_store: MakeStore) -> None:
    """Run every clause on fresh stores.

    Args:
        make_store: function that returns a new, empty store each time. Its ``clone`` must see the same keys. The store
            is closed afterward if it has a ``close``.

    Raises:
        AssertionError: a clause does not hold; the traceback shows which one.

    >>> from torchdist_ref.testing import check_store
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
    # Values are returned as bytes: text, bytes, empty values, and all 256 bytes.
    for value in ("v", b"v", "", "größer", bytes(range(256)), bytearray(b"ab")):
        store.set("key", value)
        assert store.get("key") == (value.encode() if isinstance(value, str) else bytes(value))
    # Large values are returned complete.
    big = bytes(i * i % 251 for i in range(300_000))
    store.set("big", big)
    assert store.get("big") == big


def _keys(store: Store) -> None:
    # A key may be any text: empty, with slashes, dashes, zero bytes or letters of any language.
    keys = ["", "/", "a/b", "-/x", "nul\0nul", "schlüssel", "refcount/", "init/", " "]
    for number, key in enumerate(keys):
        store.set(key, str(number))
    assert store.multi_get(keys) == [str(number).encode() for number in range(len(keys))]
    assert sorted(store.list_keys()) == sorted(keys)
    # Text and the same bytes are one key.
    store.set(b"both", "1")
    assert store.get("both") == b"1"


def _adding(store: Store) -> None:
    # A missing counter starts at 0; the new value is returned, and stored as decimal text.
    assert [store.add("n", amount) for amount in (3, -10, 0, 2**40)] == [3, -7, -7, 2**40 - 7]
    assert store.get("n") == str(2**40 - 7).encode()
    # Text that is an integer is accepted.
    store.set("m", "41")
    assert store.add("m", 1) == 42
    # Other text is refused and kept; so is a sum that does not fit in 64 bits.
    store.set("text", "12abc")
    _raises(ArgumentError, store.add, "text", 1, containing="text")
    assert store.get("text") == b"12abc"
    store.set("full", str(2**63 - 1))
    _raises(ArgumentError, store.add, "full", 1, containing="full")
    # The store remains usable after a refusal.
    assert store.add("n", 7) == 2**40


def _comparing(store: Store) -> None:
    # A missing key matches an empty expectation only; otherwise the expectation is returned and nothing is stored.
    assert store.compare_set("k", "old", "new") == b"old"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    # The value of an existing key is exchanged if it matches; otherwise it is returned.
    assert store.compare_set("k", "wrong", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"
    assert store.get("k") == b"second"


def _deleting(store: Store) -> None:
    # True once, for a key that existed; afterward it is missing for all.
    store.set("k", "v")
    before = store.num_keys()
    assert store.delete_key("k") is True
    assert store.delete_key("k") is False
    assert store.num_keys() == before - 1
    assert not store.check(["k"]) and "k" not in store.list_keys()


def _checking(store: Store) -> None:
    # True only if all keys exist; also for an empty list.
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.check(["a", "b"]) and store.check([])
    assert not store.check(["a", "c"])


def _looking(store: Store) -> None:
    # The value of a key that exists, empty or not; otherwise None, at once, and nothing is stored.
    before = store.num_keys()
    assert store.get_if_present("k") is None and store.num_keys() == before and not store.check(["k"])
    for value in (b"", b"v", bytes(range(256))):
        store.set("k", value)
        assert store.get_if_present("k") == value == store.get("k")
    store.delete_key("k")
    assert store.get_if_present("k") is None


def _several_keys(store: Store) -> None:
    # Values have the order of the keys, repeated keys included; the last value of a repeated key is kept.
    store.multi_set(["x", "y", "x"], ["1", "2", "3"])
    assert store.multi_get(["y", "x", "y"]) == [b"2", b"3", b"2"]
    assert store.multi_get([]) == []
    store.multi_set([], [])
    # Lists of different lengths are refused and nothing is stored.
    _raises(ArgumentError, store.multi_set, ["p", "q"], ["1"], containing="values")
    assert not store.check(["p"])


def _appending(store: Store) -> None:
    # To an existing or to a missing value.
    for piece in ("a", "", "bc"):
        store.append("k", piece)
    assert store.get("k") == b"abc"


def _timing_out(store: Store) -> None:
    # A missing key: the error is raised on time and names the operation and the missing keys only.
    store.set("there", "1")
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    start = time.monotonic()
    _raises(StoreTimeoutError, store.get, "absent", containing="get: wait timeout after 60ms, keys: ")
    _raises(StoreTimeoutError, store.multi_get, ["there", "absent"], containing="absent'", without="there'")
    _raises(StoreTimeoutError, store.wait, ["there", "absent"], containing="absent'", without="there'")
    # A time-out passed to `wait` overrides the store's.
    store.set_timeout(LONG)
    _raises(StoreTimeoutError, store.wait, ["absent"], SHORT, containing="absent")
    assert 4 * 0.06 <= time.monotonic() - start < LONG.total_seconds()
    # Zero means a single check.
    store.set_timeout(timedelta(0))
    assert store.get("there") == b"1"
    _raises(StoreTimeoutError, store.get, "absent")
    # Waiting for no keys returns at once, and the store remains usable.
    store.wait([])
    store.set("absent", "2")
    assert store.get("absent") == b"2"


def _wrong_arguments(store: Store) -> None:
    # Errors for wrong types, and for strings instead of lists, name the operation and the argument.
    odd: Any
    for odd in (None, 1, 1.5, ["k"]):
        _raises(ArgumentTypeError, store.set, odd, "v", containing="set: argument 'key'")
        _raises(ArgumentTypeError, store.set, "k", odd, containing="set: argument 'value'")
        _raises(ArgumentTypeError, store.get, odd, containing="get: argument 'key'")
    _raises(ArgumentTypeError, store.add, "n", 1.5, containing="value")
    _raises(ArgumentTypeError, store.add, "n", 2**63, containing="value")
    for many in (store.wait, store.check, store.multi_get):
        _raises(ArgumentTypeError, many, "bare", containing="keys")
        _raises(ArgumentTypeError, many, ["good", 7], containing="keys[1]")
    _raises(ArgumentError, store.set_timeout, timedelta(seconds=-1), containing="timeout")
    _raises(ArgumentTypeError, store.set_timeout, 5, containing="timeout")
    # Nothing was stored.
    assert store.list_keys() == []


def _cloning(store: Store) -> None:
    # A clone sees the same keys, and has the time-out of the original.
    other = store.clone()
    store.set("k", "v")
    assert other.get("k") == b"v" and other.timeout == store.timeout
    _close(other)
    assert store.get("k") == b"v"


def _queues(store: Store) -> None:
    # First in, first out; separate from values, but `check` finds a queue that is not empty.
    before = store.num_keys()
    for value in ("a", "", "c"):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3 and store.check(["q"]) and store.num_keys() == before
    assert [store.queue_pop("q"), store.queue_pop("q", block=False), store.queue_pop("q")] == [b"a", b"", b"c"]
    assert store.queue_len("q") == 0 and not store.check(["q"]) and store.queue_len("never") == 0
    assert store.delete_key("q") is False
    # An empty queue is an error at once without blocking, and after the time-out with blocking.
    _raises(QueueEmptyError, store.queue_pop, "q", False, containing="queue is empty")
    store.set_timeout(SHORT)
    _raises(StoreTimeoutError, store.queue_pop, "q", containing="queue_pop")


def _lacks_queues(store: Store) -> None:
    # A store without queues raises torch's type of error, which names the stores that have them.
    for call in (lambda: store.queue_push("q", "v"), lambda: store.queue_pop("q"), lambda: store.queue_len("q")):
        _raises(NotImplementedError, call, containing="TCPStore")


def _raises(
    kind: type[BaseException], call: Callable[..., Any], *args: Any, containing: str = "", without: str = "\0"
) -> None:
    """Check that a call raises this type of error, with one text in the message and without another."""
    try:
        got = call(*args)
    except kind as error:
        assert containing in str(error), f"the message must contain {containing!r}: {error}"
        assert without not in str(error), f"the message must not contain {without!r}: {error}"
        return
    raise AssertionError(f"{kind.__name__} expected, but the call returned {got!r}")


def _wake_ups(store: Store) -> None:
    """Check that every operation that creates a key wakes waiting calls."""
    creators: list[Callable[[Store, str], Any]] = [
        lambda other, key: other.set(key, "1"),
        lambda other, key: other.add(key, 1),
        lambda other, key: other.append(key, "1"),
        lambda other, key: other.compare_set(key, "", "1"),
        lambda other, key: other.multi_set([key, key + "'"], ["1", "1"]),
    ]
    for number, create in enumerate(creators):
        key = f"late{number}"
        value = _run_concurrently(store, functools.partial(_get, key=key), functools.partial(create, store, key))
        assert value == b"1"
    # Waiting for several keys ends with the last one, in any order.
    values = _run_concurrently(
        store,
        lambda other: other.multi_get(["one", "two", "three"]),
        lambda: _set_all(store, ["three", "one", "two"]),
    )
    assert values == [b"one", b"two", b"three"]
    # All calls that wait for different keys, or for the same one, are woken by the keys, not by their time-outs.
    got: list[bytes] = []
    start = time.monotonic()

    def work(number: int) -> None:
        if number < 4:
            got.append(store.get(f"mine{number // 2}"))
        else:
            _set_all(store, ["mine1", "mine0"])

    _run_threads(work, 5)
    assert sorted(got) == [b"mine0", b"mine0", b"mine1", b"mine1"]
    assert time.monotonic() - start < store.timeout.total_seconds() / 2


def _set_all(store: Store, keys: list[str]) -> None:
    for key in keys:
        store.set(key, key)


def _get(store: Store, key: str) -> bytes:
    return store.get(key)


def _run_concurrently(store: Store, wait: Callable[[Store], Any], act: Callable[[], Any]) -> Any:
    """Run `wait` on a clone in a thread, then `act` here; return the result of `wait`."""
    results: list[Any] = []
    ready = threading.Event()

    def body() -> None:
        ready.set()
        results.append(wait(store.clone()))

    thread = threading.Thread(target=body)
    thread.start()
    ready.wait()
    act()
    thread.join()
    assert results, "the waiting thread failed"
    return results[0]


def _atomicity(store: Store) -> None:
    """Check that operations of several threads on one store are atomic."""
    wins: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            store.add("sum", number * number)
        store.append("pieces", f"<{number}>")
        if store.compare_set("winner", "", str(number)) == str(number).encode():
            wins.append(number)

    _run_threads(work, 4)
    assert store.add("sum", 0) == 20 * (0 + 1 + 4 + 9)
    assert sorted(store.get("pieces").decode().strip("<>").split("><")) == ["0", "1", "2", "3"]
    assert [str(number).encode() for number in wins] == [store.get("winner")]


def _run_threads(work: Callable[[int], None], count: int) -> None:
    failures: list[BaseException] = []

    def body(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # raised again by the waiting thread
            failures.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _blocked_thread(store: Store) -> None:
    """Check that a waiting thread does not block another on the same object."""
    results: list[bytes] = []
    thread = threading.Thread(target=lambda: results.append(store.get("gate")))
    thread.start()
    store.set("other", "1")
    store.set("gate", "open")
    thread.join()
    assert results == [b"open"]


def _barrier(store: Store) -> None:
    """Check that no caller passes a barrier before the last has arrived."""
    arrived: list[int] = []

    def work(number: int) -> None:
        arrived.append(number)
        store.barrier("gate", 3)
        assert len(arrived) == 3

    _run_threads(work, 3)
    # A single caller does not wait; the error for too few callers has their number.
    store.barrier("alone", 1)
    _raises(StoreTimeoutError, store.barrier, "few", 2, SHORT, containing="1 of 2 callers arrived")
    _raises(ArgumentError, store.barrier, "none", 0, containing="world_size")


def _shared_queue(store: Store) -> None:
    """Check that each value of a queue is returned to exactly one caller."""
    taken: list[bytes] = []

    def work(number: int) -> None:
        if number == 0:
            for value in range(9):
                store.queue_push("jobs", str(value * value))
        else:
            taken.extend(store.queue_pop("jobs") for _ in range(3))

    _run_threads(work, 4)
    assert sorted(map(int, taken)) == [value * value for value in range(9)]


CLAUSES: list[Callable[[Store], None]] = [
    _values,
    _keys,
    _adding,
    _comparing,
    _deleting,
    _checking,
    _looking,
    _several_keys,
    _appending,
    _timing_out,
    _wake_ups,
    _atomicity,
    _blocked_thread,
    _barrier,
    _wrong_arguments,
    _cloning,
]
QUEUE_CLAUSES: list[Callable[[Store], None]] = [_queues, _shared_queue]
