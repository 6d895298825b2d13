"""HashStore: a store in the memory of one process, and `Table`: the semantics that all stores share.

`Table` is a dictionary of bytes with torch's rules for counters, compare-and-set and queues. `HashStore` guards one
with a lock, the TCP server serves one over sockets, and `FileStore` replays its log into one. So the three cannot
disagree.
Do not add waiting, time-outs or names of ranks to `Table`, or checks of arguments to `HashStore`.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import filterfalse
from typing import NamedTuple, TypeVar

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

KEYS_IN_PART = 256
"""Keys that a part of `Table.delete_in_parts` looks at, or values that it takes from a queue."""
MAX_NUMBER_BYTES = 20
"""Longest text of a counter: that of the smallest 64-bit integer."""

DetachedQueue = tuple[bytes, deque[bytes]]
"""Queue that is no longer in the table, and its key."""


class Deleted(NamedTuple):
    """A part of a deletion.

    Attributes:
        values: number of values, in queues too.
        queues: number of queues.
        nbytes: size of these values and of the keys, in bytes.
    """

    values: int
    queues: int
    nbytes: int


def _take_part(queues: deque[DetachedQueue]) -> Deleted:
    """Delete a part of the first of detached queues."""
    key, queue = queues[0]
    part = [queue.popleft() for _ in range(min(len(queue), KEYS_IN_PART))]
    if not queue:
        queues.popleft()
    return Deleted(len(part), not queue, sum(map(len, part)) + (not queue) * len(key))


def release_counter(prefix: bytes) -> bytes:
    """Return the key under which `Store.release` counts the users of a prefix that have gone."""
    return prefix + b"/" + RELEASED.encode()


class Table:
    """Keys, values and queues of one store. One thread at a time may use it.

    Args:
        slash: prefix that the store puts before keys of users, and that error messages leave out.

    Attributes:
        values: values by key.
        queues: queues by key; none of them is empty.
    """

    def __init__(self, slash: bytes = b"") -> None:
        self._slash = slash
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}

    def absent(self, keys: Iterable[bytes]) -> Iterator[bytes]:
        """Return an iterator over the keys that do not exist, in order. It makes no call in Python for each."""
        return filterfalse(self.queues.__contains__, filterfalse(self.values.__contains__, keys))

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys that do not exist, each once, in order."""
        return list(dict.fromkeys(self.absent(keys)))

    def add(self, key: bytes, value: int) -> int:
        """Add to a counter, which is decimal text, and return its new value. A missing one is 0."""
        total = self.number(key) + value
        if total not in INT64:
            expected = f"small enough for {self._shown(key)} to fit 64 bits"
            raise ArgumentError(explain("add", "value", expected, value))
        self.values[key] = str(total).encode()
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
            self.values[key] = desired
            return desired
        return expected if current is None else current

    def append(self, key: bytes, value: bytes) -> None:
        """Append bytes to a value. A missing key starts empty."""
        self.values[key] = self.values.get(key, b"") + value

    def delete(self, key: bytes) -> bool:
        """Remove a value (not a queue). Return whether it existed."""
        return self.values.pop(key, None) is not None

    def release(self, prefix: bytes, users: int) -> bool:
        """Count one more user of a prefix as gone; the last one deletes the keys (see `Store.release`).

        Returns:
            Whether the keys were deleted.
        """
        last = self.count_release(prefix, users)
        if last:
            start = prefix + b"/"
            deque(self.delete_in_parts(lambda key: key.startswith(start), deque()), maxlen=0)
        return last

    def count_release(self, prefix: bytes, users: int) -> bool:
        """Count one more user of a prefix as gone; forget the count after the last one. Return whether it was that."""
        counter = release_counter(prefix)
        if not self.is_last_release(prefix, users):
            self.add(counter, 1)
            return False
        self.values.pop(counter, None)
        return True

    def is_last_release(self, prefix: bytes, users: int) -> bool:
        """Return whether the next user of a prefix to go is the last one."""
        return self.number(release_counter(prefix)) + 1 >= users

    def detach(self, keys: Iterable[bytes]) -> tuple[Deleted, list[DetachedQueue]]:
        """Delete values, and take queues out of the table. The queues are not yet counted as deleted."""
        values = [(key, value) for key in keys if (value := self.values.pop(key, None)) is not None]
        queues = [(key, queue) for key in keys if (queue := self.queues.pop(key, None))] if self.queues else []
        return Deleted(len(values), 0, sum(len(key) + len(value) for key, value in values)), queues

    def delete_in_parts(self, dooms: Callable[[bytes], bool], queues: deque[DetachedQueue]) -> Iterator[Deleted]:
        """Delete the keys of which `dooms` is true when their part is due, and yield after each part.

        Args:
            dooms: function of a key. It is asked about the keys that exist when the first part is asked for.
            queues: detached queues, which are freed in parts too. The caller may add some between two parts.
        """
        keys = [*self.values, *self.queues]
        while keys or queues:
            if queues:
                yield _take_part(queues)
                continue
            part = [key for key in keys[-KEYS_IN_PART:] if dooms(key)]
            # The list holds the last references to keys, so what it drops at once is freed at once.
            del keys[-KEYS_IN_PART:]
            deleted, detached = self.detach(part)
            queues += detached
            yield deleted

    def push(self, key: bytes, value: bytes) -> None:
        """Append a value to a queue."""
        self.queues.setdefault(key, deque()).append(value)

    def pop(self, key: bytes) -> bytes | None:
        """Remove and return the value at the head of a queue; None if the queue does not exist."""
        queue = self.queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return value

    def length(self, key: bytes) -> int:
        """Return the number of values in a queue."""
        return len(self.queues.get(key, ()))

    def _shown(self, key: bytes) -> str:
        return quote_keys([key.removeprefix(self._slash)])


class HashStore(Store):
    """Store in the memory of one process, shared by its threads.

    For ranks that are threads, for a single rank, and for tests.

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
        self._change(lambda table: table.values.__setitem__(name, data))

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
        self._change(lambda table: table.values.update(pairs))

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
