"""What a store accepts: keys, values, numbers and time-outs, checked once and in one place.

Keys and values are bytes underneath; text is taken as UTF-8, as torch takes it. Every check names the
operation and the argument. A check belongs here if more than one kind of store needs it; what only one
store can't take (the wire's size limits) belongs to that store.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, SupportsIndex

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

Text = str | bytes | bytearray
INT64 = range(-(2**63), 2**63)


def key_text(operation: str, key: Text, argument: str = "key") -> str:
    """The key as text; bytes that are no UTF-8 survive the trip there and back."""
    if isinstance(key, str):
        return key
    if isinstance(key, (bytes, bytearray)):
        return key.decode("utf-8", "surrogateescape")
    raise ArgumentTypeError(explain(operation, argument, "a str or bytes", key))


def key_bytes(operation: str, key: Text, argument: str = "key") -> bytes:
    """The key as bytes."""
    if isinstance(key, str):
        try:
            return key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ArgumentTypeError(explain(operation, argument, "text that UTF-8 has bytes for", key)) from None
    if isinstance(key, (bytes, bytearray)):
        return bytes(key)
    raise ArgumentTypeError(explain(operation, argument, "a str or bytes", key))


def value_bytes(operation: str, value: Any, argument: str = "value") -> bytes:
    """The value as bytes."""
    if type(value) is bytes:
        return value
    if isinstance(value, (str, bytes, bytearray)):
        return key_bytes(operation, value, argument)
    hint = "Encode it first: str(x) for a number, pickle.dumps(x) for an object."
    raise ArgumentTypeError(explain(operation, argument, "a str or bytes", value, hint=hint))


def key_list(operation: str, keys: Collection[Text], argument: str = "keys") -> list[bytes]:
    """Several keys as bytes; a set will do. One bare string is refused: it would be read as a list of letters."""
    _must_be_list(operation, argument, keys)
    return [key_bytes(operation, key, f"{argument}[{i}]") for i, key in enumerate(keys)]


def pair_list(operation: str, keys: Sequence[Text], values: Sequence[Text]) -> list[tuple[bytes, bytes]]:
    """Keys with their values; the lists must be equally long."""
    names = key_list(operation, keys)
    _must_be_list(operation, "values", values)
    if len(names) != len(values):
        raise ArgumentError(explain(operation, "values", f"as long as keys ({len(names)})", len(values)))
    zipped = enumerate(zip(names, values, strict=True))
    return [(key, value_bytes(operation, value, f"values[{i}]")) for i, (key, value) in zipped]


def _must_be_list(operation: str, argument: str, given: Any) -> None:
    if isinstance(given, (str, bytes, bytearray)) or not isinstance(given, Collection):
        raise ArgumentTypeError(explain(operation, argument, "a list of str or bytes", given))


def integer(operation: str, argument: str, number: SupportsIndex) -> int:
    """A whole number that fits in 64 bits, which is all that the wire and torch can carry."""
    try:
        value = operator.index(number)
    except TypeError:
        raise ArgumentTypeError(explain(operation, argument, "an int", number)) from None
    if value not in INT64:
        raise ArgumentTypeError(explain(operation, argument, "an int of 64 bits", number))
    return value


def world_of(operation: str, number: SupportsIndex) -> int:
    """A world size: a whole number of one or more."""
    if type(number) is int and 0 < number < INT64.stop:
        return number  # what nearly all callers give
    value = integer(operation, "world_size", number)
    if value < 1:
        raise ArgumentError(explain(operation, "world_size", "1 or more", value))
    return value


def seconds(operation: str, timeout: timedelta | float, argument: str = "timeout") -> float:
    """A time-out in seconds. torch waits for ever on a negative one; that is nearly always a mistake."""
    if isinstance(timeout, timedelta):
        value = timeout.total_seconds()
    elif isinstance(timeout, float):
        value = timeout
    else:
        raise ArgumentTypeError(explain(operation, argument, "a datetime.timedelta", timeout))
    if not 0 <= value <= timedelta.max.total_seconds():
        raise ArgumentError(explain(operation, argument, "zero or more", timeout, hint="Zero means: look once."))
    return value


def shown(keys: Sequence[Text], most: int = 4) -> str:
    """Keys as an error message shows them: quoted, and the first few only."""
    texts = [repr(k if isinstance(k, str) else bytes(k).decode("utf-8", "backslashreplace"))[:100] for k in keys[:most]]
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(texts) + more
