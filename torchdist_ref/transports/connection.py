"""Connection: frames between two ranks over one TCP socket.

A frame says: here are some bytes of the segment, put them where they belong, then give a token::

    u8 kind | u8 number of ranges | u32 owner | ranges: (u64 offset, u64 bytes)... | the bytes of each range

Kinds are numbered as in `layout.KINDS`; the owner is the rank whose part of the segment it is. The receiver knows
how many bytes to expect from the ranges and checks that they lie inside the owner's part, so a broken peer can't
write elsewhere. A range at `ELSEWHERE` goes where the receiver said that it wants it. Sockets don't block: who has to
wait for room keeps reading meanwhile, so that two ranks that send to each other never wait for each other.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchdist_ref.errors import DistNetworkError
from torchdist_ref.transports.memory import Range

_HEAD = struct.Struct("<BBI")
_RANGE = struct.Struct("<QQ")
_SCRATCH = 256 * 1024
ELSEWHERE = 2**63


class Frame(NamedTuple):
    """What a frame's head says."""

    kind: int
    owner: int
    ranges: tuple[Range, ...]


def pack(frame: Frame) -> bytes:
    """The head of a frame.

    >>> unpack(pack(Frame(2, 5, ((64, 8),))))
    (Frame(kind=2, owner=5, ranges=((64, 8),)), 22)
    """
    head = _HEAD.pack(frame.kind, len(frame.ranges), frame.owner)
    return head + b"".join(_RANGE.pack(*piece) for piece in frame.ranges)


def unpack(data: bytes | memoryview) -> tuple[Frame, int] | None:
    """A frame's head and its length, or None where there are too few bytes yet."""
    if len(data) < _HEAD.size:
        return None
    kind, count, owner = _HEAD.unpack_from(data)
    end = _HEAD.size + count * _RANGE.size
    if len(data) < end:
        return None
    ranges = tuple(_RANGE.unpack_from(data, _HEAD.size + i * _RANGE.size) for i in range(count))
    return Frame(kind, owner, ranges), end


Target = Callable[[Frame], list[memoryview]]
Arrived = Callable[[Frame], None]


class Connection:
    """One end of a socket to a peer.

    Args:
        sock: Connected.
        target: For a frame, where its bytes go; raises `DistNetworkError` if it may not write there.
        arrived: Called when all bytes of a frame are there.
    """

    def __init__(self, sock: socket.socket, target: Target, arrived: Arrived) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._target, self._arrived = target, arrived
        self._scratch = bytearray(_SCRATCH)
        self._view = memoryview(self._scratch)
        self._begin = self._end = 0
        self._frame: Frame | None = None
        self._missing: list[memoryview] = []

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.sock.fileno()

    def send(self, parts: Sequence[memoryview | bytes], meanwhile: Callable[[], None]) -> None:
        """Send all parts, doing something else whenever there is no room.

        Raises:
            OSError: The peer is gone.
        """
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            try:
                sent = self.sock.sendmsg(left)
            except BlockingIOError:
                meanwhile()
                continue
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    def receive(self) -> bool:
        """Read what is there, and complete what can be completed. False at the end of the stream.

        Raises:
            DistNetworkError: The peer sent what no rank of this library sends.
        """
        while True:
            into = self._room()
            try:
                count = self.sock.recv_into(into)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if count == 0:
                return False
            self._took(into, count)
            if count < len(into):
                return True

    def _room(self) -> memoryview:
        """Where the next bytes go: a large range takes them directly, everything else is read in bulk."""
        if self._missing and len(self._missing[0]) >= _SCRATCH // 2 and self._begin == self._end:
            return self._missing[0]
        if self._begin:
            self._scratch[: self._end - self._begin] = self._scratch[self._begin : self._end]
            self._begin, self._end = 0, self._end - self._begin
        return self._view[self._end :]

    def _took(self, into: memoryview, count: int) -> None:
        if self._missing and into is self._missing[0]:
            self._filled(count)
        else:
            self._end += count
        while self._advance():
            pass

    def _advance(self) -> bool:
        """Do the next thing that the bytes at hand allow; False where they allow nothing."""
        if self._frame is None:
            head = unpack(self._view[self._begin : self._end])
            if head is None:
                return False
            self._frame, length = head
            self._begin += length
            self._missing = [view for view in self._target(self._frame) if len(view)]
        while self._missing and self._begin < self._end:
            count = min(len(self._missing[0]), self._end - self._begin)
            self._missing[0][:count] = self._view[self._begin : self._begin + count]
            self._begin += count
            self._filled(count)
        if self._missing:
            return False
        frame, self._frame = self._frame, None
        self._arrived(frame)
        return True

    def _filled(self, count: int) -> None:
        rest = self._missing[0][count:]
        if len(rest):
            self._missing[0] = rest
        else:
            self._missing.pop(0)

    def close(self) -> None:
        """Close the socket; what was sent is delivered."""
        self.sock.close()


def inside(ranges: Sequence[Range], allowed: Sequence[Range]) -> None:
    """Raise unless every range lies in one of the allowed ones."""
    for begin, size in ranges:
        if not any(start <= begin and begin + size <= start + room for start, room in allowed):
            raise DistNetworkError(f"a peer wants to write {size} bytes at {begin}: not its part of the segment.")
