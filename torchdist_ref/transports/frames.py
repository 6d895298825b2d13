"""Connections between ranks of different hosts: the acceptor that authenticates them, and the frames that they carry.

A frame carries bytes of the segment, which the receiver copies to the same offsets, and posts one semaphore::

    u8 kind | u8 number of ranges | u32 owner | ranges: (u64 offset, u64 bytes)... | the bytes of each range

Kinds are indices into `segment.SEMAPHORE_KINDS`; the owner is the rank whose part of the segment it is. The
receiver checks that the ranges lie inside that part, so that a faulty peer cannot write elsewhere. A range at
`POSTED_RECEIVE` goes to the next view that the receiver has posted. Sockets are non-blocking: a sender that waits for
buffer space keeps receiving, so that two ranks that send to each other cannot deadlock.

Before the first frame both ends prove that they know the group's key, by HMACs over random numbers of both::

    connector → u32 rank | 16 bytes nonce        acceptor → 16 bytes nonce | 32 bytes proof
    connector → 32 bytes proof

The store and the notebook have protocols of their own. Sharing one would cost speed here: payloads are received
directly into the segment or a tensor, without an intermediate copy.

Do not add knowledge of groups or calls here.
"""

from __future__ import annotations

import hmac
import math
import secrets
import selectors
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import NamedTuple

from torchdist_ref.errors import AuthenticationError, DistNetworkError, RankStalledError, advice_on_limit
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.processes.forks import close_copies_in_child
from torchdist_ref.timeouts import CHECK_SECONDS
from torchdist_ref.transports.base import Range

HANDSHAKE_SECONDS = 5.0
MAX_HANDSHAKES = 64
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_RANK, _RANKS = struct.Struct("<I"), struct.Struct("<II")
_HEADER = struct.Struct("<BBI")
_RANGE = struct.Struct("<QQ")
_BUFFER_BYTES = 256 * 1024
POSTED_RECEIVE = 2**63


class MeshFrame(NamedTuple):
    """Header of a frame."""

    kind: int
    owner: int
    ranges: tuple[Range, ...]


def pack(frame: MeshFrame) -> bytes:
    """Return the header as bytes.

    >>> unpack(pack(MeshFrame(2, 5, ((64, 8),))))
    (MeshFrame(kind=2, owner=5, ranges=((64, 8),)), 22)
    """
    header = _HEADER.pack(frame.kind, len(frame.ranges), frame.owner)
    return header + b"".join(_RANGE.pack(*part) for part in frame.ranges)


def unpack(data: bytes | memoryview) -> tuple[MeshFrame, int] | None:
    """Return a header and its length, or None if it is incomplete."""
    if len(data) < _HEADER.size:
        return None
    kind, count, owner = _HEADER.unpack_from(data)
    end = _HEADER.size + count * _RANGE.size
    if len(data) < end:
        return None
    ranges = tuple(_RANGE.unpack_from(data, _HEADER.size + i * _RANGE.size) for i in range(count))
    return MeshFrame(kind, owner, ranges), end


def check_ranges(ranges: Sequence[Range], allowed: Sequence[Range]) -> None:
    """Raise `DistNetworkError` unless every range lies in one of the allowed ones."""
    for begin, size in ranges:
        if not any(start <= begin and begin + size <= start + length for start, length in allowed):
            raise DistNetworkError(f"a peer tried to write {size} bytes at {begin}: not its part of the segment.")


def discarded(view: memoryview) -> memoryview:
    """Return memory of the same size, for bytes that nobody wants."""
    return memoryview(bytearray(len(view)))


class MeshConnection:
    """One end of a socket to a peer.

    Args:
        sock: Connected socket.
        views_for: Function that returns the destinations of a frame's bytes; raises `DistNetworkError` if the peer may
            not write there.
        on_frame: Function that is called when all bytes of a frame have arrived.

    Attributes:
        rest: Bytes of an interrupted send, which the next one sends first; None if they are not known.
    """

    def __init__(
        self,
        sock: socket.socket,
        views_for: Callable[[MeshFrame], list[memoryview]],
        on_frame: Callable[[MeshFrame], None],
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        close_copies_in_child(self)
        self._views_for, self._on_frame = views_for, on_frame
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self.rest: bytes | None = b""
        self._frame: MeshFrame | None = None
        self._missing: list[memoryview] = []

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self.sock.fileno()

    def send(self, parts: Sequence[memoryview | bytes], on_full: Callable[[], None]) -> None:
        """Send all parts, after the rest of those before; call `on_full` whenever the socket's buffer is full.

        If `on_full` raises, `rest` has the bytes that have not been sent; None if that is not known.

        Raises:
            OSError: The connection is closed.
        """
        left = [memoryview(part) for part in (self.rest or b"", *parts) if len(part)]
        begun, self.rest = bool(self.rest), None
        while left:
            try:
                sent = self.sock.sendmsg(left)
            except BlockingIOError:
                try:
                    on_full()
                except BaseException:
                    # A copy: what the parts are views of may go.
                    self.rest = b"".join(left) if begun else b""
                    raise
                continue
            begun = True
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]
        self.rest = b""

    def receive(self) -> bool:
        """Read the available bytes and process complete frames; return False at the end of the stream.

        Raises:
            DistNetworkError: The peer sent a frame that no rank of this library sends.
        """
        while True:
            target = self._receive_target()
            try:
                count = self.sock.recv_into(target)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if count == 0:
                return False
            self._received(target, count)
            if count < len(target):
                return True

    def report_deliveries(self) -> None:
        """From now on, poll as writable only while the peer's host has been sent all bytes."""
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 1)

    def discard(self) -> bool:
        """Discard some of the available bytes; return False at the end of the stream. No `receive` may follow."""
        try:
            return self.sock.recv_into(self._buffer) > 0
        except BlockingIOError:
            return True
        except OSError:
            return False

    def discard_direct(self) -> None:
        """Discard what has yet to come of a frame for a posted view."""
        if self._frame is not None and self._frame.ranges and self._frame.ranges[0][0] == POSTED_RECEIVE:
            self._missing = [discarded(view) for view in self._missing]

    def _receive_target(self) -> memoryview:
        """Return the destination of the next bytes: that of a large range itself, else the buffer."""
        if self._missing and len(self._missing[0]) >= _BUFFER_BYTES // 2 and self._begin == self._end:
            return self._missing[0]
        if self._begin:
            self._buffer[: self._end - self._begin] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, self._end - self._begin
        return self._view[self._end :]

    def _received(self, target: memoryview, count: int) -> None:
        if self._missing and target is self._missing[0]:
            self._advance_range(count)
        else:
            self._end += count
        while self._process_buffer():
            pass

    def _process_buffer(self) -> bool:
        """Process the next header or frame in the buffer; return False if it is incomplete."""
        if self._frame is None:
            header = unpack(self._view[self._begin : self._end])
            if header is None:
                return False
            self._frame, length = header
            self._begin += length
            self._missing = [view for view in self._views_for(self._frame) if len(view)]
        while self._missing and self._begin < self._end:
            count = min(len(self._missing[0]), self._end - self._begin)
            self._missing[0][:count] = self._view[self._begin : self._begin + count]
            self._begin += count
            self._advance_range(count)
        if self._missing:
            return False
        frame, self._frame = self._frame, None
        self._on_frame(frame)
        return True

    def _advance_range(self, count: int) -> None:
        rest = self._missing[0][count:]
        if len(rest):
            self._missing[0] = rest
        else:
            self._missing.pop(0)

    def close(self) -> None:
        """Close the socket. Sent bytes are still delivered."""
        self.sock.close()

    close_copies = close


class _Challenge(NamedTuple):
    """Facts of one handshake that both ends prove to know together with the key.

    Attributes:
        key: Key of the group's connections.
        acceptor: Rank that accepted the connection.
        connector: Rank that connected.
        nonces: Random numbers of the connector and of the acceptor.
    """

    key: bytes
    acceptor: int
    connector: int
    nonces: bytes

    def proof(self, side: bytes) -> bytes:
        """Return the proof of one side, ``b"acceptor"`` or ``b"connector"``: that of the other is no use here."""
        ranks = _RANKS.pack(self.acceptor, self.connector)
        return hmac.digest(self.key, b"%b\0%b%b" % (side, ranks, self.nonces), "sha256")


def authenticate_to(sock: socket.socket, key: bytes, rank: int, peer: int, deadline: float) -> None:
    """Prove to the `Acceptor` of a peer that this rank knows the key, after the peer has proved it.

    Neither proof can be replayed: each covers a random number of the other side.

    Raises:
        ConnectionError: The peer closed the connection.
        TimeoutError: The peer did not respond before the deadline, a time of `monotonic`.
        AuthenticationError: The process there does not know the key.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.settimeout(max(0.1, deadline - monotonic()))
    sock.sendall(_RANK.pack(rank) + nonce)
    response = _receive_exactly(sock, _NONCE_BYTES + _PROOF_BYTES)
    challenge = _Challenge(key, peer, rank, nonce + response[:_NONCE_BYTES])
    if not hmac.compare_digest(response[_NONCE_BYTES:], challenge.proof(b"acceptor")):
        raise AuthenticationError(
            f"the process at {sock.getpeername()} is not rank {peer} of this group: it does not know the group's key."
        )
    sock.sendall(challenge.proof(b"connector"))


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the peer closed the connection during the handshake")
        data += part
    return data


class _PendingHandshake:
    """One connection to an `Acceptor` whose client has not proved yet that it knows the key.

    Attributes:
        sock: The connection.
        expires: When it is closed, as a time of `monotonic`.
        rank: Rank that the client claims and, once `done`, has.
        done: Whether the handshake is complete.
    """

    def __init__(self, sock: socket.socket, key: bytes, acceptor: int) -> None:
        sock.setblocking(False)
        self.sock, self.expires = sock, monotonic() + HANDSHAKE_SECONDS
        self.rank, self.done = -1, False
        self._key, self._acceptor = key, acceptor
        self._received = b""
        self._proof = b""

    def advance(self) -> None:
        """Process the bytes that have arrived.

        Raises:
            OSError: The client has disconnected, or its proof is wrong.
        """
        missing = (_PROOF_BYTES if self._proof else _RANK.size + _NONCE_BYTES) - len(self._received)
        try:
            received = self.sock.recv(missing)
        except BlockingIOError:
            return
        if not received:
            raise ConnectionResetError("the client closed the connection")
        self._received += received
        if len(received) == missing:
            self._verify() if self._proof else self._respond()

    def _respond(self) -> None:
        [self.rank] = _RANK.unpack_from(self._received)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        challenge = _Challenge(self._key, self._acceptor, self.rank, self._received[_RANK.size :] + nonce)
        self._proof, self._received = challenge.proof(b"connector"), b""
        # An empty send buffer takes this at once.
        self.sock.sendall(nonce + challenge.proof(b"acceptor"))

    def _verify(self) -> None:
        if not hmac.compare_digest(self._received, self._proof):
            raise ConnectionRefusedError("the client does not know the key")
        self.done = True


class Acceptor:
    """Acceptor of connections from ranks on other hosts, which it authenticates.

    Handshakes run concurrently, so a client that stays silent, sends garbage or disconnects cannot delay or abort the
    others. Port scanners are such clients. A handshake may take `HANDSHAKE_SECONDS`, and `MAX_HANDSHAKES` may be
    unfinished: then the oldest one is closed, and its client has to connect again.

    Args:
        server: Listening socket.
        key: Key that only ranks of the group know.
        rank: This rank.
    """

    def __init__(self, server: socket.socket, key: bytes, rank: int) -> None:
        server.setblocking(False)
        self.listener, self._key, self._rank = server, key, rank
        self.handshakes: dict[int, _PendingHandshake] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        close_copies_in_child(self)

    def next(
        self, expected: Collection[int], deadline: float, watch: MemberWatch | None = None
    ) -> tuple[int, socket.socket]:
        """Return the next of the expected ranks that has authenticated itself, and its socket.

        Raises:
            RankStalledError: None did before the deadline, a time of `monotonic`.
            DistBackendError: One of them has failed, as `watch` knows.
            OSError: This process has reached a limit of the system, and no handshake can be closed.
        """
        check_at = monotonic() + CHECK_SECONDS
        while (left := deadline - monotonic()) > 0:
            events = self._selector.select(min(left, self._next_check(), CHECK_SECONDS))
            # Clients that others start without end must not delay the check.
            if watch is not None and monotonic() >= check_at:
                if (failure := watch.failure([*expected])) is not None:
                    raise failure
                check_at = monotonic() + CHECK_SECONDS
            for key, _ in events:
                if key.fd == self.listener.fileno():
                    self.accept()
                elif (client := self._advance(key.fd)) is not None:
                    if client.rank in expected:
                        return client.rank, client.sock
                    client.sock.close()
            self._close_expired()
        raise RankStalledError(f"init_process_group: ranks {sorted(expected)} did not connect in time.")

    def _next_check(self) -> float:
        first = next(iter(self.handshakes.values()), None)
        return max(0.0, first.expires - monotonic()) if first else math.inf

    def _close_expired(self) -> None:
        now = monotonic()
        while self.handshakes and (first := next(iter(self.handshakes.values()))).expires <= now:
            self._forget(first).close()

    def accept(self) -> None:
        """Accept a connection, and begin its handshake."""
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            # Other errors concern only the client, which has disconnected again.
            if not advice_on_limit(error):
                return
            if not self.handshakes:
                raise
            return self._close_oldest()
        if len(self.handshakes) >= MAX_HANDSHAKES:
            self._close_oldest()
        self.handshakes[sock.fileno()] = client = _PendingHandshake(sock, self._key, self._rank)
        self._selector.register(client.sock, selectors.EVENT_READ)

    def _close_oldest(self) -> None:
        """Close the oldest handshake, to make space for another one."""
        self._forget(next(iter(self.handshakes.values()))).close()

    def _advance(self, descriptor: int) -> _PendingHandshake | None:
        """Process a client's bytes; return the handshake if it is complete now."""
        client = self.handshakes.get(descriptor)
        if client is None:
            # Closed since the selector reported it.
            return None
        try:
            client.advance()
        except OSError:
            self._forget(client).close()
            return None
        if client.done:
            self._forget(client)
            return client
        return None

    def _forget(self, client: _PendingHandshake) -> socket.socket:
        self._selector.unregister(client.sock)
        del self.handshakes[client.sock.fileno()]
        return client.sock

    def close_copies(self) -> None:
        """See `DescriptorOwner.close_copies`. A child has the parent's selector, so nothing is unregistered."""
        for sock in (self.listener, *(client.sock for client in self.handshakes.values())):
            sock.close()

    def close(self) -> None:
        """Close the connections whose handshake is incomplete."""
        for client in [*self.handshakes.values()]:
            self._forget(client).close()
        self._selector.close()
