"""PrefixStore: a namespace of another store; and WatchedStore, one whose waits end when a peer fails.

Groups and backends that share a store each have a prefix, so that they do not read each other's keys by accident. The
key in the underlying store is ``prefix/key``, as torch's, so both libraries can read the same store. This form is not
collision-proof: prefix "a" with key "b/c" is prefix "a/b" with key "c". Do not add an operation that cannot be
forwarded, or the detection of failures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, StoreTimeoutError, explain
from torchdist_ref.stores.base import (
    POLL_SECONDS,
    Store,
    Text,
    key_text,
    key_value,
    key_values,
    quote_keys,
    request_limit,
)
from torchdist_ref.timeouts import CHECK_SECONDS, Deadline

_RELEASE_TIMEOUT = timedelta(seconds=0.25)
"""Longest duration of the release of a group's keys, which other ranks may not depend on."""
_LAST_SECONDS = 0.11
"""Duration of a request that waits `CHECK_SECONDS` at a server that does not respond, in seconds."""


class PrefixStore(Store):
    """Store that puts a prefix before every key of another store.

    Time-outs are those of the underlying store, and `num_keys` counts its keys, as in torch; `list_keys` returns only
    the keys with the prefix.

    Args:
        prefix: text before each key, with a slash between.
        store: underlying store; it is kept alive.

    >>> from torchdist_ref import PrefixStore
    >>> from torchdist_ref.stores import HashStore
    >>> whole = HashStore()
    >>> PrefixStore("group_0", whole).set("rank", "3")
    >>> whole.get("group_0/rank")
    b'3'

    Elsewhere:
        The namespace of a job in PMIx (``PMIX_NSPACE``); none in NCCL and JAX, whose programs prefix keys themselves.
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
        """Prefix, without the slash."""
        return self._prefix

    @property
    def underlying_store(self) -> Store:
        """Store one level down."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return store

    @property
    def timeout(self) -> timedelta:
        """Time-out of the underlying store."""
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

    def set_and_compare_set(
        self, publish: Mapping[str, Text], key: Text, expected_value: Text, desired_value: Text
    ) -> bytes:
        # A store of torch's has no such method.
        both: Callable[..., bytes] | None = getattr(self._store, "set_and_compare_set", None)
        if both is None:
            return super().set_and_compare_set(publish, key, expected_value, desired_value)
        operation = "compare_set"
        set_first = self._pairs(operation, "publish", publish)
        return both(set_first, self._key(operation, key), expected_value, desired_value)

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

    def wait_get(
        self,
        keys: Sequence[Text],
        timeout: timedelta,
        publish: Mapping[str, Text] | None = None,
        on_disconnect: tuple[str, Text] | None = None,
    ) -> list[bytes]:
        # A store of torch's has no such method.
        wait_get: Callable[..., list[bytes]] | None = getattr(self._store, "wait_get", None)
        if wait_get is None:
            return super().wait_get(keys, timeout, publish)
        set_first = self._pairs("wait_get", "publish", publish)
        if on_disconnect is None:
            return wait_get(self._keys("wait_get", keys), timeout, set_first)
        key, value = key_value("wait_get", "on_disconnect", on_disconnect)
        return wait_get(self._keys("wait_get", keys), timeout, set_first, (self._key("wait_get", key), value))

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

    def set_on_disconnect(self, key: Text, value: Text, now: Mapping[str, Text] | None = None) -> bool:
        # A store of torch's has no such method.
        ask: Callable[[Text, Text, Mapping[str, Text]], bool] | None = getattr(self._store, "set_on_disconnect", None)
        operation = "set_on_disconnect"
        set_now = self._pairs(operation, "now", now)
        return ask is not None and ask(self._key(operation, key), value, set_now)

    def release(self, prefix: Text, users: int, timeout: timedelta | None = None) -> bool:
        # A store of torch's has no such method.
        release: Callable[[Text, int, timedelta | None], bool] | None = getattr(self._store, "release", None)
        if release is None:
            return super().release(prefix, users, timeout)
        return release(self._key("release", prefix, "prefix"), users, timeout)

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._store.clone())

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"

    def _key(self, operation: str, key: Text, argument: str = "key") -> str:
        return f"{self._prefix}/{key if isinstance(key, str) else key_text(operation, key, argument)}"

    def _pairs(self, operation: str, argument: str, pairs: Mapping[str, Text] | None) -> dict[str, Text]:
        return {self._key(operation, key): value for key, value in key_values(operation, argument, pairs).items()}

    def _keys(self, operation: str, keys: Sequence[Text]) -> Sequence[Text]:
        # The underlying store refuses a bare string, or no list at all, with its own message.
        if isinstance(keys, (str, bytes, bytearray)) or not isinstance(keys, Collection):
            return keys
        start = f"{self._prefix}/"
        return [
            start + (key if type(key) is str else key_text(operation, key, f"keys[{i}]")) for i, key in enumerate(keys)
        ]


class KeyRange(NamedTuple):
    """Keys with one prefix that several ranks use, until each of them has released them.

    Attributes:
        store: store of the keys.
        prefix: text before the keys, without the slash.
        users: number of ranks that release the keys; the last one deletes them.
    """

    store: Store
    prefix: str
    users: int

    def release(self) -> None:
        """Release the keys on this rank. Without effect if the store is gone or does not respond."""
        release: Callable[[str, int, timedelta], bool] = getattr(self.store, "release", None) or partial(
            Store.release, self.store
        )
        with suppress(RuntimeError, OSError):
            release(self.prefix, self.users, _RELEASE_TIMEOUT)


class WatchedStore(PrefixStore):
    """`PrefixStore` whose waits fail as soon as a rank that they depend on has failed.

    A key that a dead rank was to set will never appear, but a store cannot know that. This one checks for failures
    every `CHECK_SECONDS` while it waits.

    Args:
        prefix: text before each key, with a slash between.
        store: underlying store.
        failure: function that returns the error to raise if the keys will not appear; None while they may.

    >>> from torchdist_ref.stores import HashStore
    >>> watched = WatchedStore("a", HashStore(), lambda: RuntimeError("rank 1 died"))
    >>> watched.get("address of rank 1")
    Traceback (most recent call last):
    RuntimeError: rank 1 died
    """

    def __init__(self, prefix: str, store: Store, failure: Callable[[], BaseException | None]) -> None:
        super().__init__(prefix, store)
        self._failure = failure

    def get(self, key: Text) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        return self.wait_get(keys, self.timeout)

    def wait_get(
        self,
        keys: Sequence[Text],
        timeout: timedelta,
        publish: Mapping[str, Text] | None = None,
        on_disconnect: tuple[str, Text] | None = None,
    ) -> list[bytes]:
        deadline = self._deadline("wait", timeout)
        store: object = self._underlying_non_prefix_store
        if isinstance(store, Store):
            while (values := self._values(keys, deadline, publish, on_disconnect)) is None:
                limit = request_limit()
                if limit is None or limit.silent_since is None:
                    # The server has responded, so the keys are set.
                    publish = on_disconnect = None
                if self._appeared_at_last(keys, deadline):
                    # A server that takes longer than a check would miss each of them.
                    return super().multi_get(keys)
            return values
        for key, value in (publish or {}).items():
            self.set(key, value)
        self.wait(keys, timeout)
        return super().multi_get(keys)

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        deadline = self._deadline("wait", timeout)
        while not self._appeared(keys, Deadline(self.next_check(deadline))):
            if self._appeared_at_last(keys, deadline):
                return

    def next_check(self, deadline: Deadline) -> float:
        """Return the seconds after which a wait checks for failures next."""
        return min(CHECK_SECONDS, deadline.remaining())

    def _appeared_at_last(self, keys: Sequence[Text], deadline: Deadline) -> bool:
        """Return whether the keys have appeared, once a rank has failed or the deadline has passed; raise if not."""
        limit = request_limit()
        if limit is not None and limit.silent and min(limit.deadline.remaining(), deadline.remaining()) < _LAST_SECONDS:
            # The server will hardly respond now, and one more request could end too late.
            time.sleep(min(limit.deadline.remaining(), deadline.remaining()))
            raise self._not_responding(keys, deadline)
        failure = self._failure()
        # The keys may have been set just before the failure.
        if failure is None and not deadline.passed():
            return False
        if not self.check(keys):
            raise failure or self._timed_out("wait", self._missing(keys), deadline)
        return True

    def _not_responding(self, keys: Sequence[Text], deadline: Deadline) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"wait: wait timeout after {deadline.seconds * 1000:.0f}ms, keys: {quote_keys(list(keys))}, on {self!r}: "
            f"the server does not respond at all. It may be stopped, overloaded or cut off from this host."
        )

    def _values(
        self,
        keys: Sequence[Text],
        deadline: Deadline,
        publish: Mapping[str, Text] | None,
        on_disconnect: tuple[str, Text] | None,
    ) -> list[bytes] | None:
        """Return the values of the keys, or None if they do not appear before the next check for failures."""
        # A timedelta has whole microseconds. A wait of none would leave a virtual clock just before the deadline.
        seconds = max(timedelta.resolution, timedelta(seconds=self.next_check(deadline)))
        try:
            return super().wait_get(keys, seconds, publish, on_disconnect)
        except StoreTimeoutError:
            return None

    def raise_failure(self) -> None:
        """Raise the failure of a rank if there is one; for waits that repeat other operations."""
        if (failure := self._failure()) is not None:
            raise failure

    def _appeared(self, keys: Sequence[Text], deadline: Deadline) -> bool:
        """Return whether the keys appear before the deadline of this check."""
        store: object = self._underlying_non_prefix_store
        if isinstance(store, Store):
            try:
                super().wait(keys, timedelta(seconds=deadline.seconds))
            except StoreTimeoutError:
                return False
            return True
        # torch's stores have several types of errors for a time-out, and log a line for each.
        while not (found := self.check(keys)) and not deadline.passed():
            time.sleep(min(POLL_SECONDS, deadline.remaining()))
        return found

    def _missing(self, keys: Sequence[Text]) -> list[Text]:
        return [key for key in keys if not self.check([key])]

    def clone(self) -> WatchedStore:
        return WatchedStore(self.prefix, self.underlying_store.clone(), self._failure)
