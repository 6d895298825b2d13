"""Who of my peers is still alive: asked in slow waits only, so that a fast call never pays for it.

A pidfd becomes readable when its process ends, however it ends, and cannot be confused with a later
process of the same number. A wait that does not succeed at once is cut in slices; between slices the
waiter polls the pidfds of all peers, so that a death is known within one slice, with no thread of
our own and no message from anybody. Thread ranks share one fate and need none of this.

Don't add heartbeats: a stopped process is not a dead one, and is found by the deadline.
"""

from __future__ import annotations

import os
import select
import threading


class Peers:
    """The processes behind the ranks of a group.

    >>> import os
    >>> peers = Peers({0: os.getpid()})
    >>> peers.dead(), peers.close()
    ([], None)
    """

    def __init__(self, pids: dict[int, int]) -> None:
        self._ranks: dict[int, int] = {}
        self._gone: set[int] = set()
        self._poll = select.poll()
        self._asking = threading.Lock()
        for rank, pid in pids.items():
            self._open(rank, pid)

    def _open(self, rank: int, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone.add(rank)
            return
        self._ranks[fd] = rank
        self._poll.register(fd, select.POLLIN)

    def dead(self) -> list[int]:
        """The ranks whose processes have ended, in order."""
        # One thread asks at a time, which the poll object demands; another gets what was last known.
        if self._asking.acquire(False):
            try:
                self._gone.update(self._ranks[fd] for fd, _ in self._poll.poll(0))
            finally:
                self._asking.release()
        return sorted(self._gone)

    def close(self) -> None:
        """Let go of the descriptors."""
        for fd in self._ranks:
            os.close(fd)
        self._ranks.clear()
        self._poll = select.poll()


class NoPeers:
    """Thread ranks: nobody can die alone."""

    def dead(self) -> list[int]:
        """Nobody."""
        return []

    def close(self) -> None:
        """Nothing to let go of."""
