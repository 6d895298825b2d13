"""TCPStore: one process holds the keys and serves them; every rank is a client over TCP.

`TCPStore` is the client, and on the master it also starts the server. Guarantees beyond torch's store: `set` returns
when the value is in the store; `get` and `queue_pop` are atomic at a server of ours; a broken connection is opened
again, and a repeated `add` counts once; every call keeps its time-out, even if the server is stopped; threads may share
a store without blocking each other; a forked child opens connections of its own.

Do not add sockets or bytes here: requests are sent by `client` and served by `server`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from socket import AddressFamily
from time import monotonic
from typing import Any

from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistNetworkError,
    QueueEmptyError,
    StoreTimeoutError,
    explain,
)
from torchdist_ref.processes.identity import simulated_place
from torchdist_ref.stores.addresses import only_this_host, parse_host
from torchdist_ref.stores.base import (
    RequestLimit,
    Store,
    Text,
    checked_world_size,
    integer,
    key_bytes,
    key_list,
    key_text,
    key_value,
    key_values,
    pair_list,
    quote_keys,
    request_limit,
    timeout_seconds,
    value_bytes,
)
from torchdist_ref.stores.sealed import innermost
from torchdist_ref.stores.tcp.client import Ahead, ConnectionPool, RequestTimeout
from torchdist_ref.stores.tcp.operations import MAX_KEY_BYTES, MAX_VALUE_BYTES, Op, Operation
from torchdist_ref.stores.tcp.server import TCPServer
from torchdist_ref.timeouts import STORE_TIMEOUT, Deadline, without_grace

_WORKERS_KEY = b"init/"
_shared_servers: weakref.WeakValueDictionary[tuple[object, int], TCPServer] = weakref.WeakValueDictionary()
"""Servers that stores of one process share, by port. A simulated rank is a process of its own, by its place."""
_shared_servers_lock = threading.RLock()


class TCPStore(Store):
    """A store served by one process and reached over TCP, wire-compatible with torch's.

    Args:
        host_name: host of the server; on the master also the address to listen on (loopback stays loopback).
        port: port of the server; 0 on the master lets the system choose one, which the property `port` returns.
        world_size: number of stores that will connect, the master's included; None if not known.
        is_master: whether this process runs the server. Exactly one does.
        timeout: time to wait for the server and for missing keys; 300 s by default.
        wait_for_workers: whether the master waits here until `world_size` stores have connected.
        multi_tenant: whether several masters with the same port in one process share one server.
        master_listen_fd: on the master, file descriptor of a listening socket to use.
        use_libuv: accepted for compatibility with torch. There is one kind of server here, and it has queues.

    Attributes:
        server: server that this process runs for the store, or None.
        keeps_alive: object that the store needs as long as it is open, such as a store of torch's that runs the server.

    Raises:
        DistNetworkError: the port is in use, the name does not resolve, or no server responds in time.
        StoreTimeoutError: not all workers connected in time.

    >>> from torchdist_ref.stores import TCPStore
    >>> master = TCPStore("127.0.0.1", 0, is_master=True)
    >>> other = TCPStore("127.0.0.1", master.port)
    >>> other.set("greeting", "hello")
    >>> master.get("greeting")
    b'hello'
    >>> other.close(), master.close()
    (None, None)

    Elsewhere:
        The PMIx server of MPI's launchers; the address ``NCCL_COMM_ID`` in NCCL; the coordinator of
        ``jax.distributed.initialize`` in JAX.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = STORE_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        timeout_seconds("TCPStore", timeout)
        self._timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        self.keeps_alive: object = None
        self._host, self._libuv = _checked_host(host_name), bool(use_libuv)
        world = None if world_size is None or world_size == -1 else checked_world_size("TCPStore", world_size)
        wanted = _checked_port(port)
        if not self._timeout:
            # A quick server may respond in no time, which would be chance.
            raise DistNetworkError(
                f"TCPStore: no connection to {self._host}:{wanted}: argument 'timeout' is zero, which leaves no time "
                f"to connect. Pass a longer one; for a single look at keys without waiting, call set_timeout afterward."
            )
        if master_listen_fd is not None:
            master_listen_fd = integer("TCPStore", "master_listen_fd", master_listen_fd)
        self.server = self._open_server(wanted, multi_tenant, master_listen_fd) if is_master else None
        self._pool = ConnectionPool(self._host, self.server.port if self.server else wanted)
        self._finalizer = weakref.finalize(self, self._pool.close)
        try:
            self._join(world if wait_for_workers else None)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        """Host name that was given."""
        return self._host

    @property
    def local_end(self) -> tuple[AddressFamily, str] | None:
        """Family and address from which this process has reached the server."""
        return self._pool.server.local_end

    @property
    def port(self) -> int:
        """Port of the server."""
        return self._pool.server.port

    @property
    def libuvBackend(self) -> bool:
        """Value that was given as `use_libuv`."""
        return self._libuv

    def close(self, linger: float = 0.0) -> None:
        """Close the connections of this store, and its server unless another store of this process shares it.

        Calls after this raise `DistNetworkError`. A store that is no longer referenced closes itself.

        Args:
            linger: seconds for which the server may wait for other clients to disconnect first.
        """
        self._finalizer()
        if self.server is not None and linger:
            self.server.await_clients(linger)
        self.server = self.keeps_alive = None

    def set(self, key: Text, value: Text) -> None:
        self._request("set", Op.SET, _key("set", key), _value("set", value))

    def get(self, key: Text) -> bytes:
        return bytes(self._request("get", Op.WAIT_GET, _key("get", key))[0])

    def add(self, key: Text, value: int) -> int:
        return int(self._request("add", Op.ADD, _key("add", key), integer("add", "value", value))[0])

    def check(self, keys: Sequence[Text]) -> bool:
        return bool(self._request("check", Op.CHECK, _keys("check", keys))[0] == 0)

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        self._request("wait", Op.WAIT, _keys("wait", keys), timeout=timeout)

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        return self.set_and_compare_set({}, key, expected_value, desired_value)

    def set_and_compare_set(
        self, publish: Mapping[str, Text], key: Text, expected_value: Text, desired_value: Text
    ) -> bytes:
        operation = "compare_set"
        expected = _value(operation, expected_value, "expected_value")
        desired = _value(operation, desired_value, "desired_value")
        pairs = _pairs(operation, "publish", publish)
        ahead: list[Ahead] = [(Op.MULTI_SET, (pairs,))] if pairs else []
        fields = _key(operation, key), expected, desired
        return bytes(self._request(operation, Op.COMPARE_SET, *fields, ahead=ahead)[0])

    def delete_key(self, key: Text) -> bool:
        return bool(self._request("delete_key", Op.DELETE_KEY, _key("delete_key", key))[0])

    def num_keys(self) -> int:
        return int(self._request("num_keys", Op.GETNUMKEYS)[0])

    def list_keys(self) -> list[str]:
        [keys] = self._request("list_keys", Op.LIST_KEYS)
        return [key[1:].decode("utf-8", "surrogateescape") for key in keys if key.startswith(b"/")]

    def append(self, key: Text, value: Text) -> None:
        self._request("append", Op.APPEND, _key("append", key), _value("append", value))

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        names = _keys("multi_get", keys)
        return list(self._request("multi_get", Op.WAIT_GET_ALL, names)[0]) if names else []

    def wait_get(
        self,
        keys: Sequence[Text],
        timeout: timedelta,
        publish: Mapping[str, Text] | None = None,
        on_disconnect: tuple[str, Text] | None = None,
    ) -> list[bytes]:
        names = _keys("wait_get", keys)
        pairs = _pairs("wait_get", "publish", publish)
        ahead: list[Ahead] = [(Op.MULTI_SET, (pairs,))] if pairs else []
        if on_disconnect is not None and self._pool.server.is_ours:
            key, value = key_value("wait_get", "on_disconnect", on_disconnect)
            ahead = [(Op.SET_ON_DISCONNECT, (_key("wait_get", key), _value("wait_get", value), pairs))]
        return list(self._request("wait", Op.WAIT_GET_ALL, names, timeout=timeout, ahead=ahead)[0])

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        pairs = pair_list("multi_set", keys, values)
        checked = [(_key("multi_set", key), _value("multi_set", value)) for key, value in pairs]
        self._request("multi_set", Op.MULTI_SET, checked)

    def barrier(self, key: Text, world_size: int, timeout: timedelta | None = None) -> None:
        self._request(
            "barrier", Op.BARRIER, _key("barrier", key), checked_world_size("barrier", world_size), timeout=timeout
        )

    def queue_push(self, key: Text, value: Text) -> None:
        self._request("queue_push", Op.QUEUE_PUSH, _key("queue_push", key), _value("queue_push", value))

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        name = _key("queue_pop", key)
        if block:
            return bytes(self._request("queue_pop", Op.WAIT_POP, name)[0])
        [(length, value)] = self._request("queue_pop", Op.QUEUE_POP, name)
        if not length:
            raise QueueEmptyError(f"queue_pop: queue is empty: {key!r} on {self!r}. Push first, or pass block=True.")
        return bytes(value)

    def queue_len(self, key: Text) -> int:
        return int(self._request("queue_len", Op.QUEUE_LEN, _key("queue_len", key))[0])

    def release(self, prefix: Text, users: int, timeout: timedelta | None = None) -> bool:
        if not self._pool.server.is_ours:
            return super().release(prefix, users, timeout)
        fields = _key("release", prefix), integer("release", "users", users)
        return bool(self._request("release", Op.RELEASE, *fields, timeout=timeout)[0])

    def has_extended_api(self) -> bool:
        return True

    def set_on_disconnect(self, key: Text, value: Text, now: Mapping[str, Text] | None = None) -> bool:
        if not self._pool.server.is_ours:
            return False
        operation = "set_on_disconnect"
        pairs = _pairs(operation, "now", now)
        fields = _key(operation, key), _value(operation, value), pairs
        if pairs:
            self._request(operation, Op.SET_ON_DISCONNECT, *fields)
        else:
            # Nobody depends on it before the end of this connection, which the server sees later.
            seconds = self._timeout.total_seconds()
            self._pool.request(Op.SET_ON_DISCONNECT, fields, seconds, await_response=False)
        return True

    def clone(self) -> TCPStore:
        other = TCPStore(self._host, self.port, timeout=self._timeout or STORE_TIMEOUT, use_libuv=self._libuv)
        other._timeout, other.server, other.keeps_alive = self._timeout, self.server, self.keeps_alive
        return other

    def __repr__(self) -> str:
        return f"TCPStore({self._pool.server}{', master' if self.server else ''})"

    def _request(
        self,
        operation: str,
        row: Operation,
        *fields: Any,
        timeout: timedelta | None = None,
        ahead: Sequence[Ahead] = (),
    ) -> tuple[Any, ...]:
        """Send a request; return the fields of the reply, or raise an error that names the operation and its keys."""
        seconds = self._timeout.total_seconds() if timeout is None else timeout_seconds(operation, timeout)
        limit = request_limit()
        if limit is not None:
            return self._request_within(limit, operation, row, fields, seconds, ahead)
        try:
            return self._pool.request(row, fields, seconds, ahead)
        except RequestTimeout as report:
            raise self._timeout_error(report, operation, fields, Deadline(seconds)) from None

    def _request_within(
        self,
        limit: RequestLimit,
        operation: str,
        row: Operation,
        fields: tuple[Any, ...],
        seconds: float,
        ahead: Sequence[Ahead],
    ) -> tuple[Any, ...]:
        """Run a request of an operation whose requests share a deadline."""
        bounded, began = limit.within(seconds), monotonic()
        try:
            if limit.spent():
                raise RequestTimeout(no_response=True)
            response = self._pool.request(row, fields, without_grace(bounded) if bounded < seconds else bounded, ahead)
        except RequestTimeout as report:
            if not report.no_response:
                limit.silent_since = None
            elif limit.silent_since is None:
                limit.silent_since = began
            shown = Deadline(limit.deadline.seconds if bounded < seconds else seconds)
            raise self._timeout_error(report, operation, fields, shown) from None
        limit.silent_since = None
        return response

    def _timeout_error(
        self, report: RequestTimeout, operation: str, fields: tuple[Any, ...], deadline: Deadline
    ) -> StoreTimeoutError:
        keys = _user_keys(report.missing, fields)
        if report.no_response:
            return self._no_response(operation, keys, deadline)
        if operation == "barrier":
            return self._barrier_timeout(key_text("barrier", keys[0]), self.add(keys[0], 0), fields[1], deadline)
        return self._timed_out(operation, keys, deadline)

    def _no_response(self, operation: str, keys: Sequence[Text], deadline: Deadline) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"{operation}: wait timeout after {deadline.seconds * 1000:.0f}ms, keys: {quote_keys(list(keys))}, on "
            f"{self!r}: the server does not respond at all. It may be stopped, overloaded or cut off from this host. "
            f"The operation may or may not have been done."
        )

    def _open_server(self, port: int, shared: bool, descriptor: int | None) -> TCPServer:
        with _shared_servers_lock:
            server = _shared_servers.get((simulated_place.get(), port)) if shared else None
            if server is None:
                server = TCPServer(self._host, port, descriptor, self._timeout.total_seconds())
            if shared:
                _shared_servers[simulated_place.get(), server.port] = server
        return server

    def _join(self, world: int | None) -> None:
        deadline = self._deadline("TCPStore", None)
        # The kernel need not be asked whose the own server is. Later, it may have ended.
        self._pool.server.listening = self.server.addresses if self.server is not None else ()
        self._pool.connect(deadline)
        self._pool.server.listening = ()
        if world is None:
            return
        self._request("TCPStore", Op.ADD, _WORKERS_KEY, 1)
        if self.server is not None:
            self._await_workers(world, deadline)

    def _await_workers(self, world: int, deadline: Deadline) -> None:
        try:
            self._pool.request(Op.WAIT_NUMBER, (_WORKERS_KEY, world), deadline.remaining())
        except RequestTimeout:
            joined = self._request("TCPStore", Op.ADD, _WORKERS_KEY, 0)[0]
            raise StoreTimeoutError(
                f"TCPStore: Timed out after {deadline.seconds:g} seconds waiting for clients. {joined}/{world} clients "
                f"joined, on {self!r}. Check that all ranks were started, with this address and world size."
                f"{advice_on_loopback(self)}"
            ) from None


def shared_server(port: int) -> TCPServer | None:
    """Return the server that stores of this process share at a port; None if there is none."""
    with _shared_servers_lock:
        return _shared_servers.get((simulated_place.get(), port))


def forget_simulated_servers() -> None:
    """Forget what simulated ranks share: those of another run have the same places."""
    with _shared_servers_lock:
        for key in [key for key in _shared_servers if key[0] is not None]:
            del _shared_servers[key]


def advice_on_loopback(store: Any) -> str:
    """Return the end of an error for absent ranks: that only this host reaches the store that this process serves.

    It is empty if other hosts reach it, or if this process does not serve it.
    """
    store = innermost(store)
    server = store.server if isinstance(store, TCPStore) else None
    return only_this_host([str(address[0]) for address in server.addresses] if server is not None else [])


def _checked_host(host: str) -> str:
    if not isinstance(host, str):
        raise ArgumentTypeError(explain("TCPStore", "host_name", "a str", host))
    try:
        return parse_host(host)
    except ValueError as error:
        text = explain("TCPStore", "host_name", "a host name or an address", host, hint=f"The reason: {error}.")
        raise ArgumentError(text) from None


def _checked_port(port: int) -> int:
    number = integer("TCPStore", "port", port)
    if not 0 <= number < 2**16:
        raise ArgumentTypeError(explain("TCPStore", "port", "from 0 to 65535", port))
    return number


def _key(operation: str, key: Text) -> bytes:
    """Return a key as it is on the wire, or raise if it is too long."""
    # On the wire, keys of users have a slash in front; the store's own keys have none.
    name = b"/" + (key.encode() if type(key) is str and key.isascii() else key_bytes(operation, key))
    if len(name) > MAX_KEY_BYTES:
        expected, got = f"at most {MAX_KEY_BYTES - 1} bytes long", f"{len(name) - 1} bytes"
        raise ArgumentError(explain(operation, "key", expected, got))
    return name


def _keys(operation: str, keys: Sequence[Text]) -> list[bytes]:
    return [_key(operation, key) for key in key_list(operation, keys)]


def _value(operation: str, value: Text, argument: str = "value") -> bytes:
    data = value_bytes(operation, value, argument)
    if len(data) > MAX_VALUE_BYTES:
        hint = "A store is for addresses and small values; send tensors with a collective."
        got = f"{len(data)} bytes"
        raise ArgumentError(explain(operation, argument, f"at most {MAX_VALUE_BYTES} bytes long", got, hint=hint))
    return data


def _pairs(operation: str, argument: str, pairs: Mapping[str, Text] | None) -> list[tuple[bytes, bytes]]:
    found = key_values(operation, argument, pairs)
    return [(_key(operation, key), _value(operation, value)) for key, value in found.items()]


def _user_keys(missing: list[bytes] | None, fields: tuple[Any, ...]) -> list[bytes]:
    first = fields[0] if fields else []
    keys = missing or (first if isinstance(first, list) else [first])
    return [(key[0] if isinstance(key, tuple) else key).removeprefix(b"/") for key in keys]
