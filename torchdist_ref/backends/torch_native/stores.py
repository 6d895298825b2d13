"""Store adapters: torch's store with the interface of ours, and ours with the interface of torch's.

`ref` inside torch connects through the first. It uses only operations that every store of torch has; the others are
built from those in `Store`. It does not use torch's `wait`, which Ctrl-C does not interrupt, and of which a `TCPStore`
logs every time-out. torch's backends on our groups connect through the second. `share_servers` has torch's rendezvous
use our server where one runs at its address already.

Do not add operations here: they belong in our `Store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, ClassVar

import torch.distributed as c10d

from torchdist_ref.errors import DistStoreError
from torchdist_ref.processes.program_end import leave_at_end
from torchdist_ref.stores import Store
from torchdist_ref.stores.base import Text, key_list, key_text, value_bytes
from torchdist_ref.stores.tcp.store import TCPStore, shared_server
from torchdist_ref.timeouts import STORE_TIMEOUT
from torchdist_ref.torch_internals import torch_private

_LINGER_SECONDS = 1.0


class StoreFromTorch(Store):
    """Store of torch's with our names, semantics and errors.

    Args:
        torch_store: torch's store; it is kept alive.
        timeout: Time-out of waits for a missing key. torch's own setting is neither used nor changed.

    >>> import torch.distributed
    >>> store = StoreFromTorch(torch.distributed.HashStore())
    >>> store.set("color", "red")
    >>> store.get("color"), store.add("arrived", 2)
    (b'red', 2)
    """

    def __init__(self, torch_store: Any, timeout: timedelta = STORE_TIMEOUT) -> None:
        self._torch_store = torch_store
        self.set_timeout(timeout)

    @property
    def underlying_store(self) -> Any:
        """Store of torch's below."""
        return self._torch_store

    def set(self, key: Text, value: Text) -> None:
        """See `Store.set`."""
        self._torch_store.set(key_text("set", key), value_bytes("set", value))

    def get(self, key: Text) -> bytes:
        """See `Store.get`."""
        self.wait([key])
        return bytes(self._torch_store.get(key_text("get", key)))

    def add(self, key: Text, value: int) -> int:
        """See `Store.add`."""
        return int(self._torch_store.add(key_text("add", key), value))

    def check(self, keys: Sequence[Text]) -> bool:
        """See `Store.check`."""
        names = key_list("check", keys)
        try:
            return bool(self._torch_store.check(names))
        except RuntimeError as error:
            raise DistStoreError(f"check: torch's store failed: {error}") from error

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        """See `Store.compare_set`."""
        expected, desired = value_bytes("compare_set", expected_value), value_bytes("compare_set", desired_value)
        return bytes(self._torch_store.compare_set(key_text("compare_set", key), expected, desired))

    def delete_key(self, key: Text) -> bool:
        """See `Store.delete_key`."""
        return bool(self._torch_store.delete_key(key_text("delete_key", key)))

    def num_keys(self) -> int:
        """See `Store.num_keys`."""
        return int(self._torch_store.num_keys())

    def list_keys(self) -> list[str]:
        """See `Store.list_keys`."""
        return [key_text("list_keys", key) for key in self._torch_store.list_keys()]

    def clone(self) -> StoreFromTorch:
        """See `Store.clone`."""
        return StoreFromTorch(self._torch_store.clone(), self.timeout)

    def __repr__(self) -> str:
        return f"StoreFromTorch({type(self._torch_store).__name__})"


class StoreForTorch(c10d.Store):
    """One of our stores as a store of torch's C++.

    Args:
        store: Our store; it is kept alive. The caller has to keep this object alive, since C++ does not.

    >>> from torchdist_ref.stores import HashStore
    >>> store = StoreForTorch(HashStore())
    >>> store.set("color", "red")
    >>> store.get("color"), store.add("arrived", 2)
    (b'red', 2)
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._clones: list[StoreForTorch] = []

    def clone(self) -> StoreForTorch:
        """Return a store with a connection of its own, as splitting and shrinking a group in C++ ask for one.

        It lives as long as this one: C++ keeps no reference to it, and a group's backend keeps this one.
        """
        self._clones.append(StoreForTorch(self._store.clone()))
        return self._clones[-1]

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._store.set(key, bytes(value) if not isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, after waiting for it."""
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return its new value."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the expected value, and return its value."""
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it was set."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._store.num_keys()


class AddressStore(StoreForTorch):
    """`StoreForTorch` for keys that are set once, such as the addresses of Gloo.

    Gloo waits for each address before it gets it: the wait reads the value, and the first `get` after it returns that.
    Gloo also reads its own address, which needs no request.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        super().set(key, value)
        self._values[key] = value_bytes("set", value if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, after waiting for it."""
        value = self._values.pop(key, None)
        return super().get(key) if value is None else value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set, and read them."""
        unknown = [key for key in keys if key not in self._values]
        if unknown:
            values = self._store.wait_get(unknown, self._store.timeout if timeout is None else timeout)
            self._values.update(zip(unknown, values, strict=True))


class StoreOfRpc(StoreForTorch):
    """Store of torch's RPC on a server that this process runs; it lives until the process ends, as torch's does.

    Args:
        store: The store, with its server.
    """

    _all: ClassVar[list[StoreOfRpc]] = []

    def __init__(self, store: TCPStore) -> None:
        super().__init__(store)
        self._served = store
        self._all.append(self)
        leave_at_end(self)

    def abort_with(self, error: BaseException) -> None:
        """See `GroupOwner.abort_with`; the store has no group."""

    def exit(self) -> None:
        """Close the store. Workers still read it in `rpc.shutdown` when this one has left that."""
        self._served.close(_LINGER_SECONDS)


def share_servers() -> None:
    """Have rank 0 of torch's rendezvous use our server at its address, if this process runs one; once.

    torch's RPC and our default group read the same MASTER_PORT. torch's own group and RPC share a server in this way.
    The store is one of ours: our server needs the interpreter, which torch's RPC holds while a store of torch's waits.
    """
    original = torch_private.CREATE_STORE.get()
    if hasattr(original, "shares_servers"):
        return

    @wraps(original)
    def create_store(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *args: Any, **kwargs: Any
    ) -> Any:
        if rank or shared_server(port) is None:
            return original(hostname, port, rank, world_size, timeout, *args, **kwargs)
        return StoreOfRpc(TCPStore(hostname, port, world_size, True, timeout, False, multi_tenant=True))

    create_store.shares_servers = True
    torch_private.CREATE_STORE.set(create_store)
