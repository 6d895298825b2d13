"""Reading the bytes of TCPStore: one small grammar, driven from two sides.

A parser is a generator that yields how many bytes it needs next and is sent exactly those. The client drives it
from a blocking socket (`drive`), the server piece by piece as bytes arrive (`Decoder`), so both read by the same
rules. Lengths are checked before the bytes that they announce are waited for. What the messages mean does not
belong here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from torchdist_ref.stores.tcp_wire import (
    ANY_SIZE,
    LONGEST_KEY,
    LONGEST_MESSAGE,
    LONGEST_VALUE,
    MOST_KEYS,
    REQUESTS,
    Op,
    Request,
    Status,
    WireError,
)

T = TypeVar("T")
Parse = Generator[int, bytes, T]


def _read_u32() -> Parse[int]:
    return int(struct.unpack("<I", (yield 4))[0])


def _read_i64() -> Parse[int]:
    return int(struct.unpack("<q", (yield 8))[0])


def _read_u64(most: int) -> Parse[int]:
    number = int(struct.unpack("<Q", (yield 8))[0])
    if number > most:
        raise WireError(f"a length of {number}, where at most {most} is allowed")
    return number


def _read_byte() -> Parse[int]:
    return int((yield 1)[0])


def _read_blob(longest: int) -> Parse[bytes]:
    size = yield from _read_u64(longest)
    return (yield size) if size else b""


def _read_blobs(longest: int, most: int) -> Parse[list[bytes]]:
    count = yield from _read_u64(most)
    found = []
    for _ in range(count):
        found.append((yield from _read_blob(longest)))
    return found


def _read_pairs() -> Parse[list[tuple[bytes, bytes]]]:
    count = yield from _read_u64(MOST_KEYS)
    found = []
    for _ in range(count):
        key = yield from _read_blob(LONGEST_KEY)
        found.append((key, (yield from _read_blob(LONGEST_VALUE))))
    return found


def _read_head() -> Parse[tuple[int, bytes | None]]:
    length = yield from _read_i64()
    return length, (yield from _read_blob(ANY_SIZE)) if length > 0 else None


READERS: dict[str, Callable[[], Parse[Any]]] = {
    "k": lambda: _read_blob(LONGEST_KEY),
    "v": lambda: _read_blob(LONGEST_VALUE),
    "r": lambda: _read_blob(ANY_SIZE),
    "i": _read_i64,
    "b": _read_byte,
    "n": _read_u32,
    "K": lambda: _read_blobs(LONGEST_KEY, MOST_KEYS),
    "P": _read_pairs,
    "L": lambda: _read_blobs(ANY_SIZE, ANY_SIZE),
    "q": _read_head,
}


def read(shape: str) -> Parse[tuple[Any, ...]]:
    """Parser of the fields of one message."""
    fields = []
    for kind in shape:
        fields.append((yield from READERS[kind]()))
    return tuple(fields)


def read_greeting() -> Parse[Request]:
    """Parser of the first message of a connection: VALIDATE and nothing else, so a stranger can't send much."""
    if (op := (yield 1)[0]) != Op.VALIDATE:
        raise WireError(f"the first message is operation {op:#04x}, not VALIDATE")
    return Request(Op.VALIDATE, (yield from read("n")))


def read_request() -> Parse[Request]:
    """Parser of one request, numbered or not."""
    op, number = (yield 1)[0], None
    if op == Op.TRACKED:
        number = int(struct.unpack("<Q", (yield 8))[0])
        op = (yield 1)[0]
    if op not in REQUESTS:
        raise WireError(f"unknown operation {op:#04x}")
    return Request(Op(op), (yield from read(REQUESTS[op])), number)


def read_answer() -> Parse[tuple[int, Status, bytes]]:
    """Parser of the answer to a numbered request."""
    number, status, size = struct.unpack("<QBQ", (yield 17))
    return number, Status(status), (yield size) if size else b""


def drive(parser: Parse[T], take: Callable[[int], bytes]) -> T:
    """Run a parser to its end on a source that gives exactly as many bytes as it is asked for."""
    try:
        need = next(parser)
        while True:
            need = parser.send(take(need))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class Decoder:
    """Turns bytes, cut anywhere, into requests. Refuses a message before it grows beyond the limits."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._restart(read_greeting())

    @property
    def held(self) -> int:
        """Bytes of unfinished messages kept in memory."""
        return self._parsed + len(self._buffer)

    @property
    def wanted(self) -> int:
        """How many more bytes bring the parser a step further."""
        return max(1, self._need - len(self._buffer))

    def feed(self, data: bytes) -> None:
        """Take in what has arrived."""
        self._buffer += data

    def next(self) -> Request | None:
        """The next whole request, or None until more bytes are fed.

        Raises:
            WireError: the bytes are no request, or too large a one.
        """
        while len(self._buffer) >= self._need:
            piece = bytes(self._buffer[: self._need])
            del self._buffer[: self._need]
            try:
                self._step(piece)
            except StopIteration as end:
                self._restart(read_request())
                return end.value  # type: ignore[no-any-return]
        return None

    def _step(self, piece: bytes) -> None:
        self._parsed += len(piece)
        self._need = self._parser.send(piece)
        if self._parsed + self._need > LONGEST_MESSAGE:
            raise WireError(f"a message of more than {LONGEST_MESSAGE} bytes")

    def _restart(self, parser: Parse[Request]) -> None:
        self._parsed = 0
        self._parser = parser
        self._need = next(self._parser)
