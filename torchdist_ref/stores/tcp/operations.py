"""Operations of TCPStore's protocol: one table, read by the client, the parser and the server.

Opcodes up to 0x12, and the fields of their requests and replies, are those of torch 2.13. Opcodes from 0x80 are
extensions, used only where client and server have recognized each other in the handshake (see `protocol`).

A field's kind is one letter; integers are little-endian::

    k key              i signed 64-bit integer     K list of keys
    v value            n unsigned 32-bit integer   P list of (key, value)
    r value of any     b byte                      L list of values
      size             a acknowledgement, a byte   q head of a queue: its length, then a value if that is
                         that is 0                   positive

The reply ``*`` is one ``r`` for each key of the request. To add an operation, add a row to `Op`. Do not add sockets,
sessions or bytes here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import filterfalse, islice, repeat
from typing import Any, Literal

from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores.hash import Table

MAX_KEY_BYTES = 8192
MAX_VALUE_BYTES = 8 * 2**20
# Conditions under which a request waits at once. When they hold, the others are looked at.
MAX_FILED = 256

# Key, and the number that its counter must reach; 0 if the key only has to exist.
Condition = tuple[bytes, int]

Fields = tuple[Any, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """Row of the table of operations.

    Attributes:
        name: name in error messages.
        code: opcode, one byte.
        request: kinds of the request's fields.
        reply: kinds of the reply's fields; empty if torch's servers send no reply.
        execute: function that runs the operation on the server's table and returns the fields of the reply; None for
            operations on the connection itself.
        unmet: function that returns the conditions that the request still waits for; None if it never waits.
        idempotent: whether running the operation twice has the effect of running it once. If not, our server keeps the
            response until the client's next request, and a client of torch's server does not retry.
        wakes: number of waiting requests that a change of the request's keys may complete.
        emulation: for extensions and WAIT, the operation that torch's servers run after a WAIT, and the function that
            converts its reply; a None from that function means to wait again.
    """

    name: str
    code: int
    request: str
    reply: str
    execute: Callable[..., Fields] | None = None
    unmet: Callable[..., Sequence[Condition]] | None = None
    idempotent: bool = False
    wakes: Literal["none", "one", "all"] = "none"
    emulation: tuple[Operation, Callable[[Fields], Fields | None]] | None = None


def _set(table: Table, key: bytes, value: bytes) -> Fields:
    table.set(key, value)
    return ()


def _append(table: Table, key: bytes, value: bytes) -> Fields:
    if len(table.values.get(key, b"")) + len(value) > MAX_VALUE_BYTES:
        raise ArgumentError(f"append: the value would be longer than {MAX_VALUE_BYTES} bytes, the limit.")
    table.append(key, value)
    return ()


def _multi_set(table: Table, pairs: list[tuple[bytes, bytes]]) -> Fields:
    table.set_all(pairs)
    return ()


def _set_pairs(table: Table, key: bytes, value: bytes, pairs: list[tuple[bytes, bytes]]) -> Fields:
    # The key and the value are kept with the client's session.
    table.set_all(pairs)
    return (0,)


def _push(table: Table, key: bytes, value: bytes) -> Fields:
    table.push(key, value)
    return ()


def _recognize(table: Table, nonce: int) -> Fields:
    known = recognized(nonce)
    return (nonce if known is None else known,)


def _release(table: Table, prefix: bytes, users: int) -> Fields:
    return (int(table.release(prefix, users)),)


def _acknowledge(*_: Any) -> Fields:
    return (0,)


def _absent(table: Table, keys: list[bytes]) -> list[Condition]:
    return [(key, 0) for key in islice(filterfalse(table.values.__contains__, keys), MAX_FILED)]


def _below(table: Table, key: bytes, number: int) -> list[Condition]:
    return [] if table.number(key) >= number else [(key, number)]


class Op:
    """The operations. Names and opcodes up to BARRIER are torch's."""

    VALIDATE = Operation("VALIDATE", 0x00, "n", "")
    SET = Operation("SET", 0x01, "kv", "", _set, wakes="all")
    COMPARE_SET = Operation(
        "COMPARE_SET", 0x02, "kvv", "r", lambda table, *fields: (table.compare_set(*fields),), wakes="all"
    )
    GET = Operation("GET", 0x03, "k", "r", lambda table, key: (table.values.get(key, b""),), idempotent=True)
    ADD = Operation("ADD", 0x04, "ki", "i", lambda table, key, amount: (table.add(key, amount),), wakes="all")
    CHECK = Operation(
        "CHECK",
        0x05,
        "K",
        "b",
        lambda table, keys: (int(any(True for _ in table.absent(keys))),),
        idempotent=True,
    )
    WAIT = Operation(
        "WAIT",
        0x06,
        "K",
        "a",
        _acknowledge,
        unmet=lambda table, keys: [(key, 0) for key in islice(table.absent(keys), MAX_FILED)],
        idempotent=True,
        emulation=(CHECK, lambda reply: None if reply[0] else ()),
    )
    GETNUMKEYS = Operation("GETNUMKEYS", 0x07, "", "i", lambda table: (len(table.values),), idempotent=True)
    DELETE_KEY = Operation("DELETE_KEY", 0x08, "k", "i", lambda table, key: (int(table.delete(key)),))
    APPEND = Operation(
        "APPEND",
        0x09,
        "kv",
        "",
        _append,
        wakes="all",
    )
    MULTI_GET = Operation(
        "MULTI_GET",
        0x0A,
        "K",
        "*",
        lambda table, keys: tuple(map(table.values.get, keys, repeat(b""))),
        idempotent=True,
    )
    MULTI_SET = Operation("MULTI_SET", 0x0B, "P", "", _multi_set, wakes="all")
    CANCEL_WAIT = Operation("CANCEL_WAIT", 0x0C, "", "b")
    PING = Operation("PING", 0x0D, "n", "n", _recognize, idempotent=True)
    QUEUE_PUSH = Operation("QUEUE_PUSH", 0x0E, "kv", "", _push, wakes="one")
    QUEUE_POP = Operation("QUEUE_POP", 0x0F, "k", "q", lambda table, key: ((table.length(key), table.pop(key)),))
    QUEUE_LEN = Operation("QUEUE_LEN", 0x10, "k", "i", lambda table, key: (table.length(key),), idempotent=True)
    LIST_KEYS = Operation(
        "LIST_KEYS",
        0x11,
        "",
        "L",
        # A tuple: Python's garbage collector goes through all items of a list again and again.
        lambda table: (tuple(table.values),),
        idempotent=True,
    )
    BARRIER = Operation("BARRIER", 0x12, "ki", "a", _acknowledge, unmet=_below)
    HELLO = Operation("HELLO", 0x80, "k", "r", idempotent=True)
    WAIT_GET = Operation(
        "WAIT_GET",
        0x82,
        "k",
        "r",
        lambda table, key: (table.values[key],),
        unmet=lambda table, key: () if key in table.values else ((key, 0),),
        idempotent=True,
        emulation=(GET, lambda reply: reply),
    )
    WAIT_POP = Operation(
        "WAIT_POP",
        0x83,
        "k",
        "r",
        lambda table, key: (table.pop(key),),
        unmet=lambda table, key: [] if table.length(key) else [(key, 0)],
        emulation=(QUEUE_POP, lambda reply: reply[0][1:] if reply[0][0] else None),
    )
    WAIT_NUMBER = Operation(
        "WAIT_NUMBER", 0x84, "ki", "i", lambda table, key, _: (table.number(key),), unmet=_below, idempotent=True
    )
    WAIT_GET_ALL = Operation(
        "WAIT_GET_ALL",
        0x85,
        "K",
        "L",
        lambda table, keys: (list(map(table.values.__getitem__, keys)),),
        unmet=_absent,
        idempotent=True,
        emulation=(MULTI_GET, lambda reply: (list(reply),)),
    )
    SET_ON_DISCONNECT = Operation("SET_ON_DISCONNECT", 0x86, "kvP", "a", _set_pairs, idempotent=True, wakes="all")
    RELEASE = Operation("RELEASE", 0x87, "ki", "b", _release)


# Rows of `Op` by opcode.
OPERATIONS: dict[int, Operation] = {row.code: row for row in vars(Op).values() if isinstance(row, Operation)}

# Upper 16 bits of the nonce in a PING of our clients. torch's clients send their process id, which is smaller.
NONCE_MARK = 0x7D1F0000


def recognized(nonce: int) -> int | None:
    """Return our server's reply to the PING of our client; None if the nonce is torch's, whose reply is the nonce."""
    return nonce ^ 0xFFFF if nonce & 0xFFFF0000 == NONCE_MARK else None
