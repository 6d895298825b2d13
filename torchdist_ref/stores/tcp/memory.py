"""Memory of TCPStore's server: the operations on its table, counted against one budget.

Keys, values, queues, the keys of waiting requests, sessions, kept responses, unsent replies and what is set for
clients that disconnect use at most one budget, 256 MiB by default. A request that would exceed it is refused. Do not
add clients or sessions here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import compress, repeat
from operator import is_
from typing import Any

from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores.hash import MAX_NUMBER_BYTES, Deleted, Table, release_counter
from torchdist_ref.stores.tcp.operations import OPERATIONS, Op, Operation
from torchdist_ref.stores.tcp.protocol import MAX_KEY_BYTES, MAX_VALUE_BYTES

MEMORY_VARIABLE = "TORCHDIST_REF_STORE_MEMORY"
DEFAULT_MEMORY_MIB = 256
KEY_OVERHEAD_BYTES = 200
"""Memory of a key or of a queued value besides its bytes."""
QUEUE_OVERHEAD_BYTES = 800
"""Memory of a queue besides its key and its values."""


_CHANGES = {
    row
    for row in OPERATIONS.values()
    if row.wakes != "none" or row in (Op.DELETE_KEY, Op.QUEUE_POP, Op.WAIT_POP, Op.RELEASE)
}
"""Operations that change the memory of keys and values."""


def memory_budget() -> int:
    """Return the memory that a server may use for its clients, in bytes."""
    text = os.environ.get(MEMORY_VARIABLE, "")
    return (int(text) if text.isdecimal() else DEFAULT_MEMORY_MIB) << 20


class StoreMemory:
    """Table of a store, and the memory that the store uses.

    Attributes:
        table: keys, values and queues.
        budget: largest `used`, in bytes.
        used: memory that counts against the budget, in bytes. The holders of other memory than the table's add to it.
        reclaim: function that frees memory of unread replies until so many bytes fit, as far as possible; or None.
    """

    def __init__(self) -> None:
        self.table = Table(slash=b"/")
        self.budget = memory_budget()
        self.used = 0
        self.reclaim: Callable[[int], None] | None = None

    def fits(self, nbytes: int) -> bool:
        """Return whether so many bytes fit in the budget; for that, clients that do not read are disconnected."""
        if self.used + nbytes > self.budget and self.reclaim is not None:
            self.reclaim(nbytes)
        return self.used + nbytes <= self.budget

    def run(self, operation: Operation, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run an operation and count the memory that it changes.

        Raises:
            ArgumentError: the operation is not possible, or would exceed the budget.
        """
        execute = operation.execute
        assert execute is not None
        if operation not in _CHANGES:
            return execute(self.table, *fields)
        if operation is Op.SET or operation is Op.ADD:
            # The most frequent changes, without the general bookkeeping below, which would double their cost.
            key, value = fields
            values = self.table.values
            before = len(values[key]) if key in values else -len(key) - KEY_OVERHEAD_BYTES
            if not self.fits((len(value) if operation is Op.SET else MAX_NUMBER_BYTES) - before):
                raise self.full(operation)
            reply = execute(self.table, key, value)
            self.used += len(values[key]) - before
            return reply
        if operation is Op.MULTI_SET:
            return self._set_all(dict(fields[0]))
        key = release_counter(fields[0]) if operation is Op.RELEASE else fields[0]
        before = self._value_bytes(key) + self._queue_bytes(key)
        if operation.wakes != "none" or (operation is Op.RELEASE and fields[1] > 1):
            self._require(operation, (key, *fields[1:]))
        reply = execute(self.table, *fields)
        self.used += self._value_bytes(key) + self._queue_bytes(key) - before
        if operation is Op.QUEUE_PUSH:
            self.used += len(fields[1]) + KEY_OVERHEAD_BYTES
        elif operation in (Op.QUEUE_POP, Op.WAIT_POP):
            value = reply[0][1] if operation is Op.QUEUE_POP else reply[0]
            self.used -= 0 if value is None else len(value) + KEY_OVERHEAD_BYTES
        return reply

    def set_unless_present(self, key: bytes, value: bytes) -> bool:
        """Set a key beyond the budget, since its value was counted before; return whether it was missing."""
        if key in self.table.values:
            return False
        self.table.values[key] = value
        self.used += self._value_bytes(key)
        return True

    def free(self, deleted: Deleted) -> None:
        """Stop counting what a release has deleted."""
        values, queues, nbytes = deleted
        self.used -= values * KEY_OVERHEAD_BYTES + queues * QUEUE_OVERHEAD_BYTES + nbytes

    def full(self, operation: Operation) -> ArgumentError:
        """Return the error of a request that would exceed the budget."""
        return ArgumentError(
            f"{operation.name.lower()}: the store is full: keys, values, waiting requests and unread replies may use "
            f"{self.budget >> 20} MiB. A store is for addresses and small values. Delete keys that are not needed, "
            f"send data with collectives, or set {MEMORY_VARIABLE} to a larger number of MiB where the server runs."
        )

    def _set_all(self, pairs: dict[bytes, bytes]) -> tuple[Any, ...]:
        # Without a call in Python for each of up to 131072 pairs: other clients wait.
        former = list(map(self.table.values.get, pairs))
        added = list(compress(pairs, map(is_, former, repeat(None))))
        change = len(added) * KEY_OVERHEAD_BYTES + sum(map(len, added))
        change += sum(map(len, pairs.values())) - sum(map(len, filter(None, former)))
        if not self.fits(change):
            raise self.full(Op.MULTI_SET)
        self.table.values.update(pairs)
        self.used += change
        return ()

    def _value_bytes(self, key: bytes) -> int:
        """Return the memory of a key and its value."""
        value = self.table.values.get(key)
        return 0 if value is None else len(key) + len(value) + KEY_OVERHEAD_BYTES

    def _queue_bytes(self, key: bytes) -> int:
        """Return the memory of a queue without the values in it."""
        return len(key) + QUEUE_OVERHEAD_BYTES if key in self.table.queues else 0

    def _require(self, operation: Operation, fields: tuple[Any, ...]) -> None:
        key = fields[0]
        wanted = KEY_OVERHEAD_BYTES + sum([len(field) for field in fields if isinstance(field, bytes)])
        former = self._value_bytes(key)
        if operation is Op.APPEND:
            wanted += former
            if wanted > MAX_VALUE_BYTES + MAX_KEY_BYTES:
                raise ArgumentError(f"append: the value would be longer than {MAX_VALUE_BYTES} bytes, the limit.")
        if operation is Op.QUEUE_PUSH:
            former, wanted = 0, wanted + (0 if key in self.table.queues else QUEUE_OVERHEAD_BYTES)
        if not self.fits(wanted - former):
            raise self.full(operation)
