"""A collective is a value: frozen, comparable, printable, with its contract in its docstring.

The front door builds a call once, and everything below passes it on unchanged: backends dispatch on it,
the planner caches by it, the recorder logs it, ranks compare it. That is why there is one class per
operation and no method per operation on backends: a backend answers `submit(call, ...)`.

Ranks in calls are *group* ranks: the door has translated them. Reductions are plain words
(``"sum"``, ``"avg"``, ...), so that this file knows nothing of torch; for ``"premul_sum"`` the door has multiplied the
operands, each rank by its own factor, and backends add. Don't add behaviour here:
what to do with a call is the backends' business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

# As large as every backend takes one.
MOST_TAG = 2**30 - 1
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


@dataclass(frozen=True, slots=True)
class Call:
    """What every call has: the name of its operation, as schedules and reports know it."""

    op: ClassVar[str]

    def __str__(self) -> str:
        arguments = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
        return f"{self.op}({arguments})"


@dataclass(frozen=True, slots=True)
class AllReduce(Call):
    """Every rank's tensor becomes the reduction over all ranks; bit-identical everywhere."""

    op = "all_reduce"
    reduction: str = "sum"


@dataclass(frozen=True, slots=True)
class Reduce(Call):
    """The root's tensor becomes the reduction over all ranks; what the others hold then is unspecified."""

    op = "reduce"
    root: int
    reduction: str = "sum"


@dataclass(frozen=True, slots=True)
class Broadcast(Call):
    """Every rank's tensor becomes the root's."""

    op = "broadcast"
    root: int


@dataclass(frozen=True, slots=True)
class AllGather(Call):
    """Output `r` of every rank becomes rank `r`'s input."""

    op = "all_gather"


@dataclass(frozen=True, slots=True)
class Gather(Call):
    """Output `r` of the root becomes rank `r`'s input; the others have no outputs."""

    op = "gather"
    root: int


@dataclass(frozen=True, slots=True)
class Scatter(Call):
    """The output of rank `r` becomes the root's input `r`; the others have no inputs."""

    op = "scatter"
    root: int


@dataclass(frozen=True, slots=True)
class ReduceScatter(Call):
    """The output of rank `r` becomes the reduction over all ranks of their input `r`."""

    op = "reduce_scatter"
    reduction: str = "sum"


@dataclass(frozen=True, slots=True)
class AllToAll(Call):
    """Output `s` of rank `d` becomes input `d` of rank `s`.

    Blocks have one size, or if `uneven` any: then no rank knows more than the sizes of what it gives and takes itself.
    """

    op = "all_to_all"
    uneven: bool = False


@dataclass(frozen=True, slots=True)
class Barrier(Call):
    """No rank returns before every rank has called."""

    op = "barrier"


@dataclass(frozen=True, slots=True)
class Send(Call):
    """The tensor goes to the one matching `Recv` of rank `dst`; done when that rank has it."""

    op = "send"
    dst: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Recv(Call):
    """The tensor becomes what the matching `Send` of rank `src` holds; `src` None takes any rank's."""

    op = "recv"
    src: int | None
    tag: int = 0


Shape = tuple[int, ...]


def signature(call: Call, dtype: str, shapes: Sequence[Shape]) -> str:
    """What all ranks must agree on, as a person reads it in an error.

    >>> signature(AllReduce("sum"), "float32", [(2, 3)])
    'all_reduce(reduction=sum) of float32 [2, 3]'
    """
    sizes = " ".join(str(list(shape)) for shape in shapes)
    return f"{call} of {dtype} {sizes}" if shapes else str(call)


def fingerprint(text: str) -> int:
    """Eight bytes of a signature, as a signed integer: what ranks compare on every call.

    >>> fingerprint("barrier()") == fingerprint("barrier()") != fingerprint("barrier() ")
    True
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
