"""Calls: one frozen, comparable, printable class per operation, with its contract in its docstring.

The public API creates a call, and all layers below pass it on unchanged. Backends dispatch on it, the planner caches
by it, the recorder stores it, ranks compare it. So backends have one method, `submit(call, ...)`, instead of one per
operation. The module `schedules.contract` states the contracts of collectives as values, by the same names; every
algorithm is verified against them.

Ranks in calls are *group* ranks: the public API has translated them. Reductions are strings (``"sum"``, ``"avg"``),
so this module does not need torch. For ``"premul_sum"`` the public API has multiplied the operands, each rank by its
own factor, and backends add. Do not add behavior here: it belongs to the backends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

# Largest tag that every backend accepts.
MAX_TAG = 2**30 - 1
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


@dataclass(frozen=True, slots=True)
class Call:
    """Base class of calls.

    Attributes:
        op: Name of the operation, also in `schedules` and in error messages.
    """

    op: ClassVar[str]

    def __str__(self) -> str:
        arguments = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
        return f"{self.op}({arguments})"


@dataclass(frozen=True, slots=True)
class AllReduce(Call):
    """Every rank's tensor becomes the reduction over all ranks, bit-identical.

    Contract: ``schedules.contract.contract("all_reduce", world)``.
    """

    op = "all_reduce"
    reduction: str = "sum"


@dataclass(frozen=True, slots=True)
class Reduce(Call):
    """The root's tensor becomes the reduction over all ranks; the tensors of the others are unspecified then.

    Contract: ``schedules.contract.contract("reduce", world)``.
    """

    op = "reduce"
    root: int
    reduction: str = "sum"


@dataclass(frozen=True, slots=True)
class Broadcast(Call):
    """Every rank's tensor becomes the root's.

    Contract: ``schedules.contract.contract("broadcast", world)``.
    """

    op = "broadcast"
    root: int


@dataclass(frozen=True, slots=True)
class AllGather(Call):
    """Output `r` of every rank becomes rank `r`'s input.

    Contract: ``schedules.contract.contract("all_gather", world)``.
    """

    op = "all_gather"


@dataclass(frozen=True, slots=True)
class Gather(Call):
    """Output `r` of the root becomes rank `r`'s input; the others have no outputs.

    Contract: ``schedules.contract.contract("gather", world)``.
    """

    op = "gather"
    root: int


@dataclass(frozen=True, slots=True)
class Scatter(Call):
    """The output of rank `r` becomes the root's input `r`; the others have no inputs.

    Contract: ``schedules.contract.contract("scatter", world)``.
    """

    op = "scatter"
    root: int


@dataclass(frozen=True, slots=True)
class ReduceScatter(Call):
    """The output of rank `r` becomes the reduction over all ranks of their input `r`.

    Contract: ``schedules.contract.contract("reduce_scatter", world)``.
    """

    op = "reduce_scatter"
    reduction: str = "sum"


@dataclass(frozen=True, slots=True)
class AllToAll(Call):
    """Output `s` of rank `d` becomes input `d` of rank `s`.

    Blocks have one size, or any size if `uneven`. Then each rank knows only the sizes that it sends and receives.

    Contract: ``schedules.contract.contract("all_to_all", world)``.
    """

    op = "all_to_all"
    uneven: bool = False


@dataclass(frozen=True, slots=True)
class Barrier(Call):
    """No rank returns before every rank has called.

    Contract: ``schedules.contract.contract("barrier", world)``.
    """

    op = "barrier"


@dataclass(frozen=True, slots=True)
class Send(Call):
    """The matching `Recv` of rank `dst` receives the tensor; complete when that rank has it.

    Contract: ``schedules.contract.contract("send", world)``.
    """

    op = "send"
    dst: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Recv(Call):
    """The tensor becomes that of the matching `Send` of rank `src`, or of any rank if `src` is None."""

    op = "recv"
    src: int | None
    tag: int = 0


Shape = tuple[int, ...]


def signature(call: Call, dtype: str, shapes: Sequence[Shape]) -> str:
    """Return the text of everything in a call that all ranks must agree on, for error messages.

    >>> signature(AllReduce("sum"), "float32", [(2, 3)])
    'all_reduce(reduction=sum) of float32 [2, 3]'
    """
    sizes = " ".join(str(list(shape)) for shape in shapes)
    return f"{call} of {dtype} {sizes}" if shapes else str(call)


def fingerprint(text: str) -> int:
    """Return a 64-bit hash of a signature, which ranks compare on every call.

    >>> fingerprint("barrier()") == fingerprint("barrier()") != fingerprint("barrier() ")
    True
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
