"""Reductions as tensor operations: in place, of two operands into a third, and of sparse tensors.

`reduction` refuses reductions that the dtype does not have, such as MAX of complex numbers.

The reductions are commutative, and MIN and MAX are associative. Sums and products are not in floating point, so
schedules fix an order (`schedules.reduction_tree`). Callers add float16, bfloat16 and float8 (`WIDENED`) in float32:
`ref.steps.widened` and `ref.execute.reduce`, `torch_native.gloo`, `mpi`.
Dtypes that torch stores but does not calculate with are reduced in a wider dtype here. The sum of sparse tensors
gathers the entries of all ranks, since ranks have entries at different indices.

The caller decides when a sum is divided for an average; `divide` does it.
Do not add that decision here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend
from torchdist_ref.calls import AllGather
from torchdist_ref.errors import BackendArgumentError, UnsupportedError, explain, on_rank
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.work import Work

_FLOAT8 = {
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
}
WIDENED = {torch.float16, torch.bfloat16, *_FLOAT8}
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
# Bits, quantized numbers, integers and floats of a few bits: torch stores them and has no arithmetic for them.
_STORED_ONLY = re.compile(r"torch\.(bits|q|u?int[1-7]$|float4)")
# Dtypes that torch stores but does not add or compare, and a dtype that holds all their values; sums wrap alike.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAN = {
    torch.float16: 0x7E00,
    torch.bfloat16: 0x7FC0,
    torch.float32: 0x7FC00000,
    torch.float64: 0x7FF8000000000000,
}
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, **dict.fromkeys(_FLOAT8, torch.float32)}


class Reduction(NamedTuple):
    """Functions of a reduction.

    Attributes:
        into: ``into(a, b)`` changes a.
        combine: ``combine(a, b, out=c)`` writes c.
        is_exact: Whether results are never rounded, so that 16-bit floats need no float32.
    """

    into: Callable[..., Any]
    combine: Callable[..., Any]
    is_exact: bool = False

    def of_two(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a new tensor."""
        result: Tensor = self.combine(a, b, out=torch.empty_like(a))
        return result


def _into(combine: Callable[..., Any]) -> Callable[[Tensor, Tensor], Any]:
    """Return the in-place form of an operation."""
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
# The caller has scaled the operands, or divides the result.
_TABLE["avg"] = _TABLE["premul_sum"] = _TABLE["sum"]
_BITWISE = {"band", "bor", "bxor"}
_ORDERED = {"min", "max"}
_SCALED = {"avg", "premul_sum"}
# Integers whose sums `divide` divides. Lightning averages integers on each backend that is not named "gloo".
_DIVIDED = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
# Complex numbers have no order, and torch refuses their products: its public functions have this list.
_NOT_COMPLEX = {"product", *_BITWISE, *_ORDERED}


def reduction(name: str, dtype: torch.dtype, operation: str, averages_integers: bool = False) -> Reduction:
    """Return the tensor operations of a reduction for a dtype.

    Args:
        name: Reduction, as in calls.
        dtype: Dtype of the operands.
        operation: Name of the call, for errors.
        averages_integers: Whether the backend supports AVG of integers, as NCCL does and Gloo does not.

    Raises:
        ArgumentError: The reduction is not defined for the dtype.
        UnsupportedError: No backend has this reduction.
    """
    if name not in _TABLE:
        raise UnsupportedError(f"{operation}: no backend has a reduction {name!r}; there are {', '.join(_TABLE)}.")
    if not (averages_integers and name == "avg" and dtype in _DIVIDED):
        check(name, dtype, operation)
    if _STORED_ONLY.match(str(dtype)):
        expected = "tensors of a dtype that torch calculates with"
        raise BackendArgumentError(explain(operation, "tensor", expected, dtype, hint="Use .view() or .to()."))
    if name in _ORDERED and dtype.is_floating_point:
        return _through(_WIDER[dtype], _ordered(name).combine) if dtype in _WIDER else _ordered(name)
    if dtype in _WIDER:
        return _through(_WIDER[dtype], _TABLE[name].combine)
    return _through_signed(name) if dtype is torch.uint64 else _TABLE[name]


def check(name: str, dtype: torch.dtype, operation: str) -> None:
    """Raise ArgumentError unless a reduction is defined for a dtype."""
    if name in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise _requires(operation, name, "integer or bool", dtype)
    if name in _NOT_COMPLEX and dtype.is_complex:
        hint = f" torch does not support ReduceOp.{name.upper()} on complex tensors."
        raise _requires(operation, name, "real", dtype, hint)
    if name in _SCALED and not (dtype.is_floating_point or dtype.is_complex):
        raise _requires(operation, name, "floating-point", dtype, " Use SUM and divide.")


def _requires(operation: str, name: str, kind: str, dtype: torch.dtype, hint: str = "") -> BackendArgumentError:
    """Return the error for a reduction that another kind of tensors needs."""
    words = f"{operation}: op=ReduceOp.{name.upper()} requires {kind} tensors, got {dtype}{on_rank()}.{hint}"
    return BackendArgumentError(words)


def _through(wide: torch.dtype, combine: Callable[..., Tensor]) -> Reduction:
    """Return a reduction that runs in a wider dtype."""

    def widened(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(combine(a.to(wide), b.to(wide)))

    return Reduction(_into(widened), widened)


def _ordered(name: str) -> Reduction:
    """Return MIN or MAX of floats, with the same bits in any order: -0 is less than 0, and there is one NaN.

    Of two zeros torch returns either, and of two NaN the first one or a new one, depending on the element's index.
    """
    combine = _TABLE[name].combine
    join = torch.bitwise_or if name == "min" else torch.bitwise_and

    def of_two(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(a) if out is None else out
        # A minimum is negative if an operand is, a maximum if both are.
        bits = _BITS[a.itemsize]
        sign = join(a.view(bits), b.view(bits)).view(a.dtype)
        torch.copysign(combine(a, b, out=out), sign, out=out)
        # As integers: conversions between floats make other NaN in vectors than in single elements.
        out.view(bits).masked_fill_(out != out, _NAN[out.dtype])
        return out

    return Reduction(_into(of_two), of_two, is_exact=True)


def _through_signed(name: str) -> Reduction:
    """Return a reduction of uint64, which torch runs as int64; comparisons flip the top bit."""
    flip, combine = torch.iinfo(torch.int64).min if name in _ORDERED else 0, _TABLE[name].combine

    def widened(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        signed = combine(a.view(torch.int64) ^ flip, b.view(torch.int64) ^ flip)
        out.view(torch.int64).copy_(signed ^ flip)
        return out

    return Reduction(_into(widened), widened)


def divide(tensor: Tensor, by: int) -> Tensor:
    """Divide a sum in place, to make it an average; integers are rounded toward zero, as by NCCL."""
    if tensor.dtype in _DIVIDED:
        return tensor.div_(by, rounding_mode="trunc")
    if not tensor.is_cpu:
        # CUDA multiplies by the reciprocal of a number, which rounds twice, and divides by a tensor.
        wide = tensor.float() if tensor.dtype in _FLOAT8 else tensor
        return tensor.copy_(wide / torch.full((), by, dtype=wide.dtype, device=wide.device))
    return tensor.copy_(tensor.float() / by) if tensor.dtype in _FLOAT8 else tensor.div_(by)


_ALL_GATHER = AllGather()


def start_sum(backend: Backend, size: int, tensor: Tensor) -> tuple[list[Work], Callable[[], None]]:
    """Start the sum of tensors in coordinate format.

    The number of entries of each rank has to be known before they can be received, so the function waits for all ranks.

    Args:
        backend: The group's backend.
        size: The group's number of ranks.
        tensor: This rank's tensor, which becomes the sum.

    Returns:
        Works to wait for, and a function to call then, which writes the sum to ``tensor``.
    """
    with outside_modes():
        mine = tensor.detach().coalesce()
        parts = mine.indices().t().contiguous(), mine.values().contiguous()
    counts = _counts(backend, size, mine)
    with outside_modes():
        gathered = [[part.new_empty((count, *part.shape[1:])) for count in counts] for part in parts]
    works = [backend.submit(_ALL_GATHER, (part,), blocks, False) for part, blocks in zip(parts, gathered, strict=True)]

    @outside_modes()
    def add_up() -> None:
        indices, values = (torch.cat(blocks) for blocks in gathered)
        total = torch.sparse_coo_tensor(
            indices.t(), values, tensor.shape, dtype=values.dtype, device=values.device, check_invariants=False
        )
        tensor.copy_(total.coalesce())

    return works, add_up


def _counts(backend: Backend, size: int, mine: Tensor) -> list[int]:
    """Return the number of entries of each rank."""
    with outside_modes():
        counts = torch.zeros((size, 1), dtype=torch.int64, device=mine.device)
        own = torch.tensor([mine.values().shape[0]], dtype=torch.int64, device=mine.device)
        backend.submit(_ALL_GATHER, (own,), counts.unbind(), False).wait()
        return [int(count) for count in counts]
