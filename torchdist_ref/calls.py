"""Calls as values, and the numbers by which ranks match them.

There is one frozen, comparable, printable class per operation, with its contract in its docstring. The public API
creates a call, and all layers below pass it on unchanged. Backends dispatch on it, the planner caches by it, the
recorder stores it, ranks compare it. So backends have one method, `submit(call, ...)`, instead of one per operation.
The module `schedules.contract` states the contracts of collectives as values, by the same names.

Ranks in calls are *group* ranks: the public API has translated them. Reductions are strings (``"sum"``, ``"avg"``),
so this module does not need torch. For ``"premul_sum"`` the public API has multiplied the operands, each rank by its
own factor, and backends add.

A call made by the program takes the next number of its group: 0, 1, 2, ... A call made inside a completion callback is
numbered under the call that completed (5.1, 5.2, below that 5.1.1). Callbacks run at a different time on each rank, and
on the program's thread if the call had completed already, so the order of calls alone would not match. If ranks are at
different calls, they run the one with the smallest number first: the callbacks of a call before the next call of the
program.

Do not add behavior here: it belongs to the backends.
"""

from __future__ import annotations

import contextvars
import hashlib
import itertools
import operator
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torchdist_ref.errors import ArgumentTypeError, BackendArgumentError, DistBackendError, explain

# Largest tag that every backend accepts.
MAX_TAG = 2**30 - 1


def checked_tag(operation: str, tag: Any) -> int:
    """Return the tag of a message.

    Raises:
        ArgumentTypeError: It is not an integer, or too large for torch's backends: torch raises a TypeError there.
        BackendArgumentError: It is negative.
    """
    if tag.__class__ is int and 0 <= tag <= MAX_TAG:
        return tag
    expected = explain(operation, "tag", f"an integer from 0 to {MAX_TAG}", tag)
    try:
        number = operator.index(tag)
    except TypeError:
        raise ArgumentTypeError(expected) from None
    if number > MAX_TAG:
        raise ArgumentTypeError(expected)
    if number < 0:
        raise BackendArgumentError(expected)
    return number


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


IN_PLACE = frozenset(("all_reduce", "reduce", "broadcast"))
"""Operations on one tensor, which is input and output."""

Shape = tuple[int, ...]


def signature(call: Call | str, dtype: str, shapes: Sequence[Shape]) -> str:
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


Number = tuple[int, int]
"""(count of the program's calls, path below it): two integers that compare as the dotted number does."""

# A path has three levels of 21 bits in one 64-bit integer.
_LEVELS, _BITS = 3, 21


class CallScope:
    """Numbering of the calls that callbacks of one call make.

    Args:
        group: Key of the group of the call.
        number: Number of the call.

    >>> scope = CallScope(1, (5, 0))
    >>> first, second = scope.next(1), scope.next(1)
    >>> (5, 0) < first < CallScope(1, first).next(1) < second < (6, 0)
    True
    """

    def __init__(self, group: int, number: Number) -> None:
        self._group, self._number = group, number
        self._depth = sum(1 for level in range(_LEVELS) if number[1] >> level * _BITS & (1 << _BITS) - 1)
        self._counts: defaultdict[int, Iterator[int]] = defaultdict(lambda: itertools.count(1))

    def next(self, group: int) -> Number:
        """Return the number of the next call on a group in this scope.

        Raises:
            DistBackendError: Callbacks are nested too deeply, or make too many calls.
        """
        count = next(self._counts[group])
        main, path = self._number
        if group != self._group:
            # On another group it precedes the calls of the program there; the order of two such calls does not matter.
            return -1 - zlib.crc32(repr((self._group, self._number)).encode()), count
        if self._depth == _LEVELS or count >> _BITS:
            raise DistBackendError(f"callbacks of call {main} make calls more than {_LEVELS} levels deep, or too many.")
        return main, path | count << _BITS * (_LEVELS - 1 - self._depth)


_scope: contextvars.ContextVar[CallScope | None] = contextvars.ContextVar("torchdist_ref_scope", default=None)


class Numbers:
    """Numbers for the calls of one group on one rank.

    >>> numbers = Numbers("world")
    >>> numbers.next(), numbers.next()
    ((0, 0), (1, 0))
    """

    def __init__(self, name: str) -> None:
        self._group = zlib.crc32(name.encode())
        self._program = itertools.count()

    def next(self) -> Number:
        """Return the number of a call made now on this thread."""
        scope = _scope.get()
        return (next(self._program), 0) if scope is None else scope.next(self._group)

    def scope(self, number: Number) -> CallScope:
        """Return the scope of the callbacks of a call."""
        return CallScope(self._group, number)


@contextmanager
def numbered_in(scope: CallScope) -> Iterator[None]:
    """Let the calls of this thread be numbered in a scope while the context is open."""
    previous = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(previous)
