"""Frames on the connections between ranks of different hosts. `transports.acceptor` authenticates the two ends first.

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

import socket
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchdist_ref.errors import DistNetworkError
from torchdist_ref.processes.forks import close_copies_in_child
from torchdist_ref.processes.linux_calls import TCP_NOTSENT_LOWAT
from torchdist_ref.transports.base import Range

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
        self.sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, 1)

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
