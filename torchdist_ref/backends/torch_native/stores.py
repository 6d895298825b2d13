"""Stores both ways: one of torch's as our backends see a store, and one of ours as torch's C++ sees one.

With the first `ref` finds its peers when torch made the group; only what every store of torch has is asked of it, and
the richer operations are `Store`'s own, built from those. With the second torch's backends find theirs when we did.
Don't add operations here: a store of ours has them, or it has them not.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as c10d

from torchdist_ref.errors import DistStoreError
from torchdist_ref.stores import Store
from torchdist_ref.stores.base import Text, key_list, key_text, value_bytes
from torchdist_ref.timeouts import STORE_TIMEOUT


class StoreFromTorch(Store):
    """A store of torch's behind our names, meanings and errors.

    Args:
        theirs: torch's store; it is kept alive.
        timeout: how long a call waits for a missing key. torch's own setting is neither used nor changed.

    >>> import torch.distributed
    >>> store = StoreFromTorch(torch.distributed.HashStore())
    >>> store.set("colour", "red")
    >>> store.get("colour"), store.add("arrived", 2)
    (b'red', 2)
    """

    def __init__(self, theirs: Any, timeout: timedelta = STORE_TIMEOUT) -> None:
        self._theirs = theirs
        self.set_timeout(timeout)

    def set(self, key: Text, value: Text) -> None:
        self._theirs.set(key_text("set", key), value_bytes("set", value))

    def get(self, key: Text) -> bytes:
        self.wait([key])
        return bytes(self._theirs.get(key_text("get", key)))

    def add(self, key: Text, value: int) -> int:
        return int(self._theirs.add(key_text("add", key), value))

    def check(self, keys: Sequence[Text]) -> bool:
        return bool(self._theirs.check(key_list("check", keys)))

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        expected, desired = value_bytes("compare_set", expected_value), value_bytes("compare_set", desired_value)
        return bytes(self._theirs.compare_set(key_text("compare_set", key), expected, desired))

    def delete_key(self, key: Text) -> bool:
        return bool(self._theirs.delete_key(key_text("delete_key", key)))

    def num_keys(self) -> int:
        return int(self._theirs.num_keys())

    def list_keys(self) -> list[str]:
        return [key_text("list_keys", key) for key in self._theirs.list_keys()]

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        deadline = self._deadline("wait", timeout)
        names = key_list("wait", keys)
        if not names or self.check(keys):
            return
        try:
            self._theirs.wait(names, timedelta(seconds=deadline.seconds))
        except RuntimeError as error:
            # torch's stores raise different types for a time-out, and the same types for other trouble.
            if not deadline.passed():
                raise DistStoreError(f"wait: torch's store failed: {error}") from error
            raise self._timed_out("wait", [key for key in keys if not self.check([key])], deadline) from error

    def clone(self) -> StoreFromTorch:
        return StoreFromTorch(self._theirs.clone(), self.timeout)

    def __repr__(self) -> str:
        return f"StoreFromTorch({type(self._theirs).__name__})"


class StoreForTorch(c10d.Store):
    """One of our stores, as torch's C++ sees a store.

    Args:
        store: ours; it is kept alive, as this object has to be by whoever hands it to C++.

    >>> from torchdist_ref.stores import HashStore
    >>> store = StoreForTorch(HashStore())
    >>> store.set("colour", "red")
    >>> store.get("colour"), store.add("arrived", 2)
    (b'red', 2)
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._store.set(key, bytes(value) if not isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there."""
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set if it has the expected value."""
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._store.num_keys()
