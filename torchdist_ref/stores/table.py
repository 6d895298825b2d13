"""What the operations of a store mean, with no waiting, no locks and no sockets.

`Table` is a dictionary of bytes with torch's rules for counters, compare-and-set and queues. HashStore
puts a lock around one, the TCP server puts sockets in front of one, and FileStore replays its log into one:
so the three can't disagree. Whoever owns a Table sees to it that one thread at a time uses it.
Waiting, time-outs and names of peers don't belong here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.stores.arguments import INT64, shown


class Table:
    """The keys, values and queues of one store.

    Args:
        slash: what the store puts before users' keys; error messages leave it out.
    """

    def __init__(self, slash: bytes = b"") -> None:
        self._slash = slash
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}

    def has(self, key: bytes) -> bool:
        """Whether the key holds a value, or a queue with something in it."""
        return key in self.values or key in self.queues

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of the keys that are not there, each once, in order."""
        return [key for key in dict.fromkeys(keys) if not self.has(key)]

    def add(self, key: bytes, value: int) -> int:
        """Add to a counter, which is decimal text; a missing one counts as 0."""
        total = self.number(key) + value
        if total not in INT64:
            expected = f"small enough for {self._shown(key)} to fit 64 bits"
            raise ArgumentError(explain("add", "value", expected, value))
        self.values[key] = str(total).encode()
        return total

    def number(self, key: bytes) -> int:
        """A counter's value; 0 if it is missing or empty."""
        text = self.values.get(key, b"0")
        try:
            return int(text.replace(b"_", b"?") or b"0")  # Python would read 1_000 as a number
        except ValueError:
            hint = f"It holds {text[:40]!r}; count under a key of its own."
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
        """torch's rule: a missing key matches an empty `expected` only, and answers `expected` otherwise."""
        current = self.values.get(key)
        if current == expected or (current is None and not expected):
            self.values[key] = desired
            return desired
        return expected if current is None else current

    def append(self, key: bytes, value: bytes) -> None:
        """Put bytes behind the key's value; a missing key starts empty."""
        self.values[key] = self.values.get(key, b"") + value

    def delete(self, key: bytes) -> bool:
        """Remove a value (not a queue); whether there was one."""
        return self.values.pop(key, None) is not None

    def push(self, key: bytes, value: bytes) -> None:
        """Put a value at the end of a queue."""
        self.queues.setdefault(key, deque()).append(value)

    def pop(self, key: bytes) -> bytes | None:
        """Take the value at the head of a queue, or None. An empty queue does not exist."""
        queue = self.queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return value

    def length(self, key: bytes) -> int:
        """How many values a queue holds."""
        return len(self.queues.get(key, ()))

    def _shown(self, key: bytes) -> str:
        return shown([key.removeprefix(self._slash)])
