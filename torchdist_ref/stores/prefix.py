"""PrefixStore: a part of another store, set apart by a prefix in front of every key.

Groups and backends that share one store each get a prefix, so that they can't read each other's keys by
accident. The key underneath is ``prefix/key``, exactly torch's, so that both read the same store. That form
is not collision-proof: prefix "a" with key "b/c" meets prefix "a/b" with key "c". Every method is one line;
an operation that can't be forwarded does not belong here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, StoreTimeoutError, explain
from torchdist_ref.stores.base import POLL_SECONDS, Store, Text, key_text
from torchdist_ref.timeouts import CHECK_SECONDS, Deadline


class PrefixStore(Store):
    """A view of `store` in which every key stands under `prefix`.

    Time-outs are those of the store underneath, and `num_keys` counts that whole store, as in torch;
    `list_keys` shows only the keys under the prefix.

    Args:
        prefix: put before each key, with a slash between.
        store: the store underneath; it is kept alive.

    >>> from torchdist_ref.stores import HashStore
    >>> whole = HashStore()
    >>> PrefixStore("group_0", whole).set("rank", "3")
    >>> whole.get("group_0/rank")
    b'3'
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if store is None:
            raise ArgumentError(explain("PrefixStore", "store", "a store", None))
        if not hasattr(store, "compare_set"):
            raise ArgumentTypeError(explain("PrefixStore", "store", "a store", store))
        self._prefix = key_text("PrefixStore", prefix, "prefix")
        self._store = store

    @property
    def prefix(self) -> str:
        """The prefix, without the slash."""
        return self._prefix

    @property
    def underlying_store(self) -> Store:
        """The store one level down."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        store = self._store
        return store._underlying_non_prefix_store if isinstance(store, PrefixStore) else store

    @property
    def timeout(self) -> timedelta:
        """The time-out of the store underneath."""
        return self._store.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def set(self, key: Text, value: Text) -> None:
        self._store.set(self._key("set", key), value)

    def get(self, key: Text) -> bytes:
        return self._store.get(self._key("get", key))

    def add(self, key: Text, value: int) -> int:
        return self._store.add(self._key("add", key), value)

    def check(self, keys: Sequence[Text]) -> bool:
        return self._store.check(self._keys("check", keys))

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        self._store.wait(self._keys("wait", keys), self.timeout if timeout is None else timeout)

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        return self._store.compare_set(self._key("compare_set", key), expected_value, desired_value)

    def delete_key(self, key: Text) -> bool:
        return self._store.delete_key(self._key("delete_key", key))

    def num_keys(self) -> int:
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        start = f"{self._prefix}/"
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def append(self, key: Text, value: Text) -> None:
        self._store.append(self._key("append", key), value)

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        return self._store.multi_get(self._keys("multi_get", keys))

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        self._store.multi_set(self._keys("multi_set", keys), values)

    def barrier(self, key: Text, world_size: int, timeout: timedelta | None = None) -> None:
        self._store.barrier(self._key("barrier", key), world_size, timeout)

    def queue_push(self, key: Text, value: Text) -> None:
        self._store.queue_push(self._key("queue_push", key), value)

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        return self._store.queue_pop(self._key("queue_pop", key), block)

    def queue_len(self, key: Text) -> int:
        return self._store.queue_len(self._key("queue_len", key))

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._store.clone())

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"

    def _key(self, operation: str, key: Text, argument: str = "key") -> str:
        return f"{self._prefix}/{key_text(operation, key, argument)}"

    def _keys(self, operation: str, keys: Sequence[Text]) -> Sequence[Text]:
        # A bare string goes down as it is, so that the store underneath refuses it with its own words.
        if isinstance(keys, (str, bytes, bytearray)):
            return keys
        return [self._key(operation, key, f"keys[{i}]") for i, key in enumerate(keys)]


class WatchedStore(PrefixStore):
    """A `PrefixStore` whose waits look for trouble.

    Args:
        prefix: As a `PrefixStore` has it.
        store: The store underneath.
        trouble: What to raise if the keys that are waited for will not come; None while they may.

    >>> from torchdist_ref.stores import HashStore
    >>> watched = WatchedStore("a", HashStore(), lambda: RuntimeError("rank 1 died"))
    >>> watched.get("address of rank 1")
    Traceback (most recent call last):
    RuntimeError: rank 1 died
    """

    def __init__(self, prefix: str, store: Store, trouble: Callable[[], BaseException | None]) -> None:
        super().__init__(prefix, store)
        self._trouble = trouble

    def get(self, key: Text) -> bytes:
        self.wait([key])
        return super().get(key)

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        self.wait(keys)
        return super().multi_get(keys)

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        deadline = self._deadline("wait", timeout)
        while not self._came(keys, Deadline(min(CHECK_SECONDS, deadline.remaining()))):
            trouble = self._trouble()
            # What was waited for may have come just before the trouble did.
            if (trouble is not None or deadline.passed()) and not self.check(keys):
                raise trouble or self._timed_out("wait", self._missing(keys), deadline)

    def _came(self, keys: Sequence[Text], look: Deadline) -> bool:
        """Whether the keys come before the next look."""
        store: object = self._underlying_non_prefix_store
        if isinstance(store, Store):
            try:
                super().wait(keys, timedelta(seconds=look.seconds))
            except StoreTimeoutError:
                return False
            return True
        # torch's stores have several types of errors for a time-out, and put a line into the log for each.
        while not (here := self.check(keys)) and not look.passed():
            time.sleep(min(POLL_SECONDS, look.remaining()))
        return here

    def _missing(self, keys: Sequence[Text]) -> list[Text]:
        return [key for key in keys if not self.check([key])]

    def clone(self) -> WatchedStore:
        return WatchedStore(self.prefix, self.underlying_store.clone(), self._trouble)
