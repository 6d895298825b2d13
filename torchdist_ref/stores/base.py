"""The store: a small dictionary that all ranks share, through which they find each other.

Ranks use a store to exchange addresses, to count who has arrived, and to agree on small facts; tensors never
go through it. `Store` states what each operation means and builds the richer operations from the few basic
ones, so that a store of your own needs only ``set``, ``get``, ``add``, ``check``, ``compare_set``,
``delete_key`` and ``num_keys``. Names, arguments and meaning are those of `torch.distributed.Store` in 2.13
(https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store).

A new kind of store goes into a file of its own; an operation goes here only if every store can have it.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, SupportsIndex

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, StoreTimeoutError, explain
from torchdist_ref.timeouts import STORE_TIMEOUT, Deadline

Text = str | bytes | bytearray
INT64 = range(-(2**63), 2**63)
POLL_SECONDS = 0.01
"""Interval at which a store that is not notified of changes is polled."""


class Store:
    """What every store can do. Keys are text or bytes, values come back as bytes.

    A call that needs a missing key waits for it, up to the store's time-out (300 s unless set), and then
    raises `StoreTimeoutError`. Any rank may make any call at any time; nothing here is collective but `barrier`.

    >>> from torchdist_ref.stores import HashStore
    >>> store = HashStore()
    >>> store.set("colour", "red")
    >>> store.get("colour")
    b'red'
    """

    _timeout: timedelta = STORE_TIMEOUT

    @property
    def timeout(self) -> timedelta:
        """How long a call waits for a missing key; `set_timeout` changes it."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long this object's calls wait for missing keys.

        Args:
            timeout: the new time-out; zero means to look once and never wait.

        Raises:
            ArgumentError: the time-out is negative.
            ArgumentTypeError: it is no timedelta.
        """
        self._timeout = timedelta(seconds=seconds("set_timeout", timeout))

    def set(self, key: Text, value: Text) -> None:
        """Store a value under a key, over any old one. It is in the store when the call returns."""
        raise self._lacks("set")

    def get(self, key: Text) -> bytes:
        """The value of a key, waiting for the key if it is missing.

        Raises:
            StoreTimeoutError: nobody set the key within the store's time-out.
        """
        raise self._lacks("get")

    def add(self, key: Text, value: int) -> int:
        """Add to a counter in one step, and return its new value. A missing counter starts at 0.

        Raises:
            ArgumentError: the key holds something that is no whole number, or the sum leaves 64 bits.

        >>> from torchdist_ref.stores import HashStore
        >>> store = HashStore()
        >>> store.add("arrived", 1), store.add("arrived", 2)
        (1, 3)
        """
        raise self._lacks("add")

    def check(self, keys: Sequence[Text]) -> bool:
        """Whether all the keys are there now. Never waits."""
        raise self._lacks("check")

    def compare_set(self, key: Text, expected_value: Text, desired_value: Text) -> bytes:
        """Store `desired_value` only if the key holds `expected_value` (or is missing and that is empty).

        Returns:
            The value that the key holds afterwards; for a missing key and a non-empty expectation, as in torch,
            the expectation itself, and nothing is stored.
        """
        raise self._lacks("compare_set")

    def delete_key(self, key: Text) -> bool:
        """Remove a key. Returns whether it was there."""
        raise self._lacks("delete_key")

    def num_keys(self) -> int:
        """How many keys the whole store holds, the store's own bookkeeping included."""
        raise self._lacks("num_keys")

    def list_keys(self) -> list[str]:
        """All keys that users have set, in no particular order; bookkeeping and queues left out."""
        raise self._lacks("list_keys")

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Args:
            keys: what to wait for; an empty list is there at once.
            timeout: how long; the store's time-out if None.

        Raises:
            StoreTimeoutError: some key is still missing; the message lists which.
        """
        deadline = self._deadline("wait", timeout)
        key_list("wait", keys)
        while not self.check(keys):
            if deadline.passed():
                raise self._timed_out("wait", [key for key in keys if not self.check([key])], deadline)
            time.sleep(min(POLL_SECONDS, deadline.remaining()))

    def append(self, key: Text, value: Text) -> None:
        """Put bytes behind what the key holds; a missing key starts empty. One step, as seen by others."""
        old, tail = b"", value_bytes("append", value)
        if self.check([key]):
            old = self.get(key)
        while (seen := self.compare_set(key, old, old + tail)) != old + tail:
            old = b"" if seen == old else seen

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        """The values of several keys, in order, waiting for those that are missing."""
        key_list("multi_get", keys)
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Store several values.

        Raises:
            ArgumentError: the lists differ in length; nothing was stored.
        """
        for key, value in pair_list("multi_set", keys, values):
            self.set(key, value)

    def barrier(self, key: Text, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until `world_size` callers have come to the barrier `key`. A key serves once.

        Args:
            key: names the barrier; the store keeps its count, so take a fresh key each time.
            world_size: how many callers to wait for, this one included.
            timeout: how long; the store's time-out if None.

        Raises:
            StoreTimeoutError: others did not come in time. This caller stays counted.

        >>> from torchdist_ref.stores import HashStore
        >>> HashStore().barrier("start", 1)
        """
        world, name = world_of("barrier", world_size), key_text("barrier", key)
        deadline = self._deadline("barrier", timeout)
        arrived = self.add(f"{name}/num_members", 1)
        if arrived == world:
            self.set(f"{name}/last_member", "1")
        try:
            self.wait([f"{name}/last_member"], timedelta(seconds=deadline.remaining()))
        except StoreTimeoutError:
            raise self._too_few(name, self.add(f"{name}/num_members", 0), world, deadline) from None

    def queue_push(self, key: Text, value: Text) -> None:
        """Put a value at the end of the queue `key`. Queues and values live in separate worlds."""
        raise self._lacks("queue_push")

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Take the value at the head of a queue; each value goes to one caller.

        Args:
            key: the queue.
            block: whether to wait for a value, up to the store's time-out.

        Raises:
            QueueEmptyError: nothing is there and `block` is False.
            StoreTimeoutError: nothing came in time.

        >>> from torchdist_ref.stores import HashStore
        >>> store = HashStore()
        >>> store.queue_push("jobs", "first")
        >>> store.queue_push("jobs", "second")
        >>> store.queue_pop("jobs"), store.queue_len("jobs")
        (b'first', 1)
        """
        raise self._lacks("queue_pop")

    def queue_len(self, key: Text) -> int:
        """How many values the queue holds now; 0 for a queue that nobody has pushed to."""
        raise self._lacks("queue_len")

    def has_extended_api(self) -> bool:
        """Whether ``append``, ``multi_get`` and ``multi_set`` are done by the store itself, in one step each."""
        return False

    def clone(self) -> Store:
        """Another object for the same keys, so that threads need not share one. Time-outs are separate."""
        raise self._lacks("clone")

    def _lacks(self, operation: str) -> NotImplementedError:
        # torch raises NotImplementedError here, and its callers catch that.
        return NotImplementedError(
            f"{operation}: {type(self).__name__} has no such operation. HashStore and TCPStore have all of them; "
            f"a store of your own gets it by defining {operation}()."
        )

    def _deadline(self, operation: str, timeout: timedelta | float | None) -> Deadline:
        return Deadline(seconds(operation, self.timeout if timeout is None else timeout))

    def _timed_out(self, operation: str, keys: Sequence[Text], deadline: Deadline) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"{operation}: wait timeout after {deadline.seconds * 1000:.0f}ms, keys: {shown(keys)}, on {self!r}. "
            f"No rank has set that yet: see whether the rank that should is alive, or allow longer with set_timeout."
        )

    def _too_few(self, key: str, arrived: int, world: int, deadline: Deadline) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"barrier: barrier timeout after {deadline.seconds * 1000:.0f}ms, key: {key!r}, on {self!r}: "
            f"{arrived} of {world} came. See which ranks are late or dead; use a new key for the next try."
        )


def key_text(operation: str, key: Text, argument: str = "key") -> str:
    """The key as text; bytes that are no UTF-8 survive the trip there and back."""
    if isinstance(key, str):
        return key
    if isinstance(key, (bytes, bytearray)):
        return key.decode("utf-8", "surrogateescape")
    raise ArgumentTypeError(explain(operation, argument, "a str or bytes", key))


def key_bytes(operation: str, key: Text, argument: str = "key") -> bytes:
    """The key as bytes."""
    if isinstance(key, str):
        try:
            return key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ArgumentTypeError(explain(operation, argument, "text that UTF-8 has bytes for", key)) from None
    if isinstance(key, (bytes, bytearray)):
        return bytes(key)
    raise ArgumentTypeError(explain(operation, argument, "a str or bytes", key))


def value_bytes(operation: str, value: Any, argument: str = "value") -> bytes:
    """The value as bytes."""
    if type(value) is bytes:
        return value
    if isinstance(value, (str, bytes, bytearray)):
        return key_bytes(operation, value, argument)
    hint = "Encode it first: str(x) for a number, pickle.dumps(x) for an object."
    raise ArgumentTypeError(explain(operation, argument, "a str or bytes", value, hint=hint))


def key_list(operation: str, keys: Collection[Text], argument: str = "keys") -> list[bytes]:
    """Several keys as bytes; a set will do. One bare string is refused: it would be read as a list of letters."""
    _must_be_list(operation, argument, keys)
    return [key_bytes(operation, key, f"{argument}[{i}]") for i, key in enumerate(keys)]


def pair_list(operation: str, keys: Sequence[Text], values: Sequence[Text]) -> list[tuple[bytes, bytes]]:
    """Keys with their values; the lists must be equally long."""
    names = key_list(operation, keys)
    _must_be_list(operation, "values", values)
    if len(names) != len(values):
        raise ArgumentError(explain(operation, "values", f"as long as keys ({len(names)})", len(values)))
    zipped = enumerate(zip(names, values, strict=True))
    return [(key, value_bytes(operation, value, f"values[{i}]")) for i, (key, value) in zipped]


def _must_be_list(operation: str, argument: str, given: Any) -> None:
    if isinstance(given, (str, bytes, bytearray)) or not isinstance(given, Collection):
        raise ArgumentTypeError(explain(operation, argument, "a list of str or bytes", given))


def integer(operation: str, argument: str, number: SupportsIndex) -> int:
    """A whole number that fits in 64 bits, which is all that the wire and torch can carry."""
    try:
        value = operator.index(number)
    except TypeError:
        raise ArgumentTypeError(explain(operation, argument, "an int", number)) from None
    if value not in INT64:
        raise ArgumentTypeError(explain(operation, argument, "an int of 64 bits", number))
    return value


def world_of(operation: str, number: SupportsIndex) -> int:
    """A world size: a whole number of one or more."""
    if type(number) is int and 0 < number < INT64.stop:
        return number  # what nearly all callers give
    value = integer(operation, "world_size", number)
    if value < 1:
        raise ArgumentError(explain(operation, "world_size", "1 or more", value))
    return value


def seconds(operation: str, timeout: timedelta | float, argument: str = "timeout") -> float:
    """A time-out in seconds. torch waits for ever on a negative one; that is nearly always a mistake."""
    if isinstance(timeout, timedelta):
        value = timeout.total_seconds()
    elif isinstance(timeout, float):
        value = timeout
    else:
        raise ArgumentTypeError(explain(operation, argument, "a datetime.timedelta", timeout))
    if not 0 <= value <= timedelta.max.total_seconds():
        raise ArgumentError(explain(operation, argument, "zero or more", timeout, hint="Zero means: look once."))
    return value


def shown(keys: Sequence[Text], most: int = 4) -> str:
    """Keys as an error message shows them: quoted, and the first few only."""
    texts = [repr(k if isinstance(k, str) else bytes(k).decode("utf-8", "backslashreplace"))[:100] for k in keys[:most]]
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(texts) + more
