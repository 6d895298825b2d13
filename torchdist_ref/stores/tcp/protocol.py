"""Bytes of TCPStore's protocol: writing and reading the requests and replies of `operations`.

A request of torch's protocol is an opcode and its fields, without a length. Its end is found by an *extent*, which
follows the lengths inside the message as its bytes arrive. Lengths are checked before memory is allocated for them.

A handshake chooses the variant. torch's client starts with a PING that carries its process id, and torch's server
echoes it. Our client's nonce starts with `NONCE_MARK`, and our server replies `recognized(nonce)` instead of the echo.
After a HELLO that names the client, requests and responses are framed::

    FRAMED | u64 request id | u32 bytes of fields | opcode | fields
             u64 request id | u64 bytes of fields | u8 status | fields

The server answers a repeated request id from memory. Do not add sockets or the meaning of operations here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, repeat
from typing import Any, NamedTuple

from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores.tcp.operations import MAX_KEY_BYTES, MAX_VALUE_BYTES, OPERATIONS, Op, Operation

MAGIC = 0x3C85F7CE
FRAMED = 0x81
MAX_KEYS = 131072
MAX_MESSAGE_BYTES = 12 * 2**20
# Size of the random number by which clients distinguish servers.
IDENTITY_BYTES = 16
# Limit of fields in replies: a client limits the whole reply.
UNLIMITED = 2**40
MANY_VALUES = 1024
# Size up to which a reply is copied together and sent at once.
WHOLE_REPLY_BYTES = 64 * 1024
MEMORY_VARIABLE = "TORCHDIST_REF_STORE_MEMORY"
DEFAULT_MEMORY_MIB = 256

REQUEST_HEADER = struct.Struct("<BQIB")
RESPONSE_HEADER = struct.Struct("<QQB")
_pack_header, _unpack_header, _HEADER_BYTES = REQUEST_HEADER.pack, REQUEST_HEADER.unpack_from, REQUEST_HEADER.size
_pack_u8, _pack_i64, _pack_u64 = (struct.Struct(f"<{kind}").pack for kind in "BqQ")
_unpack_i64, _unpack_u64 = (struct.Struct(f"<{kind}").unpack_from for kind in "qQ")


def memory_budget() -> int:
    """Return the memory that a server may use for its clients, in bytes; what it sends them all is not larger."""
    text = os.environ.get(MEMORY_VARIABLE, "")
    return (int(text) if text.isdecimal() else DEFAULT_MEMORY_MIB) << 20


def full_error(operation: Operation, budget: int) -> ArgumentError:
    """Return the error of a request that would exceed the budget."""
    return ArgumentError(
        f"{operation.name.lower()}: the store is full: keys, values, waiting requests and unread replies may use "
        f"{budget >> 20} MiB. A store is for addresses and small values. Delete keys that are not needed, send data "
        f"with collectives, or set {MEMORY_VARIABLE} to a larger number of MiB where the server runs."
    )


class ProtocolError(Exception):
    """The peer sent bytes that are not a message; its connection is unusable."""


class Status(IntEnum):
    """Outcome of a framed request."""

    DONE = 0
    REFUSED = 1
    CANCELED = 2


# Looking up a member of an enumeration is a Python call, and every request needs this one.
_DONE = int(Status.DONE)


class Request(NamedTuple):
    """Parsed request; `number` is its request id, None for a request that is not framed."""

    operation: Operation
    fields: tuple[Any, ...]
    number: int | None = None


# Fields

NumberAt = Callable[[int], int]
Extent = Generator[int, None, int]
Reader = Callable[[bytes, int], tuple[Any, int]]


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """Encoding of one kind of field.

    Attributes:
        write: function from the field to its bytes, in pieces: a large value is not copied into a larger whole.
        read: function from a message and an offset to the field there, and the offset of the next one.
        extent: generator over the number of bytes that must have arrived to go on. It returns the offset of the next
            field. Its arguments are a function that reads 64 bits at an offset, and the field's offset.
        limit: longest value; 0 for other kinds of fields.
    """

    write: Callable[[Any], list[bytes]]
    read: Reader
    extent: Callable[[NumberAt, int], Extent]
    limit: int = 0


def _checked(length: int, limit: int) -> int:
    if length > limit:
        raise ProtocolError(f"a length of {length}, where at most {limit} is allowed")
    return length


def _integer(kind: str) -> FieldCodec:
    codec = struct.Struct(f"<{kind}")
    pack, unpack, size = codec.pack, codec.unpack_from, codec.size

    def extent(number_at: NumberAt, at: int) -> Extent:
        yield from ()
        return at + size

    return FieldCodec(lambda number: [pack(number)], lambda data, at: (unpack(data, at)[0], at + size), extent)


def _blob(limit: int) -> FieldCodec:
    """Return the codec of bytes with their length in front."""

    def read(data: bytes, at: int) -> tuple[bytes, int]:
        size = _unpack_u64(data, at)[0]
        if size > limit:
            _checked(size, limit)
        end = at + 8 + size
        return data[at + 8 : end], end

    def extent(number_at: NumberAt, at: int) -> Extent:
        yield at + 8
        return at + 8 + _checked(number_at(at), limit)

    return FieldCodec(lambda data: [_pack_u64(len(data)), data], read, extent, limit)


def _write_blobs(values: Sequence[bytes]) -> list[bytes]:
    return list(chain.from_iterable(zip(map(_pack_u64, map(len, values)), values, strict=True)))


class ManyValues:
    """Values of a reply that become bytes only while they are sent: a value may be in a reply many times.

    Its length is that of the bytes.

    >>> [piece.hex() for piece in ManyValues([b"a", b"bc"]).pieces()]
    ['01000000000000006102000000000000006263']
    """

    def __init__(self, values: Sequence[bytes]) -> None:
        self._values = values
        self._nbytes = sum(map(len, values)) + 8 * len(values)

    def __len__(self) -> int:
        return self._nbytes

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in pieces; large values are pieces themselves."""
        for begin in range(0, len(self._values), MANY_VALUES):
            written = _write_blobs(self._values[begin : begin + MANY_VALUES])
            if sum(map(len, written)) <= MAX_VALUE_BYTES:
                yield b"".join(written)
            else:
                yield from written


Piece = bytes | ManyValues


def _list(limit: int, *blobs: FieldCodec) -> FieldCodec:
    """Return the codec of a list of values, or of tuples of values, with the number of its items in front."""
    limits = [blob.limit for blob in blobs]
    single, first = len(blobs) == 1, limits[0]

    def write(items: Sequence[Any]) -> list[bytes]:
        values = items if single else list(chain.from_iterable(items))
        return [_pack_u64(len(items)), *_write_blobs(values)]

    def read(data: bytes, at: int) -> tuple[list[Any], int]:
        count, at = _checked(_unpack_u64(data, at)[0], limit), at + 8
        # Without a call for each of up to 131072 keys.
        values = []
        for most in repeat(first, count) if single else chain.from_iterable(repeat(limits, count)):
            size = _unpack_u64(data, at)[0]
            if size > most:
                _checked(size, most)
            at += 8 + size
            values.append(data[at - size : at])
        return values if single else list(zip(values[::2], values[1::2], strict=True)), at

    def extent(number_at: NumberAt, at: int) -> Extent:
        yield at + 8
        end = at + 8
        # Not `blob.extent`: a message may have 131072 keys.
        for _ in range(_checked(number_at(at), limit)):
            for most in limits:
                yield end + 8
                size = number_at(end)
                if size > most:
                    _checked(size, most)
                end += 8 + size
        return end

    return FieldCodec(write, read, extent)


def _read_fields(codecs: Sequence[FieldCodec], data: bytes, at: int) -> tuple[tuple[Any, ...], int]:
    fields = []
    for codec in codecs:
        field, at = codec.read(data, at)
        fields.append(field)
    return tuple(fields), at


def _queue_head() -> FieldCodec:
    blob = _blob(UNLIMITED)

    def write(head: tuple[int, bytes | None]) -> list[bytes]:
        length, value = head
        return [_pack_i64(length)] + ([] if value is None else blob.write(value))

    def read(data: bytes, at: int) -> tuple[tuple[int, bytes | None], int]:
        length = _unpack_i64(data, at)[0]
        value, at = blob.read(data, at + 8) if length > 0 else (None, at + 8)
        return (length, value), at

    def extent(number_at: NumberAt, at: int) -> Extent:
        yield at + 8
        filled = 0 < number_at(at) < 2**63
        return (yield from blob.extent(number_at, at + 8)) if filled else at + 8

    return FieldCodec(write, read, extent)


_KEY, _VALUE, _ANY = map(_blob, (MAX_KEY_BYTES, MAX_VALUE_BYTES, UNLIMITED))
CODECS: dict[str, FieldCodec] = {
    "k": _KEY,
    "v": _VALUE,
    "r": _ANY,
    "i": _integer("q"),
    "n": _integer("I"),
    "b": _integer("B"),
    "a": _integer("B"),
    "K": _list(MAX_KEYS, _KEY),
    "P": _list(MAX_KEYS, _KEY, _VALUE),
    "L": _list(UNLIMITED, _ANY),
    "q": _queue_head(),
}


# Messages. Frequent layouts have a writer and a reader of their own, which saves a tenth of a round trip.


def _message_writer(kinds: str) -> Callable[..., list[bytes]]:
    if kinds == "kv":
        return lambda key, value: [_pack_u64(len(key)), key, _pack_u64(len(value)), value]
    if kinds == "ki":
        return lambda key, number: [_pack_u64(len(key)), key, _pack_i64(number)]
    writers = [CODECS[kind].write for kind in kinds]
    if len(writers) == 1:
        return writers[0]
    return lambda *fields: [piece for write, field in zip(writers, fields, strict=True) for piece in write(field)]


def _read_key_and_value(data: bytes, at: int) -> tuple[tuple[bytes, bytes], int]:
    size = _unpack_u64(data, at)[0]
    if size > MAX_KEY_BYTES:
        _checked(size, MAX_KEY_BYTES)
    end_of_key = at + 8 + size
    value, end = _VALUE.read(data, end_of_key)
    return (data[at + 8 : end_of_key], value), end


def _read_key_and_number(data: bytes, at: int) -> tuple[tuple[bytes, int], int]:
    size = _unpack_u64(data, at)[0]
    if size > MAX_KEY_BYTES:
        _checked(size, MAX_KEY_BYTES)
    end_of_key = at + 8 + size
    return (data[at + 8 : end_of_key], _unpack_i64(data, end_of_key)[0]), end_of_key + 8


def _message_reader(kinds: str) -> Reader:
    if kinds == "kv":
        return _read_key_and_value
    if kinds == "ki":
        return _read_key_and_number
    if kinds == "i":
        return lambda data, at: (_unpack_i64(data, at), at + 8)
    codecs = [CODECS[kind] for kind in kinds]
    if len(codecs) == 1:
        read_field = codecs[0].read

        def read_one(data: bytes, at: int) -> tuple[tuple[Any], int]:
            field, at = read_field(data, at)
            return (field,), at

        return read_one
    return lambda data, at: _read_fields(codecs, data, at)


_LAYOUTS = {kinds for row in OPERATIONS.values() for kinds in (row.request, row.reply) if kinds != "*"}
_WRITERS = {kinds: _message_writer(kinds) for kinds in _LAYOUTS}
_READERS = {kinds: _message_reader(kinds) for kinds in _LAYOUTS}


def reply_kinds(operation: Operation, fields: Sequence[Any]) -> str:
    """Return the kinds of a reply's fields; only MULTI_GET's depend on the fields of the request."""
    return "r" * len(fields[0]) if operation.reply == "*" else operation.reply


def write(kinds: str, fields: Sequence[Any]) -> list[bytes]:
    """Return fields as pieces of bytes."""
    return (_WRITERS.get(kinds) or _message_writer(kinds))(*fields)


def write_request(operation: Operation, *fields: Any, number: int | None = None) -> bytes:
    """Return the bytes of a request, framed if it has a request id.

    >>> write_request(Op.SET, b"/k", b"v").hex()
    '0102000000000000002f6b010000000000000076'
    """
    try:
        body = b"".join(_WRITERS[operation.request](*fields))
    except struct.error:
        raise ArgumentError(f"{operation.name}: numbers must fit in 64 bits, got {fields!r}"[:500]) from None
    if number is None:
        return _pack_u8(operation.code) + body
    return _pack_header(FRAMED, number, len(body), operation.code) + body


def write_reply(operation: Operation, reply: Sequence[Any]) -> Sequence[Piece]:
    """Return the reply to a request, as pieces of bytes."""
    kinds = operation.reply
    if kinds == "*" or kinds == "L":
        return write_values(reply)[1:] if kinds == "*" else write_values(reply[0])
    return _WRITERS[kinds](*reply)


def write_values(values: Sequence[bytes]) -> list[Piece]:
    """Return a list of values, with their number in front, as pieces of bytes; long ones as one `ManyValues`."""
    many = ManyValues(values)
    return [_pack_u64(len(values)), *([many] if len(many) > WHOLE_REPLY_BYTES else _write_blobs(values))]


def response_to(request: Request, reply: Sequence[Any]) -> Sequence[Piece]:
    """Return the response to a request: the reply, behind a header if the request is framed."""
    operation, _, number = request
    if number is None:
        return write_reply(operation, reply)
    # The status implies the acknowledgement.
    return write_response(number, _DONE, [] if operation.reply in ("", "a") else write_reply(operation, reply))


def write_response(number: int, status: int, pieces: Sequence[Piece]) -> list[Piece]:
    """Return a header, and the pieces of bytes that it announces."""
    return [RESPONSE_HEADER.pack(number, sum(map(len, pieces)), status), *pieces]


def refusal(number: int, text: str) -> list[Piece]:
    """Return the response to a framed request that the server refuses."""
    return write_response(number, Status.REFUSED, [text.encode()])


def canceled_response(number: int, missing: Sequence[bytes]) -> list[Piece]:
    """Return the response to a framed request that was canceled while keys were missing."""
    return write_response(number, Status.CANCELED, write_values(missing))


def read(kinds: str, data: bytes, at: int = 0, end: int | None = None) -> tuple[Any, ...]:
    """Return the fields of a message that fills the data from `at` to `end` exactly.

    Raises:
        ProtocolError: the bytes have another layout.

    >>> read("kn", bytes.fromhex("02000000000000002f6b07000000"))
    (b'/k', 7)
    """
    try:
        fields, at = (_READERS.get(kinds) or _message_reader(kinds))(data, at)
    except struct.error:
        raise ProtocolError("a message ends inside a field") from None
    if at != (len(data) if end is None else end):
        raise ProtocolError("a message is longer or shorter than its fields")
    found: tuple[Any, ...] = fields
    return found


def extent(kinds: str, number_at: NumberAt, at: int = 0) -> Extent:
    """Find the end of a message while its bytes arrive.

    Args:
        kinds: kinds of its fields.
        number_at: function that returns the 64 bits at an offset that has arrived.
        at: offset of the fields.

    Yields:
        Number of bytes that must have arrived before the next step; at last, the size of the message.
    """
    for kind in kinds:
        at = yield from CODECS[kind].extent(number_at, at)
    yield at
    return at


def receive(kinds: str, take: Callable[[int], bytes], limit: int) -> tuple[Any, ...]:
    """Return the fields of a message that is not framed.

    Args:
        kinds: kinds of its fields.
        take: function that reads exactly that many bytes.
        limit: largest size of the message in bytes.

    Raises:
        ProtocolError: the message is larger, or has another layout.
    """
    data = bytearray()
    for size in extent(kinds, lambda at: int(_unpack_u64(data, at)[0])):
        data.extend(take(_checked(size, limit) - len(data)))
    return read(kinds, bytes(data))


class RequestDecoder:
    """Parser from a stream of bytes, split anywhere, to requests.

    Complete requests are read in place; only unfinished ones are copied together. Requests over the size limits are
    refused before they are held in memory.

    Attributes:
        held: bytes of unfinished requests in memory.
    """

    __slots__ = ("__weakref__", "_at", "_data", "_extent", "_needed", "_validated", "held")

    def __init__(self) -> None:
        self._data: bytes | bytearray = b""
        self._at = 0
        self._needed = 1
        self._extent: Extent | None = None
        self._validated = False
        self.held = 0

    @property
    def wanted(self) -> int:
        """Number of bytes that the next step of the parser needs, at least 1."""
        return max(1, self._needed - self.held)

    def feed(self, data: bytes) -> None:
        """Add bytes from the socket."""
        if self.held:
            rest = self._data if isinstance(self._data, bytearray) else bytearray(self._data)
            del rest[: self._at]
            rest += data
            data = rest  # type: ignore[assignment]
        self._data, self._at, self.held = data, 0, len(data)

    def clear(self) -> None:
        """Release the memory of an unfinished request. Generators refer to the parser: a cycle would keep both."""
        self._data, self._at, self.held, self._extent = b"", 0, 0, None

    def only_request(self, data: bytes) -> Request | None:
        """Return the request that bytes from the socket are, without holding them; None if `feed` must have them.

        Most requests arrive alone and whole, and this takes a quarter of the time.

        Raises:
            ProtocolError: the bytes are not a request.
        """
        if self.held or not self._validated or data[0] != FRAMED or len(data) < _HEADER_BYTES:
            return None
        _, number, size, code = _unpack_header(data)
        operation = OPERATIONS.get(code)
        if operation is None or len(data) != _HEADER_BYTES + size:
            return None
        return _new_request(Request, (operation, read(operation.request, data, _HEADER_BYTES), number))

    def next(self) -> Request | None:
        """Return the next complete request, or None until more bytes are fed.

        Raises:
            ProtocolError: the bytes are not a request, or one over the limits.
        """
        while self.held >= self._needed:
            framed = self._validated and self._data[self._at] == FRAMED
            request = self._next_framed() if framed else self._next_plain()
            if request is not None:
                return request
        return None

    def _next_framed(self) -> Request | None:
        if self.held < _HEADER_BYTES:
            self._needed = _HEADER_BYTES
            return None
        _, number, size, code = _unpack_header(self._data, self._at)
        if size > MAX_MESSAGE_BYTES:
            _checked(size, MAX_MESSAGE_BYTES)
        self._needed = _HEADER_BYTES + size
        operation = OPERATIONS.get(code) or self._operation(code)
        return self._read(operation, _HEADER_BYTES, number) if self.held >= self._needed else None

    def _next_plain(self) -> Request | None:
        operation = self._operation(self._data[self._at])
        if self._extent is None:
            self._extent = extent(operation.request, self._number_at, 1)
        try:
            self._needed = next(self._extent)
        except StopIteration:
            return self._read(operation, 1, None)
        if self._needed > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        return None

    def _number_at(self, offset: int) -> int:
        return int(_unpack_u64(self._data, self._at + offset)[0])

    def _operation(self, code: int) -> Operation:
        operation = OPERATIONS.get(code)
        if not self._validated and operation is not Op.VALIDATE:
            # VALIDATE has five bytes, so an unauthenticated peer cannot make the server hold more.
            raise ProtocolError(f"the first message is operation {code:#04x}, not VALIDATE")
        if operation is None:
            raise ProtocolError(f"unknown operation {code:#04x}")
        return operation

    def _read(self, operation: Operation, header: int, number: int | None) -> Request:
        """Return the request at the head, and drop its bytes."""
        data, at, end = self._data, self._at, self._at + self._needed
        self.held -= self._needed
        self._at, self._needed, self._extent, self._validated = end, 1, None, True
        if isinstance(data, bytearray):
            data, at, end = bytes(memoryview(data)[at:end]), 0, end - at
        return _new_request(Request, (operation, read(operation.request, data, at + header, end), number))


_new_request = tuple.__new__
