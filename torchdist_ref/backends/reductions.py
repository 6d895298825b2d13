"""What "sum" or "bxor" is in tensor operations: in place, and of two operands into a third.

Reductions of the wire are commutative; none is associative in floating point, which is why schedules
fix an order. Half and 8-bit floats are added in float32 (see `WIDENED`), and types that torch stores but does not
calculate with go through a wider one. Don't add averaging here: an average is a sum that the plan divides once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend
from torchdist_ref.calls import AllGather
from torchdist_ref.errors import BackendArgumentError, UnsupportedError, explain
from torchdist_ref.work import Work

_EIGHTHS = {
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
}


WIDENED = {torch.float16, torch.bfloat16, *_EIGHTHS}


# Types that torch stores but does not add or compare, and a type that holds all their values; sums wrap alike in both.
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, **dict.fromkeys(_EIGHTHS, torch.float32)}


class Reduction(NamedTuple):
    """A reduction as the executor calls it: ``into(a, b)`` changes a; ``combine(a, b, out=c)`` writes c."""

    into: Callable[..., Any]
    combine: Callable[..., Any]


def _into(combine: Callable[..., Any]) -> Callable[[Tensor, Tensor], Any]:
    return lambda a, b: combine(a, b, out=a)


_TABLE = {
    "sum": Reduction(Tensor.add_, torch.add),
    "product": Reduction(Tensor.mul_, torch.mul),
    "min": Reduction(_into(torch.minimum), torch.minimum),
    "max": Reduction(_into(torch.maximum), torch.maximum),
    "band": Reduction(Tensor.bitwise_and_, torch.bitwise_and),
    "bor": Reduction(Tensor.bitwise_or_, torch.bitwise_or),
    "bxor": Reduction(Tensor.bitwise_xor_, torch.bitwise_xor),
}


# Whoever submits them has scaled the operands, or the plan divides the result.
_TABLE["avg"] = _TABLE["premul_sum"] = _TABLE["sum"]


_BITWISE = {"band", "bor", "bxor"}


_ORDERED = {"min", "max"}


_SCALED = {"avg", "premul_sum"}


# Complex numbers have no order, and torch multiplies none either: the door's deny list.
_NOT_COMPLEX = {"product", *_BITWISE, *_ORDERED}


def reduction(name: str, dtype: torch.dtype, operation: str) -> Reduction:
    """The tensor operations of a reduction, if it makes sense for this dtype.

    Raises:
        ArgumentError: It does not, with the dtype named.
        UnsupportedError: No backend of ours has this reduction.
    """
    if name not in _TABLE:
        raise UnsupportedError(f"{operation}: no backend has a reduction {name!r}; there are {', '.join(_TABLE)}.")
    check(name, dtype, operation)
    if dtype in _WIDER:
        return _through(_WIDER[dtype], _TABLE[name].combine)
    return _through_signed(name) if dtype is torch.uint64 else _TABLE[name]


def check(name: str, dtype: torch.dtype, operation: str) -> None:
    """Raise an ArgumentError unless this reduction makes sense for this dtype."""
    word = name.upper()
    if name in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise BackendArgumentError(
            explain(operation, "op", f"no ReduceOp.{word} where tensors are not integers or bool", dtype)
        )
    if name in _NOT_COMPLEX and dtype.is_complex:
        raise BackendArgumentError(
            explain(
                operation,
                "op",
                f"no ReduceOp.{word} where tensors are complex",
                str(dtype),
                hint=f"torch does not support ReduceOp.{word} on complex tensors.",
            )
        )
    if name in _SCALED and not (dtype.is_floating_point or dtype.is_complex):
        raise BackendArgumentError(
            explain(
                operation,
                "op",
                f"no ReduceOp.{word} where tensors are not floating point",
                dtype,
                hint="Use SUM and divide.",
            )
        )


def _through(wide: torch.dtype, combine: Callable[..., Tensor]) -> Reduction:
    def together(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(combine(a.to(wide), b.to(wide)))

    return Reduction(_into(together), together)


def _through_signed(name: str) -> Reduction:
    """64 bits without a sign: as signed numbers they add and multiply alike, and compare once the top bit is turned."""
    turn, combine = torch.iinfo(torch.int64).min if name in _ORDERED else 0, _TABLE[name].combine

    def together(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        signed = combine(a.view(torch.int64) ^ turn, b.view(torch.int64) ^ turn)
        out.view(torch.int64).copy_(signed ^ turn)
        return out

    return Reduction(_into(together), together)


def divide(tensor: Tensor, by: int) -> Tensor:
    """What makes a sum an average, in place."""
    return tensor.copy_(tensor.float() / by) if tensor.dtype in _EIGHTHS else tensor.div_(by)


_ALL_GATHER = AllGather()


def start_sum(backend: Backend, size: int, tensor: Tensor) -> tuple[list[Work], Callable[[], None]]:
    """Begin to add up tensors in coordinate format.

    How many entries the others have has to be known before any of them can be received: so it waits for all ranks.

    Args:
        backend: That of the group.
        size: Its number of ranks.
        tensor: This rank's; becomes the sum.

    Returns:
        Works to wait for, and a function that then puts the sum into ``tensor``.
    """
    mine = tensor.detach().coalesce()
    parts = mine.indices().t().contiguous(), mine.values().contiguous()
    counts = _counts(backend, size, mine)
    gathered = [[part.new_empty((count, *part.shape[1:])) for count in counts] for part in parts]
    works = [backend.submit(_ALL_GATHER, (part,), room, False) for part, room in zip(parts, gathered, strict=True)]

    @torch.no_grad()
    def add_up() -> None:
        places, values = (torch.cat(room) for room in gathered)
        total = torch.sparse_coo_tensor(places.t(), values, tensor.shape, check_invariants=False)
        tensor.copy_(total.coalesce())

    return works, add_up


def _counts(backend: Backend, size: int, mine: Tensor) -> list[int]:
    """How many entries each rank has."""
    counts = torch.zeros((size, 1), dtype=torch.int64, device=mine.device)
    own = torch.tensor([mine._nnz()], device=mine.device)
    backend.submit(_ALL_GATHER, (own,), counts.unbind(), False).wait()
    return [int(count) for count in counts]
