"""Threads: the ranks are threads of one process, and their segment is private memory.

For tests, examples and notebooks: no process starts, a debugger sees all ranks at once, and it works
wherever Python does. The segment has the map that shared memory has, so the backend above runs the same
code; tokens are `queue.SimpleQueue`s, which block without the GIL and answer Ctrl-C. Ranks share the
interpreter lock, so this is for understanding, not for speed.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from weakref import WeakValueDictionary

from torchdist_ref.stores import Store
from torchdist_ref.transports.base import Link
from torchdist_ref.transports.layout import Layout
from torchdist_ref.transports.liveness import NoPeers
from torchdist_ref.transports.memory import OneMemory, Token


class Permits:
    """A counting semaphore over a queue: `release` puts, `acquire` gets.

    >>> permits = Permits()
    >>> permits.release()
    >>> permits.acquire(False), permits.acquire(False)
    (True, False)
    """

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()

    def release(self) -> None:
        """Add one."""
        self._queue.put(None)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take one; False if there was none (in time)."""
        try:
            self._queue.get(block, timeout)
        except Empty:
            return False
        return True


class PrivateMemory(OneMemory):
    """The segment of a group of threads. Pages that nobody touches cost nothing here either."""

    kind = "threads"

    def __init__(self, nbytes: int) -> None:
        self.buffer = mmap.mmap(-1, nbytes)
        self.bytes = memoryview(self.buffer)
        self._tokens: dict[int, Permits] = {}

    def token(self, layout: Layout, kind: str, source: int, target: int) -> Token:
        """The token that has this place in the map: the first to ask makes it."""
        return self._tokens.setdefault(layout.token(kind, source, target), Permits())


# How a thread finds what another thread of its process made: a store can only carry bytes.
_segments: WeakValueDictionary[str, PrivateMemory] = WeakValueDictionary()


def connect(store: Store, rank: int, members: Sequence[int], name: str, timeout: float) -> Link:
    """Meet the other ranks of this process. Arguments and result as in `shared_memory.connect`."""
    layout = Layout(len(members), window=256 * 1024, turns=2, letters=0)
    link = Link(_segment(store, rank, layout), layout, rank, members, name, timeout)
    # Threads can't run at once: a spin would only keep the lock from the rank that is waited for.
    link.spins = link.yields = 0
    link.alive = NoPeers()
    link.line.arrive(os.getpid())
    link.meet("init_process_group")
    return link


def _segment(store: Store, rank: int, layout: Layout) -> PrivateMemory:
    if rank:
        return _segments[store.get("segment").decode()]
    key = secrets.token_hex(16)
    memory = _segments[key] = PrivateMemory(layout.nbytes)
    store.set("segment", key.encode())
    return memory
