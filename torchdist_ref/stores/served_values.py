"""Values and queues of a store whose server this process runs, read from its memory without a request.

The agents' coordinator looks at thousands of keys several times a second. Do not add changes of values here: they need
the server's thread, which wakes the clients that wait for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from operator import length_hint

from torchdist_ref.errors import DistNetworkError, QueueEmptyError
from torchdist_ref.stores.base import Store, Text, key_bytes, key_list
from torchdist_ref.stores.tcp import TCPStore


class ServedValues(Store):
    """Values of a store whose server this process runs, read without a request to it.

    `multi_get` returns the values of keys that exist. They need not be of one moment.
    """

    def __init__(self, store: TCPStore) -> None:
        self._store = store

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        server = self._store.server
        if server is None:
            raise DistNetworkError("multi_get: this process does not serve the store any more.")
        return [server.values.get(name, b"") for name in [b"/" + key for key in key_list("multi_get", keys)]]


class ArrivedValues(Store):
    """Queues of a store whose server this process runs, read as values arrive, whatever is in front of them.

    Anybody may push thousands of values, and to pop one costs a request. With ``block``, `queue_pop` pops the first
    value of a queue. Without, it returns the next one that arrived behind it, from memory, and leaves it there: a later
    call with ``block`` returns it again.

    >>> store = TCPStore("127.0.0.1", 0, is_master=True)
    >>> for value in ("junk", "more junk", "report"):
    ...     store.queue_push("reports", value)
    >>> arrived = ArrivedValues(store)
    >>> [arrived.queue_pop("reports", block) for block in (True, False, False)], store.queue_len("reports")
    ([b'junk', b'more junk', b'report'], 2)
    >>> store.close()
    """

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        # By queue, how many values at its front were read, and those that this object has yet to return.
        self._read: dict[Text, int] = {}
        self._unread: dict[Text, deque[bytes]] = {}

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        if block:
            value = self._store.queue_pop(key)
            self._read[key] = max(self._read.get(key, 0) - 1, 0)
            return value
        unread = self._unread.setdefault(key, deque())
        if not unread:
            unread.extend(self._arrived(key))
        if not unread:
            raise QueueEmptyError(f"queue_pop: no further value has arrived in queue {key!r} on {self._store!r}.")
        return unread.popleft()

    def _arrived(self, key: Text) -> list[bytes]:
        """Return the values behind those that were read."""
        server = self._store.server
        if server is None:
            raise DistNetworkError("queue_pop: this process does not serve the store any more.")
        queue = server.queues.get(b"/" + key_bytes("queue_pop", key), deque[bytes]())
        newest = reversed(queue)
        length = length_hint(newest)
        try:
            values = list(islice(newest, max(length - self._read.get(key, 0), 0)))
        except RuntimeError:
            # The server's thread has changed the queue meanwhile. It is not empty, so `queue_pop` returns soon.
            return []
        self._read[key] = length
        return values[::-1]
