"""Mesh: this rank's connections to the ranks of other hosts, and the semaphores posted through them.

There is no progress thread: a rank that waits for a semaphore reads all sockets meanwhile (`ConnectionMesh.progress`),
one waiting thread at a time. A semaphore thus costs no thread switch. Nothing is read while no thread waits; the
kernel's buffers hold the bytes.

Do not add knowledge of calls here.
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
from torchdist_ref.transports.base import Range, Semaphore
from torchdist_ref.transports.frames import POSTED_RECEIVE, MeshConnection, MeshFrame, check_ranges, discarded, pack
from torchdist_ref.transports.segment import MESSAGE_HEADER_BYTES, ROW_BYTES, SEMAPHORE_KINDS, SegmentLayout

RESUME_SECONDS = 0.5
"""Longest time in which a peer reads the rest of an interrupted frame, or what a rank sent before it left."""
_SOCKET_POLL_SECONDS = 0.0005
"""Longest wait on the sockets before a waiter checks semaphores that other ranks of this host post."""


class ConnectionMesh:
    """Connections by rank, and semaphore counts by kind and source.

    Args:
        rank: This rank.
        layout: Offsets in the segment.
        bytes_of: Function that returns the buffer with the parts of a rank.
        timeout: Seconds for which a peer may leave sent bytes unread.

    Attributes:
        disconnected: Ranks whose connection has ended.
        counts: Semaphore counts by kind and source.
        ring_doorbell: Function that posts this rank's doorbell.
        posted_receives: Views for the next direct sends, by peer.
    """

    def __init__(
        self, rank: int, layout: SegmentLayout, bytes_of: Callable[[int], memoryview], timeout: float = 60.0
    ) -> None:
        self.rank, self.layout, self._bytes_of = rank, layout, bytes_of
        self.connections: dict[int, MeshConnection] = {}
        self._addresses: dict[int, str] = {}
        self.disconnected: set[int] = set()
        self.timeout = timeout
        self.counts: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.ring_doorbell: Callable[[], Any] = lambda: None
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        self.reading = threading.Lock()
        self._sending: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self.posted_receives: defaultdict[int, deque[memoryview]] = defaultdict(deque)

    def add(self, peer: int, sock: Any) -> None:
        """Add the connection to a peer."""
        connection = MeshConnection(
            sock, lambda frame: self._views_for(peer, frame), lambda frame: self._on_frame(peer, frame)
        )
        self.connections[peer] = connection
        self._addresses[peer] = sock.getpeername()[0]
        self._by_fd[connection.fileno()] = peer
        self._poll.register(connection.fileno(), select.POLLIN)

    def address_of(self, peer: int) -> str:
        """Return the address of a peer's end of the connection."""
        return self._addresses.get(peer, "another host")

    def _views_for(self, peer: int, frame: MeshFrame) -> list[memoryview]:
        """Return the destinations of a peer's bytes: its own part, a message header of this rank, or posted views."""
        layout = self.layout
        if frame.ranges and frame.ranges[0][0] == POSTED_RECEIVE:
            if len(frame.ranges) > 1 or frame.owner != peer:
                raise DistNetworkError(f"rank {peer} sent a direct send that is not one range of its own memory.")
            return [self._next_posted(peer, frame.ranges[0][1])]
        if frame.owner == peer:
            header = layout.message_header(peer, self.rank)
            mailbox = layout.mailbox_ring(peer, self.rank) + layout.mailbox_ring_bytes - header
            allowed = [(layout.status_row(peer), ROW_BYTES), (layout.eager_buffer(peer, 0), layout.staging_bytes)]
            allowed.append((header, mailbox))
        elif frame.owner != self.rank:
            raise DistNetworkError(f"rank {peer} sent a frame for the part of rank {frame.owner}.")
        else:
            allowed = [(layout.message_header(self.rank, peer), MESSAGE_HEADER_BYTES)]
        check_ranges(frame.ranges, allowed)
        memory = self._bytes_of(frame.owner)
        return [memory[begin : begin + size] for begin, size in frame.ranges]

    def _next_posted(self, peer: int, size: int) -> memoryview:
        views = self.posted_receives[peer]
        if not views or len(views[0]) != size:
            raise DistNetworkError(f"a peer sent {size} bytes for which no receive is posted.")
        return views.popleft()

    def cancel_receives(self, peer: int) -> None:
        """Discard what a peer has yet to send to posted views."""
        with self.reading:
            self.connections[peer].discard_direct()
            self.posted_receives[peer] = deque(map(discarded, self.posted_receives[peer]))

    def _on_frame(self, peer: int, frame: MeshFrame) -> None:
        try:
            kind = SEMAPHORE_KINDS[frame.kind]
        except IndexError:
            raise DistNetworkError(
                f"rank {peer} sent a frame of an unknown kind, {frame.kind}: it is of another version of this library, "
                "or its bytes were damaged."
            ) from None
        if kind == "doorbell":
            self.ring_doorbell()
        else:
            self.counts[kind, peer] += 1

    def send(self, peer: int, kind: str, owner: int, ranges: Sequence[Range]) -> None:
        """Send ranges and post a semaphore. Does nothing if the peer has disconnected: its waits report that."""
        memory = self._bytes_of(owner)
        header = pack(MeshFrame(SEMAPHORE_KINDS.index(kind), owner, tuple(ranges)))
        self._send(peer, [header, *(memory[begin : begin + size] for begin, size in ranges)])

    def send_direct(self, peer: int, kind: str, data: memoryview) -> None:
        """Send bytes from any memory to the peer's next posted view, and post a semaphore."""
        self._send(
            peer, [pack(MeshFrame(SEMAPHORE_KINDS.index(kind), self.rank, ((POSTED_RECEIVE, len(data)),))), data]
        )

    def _send(self, peer: int, parts: Sequence[memoryview | bytes]) -> None:
        connection = self.connections[peer]
        if peer in self.disconnected:
            return
        with self._sending[peer]:
            if connection.rest is None:
                # After an interruption in the middle of a frame, nothing that follows would be understood.
                return
            resumes = connection.rest != b""
            deadline = monotonic() + (min(self.timeout, RESUME_SECONDS) if resumes else self.timeout)
            try:
                connection.send(parts, lambda: self.wait_writable(peer, deadline))
            except OSError:
                # Not disconnected before all that has come is read, with the reason why the peer left perhaps.
                connection.rest = None
            except RankStalledError:
                # It does not read, so that no later frame would be read either.
                connection.rest = None
                if not resumes:
                    raise

    def wait_writable(self, peer: int, deadline: float) -> None:
        """Wait until the connection to a peer takes bytes, and meanwhile read those of all peers."""
        if monotonic() > deadline:
            raise RankStalledError(
                f"rank {peer} has not read for {self.timeout:g} s what rank {self.rank} sends. Inspect that rank, or "
                f"pass a longer timeout to init_process_group or new_group."
            )
        self.progress(0.0)
        # Not `select.select`, which accepts no descriptor above 1023.
        writable = select.poll()
        writable.register(self.connections[peer].fileno(), select.POLLOUT)
        writable.poll(_SOCKET_POLL_SECONDS * 1000)

    def progress(self, seconds: float) -> None:
        """Read the bytes that arrive within this time, unless another thread is reading."""
        if not (self.reading.acquire(timeout=seconds) if seconds > 0 else self.reading.acquire(False)):
            return
        try:
            for fd, _ in self._poll.poll(seconds * 1000):
                self._read(fd)
        finally:
            self.reading.release()

    def _read(self, fd: int) -> None:
        peer = self._by_fd[fd]
        if not self.connections[peer].receive():
            self._poll.unregister(fd)
            self.disconnected.add(peer)

    def progress_until(self, acquired: Callable[[], bool], block: bool, timeout: float | None) -> bool:
        """Read sockets until `acquired` returns True or the time-out; return whether it did."""
        end = monotonic() + (timeout or 0.0) if block else 0.0
        while True:
            self.progress(_SOCKET_POLL_SECONDS if block else 0.0)
            if acquired():
                return True
            if not block or (timeout is not None and monotonic() >= end):
                return False
            os.sched_yield()

    def close(self) -> None:
        """Close all connections, once the hosts of the peers have what this rank has sent, or after half a second.

        A connection that is closed before its peer's last bytes are read is reset, and bytes that still wait here for
        the peer to read are lost: with the reason why this rank leaves, so that the peer would take it for dead.
        """
        try:
            if self.reading.acquire(timeout=RESUME_SECONDS):
                try:
                    self._await_deliveries(monotonic() + RESUME_SECONDS)
                finally:
                    self.reading.release()
        finally:
            for connection in self.connections.values():
                connection.close()

    def _await_deliveries(self, deadline: float) -> None:
        """Wait until the hosts of all peers that read have what has been sent to them; discard what comes."""
        poll, waiting = select.poll(), {}
        for peer, connection in self.connections.items():
            is_open = peer not in self.disconnected and connection.fileno() >= 0
            if is_open and connection.rest is not None:
                connection.report_deliveries()
                poll.register(connection.fileno(), select.POLLIN | select.POLLOUT)
                waiting[connection.fileno()] = connection
        while waiting and (left := deadline - monotonic()) > 0:
            for fd, events in poll.poll(left * 1000):
                # A peer that sends may read only once it has sent.
                if events != select.POLLIN or not waiting[fd].discard():
                    poll.unregister(fd)
                    del waiting[fd]


class MeshDirectPath:
    """`DirectPath` over a socket."""

    def __init__(self, mesh: ConnectionMesh, peer: int) -> None:
        self._mesh, self._peer = mesh, peer

    def send(self, kind: str, data: memoryview) -> None:
        """See `DirectPath.send`."""
        self._mesh.send_direct(self._peer, kind, data)

    def post_receive(self, views: Sequence[memoryview]) -> None:
        """See `DirectPath.post_receive`."""
        self._mesh.posted_receives[self._peer].extend(views)

    def cancel_receives(self) -> None:
        """See `DirectPath.cancel_receives`."""
        self._mesh.cancel_receives(self._peer)


class OutgoingSemaphore:
    """Posting end of a semaphore that a rank of another host acquires."""

    def __init__(self, mesh: ConnectionMesh, kind: str, target: int) -> None:
        self._mesh, self._kind, self._target = mesh, kind, target

    def release(self) -> None:
        """Post it, without bytes."""
        self._mesh.send(self._target, self._kind, self._mesh.rank, ())

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Raise: only the other end can acquire it."""
        raise DistNetworkError("a semaphore of a rank on another host can be acquired only there.")


class IncomingSemaphore:
    """Acquiring end of a semaphore that a rank of another host posts."""

    def __init__(self, mesh: ConnectionMesh, kind: str, source: int) -> None:
        self._mesh, self._key = mesh, (kind, source)
        self._lock = threading.Lock()

    def release(self) -> None:
        """Raise: only the other end can post it."""
        raise DistNetworkError("a semaphore that a rank on another host posts can be posted only there.")

    def _acquire_now(self) -> bool:
        with self._lock:
            counts = self._mesh.counts
            if counts[self._key] == 0:
                return False
            counts[self._key] -= 1
            return True

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """See `Semaphore.acquire`. Reads the sockets meanwhile."""
        return self._acquire_now() or self._mesh.progress_until(self._acquire_now, block, timeout)


class LocalSemaphore:
    """Semaphore of a rank on this host. Waiting for it reads the sockets, so that no sender on another host blocks."""

    def __init__(self, mesh: ConnectionMesh, semaphore: Semaphore) -> None:
        self._mesh, self._semaphore = mesh, semaphore
        self.release = semaphore.release

    def _acquire_now(self) -> bool:
        return self._semaphore.acquire(False)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """See `Semaphore.acquire`."""
        return self._semaphore.acquire(False) or self._mesh.progress_until(self._acquire_now, block, timeout)
