"""Deletion of the keys of released prefixes, in turns.

The last user of a prefix deletes its keys (RELEASE). They may be all keys of the store, so they are deleted in turns,
and the user gets its response after the last one. For every request the keys are gone at once, though: a request that
names a key which is still to be deleted deletes that key first, and a key that is set since then stays. Only
GETNUMKEYS and LIST_KEYS may still see keys of a release that has no response yet.

One look through all keys serves all prefixes that were released before it began, so many releases cost hardly more than
one. Do not add responses or sessions here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torchdist_ref.stores.hash import Deleted, DetachedQueue, release_counter
from torchdist_ref.stores.tcp.memory import KEY_OVERHEAD_BYTES, StoreMemory
from torchdist_ref.stores.tcp.operations import Op, Operation
from torchdist_ref.stores.tcp.sessions import AWAITED_OVERHEAD_BYTES, PendingRequest

PARTS_IN_TURN = 16
"""Parts of a deletion that are deleted before the requests of other clients."""
MAX_PREFIXES = 1024
"""Prefixes that are deleted together. Further releases wait, and have no effect before their turn."""


class ReleaseBatch:
    """Prefixes whose keys one look through all keys deletes.

    Attributes:
        prefixes: the prefixes with a slash, sorted. None of them begins with another one.
        written: keys of these prefixes that were set after the release, and stay.
        queues: queues that no request can see any more, to be freed in turns.
        requests: requests to respond to after the last turn.
        nbytes: memory of the batch.
        parts: the look through all keys; None before it begins.
    """

    def __init__(self) -> None:
        self.prefixes: list[bytes] = []
        self.written: set[bytes] = set()
        self.queues: deque[DetachedQueue] = deque()
        self.requests: list[PendingRequest] = []
        self.nbytes = 0
        self.parts: Iterator[Deleted] | None = None

    def covers(self, key: bytes) -> bool:
        """Return whether a key begins with one of the prefixes."""
        # As no prefix begins with another one, only the last of those that sort before the key may match. Before the
        # first prefix, the index -1 finds the last one, which does not match.
        return key.startswith(self.prefixes[bisect_right(self.prefixes, key) - 1])

    def dooms(self, key: bytes) -> bool:
        """Return whether a key existed at the release and is to be deleted."""
        return self.covers(key) and key not in self.written

    def overlaps(self, prefix: bytes) -> bool:
        """Return whether a key can begin with this prefix and with one of the batch."""
        at = bisect_left(self.prefixes, prefix)
        return self.covers(prefix) or (at < len(self.prefixes) and self.prefixes[at].startswith(prefix))


class Releases:
    """Released prefixes whose keys are not deleted yet.

    Attributes:
        batches: the batch that is being deleted, and the one that collects the next releases.
    """

    def __init__(self, memory: StoreMemory) -> None:
        self.batches: deque[ReleaseBatch] = deque()
        self._memory = memory

    def accepts(self, prefix: bytes) -> bool:
        """Return whether the keys of a prefix can be deleted now; if not, the release must wait for a batch to end."""
        begin = prefix + b"/"
        return not any(batch.overlaps(begin) or len(batch.prefixes) >= MAX_PREFIXES for batch in self.batches)

    def begin(self, request: PendingRequest, prefix: bytes) -> None:
        """Delete the keys of a prefix that exist now."""
        if not self.batches or self.batches[-1].parts is not None:
            self.batches.append(ReleaseBatch())
        batch = self.batches[-1]
        insort(batch.prefixes, prefix + b"/")
        batch.requests.append(request)
        self._count(batch, len(prefix) + KEY_OVERHEAD_BYTES)

    def settle(self, operation: Operation, fields: tuple[Any, ...]) -> None:
        """Delete the keys of a request that are to be deleted, so that the request does not see them."""
        writes = operation.wakes != "none" or operation in (Op.RELEASE, Op.BARRIER)
        for key in _keys_of(operation, fields):
            for batch in self.batches:
                if not batch.covers(key):
                    continue
                if key not in batch.written:
                    deleted, queues = self._memory.table.detach([key])
                    self._memory.free(deleted)
                    batch.queues += queues
                    if writes:
                        batch.written.add(key)
                        self._count(batch, len(key) + AWAITED_OVERHEAD_BYTES)

    def delete_some(self) -> list[PendingRequest]:
        """Delete some of the keys of the first batch. After the last of them, return the requests to respond to."""
        batch = self.batches[0]
        if batch.parts is None:
            batch.parts = self._memory.table.delete_in_parts(batch.dooms, batch.queues)
        deleted = list(islice(batch.parts, PARTS_IN_TURN))
        for each in deleted:
            self._memory.free(each)
        if len(deleted) == PARTS_IN_TURN:
            return []
        self.batches.popleft()
        self._memory.used -= batch.nbytes
        return batch.requests

    def _count(self, batch: ReleaseBatch, nbytes: int) -> None:
        batch.nbytes += nbytes
        self._memory.used += nbytes


def _keys_of(operation: Operation, fields: tuple[Any, ...]) -> list[bytes]:
    kind = operation.request[:1]
    if operation is Op.RELEASE:
        return [release_counter(fields[0])]
    if kind == "P":
        return [key for key, _ in fields[0]]
    if kind == "K":
        keys: list[bytes] = fields[0]
        return keys
    return [fields[0]] if kind == "k" else []
