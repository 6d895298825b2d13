"""Thread transport: ranks are threads of one process, and their segment is private memory.

For tests, examples and notebooks: no process starts, a debugger sees all ranks at once, and it runs wherever Python
does. The segment has the same layout as in shared memory, so backends run the same code. Semaphores are
`queue.SimpleQueue`s, which block without the GIL and are interruptible by Ctrl-C. Ranks share the interpreter lock: do
not measure speed here.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from weakref import WeakValueDictionary

from torchdist_ref.membership.liveness import MemberWatch
from torchdist_ref.stores import Store
from torchdist_ref.transports.base import Semaphore
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.segment import CommonSegment, SegmentLayout


class QueueSemaphore:
    """Counting semaphore on a queue: `release` puts an item, `acquire` gets one.

    >>> semaphore = QueueSemaphore()
    >>> semaphore.release()
    >>> semaphore.acquire(False), semaphore.acquire(False)
    (True, False)
    """

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()

    def release(self) -> None:
        """See `Semaphore.release`."""
        self._queue.put(None)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """See `Semaphore.acquire`."""
        try:
            self._queue.get(block, timeout)
        except Empty:
            return False
        return True


class PrivateSegment(CommonSegment):
    """Segment in private memory. Untouched pages use no memory."""

    kind = "threads"

    def __init__(self, nbytes: int) -> None:
        self.buffer = mmap.mmap(-1, nbytes)
        self.bytes = memoryview(self.buffer)
        self._semaphores: dict[int, QueueSemaphore] = {}

    def semaphore(self, layout: SegmentLayout, kind: str, source: int, target: int) -> Semaphore:
        """See `Segment.semaphore`. Created on first use."""
        return self._semaphores.setdefault(layout.semaphore(kind, source, target), QueueSemaphore())


# Segments by the key that rank 0 publishes: a store carries only bytes.
_segments: WeakValueDictionary[str, PrivateSegment] = WeakValueDictionary()


def connect(
    store: Store, rank: int, members: Sequence[int], name: str, timeout: float, watch: MemberWatch | None = None
) -> Link:
    """Connect to the other ranks of this process. Arguments and result as in `shared_memory.connect`."""
    layout = SegmentLayout(len(members), window=256 * 1024, cells=2, mailbox_bytes=0)
    link = Link(_segment(store, rank, layout), layout, rank, members, name, timeout)
    # Threads do not run in parallel: spinning would keep the interpreter lock from the awaited rank.
    link.spins = link.yields = 0
    link.row.join(os.getpid())
    with link.joining():
        link.handshake(watch)
    return link


def _segment(store: Store, rank: int, layout: SegmentLayout) -> PrivateSegment:
    if rank:
        return _segments[store.get("segment").decode()]
    key = secrets.token_hex(16)
    segment = _segments[key] = PrivateSegment(layout.nbytes)
    store.set("segment", key.encode())
    return segment
