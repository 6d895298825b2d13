"""HashStore: a store in this process's memory, for ranks that are threads, for one rank, and for tests.

A `Table` behind one lock; who waits sleeps on a condition that every change wakes. Nothing else belongs here:
what the operations mean is in `table`, what arguments are allowed in `arguments`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torchdist_ref.errors import QueueEmptyError
from torchdist_ref.stores.arguments import Text, integer, key_bytes, key_list, pair_list, value_bytes
from torchdist_ref.stores.base import Store
from torchdist_ref.stores.table import Table
from torchdist_ref.stores.waiting import Deadline

T = TypeVar("T")


class HashStore(Store):
    """A store that lives in this process and is shared by its threads.

    >>> store = HashStore()
    >>> store.set("epoch", "1")
    >>> store.compare_set("epoch", "1", "2")
    b'2'
    """

    def __init__(self) -> None:
        self._table = Table()
        self._changed = threading.Condition()

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
            self._until("wait", deadline, lambda table: table.missing(names))

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        name = key_bytes("compare_set", key)
        expected = value_bytes("compare_set", expected_value, "expected_value")
        desired = value_bytes("compare_set", desired_value, "desired_value")
        return self._change(lambda table: table.compare_set(name, expected, desired))

    def delete_key(self, key: Text) -> bool:
        name = key_bytes("delete_key", key)
        return self._change(lambda table: table.delete(name))

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
                self._until("queue_pop", deadline, lambda table: [] if table.length(name) else [name])
            value = self._table.pop(name)
        if value is None:
            raise QueueEmptyError(f"queue_pop: queue is empty: {key!r} on {self!r}. Push first, or pass block=True.")
        return value

    def queue_len(self, key: Text) -> int:
        return self._table.length(key_bytes("queue_len", key))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> HashStore:
        other = HashStore()
        other._table, other._changed, other._timeout = self._table, self._changed, self._timeout
        return other

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
            self._until(operation, deadline, lambda table: [name for name in names if name not in table.values])
            return [self._table.values[name] for name in names]

    def _until(self, operation: str, deadline: Deadline, missing: Callable[[Table], list[bytes]]) -> None:
        while absent := missing(self._table):
            if deadline.passed():
                raise self._timed_out(operation, absent, deadline)
            self._changed.wait(deadline.slice())
