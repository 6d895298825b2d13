"""What "sum" or "bxor" is in tensor operations: in place, and of two operands into a third.

Reductions of the wire are commutative; none is associative in floating point, which is why schedules
fix an order. Half types are added in float32 (see `WIDENED`). Don't add averaging here: an average is
a sum that the plan divides once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.errors import ArgumentError, UnsupportedError

WIDENED = {torch.float16, torch.bfloat16}


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
_TABLE["avg"] = _TABLE["sum"]
_BITWISE = {"band", "bor", "bxor"}
_ORDERED = {"min", "max"}
# Complex numbers have no order, and torch multiplies none either: the door's deny list.
_NOT_COMPLEX = {"product", *_BITWISE, *_ORDERED}


def reduction(name: str, dtype: torch.dtype, operation: str) -> Reduction:
    """The tensor operations of a reduction, if it makes sense for this dtype.

    Raises:
        ArgumentError: It does not, with the dtype named.
        UnsupportedError: No engine of ours has this reduction.
    """
    if name not in _TABLE:
        raise UnsupportedError(f"{operation}: reduction {name!r} is not available on backend 'ref'; use SUM and scale.")
    if name in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise ArgumentError(f"{operation}: ReduceOp.{name.upper()} needs integers or bool, got {dtype}.")
    if name in _NOT_COMPLEX and dtype.is_complex:
        raise ArgumentError(f"{operation} does not support ReduceOp.{name.upper()} on complex tensors ({dtype}).")
    if name == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise ArgumentError(f"{operation}: ReduceOp.AVG needs floating point, got {dtype}; use SUM and divide.")
    return _TABLE[name]
