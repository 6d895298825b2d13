"""Mesh: this rank's connections to the ranks of other hosts, and the tokens that come through them.

There is no thread: whoever waits for a token reads all sockets meanwhile (`pump`), one waiter at a time. So a
token costs no hand-over between threads, and nothing is read while nobody waits; the kernel's buffers hold it.
"""

from __future__ import annotations

import os
import select
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from torchdist_ref.errors import DistNetworkError, RankStalledError
from torchdist_ref.transports.connection import ELSEWHERE, Connection, Frame, inside, pack
from torchdist_ref.transports.layout import BOARD_LINE, ENVELOPE, KINDS, Layout
from torchdist_ref.transports.memory import Range, Token

# How long a waiter looks at the sockets before it looks again at tokens that don't come through them.
GLANCE = 0.0005


class Mesh:
    """Connections by rank, and counters of tokens by kind and source.

    Args:
        rank: This rank.
        layout: The map of the segment.
        bytes_of: Where the parts of the segment that belong to a rank are.
        patience: Seconds that a peer may leave unread what was sent to it.

    Attributes:
        gone: Ranks whose connection has ended.
    """

    def __init__(
        self, rank: int, layout: Layout, bytes_of: Callable[[int], memoryview], patience: float = 60.0
    ) -> None:
        self.rank, self.layout, self._bytes_of = rank, layout, bytes_of
        self.connections: dict[int, Connection] = {}
        self.gone: set[int] = set()
        self._patience = patience
        # Ranks to whom a frame was sent in part only: what came behind it would be taken for its rest.
        self._cut_off: set[int] = set()
        self.counts: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.ring: Callable[[], Any] = lambda: None
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        self._reading = threading.Lock()
        self._sending: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self.expected: defaultdict[int, deque[memoryview]] = defaultdict(deque)

    def add(self, peer: int, sock: Any) -> None:
        """Use this socket for that peer."""
        connection = Connection(sock, lambda frame: self._target(peer, frame), lambda frame: self._arrived(peer, frame))
        self.connections[peer] = connection
        self._by_fd[connection.fileno()] = peer
        self._poll.register(connection.fileno(), select.POLLIN)

    def _target(self, peer: int, frame: Frame) -> list[memoryview]:
        """Where a peer's bytes go: into its own part, as a reply into an envelope of ours, or where we want them."""
        layout = self.layout
        if frame.ranges and frame.ranges[0][0] == ELSEWHERE:
            return [self._next_expected(peer, frame.ranges[0][1])]
        if frame.owner == peer:
            boxes = layout.mailbox(peer, self.rank) + layout.box - layout.envelope(peer, self.rank)
            allowed = [(layout.board(peer), BOARD_LINE), (layout.pocket(peer, 0), layout.stage)]
            allowed.append((layout.envelope(peer, self.rank), boxes))
        else:
            allowed = [(layout.envelope(self.rank, peer), ENVELOPE)]
        inside(frame.ranges, allowed)
        memory = self._bytes_of(frame.owner)
        return [memory[begin : begin + size] for begin, size in frame.ranges]

    def _next_expected(self, peer: int, size: int) -> memoryview:
        views = self.expected[peer]
        if not views or len(views[0]) != size:
            raise DistNetworkError(f"a peer sends {size} bytes that nobody here expects.")
        return views.popleft()

    def _arrived(self, peer: int, frame: Frame) -> None:
        kind = KINDS[frame.kind]
        if kind == "bell":
            self.ring()
        else:
            self.counts[kind, peer] += 1

    def send(self, peer: int, kind: str, owner: int, ranges: Sequence[Range]) -> None:
        """Show a peer these ranges and give it a token. A peer that is gone gets nothing: waits will say so."""
        memory = self._bytes_of(owner)
        head = pack(Frame(KINDS.index(kind), owner, tuple(ranges)))
        self._send(peer, [head, *(memory[begin : begin + size] for begin, size in ranges)])

    def send_bytes(self, peer: int, kind: str, data: memoryview) -> None:
        """Give a peer bytes that lie anywhere, and a token; they go where it expects them."""
        self._send(peer, [pack(Frame(KINDS.index(kind), self.rank, ((ELSEWHERE, len(data)),))), data])

    def _send(self, peer: int, parts: Sequence[memoryview | bytes]) -> None:
        if peer in self.gone or peer in self._cut_off:
            return
        deadline = monotonic() + self._patience
        with self._sending[peer]:
            try:
                self.connections[peer].send(parts, lambda: self._while_full(peer, deadline))
            except OSError:
                self.gone.add(peer)
            except BaseException:
                self._cut_off.add(peer)
                raise

    def _while_full(self, peer: int, deadline: float) -> None:
        if monotonic() > deadline:
            raise RankStalledError(
                f"rank {peer} has not read for {self._patience:g} s what rank {self.rank} sends it. Look at that rank, "
                f"or pass a longer timeout to init_process_group or new_group."
            )
        self.pump(0.0)
        # Not `select.select`, which takes no descriptor above 1023.
        room = select.poll()
        room.register(self.connections[peer].fileno(), select.POLLOUT)
        room.poll(GLANCE * 1000)

    def pump(self, seconds: float) -> None:
        """Read what comes within this time, unless somebody else is reading."""
        if not (self._reading.acquire(timeout=seconds) if seconds > 0 else self._reading.acquire(False)):
            return
        try:
            for fd, _ in self._poll.poll(seconds * 1000):
                self._read(fd)
        finally:
            self._reading.release()

    def _read(self, fd: int) -> None:
        peer = self._by_fd[fd]
        if not self.connections[peer].receive():
            self._poll.unregister(fd)
            self.gone.add(peer)

    def close(self) -> None:
        """Close all connections."""
        for connection in self.connections.values():
            connection.close()


class Incoming:
    """A token that a peer gives through the mesh."""

    def __init__(self, mesh: Mesh, kind: str, source: int) -> None:
        self._mesh, self._key = mesh, (kind, source)
        self._lock = threading.Lock()

    def release(self) -> None:
        """Not for this end."""
        raise DistNetworkError("a token that comes through a socket is given at the other end.")

    def _take(self) -> bool:
        with self._lock:
            counts = self._mesh.counts
            if counts[self._key] == 0:
                return False
            counts[self._key] -= 1
            return True

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take one; reads the sockets while there is none."""
        if self._take():
            return True
        return _pumping(self._mesh, self._take, block, timeout)


class PeerLane:
    """Straight from memory to memory, as far as sockets can: see `Lane`."""

    def __init__(self, mesh: Mesh, peer: int) -> None:
        self._mesh, self._peer = mesh, peer

    def send(self, kind: str, data: memoryview) -> None:
        """See `Lane`."""
        self._mesh.send_bytes(self._peer, kind, data)

    def expect(self, views: Sequence[memoryview]) -> None:
        """See `Lane`."""
        self._mesh.expected[self._peer].extend(views)


class Pumped:
    """A token of this host, whose waiter reads the sockets meanwhile, so that no distant sender is held up."""

    def __init__(self, mesh: Mesh, token: Token) -> None:
        self._mesh, self._token = mesh, token
        self.release = token.release

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take one."""
        if self._token.acquire(False):
            return True
        return _pumping(self._mesh, lambda: self._token.acquire(False), block, timeout)


def _pumping(mesh: Mesh, take: Callable[[], bool], block: bool, timeout: float | None) -> bool:
    end = monotonic() + (timeout or 0.0) if block else 0.0
    while True:
        mesh.pump(GLANCE if block else 0.0)
        if take():
            return True
        if not block or (timeout is not None and monotonic() >= end):
            return False
        os.sched_yield()
