"""Objects as bytes in tensors: what the object collectives send, and how a rank says that it can't.

A parcel is pickled bytes, or the reason why there are none. It travels after a header of three numbers: how many
bytes, what is wrong (0: nothing), and how many objects. So a rank that cannot pickle its object still takes part, all
ranks raise the same error, and the group goes on. Which rank sends what to whom is in `objects`.

Unpickling runs code that the sender chose. Ranks of one job trust each other; don't use this across trust boundaries.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchdist_ref.errors import ArgumentError, EntryError, PicklingError
from torchdist_ref.groups.group import ProcessGroup

_KINDS: tuple[type[Exception], ...] = (PicklingError, ArgumentError, EntryError)


class Parcel:
    """Bytes of one rank, or its error.

    Attributes:
        data: The bytes; never empty.
        error: Why there is no object in it; its text is in `data` then.
        count: How many objects there are.
    """

    def __init__(self, data: bytes | bytearray, error: Exception | None = None, count: int = 1) -> None:
        self.data = bytearray(data)
        self.error = error
        self.count = count

    def header(self) -> Tensor:
        """Size, kind of error and count."""
        kind = 0 if self.error is None else 1 + _KINDS.index(type(self.error))
        return torch.tensor([len(self.data), kind, self.count])

    def tensor(self, width: int = 0) -> Tensor:
        """The bytes as a tensor, of at least this many; what is added is never read."""
        return torch.frombuffer(self.data.ljust(width, b"\0"), dtype=torch.uint8)


def pack(operation: str, value: Any, rank: int, count: int = 1) -> Parcel:
    """Pickle one value of a global rank; an error in the parcel if it can't be."""
    try:
        return Parcel(pickle.dumps(value), count=count)
    except Exception as cause:
        error = PicklingError(
            f"{operation}: the object that rank {rank} gives can't be pickled ({type(cause).__name__}: {cause}). "
            f"No rank got anything, and the group can be used on. Give plain data, or names of modules' own functions."
        )
        error.__cause__ = cause
        return sorry(error, count)


def sorry(error: Exception, count: int = 1) -> Parcel:
    """A parcel that tells all ranks what this rank's caller did wrong."""
    return Parcel(str(error).encode(), error, count)


def unpack(buffer: bytes | bytearray | memoryview, operation: str, source: int) -> Any:
    """The object in a parcel's bytes; a failure says whose object it was."""
    try:
        # Unpickling stops where the object ends, so the width to which bytes were filled up does not matter.
        return pickle.loads(buffer)
    except Exception as error:
        error.add_note(f"{operation}: the object came whole from rank {source}, but can't be unpickled here.")
        raise


def reraise(kind: int, text: bytes | bytearray, own: Exception | None) -> NoReturn:
    """Raise here what a rank's header and bytes say was wrong there."""
    if own is not None:
        raise own
    raise _KINDS[kind - 1](text.rstrip(b"\0").decode())


class Room:
    """Space for bytes that will come, and a tensor over it."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.tensor = torch.frombuffer(self.data, dtype=torch.uint8)

    def parts(self, count: int) -> list[memoryview]:
        """The space in equal parts."""
        width = len(self.data) // count
        return [memoryview(self.data)[i * width : (i + 1) * width] for i in range(count)]


def carried(
    tensors: Sequence[Tensor], group: ProcessGroup, device: torch.device | None, move: Callable[..., Any]
) -> Any:
    """Do `move` on these tensors where the backend can reach them, and bring back what came."""
    where = torch.device("cuda") if device is None and group.backend.name == "nccl" else device
    there = list(tensors) if where is None else [tensor.to(where) for tensor in tensors]
    result = move(*there)
    for tensor, moved in zip(tensors, there, strict=True):
        if moved is not tensor:
            tensor.copy_(moved)
    return result
