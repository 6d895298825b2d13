"""Second parser of the store's requests and replies and of the mesh's frames and handshakes, written to be obvious.

It follows the documented formats (docstrings of `stores.tcp.operations`, `stores.tcp.protocol` and
`transports.frames`) and shares no code and no table with the library. It takes a whole stream and reads it field by
field; it is slow and holds everything in memory. `parser` and `sessions` compare the library with it.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
KEY_LIMIT, VALUE_LIMIT, LIST_LIMIT, MESSAGE_LIMIT = 8192, 8 * MIB, 131072, 12 * MIB
ANY_SIZE = 2**40

# Opcode: fields of the request, fields of the reply. Opcodes up to 0x12 are torch's.
OPERATIONS = {
    0x00: ("n", ""),  # VALIDATE
    0x01: ("kv", ""),  # SET
    0x02: ("kvv", "r"),  # COMPARE_SET
    0x03: ("k", "r"),  # GET
    0x04: ("ki", "i"),  # ADD
    0x05: ("K", "b"),  # CHECK
    0x06: ("K", "a"),  # WAIT
    0x07: ("", "i"),  # GETNUMKEYS
    0x08: ("k", "i"),  # DELETE_KEY
    0x09: ("kv", ""),  # APPEND
    0x0A: ("K", "*"),  # MULTI_GET
    0x0B: ("P", ""),  # MULTI_SET
    0x0C: ("", "b"),  # CANCEL_WAIT
    0x0D: ("n", "n"),  # PING
    0x0E: ("kv", ""),  # QUEUE_PUSH
    0x0F: ("k", "q"),  # QUEUE_POP
    0x10: ("k", "i"),  # QUEUE_LEN
    0x11: ("", "L"),  # LIST_KEYS
    0x12: ("ki", "a"),  # BARRIER
    0x80: ("k", "r"),  # HELLO
    0x82: ("k", "r"),  # WAIT_GET
    0x83: ("k", "r"),  # WAIT_POP
    0x84: ("ki", "i"),  # WAIT_NUMBER
    0x85: ("K", "L"),  # WAIT_GET_ALL
    0x86: ("kvP", "a"),  # SET_ON_DISCONNECT
    0x87: ("ki", "b"),  # RELEASE
}
VALIDATE, FRAMED = 0x00, 0x81


class Refused(Exception):
    """The bytes are no message."""


class Incomplete(Exception):
    """The message goes on after the bytes."""


class Cursor:
    """Position in a message that begins at `start`."""

    def __init__(self, data: bytes, start: int = 0, limit: int = ANY_SIZE) -> None:
        self.data, self.start, self.at, self.limit = data, start, start, limit

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end - self.start > self.limit:
            raise Refused
        if end > len(self.data):
            raise Incomplete
        self.at, begin = end, self.at
        return self.data[begin:end]

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def sized(self, limit: int) -> bytes:
        size = self.number(8)
        if size > limit:
            raise Refused
        return self.take(size)

    def count(self, limit: int) -> int:
        count = self.number(8)
        if count > limit:
            raise Refused
        return count

    def field(self, kind: str) -> Any:
        """Read one field. Kinds are those of the table in the docstring of `operations`."""
        if kind == "k":
            return self.sized(KEY_LIMIT)
        if kind == "v":
            return self.sized(VALUE_LIMIT)
        if kind == "r":
            return self.sized(ANY_SIZE)
        if kind == "i":
            return self.number(8, signed=True)
        if kind == "n":
            return self.number(4)
        if kind in "ba":
            return self.number(1)
        if kind == "K":
            return [self.sized(KEY_LIMIT) for _ in range(self.count(LIST_LIMIT))]
        if kind == "P":
            return [(self.sized(KEY_LIMIT), self.sized(VALUE_LIMIT)) for _ in range(self.count(LIST_LIMIT))]
        if kind == "L":
            return [self.sized(ANY_SIZE) for _ in range(self.count(ANY_SIZE))]
        assert kind == "q"
        length = self.number(8, signed=True)
        return length, self.sized(ANY_SIZE) if length > 0 else None


def fields(kinds: str, data: bytes) -> tuple[Any, ...]:
    """Read fields that fill the data exactly."""
    cursor = Cursor(data)
    try:
        found = tuple(cursor.field(kind) for kind in kinds)
    except Incomplete:
        raise Refused from None
    if cursor.at != len(data):
        raise Refused
    return found


def encoded(kinds: str, values: tuple[Any, ...]) -> bytes:
    """Write fields."""

    def sized(value: bytes) -> bytes:
        return len(value).to_bytes(8, "little") + value

    out = b""
    for kind, value in zip(kinds, values, strict=True):
        if kind in "kvr":
            out += sized(value)
        elif kind == "i":
            out += value.to_bytes(8, "little", signed=True)
        elif kind in "nba":
            out += value.to_bytes(4 if kind == "n" else 1, "little")
        elif kind in "KL":
            out += len(value).to_bytes(8, "little") + b"".join(map(sized, value))
        elif kind == "P":
            out += len(value).to_bytes(8, "little") + b"".join(sized(key) + sized(text) for key, text in value)
        elif kind == "q":
            out += value[0].to_bytes(8, "little", signed=True) + (b"" if value[1] is None else sized(value[1]))
    return out


Parsed = tuple[int, tuple[Any, ...], int | None]
"""Opcode, fields, and the request id, which is None for a request that is not framed."""


def requests(data: bytes) -> tuple[list[Parsed], str, int]:
    """Return the requests of a stream, "refused" or "open", and where the first unread one begins."""
    found: list[Parsed] = []
    at = 0
    while at < len(data):
        try:
            request, at = _request(data, at, first=not found)
        except Refused:
            return found, "refused", at
        except Incomplete:
            break
        found.append(request)
    return found, "open", at


def _request(data: bytes, at: int, first: bool) -> tuple[Parsed, int]:
    """Read one request, and return where it ends."""
    code = data[at]
    if first and code != VALIDATE:
        raise Refused
    if code != FRAMED:
        if code not in OPERATIONS:
            raise Refused
        cursor = Cursor(data, at, MESSAGE_LIMIT)
        cursor.take(1)
        return (code, tuple(cursor.field(kind) for kind in OPERATIONS[code][0]), None), cursor.at
    header = Cursor(data, at)
    header.take(1)
    number, size, code = header.number(8), header.number(4), header.number(1)
    if size > MESSAGE_LIMIT or code not in OPERATIONS:
        raise Refused
    body = header.take(size)
    return (code, fields(OPERATIONS[code][0], body), number), header.at


# Mesh

FRAME_KINDS = ("ready", "released", "message", "reply", "chunk", "credit", "doorbell", "status")
POSTED = 2**63


@dataclass
class Peer:
    """Receiving end of a mesh connection.

    Attributes:
        peer: Rank at the other end.
        allowed: By owner, the ranges of the segment that the peer may write, as (begin, size).
        posted: Buffers for direct sends, in order.
        writes: Bytes written, as (offset, bytes).
        counts: Semaphores posted, by kind.
    """

    peer: int
    allowed: dict[int, list[tuple[int, int]]]
    posted: list[bytearray]
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def read(self, data: bytes) -> str:
        """Read a stream of frames; return "refused" or "open"."""
        cursor = Cursor(data)
        try:
            while cursor.at < len(data):
                self._frame(cursor)
        except Refused:
            return "refused"
        except Incomplete:
            pass
        return "open"

    def _frame(self, cursor: Cursor) -> None:
        kind, count, owner = cursor.number(1), cursor.number(1), cursor.number(4)
        ranges = [(cursor.number(8), cursor.number(8)) for _ in range(count)]
        direct = bool(ranges) and ranges[0][0] == POSTED
        if owner not in ([self.peer] if direct else self.allowed):
            raise Refused
        if direct:
            if count != 1 or not self.posted or len(self.posted[0]) != ranges[0][1]:
                raise Refused
        else:
            for begin, size in ranges:
                if not any(a <= begin and begin + size <= a + b for a, b in self.allowed[owner]):
                    raise Refused
        target = self.posted.pop(0) if direct else None
        for begin, size in ranges:
            # What has arrived of an unfinished range is in place already.
            part = cursor.data[cursor.at : cursor.at + size]
            if target is not None:
                target[: len(part)] = part
            else:
                self.writes.append((begin, part))
            cursor.take(size)
        if kind >= len(FRAME_KINDS):
            raise Refused
        name = FRAME_KINDS[kind]
        self.counts[name] = self.counts.get(name, 0) + 1


def proof(key: bytes, side: bytes, acceptor: int, connector: int, nonces: bytes) -> bytes:
    """Return the proof of one side of a handshake: HMAC-SHA256 over the side, both ranks and both nonces."""
    text = side + b"\0" + acceptor.to_bytes(4, "little") + connector.to_bytes(4, "little") + nonces
    return hmac.new(key, text, hashlib.sha256).digest()


def handshake(key: bytes, acceptor: int, data: bytes, nonce: bytes) -> int | str:
    """Return the rank that a connector's bytes prove, "refused", or "open" if they are not all there."""
    if len(data) < 52:
        return "open"
    rank = int.from_bytes(data[:4], "little")
    expected = proof(key, b"connector", acceptor, rank, data[4:20] + nonce)
    return rank if data[20:52] == expected else "refused"
