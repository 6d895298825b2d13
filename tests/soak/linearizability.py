"""Checker of histories: is there an order of the operations, one at a time, that explains every result?

An operation takes effect at one moment between its call and its return; one that never returned (its client was killed)
takes effect at one moment after its call, or never. `explains` searches such an order for one key, as Wing and Gong do:
it takes one of the operations that may be next, applies it to a model of the key, and goes back if no order of the rest
fits. States that were searched in vain are remembered.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

NEVER = math.inf
UNKNOWN = "unknown"
"""Result of an operation that never returned."""


class Call(NamedTuple):
    """Operation of a client on one key.

    Attributes:
        key: The key.
        name: One of the operations of `apply`.
        arguments: Its arguments.
        result: Its result; UNKNOWN if it never returned.
        began: Time of the call.
        ended: Time of the return; NEVER if there is none.
    """

    key: str
    name: str
    arguments: tuple[Any, ...]
    result: Any
    began: float
    ended: float


State = tuple[bytes | None, tuple[bytes, ...]]
"""State of one key: its value, None if it has none, and its queue."""
EMPTY: State = (None, ())


def apply(state: State, name: str, arguments: tuple[Any, ...]) -> tuple[State, Any] | None:
    """Return the next state and the result of an operation on one key; None if it would wait in this state."""
    value, queue = state
    if name == "set":
        return (arguments[0], queue), None
    if name == "get":
        return None if value is None else (state, value)
    if name == "check":
        return state, value is not None or bool(queue)
    if name == "add":
        total = int(value or b"0") + arguments[0]
        return (str(total).encode(), queue), total
    if name == "compare_set":
        expected, desired = arguments
        if value == expected or (value is None and not expected):
            return (desired, queue), desired
        return state, expected if value is None else value
    if name == "append":
        return ((value or b"") + arguments[0], queue), None
    if name == "delete_key":
        return (None, queue), value is not None
    if name == "queue_push":
        return (value, (*queue, arguments[0])), None
    if name == "queue_pop_now" and not queue:
        return state, "empty"
    if name in ("queue_pop", "queue_pop_now"):
        return ((value, queue[1:]), queue[0]) if queue else None
    assert name == "queue_len", name
    return state, len(queue)


def explains(calls: Iterable[Call]) -> bool:
    """Return whether some order of the calls on one key explains their results."""
    history = sorted(calls, key=lambda call: call.began)
    everything = (1 << len(history)) - 1
    optional = sum(1 << i for i, call in enumerate(history) if call.ended == NEVER)
    searched: set[tuple[int, State]] = set()
    stack = [(0, EMPTY)]
    while stack:
        taken, state = stack.pop()
        if (taken | optional) == everything:
            return True
        if (taken, state) in searched:
            continue
        searched.add((taken, state))
        left = [i for i in range(len(history)) if not taken >> i & 1]
        first_return = min(history[i].ended for i in left)
        for i in left:
            call = history[i]
            # A call that began after another had returned cannot come before it.
            if call.began > first_return:
                break
            applied = apply(state, call.name, call.arguments)
            if applied is not None and call.result in (UNKNOWN, applied[1]):
                stack.append((taken | 1 << i, applied[0]))
    return False


def unexplained(calls: Iterable[Call]) -> dict[str, list[Call]]:
    """Return the histories of the keys that no order explains."""
    by_key: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_key[call.key].append(call)
    return {key: history for key, history in by_key.items() if not explains(history)}
