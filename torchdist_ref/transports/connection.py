"""Connections between ranks of different hosts: the acceptor that authenticates them, and the frames that they carry.

A frame carries bytes of the segment, which the receiver copies to the same offsets, and posts one semaphore::

    u8 kind | u8 number of ranges | u32 owner | ranges: (u64 offset, u64 bytes)... | the bytes of each range

Kinds are indices into `segment.SEMAPHORE_KINDS`; the owner is the rank whose part of the segment it is. The
receiver checks that the ranges lie inside that part, so that a faulty peer cannot write elsewhere. A range at
`POSTED_RECEIVE` goes to the next view that the receiver has posted. Sockets are non-blocking: a sender that waits for
buffer space keeps receiving, so that two ranks that send to each other cannot deadlock.

The store and the notebook have protocols of their own. Sharing one would cost speed here: payloads are received
directly into the segment or a tensor, without an intermediate copy.

Do not add knowledge of groups or calls here.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import NamedTuple

from torchdist_ref.errors import DistNetworkError, RankStalledError
from torchdist_ref.transports.segment import Range

SECRET_BYTES = 16
_HANDSHAKE_BYTES = SECRET_BYTES + 4
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


class MeshConnection:
    """One end of a socket to a peer.

    Args:
        sock: Connected socket.
        views_for: Function that returns the destinations of a frame's bytes; raises `DistNetworkError` if the peer may
            not write there.
        on_frame: Function that is called when all bytes of a frame have arrived.
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
        self._views_for, self._on_frame = views_for, on_frame
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._frame: MeshFrame | None = None
        self._missing: list[memoryview] = []

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self.sock.fileno()

    def send(self, parts: Sequence[memoryview | bytes], on_full: Callable[[], None]) -> None:
        """Send all parts; call `on_full` whenever the socket's buffer is full.

        Raises:
            OSError: The connection is closed.
        """
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            try:
                sent = self.sock.sendmsg(left)
            except BlockingIOError:
                on_full()
                continue
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

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


def handshake_message(secret: bytes, rank: int) -> bytes:
    """Return the message with which a rank authenticates itself to an `Acceptor`."""
    return secret + rank.to_bytes(4, "little")


class Acceptor:
    """Acceptor of connections from ranks on other hosts, which it authenticates.

    Handshakes run concurrently, so a client that stays silent, sends garbage or disconnects cannot delay or abort the
    others. Port scanners are such clients.

    Args:
        server: Listening socket.
        secret: Secret that only ranks of the group know.
    """

    def __init__(self, server: socket.socket, secret: bytes) -> None:
        server.setblocking(False)
        self._server, self._secret = server, secret
        self._handshakes: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def next(self, expected: Collection[int], deadline: float) -> tuple[int, socket.socket]:
        """Return the next of the expected ranks that has authenticated itself, and its socket.

        Raises:
            RankStalledError: None did before the deadline, a time of `monotonic`.
        """
        while (left := deadline - monotonic()) > 0:
            for key, _ in self._selector.select(left):
                client = key.fileobj
                if not isinstance(client, socket.socket) or client is self._server:
                    self._accept()
                elif (rank := self._authenticate(client)) is not None:
                    self._forget(client)
                    if rank in expected:
                        return rank, client
                    client.close()
        raise RankStalledError(f"init_process_group: ranks {sorted(expected)} did not connect in time.")

    def _accept(self) -> None:
        try:
            client, _ = self._server.accept()
        except OSError:
            # The client has disconnected again.
            return
        client.setblocking(False)
        self._handshakes[client] = b""
        self._selector.register(client, selectors.EVENT_READ)

    def _authenticate(self, client: socket.socket) -> int | None:
        """Return the rank of a client whose handshake is complete; -1 if it is wrong, None while it is incomplete."""
        received = _receive_available(client, _HANDSHAKE_BYTES - len(self._handshakes[client]))
        if received is None:
            return None
        message = self._handshakes[client] = self._handshakes[client] + received
        if received and len(message) < _HANDSHAKE_BYTES:
            return None
        valid = len(message) == _HANDSHAKE_BYTES and hmac.compare_digest(message[:SECRET_BYTES], self._secret)
        return int.from_bytes(message[SECRET_BYTES:], "little") if valid else -1

    def _forget(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        del self._handshakes[client]

    def close(self) -> None:
        """Close the connections whose handshake is incomplete."""
        for client in [*self._handshakes]:
            self._forget(client)
            client.close()
        self._selector.close()


def _receive_available(client: socket.socket, count: int) -> bytes | None:
    """Return the bytes that have arrived; nothing at the end of the stream, None if none have yet."""
    try:
        return client.recv(count)
    except BlockingIOError:
        return None
    except OSError:
        return b""
