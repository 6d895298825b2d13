"""The bytes that TCPStore's client and server exchange, both torch's dialect and our own additions.

A request is one byte of operation and then its fields. In torch's dialect there is no length in front, so a reader
must know the shape of each operation. `REQUESTS` and `REPLIES` say these shapes in one letter a field. All numbers
are little-endian. This file has the shapes and writes them; `tcp_parse` reads them.

    k key   v value   r value of any size   i signed 64 bits   b one byte   n 32 bits
    K list of keys   P list of (key, value)   L counted list of values   q queue head: (length, value or None)

The operations up to BARRIER, and the magic number, are torch 2.13's. From HELLO on they are ours, used only
between peers that have recognised each other: torch's client opens with a PING that carries its process id, and
torch's server echoes it. Ours sends a PING that starts with `MARK`, which is no process id, and our server
answers `recognised(nonce)` instead of the echo. After a HELLO that names the client, a request is framed (TRACKED: a
number, and how many bytes follow) and answered likewise; a repeated number is answered from memory::

    TRACKED | u64 number | u32 bytes of fields | operation | fields
              u64 number | u64 bytes of fields | u8 status | fields

Answers to WAIT and BARRIER are framed without fields, since the status says that the waiting is over.
Sockets and what an operation does don't belong here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

MAGIC = 0x3C85F7CE
MARK = 0x7D1F0000
LONGEST_KEY = 8192
LONGEST_VALUE = 8 * 2**20
MOST_KEYS = 131072
LONGEST_MESSAGE = 12 * 2**20
ANY_SIZE = 2**40


class WireError(Exception):
    """The other side broke the format; its connection is of no more use."""


class Op(IntEnum):
    """What a request asks for; the numbers are what goes over the wire."""

    VALIDATE = 0x00
    SET = 0x01
    COMPARE_SET = 0x02
    GET = 0x03
    ADD = 0x04
    CHECK = 0x05
    WAIT = 0x06
    GETNUMKEYS = 0x07
    DELETE_KEY = 0x08
    APPEND = 0x09
    MULTI_GET = 0x0A
    MULTI_SET = 0x0B
    CANCEL_WAIT = 0x0C
    PING = 0x0D
    QUEUE_PUSH = 0x0E
    QUEUE_POP = 0x0F
    QUEUE_LEN = 0x10
    LIST_KEYS = 0x11
    BARRIER = 0x12
    HELLO = 0x80
    TRACKED = 0x81
    WAIT_GET = 0x82
    WAIT_POP = 0x83
    WAIT_NUMBER = 0x84
    WAIT_GET_ALL = 0x85


class Status(IntEnum):
    """How a numbered request ended."""

    DONE = 0
    REFUSED = 1
    CANCELLED = 2


REQUESTS: dict[int, str] = {
    Op.VALIDATE: "n",
    Op.SET: "kv",
    Op.COMPARE_SET: "kvv",
    Op.GET: "k",
    Op.ADD: "ki",
    Op.CHECK: "K",
    Op.WAIT: "K",
    Op.GETNUMKEYS: "",
    Op.DELETE_KEY: "k",
    Op.APPEND: "kv",
    Op.MULTI_GET: "K",
    Op.MULTI_SET: "P",
    Op.CANCEL_WAIT: "",
    Op.PING: "n",
    Op.QUEUE_PUSH: "kv",
    Op.QUEUE_POP: "k",
    Op.QUEUE_LEN: "k",
    Op.LIST_KEYS: "",
    Op.BARRIER: "ki",
    Op.HELLO: "k",
    Op.WAIT_GET: "k",
    Op.WAIT_POP: "k",
    Op.WAIT_NUMBER: "ki",
    Op.WAIT_GET_ALL: "K",
}

REPLIES: dict[int, str] = {
    Op.VALIDATE: "",
    Op.SET: "",
    Op.COMPARE_SET: "r",
    Op.GET: "r",
    Op.ADD: "i",
    Op.CHECK: "b",
    Op.WAIT: "b",
    Op.GETNUMKEYS: "i",
    Op.DELETE_KEY: "i",
    Op.APPEND: "",
    Op.MULTI_SET: "",
    Op.CANCEL_WAIT: "b",
    Op.PING: "n",
    Op.QUEUE_PUSH: "",
    Op.QUEUE_POP: "q",
    Op.QUEUE_LEN: "i",
    Op.LIST_KEYS: "L",
    Op.BARRIER: "b",
    Op.HELLO: "r",
    Op.WAIT_GET: "r",
    Op.WAIT_POP: "r",
    Op.WAIT_NUMBER: "i",
    Op.WAIT_GET_ALL: "L",
}


class Request(NamedTuple):
    """One parsed request; `number` is None in torch's dialect."""

    op: Op
    fields: tuple[Any, ...]
    number: int | None = None


def reply_shape(op: Op, fields: Sequence[Any]) -> str:
    """The shape of the answer; only MULTI_GET's depends on what was asked."""
    shape = REPLIES.get(op)
    return "r" * len(fields[0]) if shape is None else shape


def recognised(nonce: int) -> int | None:
    """What our server answers to the nonce of our client; None if the nonce is torch's."""
    return nonce ^ 0xFFFF if nonce & 0xFFFF0000 == MARK else None


# Writing: each kind gives a list of pieces, so that a large value is never copied into a larger whole. What is said all
# the time has few fields, and a writer for its whole shape.

_U8, _U32, _I64, _U64 = (struct.Struct(f"<{kind}").pack for kind in "BIqQ")
TRACKED_HEAD = struct.Struct("<BQIB")
ANSWER_HEAD = struct.Struct("<QQB")
_TRACKED = int(Op.TRACKED)


def _blob(data: bytes) -> list[bytes]:
    return [_U64(len(data)), data]


def _blobs(items: Iterable[bytes]) -> list[bytes]:
    found = [piece for item in items for piece in (_U64(len(item)), item)]
    return [_U64(len(found) // 2), *found]


def _pairs(items: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    found = [piece for pair in items for item in pair for piece in _blob(item)]
    return [_U64(len(found) // 4), *found]


def _head(head: tuple[int, bytes | None]) -> list[bytes]:
    length, value = head
    return [_I64(length)] + ([] if value is None else _blob(value))


WRITERS: dict[str, Callable[..., list[bytes]]] = {
    "": lambda: [],
    "k": _blob,
    "v": _blob,
    "r": _blob,
    "i": lambda number: [_I64(number)],
    "b": lambda number: [bytes([number])],
    "n": lambda number: [_U32(number)],
    "K": _blobs,
    "P": _pairs,
    "L": _blobs,
    "q": _head,
    "kv": lambda key, value: [_U64(len(key)), key, _U64(len(value)), value],
    "ki": lambda key, number: [_U64(len(key)), key, _I64(number)],
}


def _writer(shape: str) -> Callable[..., list[bytes]]:
    def one_by_one(*fields: Any) -> list[bytes]:
        return [piece for kind, field in zip(shape, fields, strict=True) for piece in WRITERS[kind](field)]

    return WRITERS.get(shape, one_by_one)


_REQUEST_WRITERS = {op: _writer(shape) for op, shape in REQUESTS.items()}
_REPLY_WRITERS = {op: _writer(shape) for op, shape in REPLIES.items()}


def write(shape: str, fields: Sequence[Any]) -> list[bytes]:
    """The fields as pieces of bytes."""
    return _writer(shape)(*fields)


def write_request(op: Op, *fields: Any, number: int | None = None) -> bytes:
    """One request, as one string of bytes.

    >>> write_request(Op.SET, b"/k", b"v").hex()
    '0102000000000000002f6b010000000000000076'
    """
    written = b"".join(_REQUEST_WRITERS[op](*fields))
    return (_U8(op) if number is None else TRACKED_HEAD.pack(_TRACKED, number, len(written), op)) + written


def write_reply(op: Op, asked: Sequence[Any], reply: Sequence[Any]) -> list[bytes]:
    """The plain reply to a request with these fields, as pieces of bytes."""
    writer = _REPLY_WRITERS.get(op)
    return writer(*reply) if writer else write(reply_shape(op, asked), reply)


def write_answer(number: int, status: int, pieces: Sequence[bytes]) -> list[bytes]:
    """The answer to a numbered request: its number, the length of the plain reply, how it ended, and the reply."""
    head = ANSWER_HEAD.pack(number, sum(map(len, pieces)), status)
    return [head, *pieces] if pieces else [head]
