"""The clauses of `check_store` with several callers at once: waking, exactness, barriers, shared queues.

A clause is a function of one fresh store that fails by AssertionError. The clauses for a single caller, and the list of
all, are in `check_store`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchdist_ref.errors import ArgumentError, StoreTimeoutError
from torchdist_ref.stores import Store

SHORT = timedelta(milliseconds=60)


def raises(
    kind: type[BaseException], call: Callable[..., Any], *args: Any, naming: str = "", sparing: str = "\0"
) -> None:
    """Check that a call raises this kind of error, with a text that names one thing and not another."""
    try:
        got = call(*args)
    except kind as error:
        assert naming in str(error), f"the message must name {naming!r}: {error}"
        assert sparing not in str(error), f"the message must not name {sparing!r}: {error}"
        return
    raise AssertionError(f"{kind.__name__} expected, but the call returned {got!r}")


def waiting(store: Store) -> None:
    """Whoever waits is woken by each way of making a key."""
    makers: list[Callable[[Store, str], Any]] = [
        lambda other, key: other.set(key, "1"),
        lambda other, key: other.add(key, 1),
        lambda other, key: other.append(key, "1"),
        lambda other, key: other.compare_set(key, "", "1"),
        lambda other, key: other.multi_set([key, key + "'"], ["1", "1"]),
    ]
    for number, make in enumerate(makers):
        key = f"late{number}"
        seen = _meanwhile(store, functools.partial(_get, key=key), functools.partial(make, store, key))
        assert seen == b"1"
    # Waiting for several keys ends with the last of them, in whatever order they come.
    values = _meanwhile(
        store,
        lambda other: other.multi_get(["one", "two", "three"]),
        lambda: _set_in_turn(store, ["three", "one", "two"]),
    )
    assert values == [b"one", b"two", b"three"]
    # Several who wait for different keys, and for the same one, are all woken: by the keys, not by their time-outs.
    got: list[bytes] = []
    start = time.monotonic()

    def work(number: int) -> None:
        if number < 4:
            got.append(store.get(f"mine{number // 2}"))
        else:
            _set_in_turn(store, ["mine1", "mine0"])

    _all_at_once(work, 5)
    assert sorted(got) == [b"mine0", b"mine0", b"mine1", b"mine1"]
    assert time.monotonic() - start < store.timeout.total_seconds() / 2


def _set_in_turn(store: Store, keys: list[str]) -> None:
    for key in keys:
        store.set(key, key)


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


def threads(store: Store) -> None:
    """One store, many threads: sums are exact, appended pieces whole, exchanges have one winner."""
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


def blocked_thread(store: Store) -> None:
    """Check that a waiting thread does not block another on the same object."""
    results: list[bytes] = []
    thread = threading.Thread(target=lambda: results.append(store.get("gate")))
    thread.start()
    store.set("other", "1")
    store.set("gate", "open")
    thread.join()
    assert results == [b"open"]


def barrier(store: Store) -> None:
    """Nobody leaves before the last has come."""
    arrived: list[int] = []

    def work(number: int) -> None:
        arrived.append(number)
        store.barrier("gate", 3)
        assert len(arrived) == 3

    _all_at_once(work, 3)
    # Alone, it does not wait; too few, the error says how many came.
    store.barrier("alone", 1)
    raises(StoreTimeoutError, store.barrier, "few", 2, SHORT, naming="1 of 2 callers arrived")
    raises(ArgumentError, store.barrier, "none", 0, naming="world_size")


def queue_shared(store: Store) -> None:
    """Each value goes to exactly one of those who wait."""
    taken: list[bytes] = []

    def work(number: int) -> None:
        if number == 0:
            for value in range(9):
                store.queue_push("jobs", str(value * value))
        else:
            taken.extend(store.queue_pop("jobs") for _ in range(3))

    _all_at_once(work, 4)
    assert sorted(map(int, taken)) == [value * value for value in range(9)]
