"""Connection of the store's server to one client: unfinished requests, replies not sent yet, time that it takes.

Do not add limits over several connections here: `server` has them.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from time import monotonic, thread_time
from typing import cast

from torchdist_ref.stores.sockets import READ
from torchdist_ref.stores.tcp.protocol import ManyValues, Piece, Request, RequestDecoder
from torchdist_ref.stores.tcp.sessions import StoreClient

SERVICE_SECONDS = 0.0002
"""Time after which a connection's further requests and replies are left to its next turn."""
NEWCOMER_SECONDS = 0.002
"""First `presumed_seconds`: between the time of a client that sends one small request at a time, and of a greedy one.
"""
QUICK_SECONDS = 0.001
"""`recent_seconds` below which clients come in the order in which they were served: these are small requests."""
BRIEF_SECONDS = 500e-6
SMALL_REPLY_BYTES = 4096
LARGE_REPLY_BYTES = 64 * 1024
"""Size above which a reply is sent in the connection's own turn: one change may wake many clients."""
SEND_PIECES = 64
SEND_BYTES = 64 * 1024


class ThreadClock:
    """Time of this thread, for most reads from the wall's clock, which costs a tenth as much.

    A busy host lets a thread wait, while the wall's time passes: after `BRIEF_SECONDS` the other clock is read.
    """

    def __init__(self) -> None:
        self._now = self._wall = self._thread = self._unchecked = 0.0

    def read(self) -> float:
        """Return seconds; only differences count."""
        wall = monotonic()
        passed = wall - self._wall
        self._wall = wall
        if self._unchecked + passed < BRIEF_SECONDS:
            self._unchecked += passed
            self._now += passed
        else:
            thread = thread_time()
            self._now += max(0.0, thread - self._thread - self._unchecked)
            self._thread, self._unchecked = thread, 0.0
        return self._now


class ConnectionOwner(ABC):
    """Server, as its connections see it."""

    @abstractmethod
    def watch(self, connection: ServerConnection, progress: bool) -> None:
        """Take note of a connection's unsent replies; `progress` is whether some of them were sent now."""

    @abstractmethod
    def drop(self, connection: ServerConnection, reason: str) -> None:
        """Close a connection and forget it."""


class ServerConnection(StoreClient):
    """Socket of one client, with its unfinished requests and unsent replies.

    Attributes:
        accepted: when the connection was accepted, in seconds of the monotonic clock.
        unfinished_since: when the unfinished request began to hold memory.
        counted: bytes that it holds, as the loop has counted them.
        unprocessed: whether whole requests may be left of a turn that took long.
        queue: queue of long requests that the connection is in, or None. Nothing else is read from it meanwhile.
        parked: request that has been read, and waits in that queue.
        unsent: bytes of the pieces of replies that are not sent yet, or in part.
        counted_unsent: the same, as the loop has counted them.
        in_use: whether the client has sent anything but greetings.
        recent_seconds: time of the server's thread that its requests took lately.
        presumed_seconds: what is added to that until the client has left no request for a later turn.
        served: when it was served last, in seconds of the time of the server's thread. Until its first turn, minus the
            time at which it was accepted: in the order of these numbers, the newest of the new clients is the first.
    """

    __slots__ = (
        "_more",
        "accepted",
        "closed",
        "counted",
        "counted_unsent",
        "decoder",
        "descriptor",
        "in_use",
        "interest",
        "owner",
        "parked",
        "presumed_seconds",
        "queue",
        "recent_seconds",
        "send_queue",
        "served",
        "sock",
        "unfinished_since",
        "unprocessed",
        "unsent",
    )

    def __init__(self, owner: ConnectionOwner, sock: socket.socket, served: float) -> None:
        super().__init__()
        sock.setblocking(False)
        self.sock, self.owner, self.descriptor = sock, owner, sock.fileno()
        self.decoder = RequestDecoder()
        self.send_queue: deque[memoryview] = deque()
        self.accepted = self.unfinished_since = monotonic()
        self.counted = self.unsent = self.counted_unsent = 0
        self.unprocessed = self.in_use = False
        self.queue: deque[ServerConnection] | None = None
        self.parked: Request | None = None
        # A new client comes after those that are known to be quick: its first requests may take long.
        self.recent_seconds, self.presumed_seconds, self.served = 0.0, NEWCOMER_SECONDS, served
        self._more: Iterator[bytes] | None = None
        self.interest = READ
        self.closed = False

    def order(self) -> tuple[float, float]:
        """Return the time that the client may take, and when it was served last."""
        return max(QUICK_SECONDS, self.recent_seconds + self.presumed_seconds), self.served

    def charge(self, seconds: float, now: float) -> None:
        """Note that the client has been served for a time, until now."""
        self.served = now
        self.recent_seconds = self.recent_seconds * 0.9 + seconds
        if not (self.unprocessed or self.queue):
            self.presumed_seconds = 0.0

    def send(self, pieces: Sequence[Piece]) -> None:
        size = sum(map(len, pieces))
        if not self.send_queue and size <= SMALL_REPLY_BYTES:
            # Most replies are small and are sent whole, without the queue. `ManyValues` are longer.
            whole = b"".join(cast("Sequence[bytes]", pieces))
            try:
                sent = self.sock.send(whole) if whole else 0
            except OSError:
                sent = 0  # `flush` meets the same error
            if sent == len(whole):
                return
            pieces, size = [whole[sent:]], size - sent
        for piece in pieces:
            if isinstance(piece, ManyValues):
                self._more = piece.pieces()
            elif piece:
                self.send_queue.append(memoryview(piece))
        self.unsent += size
        if size <= LARGE_REPLY_BYTES:
            self.flush()
        else:
            self._has_more()
            self.owner.watch(self, True)

    def flush(self) -> None:
        """Send as much of the queue as the socket accepts, for a short time: others wait for this thread."""
        progress, end = False, monotonic() + SERVICE_SECONDS
        try:
            while not self.closed and self._has_more() and not (progress and monotonic() > end):
                self._drop_sent(self.sock.sendmsg(self._next_pieces()))
                progress = True
        except BlockingIOError:
            pass
        except OSError as error:
            self.disconnect(str(error))
        self._has_more()
        self.owner.watch(self, progress)

    def clear(self) -> None:
        """Release the memory of unfinished requests and unsent replies."""
        self.send_queue.clear()
        self._more, self.parked, self.unsent = None, None, 0
        self.decoder.clear()

    def _has_more(self) -> bool:
        """Return whether the queue has anything to send; get the next piece of a long reply if it is empty."""
        while not self.send_queue and self._more is not None:
            piece = next(self._more, None)
            if piece is None:
                self._more = None
            else:
                self.send_queue.append(memoryview(piece))
        return bool(self.send_queue)

    def _next_pieces(self) -> list[memoryview]:
        """Return the front of the queue, `SEND_BYTES` at most."""
        pieces, size = [], 0
        for piece in islice(self.send_queue, SEND_PIECES):
            pieces.append(piece[: SEND_BYTES - size])
            size += len(piece)
            if size >= SEND_BYTES:
                break
        return pieces

    def _drop_sent(self, size: int) -> None:
        while self.send_queue and size >= len(self.send_queue[0]):
            piece = self.send_queue.popleft()
            size -= len(piece)
            self.unsent -= len(cast("bytes", piece.obj))  # until now it was in memory as a whole
        if size:
            self.send_queue[0] = self.send_queue[0][size:]

    def disconnect(self, reason: str) -> None:
        self.owner.drop(self, reason)
