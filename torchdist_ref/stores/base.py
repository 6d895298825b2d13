"""Interface of stores, and the checks of their arguments.

A store is a small dictionary shared by all ranks. Ranks use it to exchange addresses, to count arrivals and to agree on
small values; tensors never go through it. `Store` defines what each operation means. It builds the others from a few
basic ones, so a store of your own needs only ``set``, ``get``, ``add``, ``check``, ``compare_set``, ``delete_key`` and
``num_keys``. Names, arguments and meaning are those of `torch.distributed.Store` in 2.13
(https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store).

A request has a time-out of its own, so a host that is cut off from the store would wait that long in each of several
requests. `limit_requests` bounds those of one operation together.

Keys and values are bytes underneath; text is encoded as UTF-8, as torch does. Every check names the operation and the
argument. Do not add a check that only one kind of store needs, or an operation that not every store can have.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, SupportsIndex

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, StoreTimeoutError, explain, indexed
from torchdist_ref.timeouts import MAX_TIMEOUT, STORE_TIMEOUT, Deadline

Text = str | bytes | bytearray
INT64 = range(-(2**63), 2**63)
_FIRST_POLL_SECONDS, POLL_SECONDS = 0.0002, 0.01
"""First and longest interval at which a store that is not notified of changes is polled."""
_LATE_SECONDS = 0.25
"""Time for the response to a request after the limit, from a server that responded to the request before."""
_ABSENT = "\0no such key"
"""Value that no key has, in the place of a missing one."""
RELEASED = "released"
"""Last part of the key that counts the users who have released a prefix."""


class Store:
    """Dictionary shared by all ranks. Keys are text or bytes, values are returned as bytes.

    A call that needs a missing key waits for it, up to the store's time-out (300 s by default), and then raises
    `StoreTimeoutError`. Any rank may make any call at any time; only `barrier` is collective.

    >>> from torchdist_ref.stores import HashStore
    >>> store = HashStore()
    >>> store.set("color", "red")
    >>> store.get("color")
    b'red'

    Elsewhere:
        The PMIx key-value space of MPI's launchers; none in NCCL, whose ``ncclUniqueId`` a program distributes itself;
        the key-value store of JAX's coordination client, which is not public.
    """

    _timeout: timedelta = STORE_TIMEOUT

    @property
    def timeout(self) -> timedelta:
        """Time that a call waits for a missing key; `set_timeout` changes it."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long calls of this object wait for missing keys.

        Args:
            timeout: new time-out; zero for a single check without waiting.

        Raises:
            ArgumentError: the time-out is negative.
            ArgumentTypeError: it is not a timedelta.

        Elsewhere:
            The attribute ``PMIX_TIMEOUT`` of a request in PMIx; none in NCCL; an argument of each request in JAX.
        """
        timeout_seconds("set_timeout", timeout)
        self._timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)

    def set(self, key: Text, value: Text) -> None:
        """Store a value under a key, and replace any old one. It is in the store when the call returns.

        Raises:
            ArgumentTypeError: key or value is neither text nor bytes.
            DistNetworkError: the server of a TCPStore cannot be reached.

        Elsewhere:
            ``PMIx_Put`` and ``PMIx_Commit`` in PMIx; none in NCCL; ``key_value_set`` of JAX's coordination client,
            which is not public.
        """
        raise self._unsupported("set")

    def get(self, key: Text) -> bytes:
        """Return the value of a key; wait for the key if it is missing.

        Raises:
            StoreTimeoutError: no rank set the key within the store's time-out.

        Elsewhere:
            ``PMIx_Get`` in PMIx; none in NCCL; ``blocking_key_value_get`` of JAX's coordination client, which is not
            public.
        """
        raise self._unsupported("get")

    def get_if_present(self, key: Text) -> bytes | None:
        """Return the value of a key, or None if it is missing. Never waits.

        Raises:
            ArgumentTypeError: the key is neither text nor bytes.
            DistNetworkError: the server of a TCPStore cannot be reached.

        >>> import torchdist_ref as dist
        >>> store = dist.HashStore()
        >>> store.set("leader", "rank 3")
        >>> store.get_if_present("leader"), store.get_if_present("deputy")
        (b'rank 3', None)

        Elsewhere:
            ``PMIx_Get`` with ``PMIX_IMMEDIATE`` in PMIx; none in NCCL; ``key_value_try_get`` of JAX's coordination
            client, which is not public.
        """
        # One atomic operation of every store, torch's included. It stores nothing, since no key has the expected value.
        found = self.compare_set(key, _ABSENT, _ABSENT)
        return None if found == _ABSENT.encode() else found

    def add(self, key: Text, value: int) -> int:
        """Add to a counter atomically, and return its new value. A missing counter starts at 0.

        Raises:
            ArgumentError: the value of the key is not an integer, or the sum does not fit in 64 bits.

        >>> import torchdist_ref as dist
        >>> store = dist.HashStore()
        >>> store.add("arrived", 1), store.add("arrived", 2)
        (1, 3)

        Elsewhere:
            ``MPI_Fetch_and_op`` in MPI, which returns the old value; none in NCCL; ``key_value_increment`` of JAX's
            coordination client, which is not public.
        """
        raise self._unsupported("add")

    def check(self, keys: Sequence[Text]) -> bool:
        """Return whether all keys exist now. Never waits."""
        raise self._unsupported("check")

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        """Store `desired_value` only if the key holds `expected_value` (or is missing and that is empty).

        Returns:
            Value of the key afterward. If the key is missing and `expected_value` is not empty, nothing is stored and
            `expected_value` is returned, as in torch.

        Raises:
            ArgumentTypeError: an argument is neither text nor bytes.

        >>> import torchdist_ref as dist
        >>> store = dist.HashStore()
        >>> store.compare_set("leader", "", "rank 3"), store.compare_set("leader", "", "rank 5")
        (b'rank 3', b'rank 3')

        Elsewhere:
            ``MPI_Compare_and_swap`` in MPI, on integers; none in NCCL and JAX.
        """
        raise self._unsupported("compare_set")

    def delete_key(self, key: Text) -> bool:
        """Remove a key. Return whether it existed.

        Raises:
            ArgumentTypeError: the key is neither text nor bytes.

        Elsewhere:
            ``PMIx_Unpublish`` in PMIx; none in NCCL; ``key_value_delete`` of JAX's coordination client, which is not
            public.
        """
        raise self._unsupported("delete_key")

    def num_keys(self) -> int:
        """Return the number of keys of the whole store, the store's own bookkeeping included.

        Raises:
            DistNetworkError: the server of a TCPStore cannot be reached.

        Elsewhere:
            None in MPI, NCCL and JAX.
        """
        raise self._unsupported("num_keys")

    def list_keys(self) -> list[str]:
        """Return the keys that users have set, in no particular order, without bookkeeping and queues."""
        raise self._unsupported("list_keys")

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Args:
            keys: keys to wait for; with an empty list the call returns at once.
            timeout: time to wait; the store's time-out if None.

        Raises:
            StoreTimeoutError: keys are still missing; the message lists them.

        Elsewhere:
            ``PMIx_Get`` in PMIx waits for a key; none in NCCL; ``blocking_key_value_get`` of JAX's coordination client,
            which is not public.
        """
        deadline = self._deadline("wait", timeout)
        key_list("wait", keys)
        pause = _FIRST_POLL_SECONDS
        while not self.check(keys):
            if deadline.passed():
                raise self._timed_out("wait", [key for key in keys if not self.check([key])], deadline)
            time.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, POLL_SECONDS)

    def append(self, key: Text, value: Text) -> None:
        """Append bytes to the value of a key, atomically. A missing key starts empty."""
        old, added = self.get_if_present(key) or b"", value_bytes("append", value)
        while (current := self.compare_set(key, old, old + added)) != old + added:
            old = b"" if current == old else current

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        """Return the values of several keys, in order; wait for those that are missing."""
        key_list("multi_get", keys)
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Store several values.

        Raises:
            ArgumentError: the lists have different lengths; nothing was stored.
        """
        for key, value in pair_list("multi_set", keys, values):
            self.set(key, value)

    def barrier(self, key: Text, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until `world_size` callers have called this with the same key. A key serves once.

        Args:
            key: name of the barrier. The store keeps its count, so use a new key each time.
            world_size: number of callers to wait for, this one included.
            timeout: time to wait; the store's time-out if None.

        Raises:
            StoreTimeoutError: not all callers arrived in time. This caller stays counted.

        >>> from torchdist_ref.stores import HashStore
        >>> HashStore().barrier("start", 1)
        """
        world, name = checked_world_size("barrier", world_size), key_text("barrier", key)
        deadline = self._deadline("barrier", timeout)
        arrived = self.add(f"{name}/num_members", 1)
        if arrived == world:
            self.set(f"{name}/last_member", "1")
        try:
            self.wait([f"{name}/last_member"], timedelta(seconds=deadline.remaining()))
        except StoreTimeoutError:
            raise self._barrier_timeout(name, self.add(f"{name}/num_members", 0), world, deadline) from None

    def queue_push(self, key: Text, value: Text) -> None:
        """Append a value to the queue `key`. Queues and values have separate namespaces."""
        raise self._unsupported("queue_push")

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Remove and return the value at the head of a queue. Each value is returned to one caller.

        Args:
            key: name of the queue.
            block: whether to wait for a value, up to the store's time-out.

        Raises:
            QueueEmptyError: the queue is empty and `block` is False.
            StoreTimeoutError: no value was pushed in time.

        >>> import torchdist_ref as dist
        >>> store = dist.HashStore()
        >>> store.queue_push("jobs", "first")
        >>> store.queue_push("jobs", "second")
        >>> store.queue_pop("jobs"), store.queue_len("jobs")
        (b'first', 1)
        """
        raise self._unsupported("queue_pop")

    def queue_len(self, key: Text) -> int:
        """Return the number of values in a queue; 0 for a queue that does not exist."""
        raise self._unsupported("queue_len")

    def has_extended_api(self) -> bool:
        """Return whether ``append``, ``multi_get`` and ``multi_set`` are atomic operations of the store itself."""
        return False

    def set_on_disconnect(self, key: Text, value: Text, now: Mapping[str, Text] | None = None) -> bool:
        """Ask the server to set a key if this process ends without another request, unless the key exists then.

        Args:
            key: key.
            value: value; empty to withdraw the last such request.
            now: keys and values to set at once, with the same request.

        Returns:
            Whether the store can do that; if not, nothing is set. Its server has to be another process, and of this
            library.
        """
        return False

    def wait_get(
        self,
        keys: Sequence[Text],
        timeout: timedelta,
        publish: Mapping[str, Text] | None = None,
        on_disconnect: tuple[str, Text] | None = None,
    ) -> list[bytes]:
        """Set some keys, and return the values of others once all exist. A `TCPStore` does it in one round trip.

        Args:
            keys: keys to wait for.
            timeout: time to wait for them.
            publish: keys and values to set before.
            on_disconnect: key and value for `set_on_disconnect`, where the store has that.

        Raises:
            StoreTimeoutError: a key was not set in time.
        """
        for key, value in key_values("wait_get", "publish", publish).items():
            self.set(key, value)
        self.wait(keys, timeout)
        return self.multi_get(keys)

    def set_and_compare_set(
        self, publish: Mapping[str, Text], key: Text, expected_value: Text, desired_value: Text
    ) -> bytes:
        """Set some keys, and return the result of `compare_set` on another. A `TCPStore` does it in one round trip.

        If its connection breaks, that may do both twice.
        """
        for each, value in key_values("compare_set", "publish", publish).items():
            self.set(each, value)
        return self.compare_set(key, expected_value, desired_value)

    def release(self, prefix: Text, users: int, timeout: timedelta | None = None) -> bool:
        """Count one more user of a prefix as gone. The last one deletes all keys ``prefix/...``, the count among them.

        Args:
            prefix: text before the keys, without the slash.
            users: number of callers after whom the keys are deleted. A later user of the prefix starts a new count.
            timeout: longest duration; the store's time-out by default.

        Returns:
            Whether the keys were deleted. A store that other processes use deletes many keys in several steps, between
            which others may find a part of them; it returns after the last step.

        >>> import torchdist_ref as dist
        >>> store = dist.HashStore()
        >>> store.multi_set(["group/1/address", "group/10/address"], ["a", "b"])
        >>> store.release("group/1", 2), store.release("group/1", 2), store.list_keys()
        (False, True, ['group/10/address'])
        """
        start = f"{key_text('release', prefix, 'prefix')}/"
        count = integer("release", "users", users)
        if self.add(f"{start}{RELEASED}", 1) < count:
            return False
        for key in self.list_keys():
            if key.startswith(start):
                self.delete_key(key)
        return True

    def clone(self) -> Store:
        """Return another object for the same keys, with a time-out of its own, for use by another thread."""
        raise self._unsupported("clone")

    def _unsupported(self, operation: str) -> Exception:
        # torch raises NotImplementedError here, which its callers catch.
        return indexed(
            NotImplementedError(
                f"{operation}: {type(self).__name__} has no such operation. HashStore and TCPStore have all of them; "
                f"define {operation}() to add it to a store of your own."
            )
        )

    def _deadline(self, operation: str, timeout: timedelta | float | None) -> Deadline:
        return Deadline(timeout_seconds(operation, self.timeout if timeout is None else timeout))

    def _timed_out(self, operation: str, keys: Sequence[Text], deadline: Deadline) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"{operation}: wait timeout after {deadline.seconds * 1000:.0f}ms, keys: {quote_keys(keys)}, on {self!r}. "
            f"No rank has set them yet: check that the rank that should is alive, or wait longer with set_timeout."
        )

    def _barrier_timeout(self, key: str, arrived: int, world: int, deadline: Deadline) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"barrier: barrier timeout after {deadline.seconds * 1000:.0f}ms, key: {key!r}, on {self!r}: "
            f"{arrived} of {world} callers arrived. Check which ranks are late or dead; use a new key for the next try."
        )


def key_text(operation: str, key: Text, argument: str = "key") -> str:
    """Return a key as text. Bytes that are not UTF-8 are kept, as surrogate escapes."""
    if isinstance(key, str):
        return key
    if isinstance(key, (bytes, bytearray)):
        return key.decode("utf-8", "surrogateescape")
    raise ArgumentTypeError(explain(operation, argument, "a str or bytes", key))


def key_bytes(operation: str, key: Text, argument: str = "key") -> bytes:
    """Return a key as bytes."""
    if isinstance(key, str):
        try:
            return key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ArgumentTypeError(explain(operation, argument, "text that UTF-8 can encode", key)) from None
    if isinstance(key, (bytes, bytearray)):
        return bytes(key)
    raise ArgumentTypeError(explain(operation, argument, "a str or bytes", key))


def value_bytes(operation: str, value: Any, argument: str = "value") -> bytes:
    """Return a value as bytes."""
    if type(value) is bytes:
        return value
    if isinstance(value, (str, bytes, bytearray)):
        return key_bytes(operation, value, argument)
    hint = "Encode it first: str(x) for a number, pickle.dumps(x) for an object."
    raise ArgumentTypeError(explain(operation, argument, "a str or bytes", value, hint=hint))


def key_list(operation: str, keys: Collection[Text], argument: str = "keys") -> list[bytes]:
    """Return several keys as bytes. A bare string is refused: it would be read as a list of letters."""
    _must_be_list(operation, argument, keys)
    return [key_bytes(operation, key, f"{argument}[{i}]") for i, key in enumerate(keys)]


def pair_list(operation: str, keys: Sequence[Text], values: Sequence[Text]) -> list[tuple[bytes, bytes]]:
    """Return keys with their values; the lists must have the same length."""
    names = key_list(operation, keys)
    _must_be_list(operation, "values", values)
    if len(names) != len(values):
        raise ArgumentError(
            explain(operation, "values", f"a list of {len(names)} values, one for each key", len(values))
        )
    zipped = enumerate(zip(names, values, strict=True))
    return [(key, value_bytes(operation, value, f"values[{i}]")) for i, (key, value) in zipped]


def key_values(operation: str, argument: str, pairs: Mapping[str, Text] | None) -> Mapping[str, Text]:
    """Return keys with their values; None stands for none."""
    if pairs is None:
        return {}
    if not isinstance(pairs, Mapping):
        raise ArgumentTypeError(explain(operation, argument, "a dict of keys and values", pairs))
    return pairs


def key_value(operation: str, argument: str, pair: tuple[str, Text]) -> tuple[str, Text]:
    """Return a key with its value."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ArgumentTypeError(explain(operation, argument, "a tuple of a key and a value", pair))
    return pair[0], pair[1]


def _must_be_list(operation: str, argument: str, keys: Any) -> None:
    if isinstance(keys, (str, bytes, bytearray)) or not isinstance(keys, Collection):
        raise ArgumentTypeError(explain(operation, argument, "a list of str or bytes", keys))


def integer(operation: str, argument: str, number: SupportsIndex) -> int:
    """Return an integer that fits in 64 bits, the limit of torch's protocol."""
    try:
        value = operator.index(number)
    except TypeError:
        raise ArgumentTypeError(explain(operation, argument, "an int", number)) from None
    if value not in INT64:
        raise ArgumentTypeError(explain(operation, argument, "an int of 64 bits", number))
    return value


def checked_world_size(operation: str, number: SupportsIndex) -> int:
    """Return a world size, an integer of at least 1."""
    if type(number) is int and 0 < number < INT64.stop:
        return number  # the common case, fast
    value = integer(operation, "world_size", number)
    if value < 1:
        raise ArgumentError(explain(operation, "world_size", "1 or more", value))
    return value


def timeout_seconds(operation: str, timeout: timedelta | float, argument: str = "timeout") -> float:
    """Return a time-out in seconds. torch waits forever on a negative one, which is nearly always a mistake."""
    if isinstance(timeout, timedelta):
        value = timeout.total_seconds()
    elif isinstance(timeout, float):
        value = timeout
    else:
        raise ArgumentTypeError(explain(operation, argument, "a datetime.timedelta", timeout))
    if not 0 <= value <= timedelta.max.total_seconds():
        raise ArgumentError(explain(operation, argument, "zero or more", timeout, hint="Zero means a single check."))
    return min(value, MAX_TIMEOUT.total_seconds())


def quote_keys(keys: Sequence[Text], limit: int = 4) -> str:
    """Return keys for an error message: quoted, and the first few only."""
    texts = [
        repr(k if isinstance(k, str) else bytes(k).decode("utf-8", "backslashreplace"))[:100] for k in keys[:limit]
    ]
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(texts) + more


class RequestLimit:
    """Deadline that all store requests of one operation share.

    Args:
        deadline: The deadline of the operation.

    Attributes:
        deadline: The same deadline.
        silent_since: Start of the first request without a response, on the monotonic clock; None after a response.
    """

    __slots__ = ("deadline", "silent_since")

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.silent_since: float | None = None

    @property
    def silent(self) -> bool:
        """Whether the server has not responded for longer than a busy one takes."""
        return self.silent_since is not None and time.monotonic() > self.silent_since + _LATE_SECONDS

    def spent(self) -> bool:
        """Return whether another request is of no use: the deadline has passed and the server is silent."""
        return self.silent and self.deadline.passed()

    def within(self, seconds: float) -> float:
        """Return the time-out of a request: at most the time that is left."""
        left = self.deadline.remaining()
        return min(seconds, left if left or self.silent else _LATE_SECONDS)


_limit: ContextVar[RequestLimit | None] = ContextVar("limit of store requests", default=None)
request_limit: Callable[[], RequestLimit | None] = _limit.get
"""Return the limit of the operation that runs in this context, or None. Every request asks, so no call is added."""


@contextmanager
def limit_requests(seconds: float) -> Iterator[Deadline]:
    """Let the store requests of a block end by a deadline, and yield it. An enclosing block's limit holds if earlier.

    >>> with limit_requests(5.0):
    ...     request_limit().within(300.0) <= 5.0
    True
    """
    deadline, outer = Deadline(seconds), _limit.get()
    chosen = outer if outer is not None and outer.deadline.at < deadline.at else RequestLimit(deadline)
    former = _limit.set(chosen)
    try:
        yield deadline
    finally:
        _limit.reset(former)
