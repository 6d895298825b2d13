"""HashStore: a store in the memory of one process, and `Table`: the semantics that all stores share.

`Table` is a dictionary of bytes with torch's rules for counters, compare-and-set and queues. `HashStore` guards one
with a lock, the TCP server serves one over sockets, and `FileStore` replays its log into one. So the three cannot
disagree.
Do not add waiting, time-outs or names of ranks to `Table`, or checks of arguments to `HashStore`.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import compress, filterfalse, repeat
from operator import is_
from typing import TypeVar

from torchdist_ref.errors import ArgumentError, QueueEmptyError, explain
from torchdist_ref.stores.base import (
    INT64,
    RELEASED,
    Store,
    Text,
    integer,
    key_bytes,
    key_list,
    pair_list,
    quote_keys,
    value_bytes,
)
from torchdist_ref.timeouts import Deadline

T = TypeVar("T")

MAX_NUMBER_BYTES = 20
"""Longest text of a counter: that of the smallest 64-bit integer."""
KEY_OVERHEAD_BYTES = 200
"""Memory of a key or of a queued value besides its bytes."""
QUEUE_OVERHEAD_BYTES = 800
"""Memory of a queue besides its key and its values."""


class StoreFullError(Exception):
    """A change needs more memory than the budget of the table has left. Nothing was changed."""


class MemoryBudget:
    """Memory that a store uses, in bytes, and the most that it may use.

    The table counts its keys, values and queues here before it changes them. A server adds what else its clients make
    it hold, such as unread replies.

    Args:
        limit: largest `used`; without a limit by default.

    Attributes:
        used: memory in use.
        reclaim: function that tries to free memory until so many more bytes fit; None if there is nothing to free.
    """

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.limit = limit
        self.used = 0
        self.reclaim: Callable[[int], None] | None = None

    def reserve(self, nbytes: int) -> None:
        """Count so many more bytes, or fewer if negative. Raise `StoreFullError` if they do not fit."""
        used = self.used + nbytes
        if used > self.limit and nbytes > 0:
            if self.reclaim is not None:
                self.reclaim(nbytes)
                used = self.used + nbytes
            if used > self.limit:
                raise StoreFullError
        self.used = used


class Table:
    """Keys, values and queues of one store. One thread at a time may use it.

    Args:
        slash: prefix that the store puts before keys of users, and that error messages leave out.
        memory: budget that keys, values and queues count in. Each change that adds to them may raise `StoreFullError`.

    Attributes:
        values: values by key.
        queues: queues by key; none of them is empty.
        memory: the budget.
    """

    def __init__(self, slash: bytes = b"", memory: MemoryBudget | None = None) -> None:
        self._slash = slash
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.memory = memory or MemoryBudget()

    def absent(self, keys: Iterable[bytes]) -> Iterator[bytes]:
        """Return an iterator over the keys that do not exist, in order. It calls no Python function for each key."""
        return filterfalse(self.queues.__contains__, filterfalse(self.values.__contains__, keys))

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys that do not exist, each once, in order."""
        return list(dict.fromkeys(self.absent(keys)))

    def set(self, key: bytes, value: bytes) -> None:
        """Set a value."""
        former = self.values.get(key)
        added = len(key) + KEY_OVERHEAD_BYTES if former is None else -len(former)
        self.memory.reserve(added + len(value))
        self.values[key] = value

    def set_all(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Set several values, or none if they do not fit in the budget."""
        # Without a call in Python for each of up to 131072 pairs.
        new = dict(pairs)
        former = list(map(self.values.get, new))
        added = list(compress(new, map(is_, former, repeat(None))))
        change = len(added) * KEY_OVERHEAD_BYTES + sum(map(len, added))
        self.memory.reserve(change + sum(map(len, new.values())) - sum(map(len, filter(None, former))))
        self.values.update(new)

    def add(self, key: bytes, value: int) -> int:
        """Add to a counter, which is decimal text, and return its new value. A missing one is 0."""
        total = self.number(key) + value
        if total not in INT64:
            expected = f"small enough for {self._shown(key)} to fit 64 bits"
            raise ArgumentError(explain("add", "value", expected, value))
        self.set(key, b"%d" % total)
        return total

    def number(self, key: bytes) -> int:
        """Return the value of a counter; 0 if it is missing or empty."""
        text = self.values.get(key, b"0")
        try:
            if len(text) > MAX_NUMBER_BYTES:
                raise ValueError  # it may have megabytes, which int() would read for milliseconds
            return int(text.replace(b"_", b"?") or b"0")  # int() accepts 1_000
        except ValueError:
            hint = f"Its value is {text[:40]!r}; use another key for the counter."
            raise ArgumentError(
                explain(
                    "add",
                    "key",
                    "one that holds a number",
                    key.removeprefix(self._slash).decode(errors="replace"),
                    hint=hint,
                )
            ) from None

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Exchange a value by torch's rule: a missing key matches an empty `expected` only."""
        current = self.values.get(key)
        if current == expected or (current is None and not expected):
            self.set(key, desired)
            return desired
        return expected if current is None else current

    def append(self, key: bytes, value: bytes) -> None:
        """Append bytes to a value. A missing key starts empty."""
        self.set(key, self.values.get(key, b"") + value)

    def delete(self, key: bytes) -> bool:
        """Remove a value (not a queue). Return whether it existed."""
        value = self.values.pop(key, None)
        if value is None:
            return False
        self.memory.used -= len(key) + len(value) + KEY_OVERHEAD_BYTES
        return True

    def release(self, prefix: bytes, users: int) -> bool:
        """Count one more user of a prefix as gone; the last one deletes the keys (see `Store.release`).

        Returns:
            Whether the keys were deleted.
        """
        begin = prefix + b"/"
        counter = begin + RELEASED.encode()
        if self.number(counter) + 1 < users:
            self.add(counter, 1)
            return False
        for key in [key for key in self.values if key.startswith(begin)]:
            self.delete(key)
        for key in [key for key in self.queues if key.startswith(begin)]:
            while self.pop(key) is not None:
                pass
        return True

    def push(self, key: bytes, value: bytes) -> None:
        """Append a value to a queue."""
        queue = self.queues.get(key)
        made = len(key) + QUEUE_OVERHEAD_BYTES if queue is None else 0
        self.memory.reserve(made + len(value) + KEY_OVERHEAD_BYTES)
        if queue is None:
            queue = self.queues[key] = deque()
        queue.append(value)

    def pop(self, key: bytes) -> bytes | None:
        """Remove and return the value at the head of a queue; None if the queue does not exist."""
        queue = self.queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        self.memory.used -= len(value) + KEY_OVERHEAD_BYTES
        if not queue:
            del self.queues[key]
            self.memory.used -= len(key) + QUEUE_OVERHEAD_BYTES
        return value

    def length(self, key: bytes) -> int:
        """Return the number of values in a queue."""
        return len(self.queues.get(key, ()))

    def _shown(self, key: bytes) -> str:
        return quote_keys([key.removeprefix(self._slash)])


class HashStore(Store):
    """Store in the memory of one process, shared by its threads.

    For ranks that are threads, for a single rank, and for tests.

    >>> from torchdist_ref import HashStore
    >>> store = HashStore()
    >>> store.set("epoch", "1")
    >>> store.compare_set("epoch", "1", "2")
    b'2'

    Elsewhere:
        None in MPI, NCCL and JAX: their ranks in one process share its memory.
    """

    def __init__(self) -> None:
        self._table = Table()
        self._changed = threading.Condition()
        # Its users share the memory of this process, so the key needs no exchange.
        self.session_key = os.urandom(32)

    def set(self, key: Text, value: Text) -> None:
        name, data = key_bytes("set", key), value_bytes("set", value)
        self._change(lambda table: table.set(name, data))

    def get(self, key: Text) -> bytes:
        return self._get_all("get", [key_bytes("get", key)])[0]

    def add(self, key: Text, value: int) -> int:
        name, delta = key_bytes("add", key), integer("add", "value", value)
        return self._change(lambda table: table.add(name, delta))

    def check(self, keys: Sequence[Text]) -> bool:
        names = key_list("check", keys)
        with self._changed:
            return not self._table.missing(names)

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        names, deadline = key_list("wait", keys), self._deadline("wait", timeout)
        with self._changed:
            self._wait_for("wait", deadline, lambda table: table.missing(names))

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        name = key_bytes("compare_set", key)
        expected = value_bytes("compare_set", expected_value, "expected_value")
        desired = value_bytes("compare_set", desired_value, "desired_value")
        return self._change(lambda table: table.compare_set(name, expected, desired))

    def delete_key(self, key: Text) -> bool:
        name = key_bytes("delete_key", key)
        return self._change(lambda table: table.delete(name))

    def release(self, prefix: Text, users: int, timeout: timedelta | None = None) -> bool:
        name, count = key_bytes("release", prefix, "prefix"), integer("release", "users", users)
        return self._change(lambda table: table.release(name, count))

    def num_keys(self) -> int:
        return len(self._table.values)

    def list_keys(self) -> list[str]:
        with self._changed:
            return [key.decode("utf-8", "surrogateescape") for key in self._table.values]

    def append(self, key: Text, value: Text) -> None:
        name, data = key_bytes("append", key), value_bytes("append", value)
        self._change(lambda table: table.append(name, data))

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        return self._get_all("multi_get", key_list("multi_get", keys))

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        pairs = pair_list("multi_set", keys, values)
        self._change(lambda table: table.set_all(pairs))

    def queue_push(self, key: Text, value: Text) -> None:
        name, data = key_bytes("queue_push", key), value_bytes("queue_push", value)
        self._change(lambda table: table.push(name, data))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        name, deadline = key_bytes("queue_pop", key), self._deadline("queue_pop", None)
        with self._changed:
            if block:
                self._wait_for("queue_pop", deadline, lambda table: [] if table.length(name) else [name])
            value = self._table.pop(name)
        if value is None:
            raise QueueEmptyError(f"queue_pop: queue is empty: {key!r} on {self!r}. Push first, or pass block=True.")
        return value

    def queue_len(self, key: Text) -> int:
        return self._table.length(key_bytes("queue_len", key))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> HashStore:
        return copy.copy(self)

    def __repr__(self) -> str:
        return "HashStore()"

    def _change(self, action: Callable[[Table], T]) -> T:
        with self._changed:
            result = action(self._table)
            self._changed.notify_all()
        return result

    def _get_all(self, operation: str, names: list[bytes]) -> list[bytes]:
        deadline = self._deadline(operation, None)
        with self._changed:
            self._wait_for(operation, deadline, lambda table: [name for name in names if name not in table.values])
            return [self._table.values[name] for name in names]

    def _wait_for(self, operation: str, deadline: Deadline, missing: Callable[[Table], list[bytes]]) -> None:
        while absent := missing(self._table):
            if deadline.passed():
                raise self._timed_out(operation, absent, deadline)
            self._changed.wait(deadline.sleep_seconds())
