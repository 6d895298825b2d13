"""The requests that TCPStore's server can answer at once: a table from operation to answer.

Each function gets the keys and the request's fields and returns the fields of the reply. What has to wait for
keys is in `tcp_service`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdist_ref.stores.table import Table
from torchdist_ref.stores.tcp_wire import Op, recognised


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
    Op.ADD: lambda table, key, value: (table.add(key, value),),
    Op.CHECK: lambda table, keys: (1 if table.missing(keys) else 0,),
    Op.GETNUMKEYS: lambda table: (len(table.values),),
    Op.DELETE_KEY: lambda table, key: (int(table.delete(key)),),
    Op.QUEUE_POP: lambda table, key: ((table.length(key), table.pop(key)),),
    Op.QUEUE_LEN: lambda table, key: (table.length(key),),
    Op.LIST_KEYS: lambda table: (list(table.values),),
}
