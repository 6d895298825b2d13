"""What TCPStore's server answers: two tables, from operation to what it lacks, and from operation to its reply.

Functions get the keys and the request's fields. `LACKING` has the requests that wait, and tells what they wait for;
`ANSWERS` has all, and gives the fields of the reply. Who waits is in `tcp_service`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchdist_ref.stores.hash import Table
from torchdist_ref.stores.tcp_wire import Op, recognised

Need = tuple[bytes, int]
"""A key, and the number that it must reach; 0 means that it must be there."""

DONE = (0,)


def _pong(table: Table, nonce: int) -> tuple[int]:
    ours = recognised(nonce)
    return (nonce if ours is None else ours,)


def _set(table: Table, key: bytes, value: bytes) -> tuple[()]:
    table.values[key] = value
    return ()


def _append(table: Table, key: bytes, value: bytes) -> tuple[()]:
    table.append(key, value)
    return ()


def _multi_set(table: Table, pairs: list[tuple[bytes, bytes]]) -> tuple[()]:
    table.values.update(pairs)
    return ()


def _push(table: Table, key: bytes, value: bytes) -> tuple[()]:
    table.push(key, value)
    return ()


ANSWERS: dict[Op, Callable[..., tuple[Any, ...]]] = {
    Op.PING: _pong,
    Op.SET: _set,
    Op.APPEND: _append,
    Op.MULTI_SET: _multi_set,
    Op.QUEUE_PUSH: _push,
    Op.COMPARE_SET: lambda table, *fields: (table.compare_set(*fields),),
    Op.GET: lambda table, key: (table.values.get(key, b""),),
    Op.MULTI_GET: lambda table, keys: tuple(table.values.get(key, b"") for key in keys),
    Op.ADD: lambda table, key, amount: (table.add(key, amount),),
    Op.CHECK: lambda table, keys: (1 if table.missing(keys) else 0,),
    Op.GETNUMKEYS: lambda table: (len(table.values),),
    Op.DELETE_KEY: lambda table, key: (int(table.delete(key)),),
    Op.QUEUE_POP: lambda table, key: ((table.length(key), table.pop(key)),),
    Op.QUEUE_LEN: lambda table, key: (table.length(key),),
    Op.LIST_KEYS: lambda table: (list(table.values),),
    Op.WAIT: lambda table, keys: DONE,
    Op.WAIT_GET: lambda table, key: (table.values[key],),
    Op.WAIT_GET_ALL: lambda table, keys: ([table.values[key] for key in keys],),
    Op.WAIT_POP: lambda table, key: (table.pop(key),),
    Op.WAIT_NUMBER: lambda table, key, enough: (table.number(key),),
    Op.BARRIER: lambda table, key, world: DONE,
}


def _absent(table: Table, keys: list[bytes]) -> list[Need]:
    return [(key, 0) for key in dict.fromkeys(keys) if key not in table.values]


def _too_small(table: Table, key: bytes, enough: int) -> list[Need]:
    return [] if table.number(key) >= enough else [(key, enough)]


LACKING: dict[Op, Callable[..., Sequence[Need]]] = {
    Op.WAIT: lambda table, keys: [(key, 0) for key in table.missing(keys)],
    Op.WAIT_GET: lambda table, key: () if key in table.values else ((key, 0),),
    Op.WAIT_GET_ALL: _absent,
    Op.WAIT_POP: lambda table, key: [] if table.length(key) else [(key, 0)],
    Op.WAIT_NUMBER: _too_small,
    Op.BARRIER: _too_small,
}
