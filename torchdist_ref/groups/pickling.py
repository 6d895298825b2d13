"""Pickling for object collectives: how objects become bytes, and which bytes become objects again.

Unpickling runs code that the sender chose, so each group has one way, by what authenticates its ranks:

- On `ref`, whose connections are authenticated, and where the user trusts the network, objects are pickled.
- On other backends of authenticated ranks, whose connections are not, each pickle carries an HMAC by the group's key.
  It is verified before anything is unpickled. It covers the exchange: operation, sender, receiver, and how many such
  exchanges the group had before. So a recorded pickle is of no use in another call.
- Ranks that are not authenticated exchange plain data (`plain_data`), whose decoding runs no code.

All ranks of a group find the same way. Do not add communication here: `objects` has it.
"""

from __future__ import annotations

import hmac
import itertools
import pickle
import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchdist_ref.backends.ref_in_torch.objects import CODE_BYTES, needs_code, not_plain, object_code
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    AuthenticationError,
    EntryError,
    PicklingError,
    add_note,
)
from torchdist_ref.groups.world import ProcessGroup
from torchdist_ref.plain_data import PLAIN_TYPES, NotPlainError, decode, encode

_ERROR_KINDS: tuple[type[Exception], ...] = (PicklingError, ArgumentError, EntryError, ArgumentTypeError)
_LENGTH = struct.Struct("<Q")
_exchanges: WeakKeyDictionary[ProcessGroup, defaultdict[str, Iterator[int]]] = WeakKeyDictionary()
"""Numbers of the next exchanges of each group, by operation, and by sender and receiver of messages."""


class Payload:
    """Bytes that one rank sends: its pickled object or objects, or an error text.

    Attributes:
        data: The bytes; never empty.
        error: The error whose text `data` holds; None for an object.
        count: Number of objects.
    """

    def __init__(self, data: bytes | bytearray, error: Exception | None = None, count: int = 1) -> None:
        self.data = bytearray(data)
        self.error = error
        self.count = count

    def header(self) -> Tensor:
        """Return size, error kind and object count, int64 of shape (3,)."""
        kind = 0 if self.error is None else 1 + _ERROR_KINDS.index(type(self.error))
        return torch.tensor([len(self.data), kind, self.count], dtype=torch.int64, device="cpu")

    def tensor(self, width: int = 0) -> Tensor:
        """Return the bytes as a uint8 tensor, padded to at least `width`; receivers ignore the padding."""
        return torch.frombuffer(self.data.ljust(width, b"\0"), dtype=torch.uint8)


class ReceiveBuffer:
    """Bytes to receive into.

    Attributes:
        data: The bytes.
        tensor: A uint8 tensor that shares their memory.
    """

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.tensor = torch.frombuffer(self.data, dtype=torch.uint8)

    def parts(self, count: int) -> list[memoryview]:
        """Return the bytes as equal parts."""
        width = len(self.data) // count
        return [memoryview(self.data)[i * width : (i + 1) * width] for i in range(count)]


def next_exchange(group: ProcessGroup, kind: str) -> str:
    """Return a text that names the next exchange of a kind in a group, the same on all ranks that take part."""
    counts = _exchanges.setdefault(group, defaultdict(itertools.count))
    return f"{kind} {next(counts[kind])}"


def next_message(group: ProcessGroup, source: int, target: int) -> str:
    """Return a text that names the next message from one group rank to another, the same on both."""
    return next_exchange(group, f"message {source} to {target}")


def pack(group: ProcessGroup, operation: str, exchange: str, value: Any, weights_only: bool, count: int = 1) -> Payload:
    """Convert an object of this rank to a payload; the payload holds the error if that fails.

    Args:
        group: The group.
        operation: Name of the function, for errors.
        exchange: Text of `next_exchange` or `next_message`.
        value: The object.
        weights_only: Whether to accept plain data only, also where ranks may pickle.
        count: Number of objects in it.
    """
    try:
        return Payload(dump_object(group, exchange, value, weights_only), count=count)
    except NotPlainError as cause:
        reason = _not_weights(operation, group, cause) if group.pickles_objects else not_plain(operation, group, cause)
        error = PicklingError(f"{reason} No rank received anything, and the group remains usable.")
    except Exception as cause:
        error = PicklingError(
            f"{operation}: rank {group.members[group.rank()]}'s object cannot be pickled ({type(cause).__name__}: "
            f"{cause}). No rank received anything, and the group remains usable. Send plain data, or functions and "
            f"classes that are defined at module level."
        )
        error.__cause__ = cause
    return error_payload(error, count)


def _not_weights(operation: str, group: ProcessGroup, cause: NotPlainError) -> str:
    """Return the text of the error for an object of this rank that is not plain data, in a call with `weights_only`."""
    return (
        f"{operation}: Weights only load failed: rank {group.members[group.rank()]}'s object has {cause} in it, and "
        f"with weights_only=True ranks exchange plain data only ({PLAIN_TYPES}; not their subclasses). Send such data, "
        "or leave weights_only at False on all ranks, to pickle objects."
    )


def error_payload(error: Exception, count: int = 1) -> Payload:
    """Return a payload that makes all ranks raise this rank's error."""
    return Payload(str(error).encode(), error, count)


def unpack(
    group: ProcessGroup,
    buffer: bytes | bytearray | memoryview,
    operation: str,
    exchange: str,
    source: int,
    weights_only: bool,
) -> Any:
    """Return the object of a payload of a group rank; padding is ignored. A failure names the sender.

    Raises:
        AuthenticationError: A process outside this job wrote the payload, or took it from another exchange.
        NotPlainError: The payload is not plain data, and the ranks are not authenticated.
        PicklingError: The payload is not plain data, and `weights_only` allows nothing else.
    """
    try:
        return load_object(group, memoryview(buffer), operation, exchange, source, weights_only)
    except Exception as error:
        rank = group.members[source]
        add_note(error, f"{operation}: the object arrived complete from rank {rank}, but cannot be unpickled here.")
        raise


def dump_object(group: ProcessGroup, exchange: str, value: Any, weights_only: bool) -> bytes:
    """Return an object as bytes, as the ranks of the group trust each other: plain data, or a pickle with a code."""
    if not group.pickles_objects:
        return encode(value)
    data = encode(value) if weights_only else pickle.dumps(value)
    if not _needs_code(group):
        return data
    return object_code(group.store, exchange, group.rank(), data) + _LENGTH.pack(len(data)) + data


def load_object(
    group: ProcessGroup, buffer: memoryview, operation: str, exchange: str, source: int, weights_only: bool
) -> Any:
    """Return the object of bytes from another rank, once their code is found right."""
    if not group.pickles_objects:
        return decode(buffer)
    load = _load_weights if weights_only else pickle.loads
    if not _needs_code(group):
        return load(buffer)
    begin = CODE_BYTES + _LENGTH.size
    size = _LENGTH.unpack_from(buffer, CODE_BYTES)[0] if len(buffer) >= begin else 0
    data = buffer[begin : begin + size]
    if not hmac.compare_digest(buffer[:CODE_BYTES], object_code(group.store, exchange, source, data)):
        raise AuthenticationError(
            f"{operation}: the object of rank {group.members[source]} was not written by a member of this job for this "
            f"call. Another process has connected to backend {group.backend.name!r}, whose connections are not "
            f"authenticated."
        )
    return load(data)


def _load_weights(data: memoryview) -> Any:
    """Return plain data that a rank sent with `weights_only`; anything else is not unpickled."""
    try:
        return decode(data)
    except NotPlainError as error:
        raise PicklingError(
            f"Weights only load failed: the object is not plain data ({error}). "
            "Pass the same weights_only on all ranks."
        ) from error


def _needs_code(group: ProcessGroup) -> bool:
    return needs_code(group.size(), group.backend.name)


def raise_error_of(kind: int, text: bytes | bytearray, own: Exception | None) -> NoReturn:
    """Raise the error of a header and payload; on the rank that caused it, the original exception."""
    if own is not None:
        raise own
    raise _ERROR_KINDS[min(max(kind, 1), len(_ERROR_KINDS)) - 1](text.rstrip(b"\0").decode(errors="replace"))
