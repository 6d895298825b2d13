"""What every store promises, as tests that anybody can run on a store of his own.

`check_store` puts one implementation through all the clauses; each says in a comment what it asks for. The meaning
is that of torch 2.13's stores, and where those differ among themselves, of its TCPStore. A clause belongs here if
all stores must hold it; sockets, files and torch's peers are tested beside those stores.
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
SHORT = timedelta(milliseconds=60)
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


def _raises(
    kind: type[BaseException], call: Callable[..., Any], *args: Any, naming: str = "", sparing: str = "\0"
) -> None:
    try:
        got = call(*args)
    except kind as error:
        assert naming in str(error), f"the message must name {naming!r}: {error}"
        assert sparing not in str(error), f"the message must not name {sparing!r}: {error}"
        return
    raise AssertionError(f"{kind.__name__} expected, but the call returned {got!r}")


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
    _raises(ArgumentError, store.add, "text", 1, naming="text")
    assert store.get("text") == b"12abc"
    store.set("full", str(2**63 - 1))
    _raises(ArgumentError, store.add, "full", 1, naming="full")
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
    _raises(ArgumentError, store.multi_set, ["p", "q"], ["1"], naming="values")
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
    _raises(StoreTimeoutError, store.get, "absent", naming="get: wait timeout after 60ms, keys: ")
    _raises(StoreTimeoutError, store.multi_get, ["there", "absent"], naming="absent'", sparing="there'")
    _raises(StoreTimeoutError, store.wait, ["there", "absent"], naming="absent'", sparing="there'")
    # A time-out given to `wait` wins over the store's.
    store.set_timeout(LONG)
    _raises(StoreTimeoutError, store.wait, ["absent"], SHORT, naming="absent")
    assert 4 * 0.06 <= time.monotonic() - start < 3.0
    # Zero means to look once: what is there is found, what is not is reported.
    store.set_timeout(timedelta(0))
    assert store.get("there") == b"1"
    _raises(StoreTimeoutError, store.get, "absent")
    # Nothing to wait for is there at once. After all this the store still works.
    store.wait([])
    store.set("absent", "2")
    assert store.get("absent") == b"2"


def _waiting(store: Store) -> None:
    # Whoever waits is woken by each way of making a key.
    makers: list[Callable[[Store, str], Any]] = [
        lambda other, key: other.set(key, "1"),
        lambda other, key: other.add(key, 1),
        lambda other, key: other.append(key, "1"),
        lambda other, key: other.compare_set(key, "", "1"),
        lambda other, key: other.multi_set([key, key + "'"], ["1", "1"]),
    ]
    for number, make in enumerate(makers):
        key = f"late{number}"
        got = _meanwhile(store, functools.partial(_get, key=key), functools.partial(make, store, key))
        assert got == b"1"
    # Waiting for several keys ends with the last of them, in whatever order they come.
    values = _meanwhile(
        store,
        lambda other: other.multi_get(["one", "two", "three"]),
        lambda: [store.set(key, key) for key in ("three", "one", "two")],
    )
    assert values == [b"one", b"two", b"three"]


def _get(store: Store, key: str) -> bytes:
    return store.get(key)


def _meanwhile(store: Store, wait: Callable[[Store], Any], act: Callable[[], Any]) -> Any:
    """Run `wait` on a clone in a thread, then `act` here; what `wait` returned."""
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


def _threads(store: Store) -> None:
    # One store, many threads: sums are exact, appended pieces whole, exchanges have one winner.
    wins: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            store.add("sum", number * number)
        store.append("pieces", f"<{number}>")
        if store.compare_set("winner", "", str(number)) == str(number).encode():
            wins.append(number)

    _all_at_once(work, 4)
    assert store.add("sum", 0) == 20 * (0 + 1 + 4 + 9)
    assert sorted(store.get("pieces").decode().strip("<>").split("><")) == ["0", "1", "2", "3"]
    assert [str(number).encode() for number in wins] == [store.get("winner")]


def _all_at_once(work: Callable[[int], None], count: int) -> None:
    failures: list[BaseException] = []

    def body(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # shown by the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _blocked_thread(store: Store) -> None:
    # A thread that waits does not keep another from using the same object.
    results: list[bytes] = []
    thread = threading.Thread(target=lambda: results.append(store.get("gate")))
    thread.start()
    store.set("other", "1")
    store.set("gate", "open")
    thread.join()
    assert results == [b"open"]


def _barrier(store: Store) -> None:
    # Nobody leaves before the last has come.
    arrived: list[int] = []

    def work(number: int) -> None:
        arrived.append(number)
        store.barrier("gate", 3)
        assert len(arrived) == 3

    _all_at_once(work, 3)
    # Alone, it does not wait; too few, the error says how many came.
    store.barrier("alone", 1)
    _raises(StoreTimeoutError, store.barrier, "few", 2, SHORT, naming="1 of 2 came")
    _raises(ArgumentError, store.barrier, "none", 0, naming="world_size")


def _misuse(store: Store) -> None:
    # Keys and values of odd kinds, and bare strings for lists, name the operation and the argument.
    odd: Any
    for odd in (None, 1, 1.5, ["k"]):
        _raises(ArgumentTypeError, store.set, odd, "v", naming="set: argument 'key'")
        _raises(ArgumentTypeError, store.set, "k", odd, naming="set: argument 'value'")
        _raises(ArgumentTypeError, store.get, odd, naming="get: argument 'key'")
    _raises(ArgumentTypeError, store.add, "n", 1.5, naming="amount")  # type: ignore[arg-type]
    _raises(ArgumentTypeError, store.add, "n", 2**63, naming="amount")
    for many in (store.wait, store.check, store.multi_get):
        _raises(ArgumentTypeError, many, "bare", naming="keys")
        _raises(ArgumentTypeError, many, ["good", 7], naming="keys[1]")
    _raises(ArgumentError, store.set_timeout, timedelta(seconds=-1), naming="timeout")
    _raises(ArgumentTypeError, store.set_timeout, 5, naming="timeout")  # type: ignore[arg-type]
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
    _raises(QueueEmptyError, store.queue_pop, "q", False, naming="queue is empty")
    store.set_timeout(SHORT)
    _raises(StoreTimeoutError, store.queue_pop, "q", naming="queue_pop")


def _queue_shared(store: Store) -> None:
    # Each value goes to exactly one of those who wait.
    taken: list[bytes] = []

    def work(number: int) -> None:
        if number == 0:
            for value in range(9):
                store.queue_push("jobs", str(value * value))
        else:
            taken.extend(store.queue_pop("jobs") for _ in range(3))

    _all_at_once(work, 4)
    assert sorted(map(int, taken)) == [value * value for value in range(9)]


def _lacks_queues(store: Store) -> None:
    # A store without queues says so, in torch's type, and names those that have them.
    for call in (lambda: store.queue_push("q", "v"), lambda: store.queue_pop("q"), lambda: store.queue_len("q")):
        _raises(NotImplementedError, call, naming="TCPStore")


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
    _waiting,
    _threads,
    _blocked_thread,
    _barrier,
    _misuse,
    _cloning,
]
QUEUE_CLAUSES: list[Callable[[Store], None]] = [_queues, _queue_shared]
