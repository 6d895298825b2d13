"""Reading the bytes of TCPStore: first how far a message reaches, then its fields, from bytes that are all there.

How far is easy where the length stands in front, as between our own peers. torch's dialect has none: there an
`extent` follows the lengths inside the message, as far as its bytes have come, and goes on from there when more come.
Lengths are checked before the bytes that they announce are waited for. What messages mean does not belong here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from typing import Any

from torchdist_ref.stores.tcp_wire import (
    ANY_SIZE,
    LONGEST_KEY,
    LONGEST_MESSAGE,
    LONGEST_VALUE,
    MOST_KEYS,
    REQUESTS,
    TRACKED_HEAD,
    Op,
    Request,
    WireError,
)

_I64, _U32, _U64 = (struct.Struct(f"<{kind}").unpack_from for kind in "qIQ")
_OPS = {int(op): op for op in Op if op in REQUESTS}
_TRACKED, _TRACKED_SIZE, _TRACKED_HEAD = int(Op.TRACKED), TRACKED_HEAD.size, TRACKED_HEAD.unpack_from
_VALIDATE = Op.VALIDATE
_new = tuple.__new__


# Fields, from a whole message: each reader gives the field and where the next one begins.


def _checked(number: int, most: int) -> int:
    if number > most:
        raise WireError(f"a length of {number}, where at most {most} is allowed")
    return number


def _blob_reader(longest: int) -> Callable[[bytes, int], tuple[bytes, int]]:
    def blob(data: bytes, at: int) -> tuple[bytes, int]:
        size = _U64(data, at)[0]
        if size > longest:
            _checked(size, longest)
        end = at + 8 + size
        return data[at + 8 : end], end

    return blob


_key, _value, _blob = map(_blob_reader, (LONGEST_KEY, LONGEST_VALUE, ANY_SIZE))


def _blobs(data: bytes, at: int, one: Callable[[bytes, int], tuple[bytes, int]] = _blob) -> tuple[list[bytes], int]:
    count, at = _checked(_U64(data, at)[0], MOST_KEYS if one is _key else ANY_SIZE), at + 8
    found = []
    for _ in range(count):
        blob, at = one(data, at)
        found.append(blob)
    return found, at


def _pairs(data: bytes, at: int) -> tuple[list[tuple[bytes, bytes]], int]:
    count, at = _checked(_U64(data, at)[0], MOST_KEYS), at + 8
    found = []
    for _ in range(count):
        key, at = _key(data, at)
        value, at = _value(data, at)
        found.append((key, value))
    return found, at


def _head(data: bytes, at: int) -> tuple[tuple[int, bytes | None], int]:
    length = _I64(data, at)[0]
    value, at = _blob(data, at + 8) if length > 0 else (None, at + 8)
    return (length, value), at


def _key_and_value(data: bytes, at: int) -> tuple[tuple[bytes, bytes], int]:
    size = _U64(data, at)[0]
    if size > LONGEST_KEY:
        _checked(size, LONGEST_KEY)
    middle = at + 8 + size
    value, end = _value(data, middle)
    return (data[at + 8 : middle], value), end


def _key_and_number(data: bytes, at: int) -> tuple[tuple[bytes, int], int]:
    size = _U64(data, at)[0]
    if size > LONGEST_KEY:
        _checked(size, LONGEST_KEY)
    middle = at + 8 + size
    return (data[at + 8 : middle], _I64(data, middle)[0]), middle + 8


READERS: dict[str, Callable[[bytes, int], tuple[Any, int]]] = {
    "k": _key,
    "v": _value,
    "r": _blob,
    "i": lambda data, at: (_I64(data, at)[0], at + 8),
    "b": lambda data, at: (data[at], at + 1),
    "n": lambda data, at: (_U32(data, at)[0], at + 4),
    "K": lambda data, at: _blobs(data, at, _key),
    "P": _pairs,
    "L": _blobs,
    "q": _head,
}


# What is said all the time has few fields, and a reader for its whole shape.
WHOLE: dict[str, Callable[[bytes, int], tuple[tuple[Any, ...], int]]] = {
    "": lambda data, at: ((), at),
    "i": lambda data, at: (_I64(data, at), at + 8),
    "kv": _key_and_value,
    "ki": _key_and_number,
}


def read(shape: str, data: bytes, at: int = 0, end: int | None = None) -> tuple[Any, ...]:
    """The fields of one message, which lies in the data from `at` to `end` and nowhere else.

    Raises:
        WireError: the bytes have another shape.

    >>> read("kn", bytes.fromhex("02000000000000002f6b07000000"))
    (b'/k', 7)
    """
    try:
        fields, at = WHOLE[shape](data, at) if shape in WHOLE else _one_by_one(shape, data, at)
    except (struct.error, IndexError):
        raise WireError("a message ends inside a field") from None
    if at != (len(data) if end is None else end):
        raise WireError("a message is longer or shorter than its fields")
    return fields


def _one_by_one(shape: str, data: bytes, at: int) -> tuple[tuple[Any, ...], int]:
    fields = []
    for kind in shape:
        field, at = READERS[kind](data, at)
        fields.append(field)
    return tuple(fields), at


# Extents: generators that yield how many bytes of the message must be there for the next step, at last its length.

Extent = Generator[int, None, int]
NumberAt = Callable[[int], int]
_LENGTHS = {"i": 8, "b": 1, "n": 4}
_BLOBS = {"k": LONGEST_KEY, "v": LONGEST_VALUE, "r": ANY_SIZE}
_LISTS = {"K": ("k", MOST_KEYS), "P": ("kv", MOST_KEYS), "L": ("r", ANY_SIZE)}


def extent(shape: str, number_at: NumberAt, end: int = 0) -> Extent:
    """How far a message reaches, found out as its bytes come.

    Args:
        shape: of its fields.
        number_at: tells the 64 bits at a place of the message; asked only about bytes that are there.
        end: where the fields begin.

    Yields:
        How many bytes must be there at least; at last, how many the message has.
    """
    for kind in shape:
        if kind in _LENGTHS:
            end += _LENGTHS[kind]
        elif kind in _BLOBS:
            end = yield from _extent_of_blob(_BLOBS[kind], number_at, end)
        elif kind in _LISTS:
            end = yield from _extent_of_list(*_LISTS[kind], number_at, end)
        else:
            end = yield from _extent_of_head(number_at, end)
    yield end
    return end


def _extent_of_blob(longest: int, number_at: NumberAt, at: int) -> Extent:
    yield at + 8
    return at + 8 + _checked(number_at(at), longest)


def _extent_of_list(kinds: str, most: int, number_at: NumberAt, at: int) -> Extent:
    yield at + 8
    end = at + 8
    for _ in range(_checked(number_at(at), most)):
        for kind in kinds:
            end = yield from _extent_of_blob(_BLOBS[kind], number_at, end)
    return end


def _extent_of_head(number_at: NumberAt, at: int) -> Extent:
    yield at + 8
    filled = 0 < number_at(at) < 2**63
    return (yield from _extent_of_blob(ANY_SIZE, number_at, at + 8)) if filled else at + 8


def take_whole(shape: str, take: Callable[[int], bytes]) -> tuple[Any, ...]:
    """The fields of a message without a length in front, from a source that gives as many bytes as it is asked for."""
    data = bytearray()
    for need in extent(shape, lambda at: int(_U64(data, at)[0])):
        data.extend(take(need - len(data)))
    return read(shape, bytes(data))


class Decoder:
    """Turns bytes, cut anywhere, into requests. Refuses a message before it grows beyond the limits.

    Bytes that hold whole requests are read where they are; only what is unfinished is put together.
    """

    def __init__(self) -> None:
        self._data: bytes | bytearray = b""
        self._at = 0
        self._need = 1
        self._extent: Extent | None = None
        self._greeted = False
        self.held = 0
        """Bytes of unfinished messages kept in memory."""

    @property
    def wanted(self) -> int:
        """How many more bytes bring the reading a step further."""
        return max(1, self._need - self.held)

    def feed(self, data: bytes) -> None:
        """Take in what has arrived."""
        if self.held:
            rest = self._data if isinstance(self._data, bytearray) else bytearray(self._data)
            del rest[: self._at]
            rest += data
            data = rest  # type: ignore[assignment]
        self._data, self._at, self.held = data, 0, len(data)

    def next(self) -> Request | None:
        """The next whole request, or None until more bytes are fed.

        Raises:
            WireError: the bytes are no request, or too large a one.
        """
        while self.held >= self._need:
            tracked = self._greeted and self._data[self._at] == _TRACKED
            request = self._tracked() if tracked else self._plain()
            if request is not None:
                return request
        return None

    def _tracked(self) -> Request | None:
        """A request with its length in front."""
        if self.held < _TRACKED_SIZE:
            self._need = _TRACKED_SIZE
            return None
        _, number, size, code = _TRACKED_HEAD(self._data, self._at)
        if size > LONGEST_MESSAGE:
            _checked(size, LONGEST_MESSAGE)
        self._need = _TRACKED_SIZE + size
        return self._read(_OPS.get(code) or self._op(code), _TRACKED_SIZE, number) if self.held >= self._need else None

    def _plain(self) -> Request | None:
        """A request whose length shows as its bytes come."""
        op = self._op(self._data[self._at])
        if self._extent is None:
            self._extent = extent(REQUESTS[op], self._number_at, 1)
        try:
            self._need = next(self._extent)
        except StopIteration:
            return self._read(op, 1, None)
        if self._need > LONGEST_MESSAGE:
            raise WireError(f"a message of more than {LONGEST_MESSAGE} bytes")
        return None

    def _number_at(self, place: int) -> int:
        return int(_U64(self._data, self._at + place)[0])

    def _op(self, code: int) -> Op:
        op = _OPS.get(code)
        if not self._greeted and op is not _VALIDATE:
            # A stranger can't send much: the first message is this one, and it has five bytes.
            raise WireError(f"the first message is operation {code:#04x}, not VALIDATE")
        if op is None:
            raise WireError(f"unknown operation {code:#04x}")
        return op

    def _read(self, op: Op, begin: int, number: int | None) -> Request:
        """Take the message at the head, whose fields begin so far in."""
        data, at, end = self._data, self._at, self._at + self._need
        self.held -= self._need
        self._at, self._need, self._extent, self._greeted = end, 1, None, True
        if isinstance(data, bytearray):
            data, at, end = bytes(memoryview(data)[at:end]), 0, end - at
        return _new(Request, (op, read(REQUESTS[op], data, at + begin, end), number))
