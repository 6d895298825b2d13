"""Argument rules that public functions share: groups, tensors, lists of tensors, reductions.

Every call pays for these checks, so each one tests values at hand and formats text only on failure. The table of
reductions and dtypes is in `backends.reductions`, since torch calls backends without passing here; `ref` also averages
integers, which Gloo refuses. Do not add checks that need another rank: backends compare the ranks' calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, strided
from torch.distributed import ReduceOp

from torchdist_ref.backends import reductions
from torchdist_ref.backends.operands import RowBlocks, check_distinct, check_writable, flat_operands, output_names
from torchdist_ref.calls import AllReduce, Reduce, ReduceScatter
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendArgumentError,
    UnsupportedError,
    explain,
    explain_type,
    on_rank,
)
from torchdist_ref.groups.world import ProcessGroup, as_integer, default_group, resolve
from torchdist_ref.torch_internals.torch_modes import outside_modes

SUM = ReduceOp.SUM
# An `op`: a member of `ReduceOp`, or a ReduceOp made of one, such as ``ReduceOp.PREMUL_SUM(0.5)``.
Reduction = ReduceOp.RedOpType | ReduceOp
_REDUCTION_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
    ReduceOp.PREMUL_SUM: "premul_sum",
}
ALL_REDUCE = {name: AllReduce(name) for name in _REDUCTION_NAMES.values()}
REDUCE_SCATTER = {name: ReduceScatter(name) for name in _REDUCTION_NAMES.values()}
reduce_call = cache(Reduce)


def member_group(operation: str, group: ProcessGroup | int | None) -> ProcessGroup | None:
    """Return the group of a call, or None with a warning if this rank is not in it, as torch documents."""
    found = resolve(group, operation)
    if found is None:
        rank = default_group().rank()
        warnings.warn(
            f"Running {operation} on global rank {rank} which does not belong to the given group.", stacklevel=3
        )
    return found


def reduction_name(op: Any, operation: str) -> str:
    """Return the name of a `ReduceOp` in calls and backends.

    Raises:
        ArgumentTypeError: Not a ReduceOp, or a PREMUL_SUM without a factor.
    """
    if op is SUM:
        return "sum"
    # An instance of ReduceOp holds its member in `op`; members equal plain numbers, which are not reductions.
    member = getattr(op, "op", op)
    if not isinstance(member, type(SUM)) or member not in _REDUCTION_NAMES:
        raise ArgumentTypeError(explain(operation, "op", "a ReduceOp (SUM, AVG, PRODUCT, MIN, ...)", op))
    if op is ReduceOp.PREMUL_SUM:
        expected = "a ReduceOp; PREMUL_SUM needs a factor, as in ReduceOp.PREMUL_SUM(0.5)"
        raise ArgumentTypeError(explain(operation, "op", expected, op))
    return _REDUCTION_NAMES[member]


@outside_modes()
def premultiplied(operation: str, tensor: Tensor, op: Any) -> Tensor:
    """Return a contiguous copy of a tensor, multiplied by the factor of a PREMUL_SUM.

    Raises:
        ArgumentError: The tensor is not floating point, or the factor is a tensor of another dtype.
    """
    reductions.check("premul_sum", tensor.dtype, operation)
    factor, real = op.__getstate__()[1], tensor.dtype.to_real()
    if isinstance(factor, Tensor) and factor.dtype != real:
        raise ArgumentError(explain(operation, "op", f"a PREMUL_SUM with a factor of {real}", factor.dtype))
    factor = torch.as_tensor(factor, dtype=real, device=tensor.device).reshape(())
    plain = tensor.contiguous()
    # torch stores 8-bit floats and does not multiply them.
    return (plain.float() * factor.float()).to(plain.dtype) if plain.itemsize == 1 else plain * factor


def check_tensor(operation: str, argument: str, value: Any) -> None:
    """Raise unless the value is a dense tensor."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(explain_type(operation, argument, "torch.Tensor", f"{type(value)}"))
    if value.layout is not strided:
        _refuse_layout(operation, argument, value)


def check_tensors(operation: str, argument: str, value: Any, count: int | None = None) -> None:
    """Raise unless the value is a list of dense tensors, of length `count` if given."""
    if type(value) is not list and not isinstance(value, Sequence):
        _refuse_list(operation, argument, value)
    for index, item in enumerate(value):
        if not isinstance(item, Tensor):
            _refuse_list(operation, argument, value)
        if item.layout is not strided:
            _refuse_layout(operation, f"{argument}[{index}]", item)
    if count is not None and len(value) != count:
        expected = f"a list of {count} tensors, one for each rank"
        raise BackendArgumentError(explain(operation, argument, expected, len(value)))


def _refuse_layout(operation: str, argument: str, tensor: Tensor) -> NoReturn:
    # Sparse values are in several tensors, or in memory that no backend can address.
    raise UnsupportedError(explain(operation, argument, "a dense tensor (use .to_dense())", tensor.layout))


def refuse_nested(operation: str, *tensors: Any) -> None:
    """Raise if one of the operands is a nested tensor, for callers that caught torch's RuntimeError about its shape.

    A nested tensor has the layout of dense tensors, so only another check in each call could find it earlier.
    """
    if any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors):
        expected = "a dense tensor (send each of .unbind(), or torch.nested.to_padded_tensor)"
        raise UnsupportedError(explain(operation, "tensor", expected, "a nested tensor")) from None


def _refuse_list(operation: str, argument: str, value: Any) -> NoReturn:
    got = f"{type(value)}"
    if isinstance(value, Sequence):
        index, other = next((index, item) for index, item in enumerate(value) if not isinstance(item, Tensor))
        got = f"a {type(value).__name__} whose entry {index} is {type(other)}"
    raise ArgumentTypeError(explain_type(operation, argument, "List[torch.Tensor]", got))


def check_not_empty(operation: str, argument: str, tensors: Sequence[Any]) -> None:
    """Raise if a list has no entry."""
    if not tensors:
        raise BackendArgumentError(explain(operation, argument, "a list of at least one tensor", tensors))


def check_one_dtype(
    operation: str, tensors: Sequence[Tensor], like: Tensor | None = None, or_real: bool = False
) -> bool:
    """Raise unless all tensors have one dtype: that of `like` if given.

    Args:
        operation: Name of the public function.
        tensors: The tensors.
        like: Another tensor.
        or_real: Accept complex tensors together with tensors of their real dtype, as torch does in some functions.

    Returns:
        Whether there are such. Then the call is made on `as_real` of all.
    """
    first = (tensors[0] if like is None else like).dtype
    for tensor in tensors:
        if tensor.dtype is not first:
            if or_real and {t.dtype.to_real() for t in tensors} == {first.to_real()}:
                return True
            dtypes = {str(first), *(str(t.dtype) for t in tensors)}
            raise BackendArgumentError(
                f"{operation}: Invalid usage of tensors with different dtypes, "
                f"{' and '.join(sorted(dtypes))}{on_rank()}."
            )
    return False


@outside_modes()
def as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors, complex ones as views of their real and imaginary parts."""
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]


def check_elements(operation: str, argument: str, tensor: Tensor, count: int, why: str) -> None:
    """Raise unless a tensor has `count` elements; `why` explains the number."""
    if tensor.numel() != count:
        raise BackendArgumentError(
            explain(operation, argument, f"a tensor of {count} elements ({why})", list(tensor.shape))
        )


def check_blocks(
    operation: str, argument: str, value: Any, count: int, why: str, like: Tensor | None = None, or_real: bool = False
) -> bool:
    """Raise unless the value is a list of `count` tensors of one size and dtype: those of `like` if given.

    Returns:
        As `check_one_dtype` does.
    """
    if not blocks_match(value, count, like):
        check_tensors(operation, argument, value, count)
        first = value[0] if like is None else like
        if check_one_dtype(operation, value, first, or_real):
            return True
        for index, tensor in enumerate(value):
            check_elements(operation, f"{argument}[{index}]", tensor, first.numel(), why)
    return False


def blocks_match(value: Any, count: int, like: Tensor | None) -> bool:
    """Return whether a list is as `check_blocks` requires: one pass over a valid list, without an error text."""
    if type(value) is not list or len(value) != count:
        return False
    first = value[0] if like is None else like
    if not isinstance(first, Tensor) or first.layout is not strided:
        return False
    dtype, elements = first.dtype, first.numel()
    for tensor in value:
        if not isinstance(tensor, Tensor) or tensor.dtype is not dtype or tensor.numel() != elements:
            return False
        if tensor.layout is not strided:
            return False
    return True


def check_outputs(operation: str, outputs: Sequence[Tensor]) -> None:
    """Raise if an output overlaps itself, or another one of the list: Gloo would keep the later block."""
    tensors = flat_operands(outputs)
    names = output_names(operation, len(tensors))
    for name, tensor in zip(names, tensors, strict=True):
        check_writable(operation, name, tensor)
    check_distinct(operation, names, tensors)


def root_of(
    group: ProcessGroup,
    operation: str,
    rank: int | None,
    group_rank: int | None,
    argument: str = "src",
    default: int | None = None,
) -> int:
    """Return the group rank that a pair of arguments like `src` and `group_src` specifies.

    Args:
        group: The group of the call.
        operation: Name of the public function, for error messages.
        rank: The global rank, or None.
        group_rank: The group rank, or None.
        argument: Name of the first argument of the pair.
        default: Global rank to use if neither is given. Default: none, which makes that an error.

    Raises:
        ArgumentError: Both or neither given, or not in the group.
    """
    if rank is not None and group_rank is not None:
        raise ArgumentError(f"{operation}: Can't specify both {argument} and group_{argument}{on_rank()}.")
    if group_rank is not None:
        number = as_integer(group_rank)
        if number is None or not 0 <= number < group.size():
            kind = "a group rank" if number is not None else "an int, a group rank"
            expected = f"{kind} from 0 to {group.size() - 1}"
            raise BackendArgumentError(explain(operation, f"group_{argument}", expected, group_rank))
        return number
    if rank is None:
        rank = default
    if rank is None:
        raise ArgumentError(f"{operation}: Must specify {argument} or group_{argument}{on_rank()}.")
    return group.group_rank(rank, operation, argument)


def blocks_of(
    operation: str, argument: str, tensor: Tensor, group: ProcessGroup, written: bool = False
) -> Sequence[Tensor]:
    """Return a tensor as one equal block for each rank; its elements divide by the number of ranks.

    Raises:
        ArgumentError: The tensor is `written`, and its elements overlap.
        BackendArgumentError: The blocks are not views: the tensor has strides, and too few rows.
    """
    size = len(group.members)
    if not tensor.is_contiguous():
        if written:
            check_writable(operation, argument, tensor)
        if tensor.shape[0] % size:
            expected = f"a contiguous tensor, or one whose first dimension divides by {size}"
            raise BackendArgumentError(explain(operation, argument, expected, list(tensor.shape)))
    # The same as `contiguous_blocks`, without the cost of one more function call.
    return RowBlocks(tensor, size) if size > 1 else (tensor,)


def contiguous_blocks(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """Return a tensor as `count` equal consecutive blocks."""
    return RowBlocks(tensor, count) if count > 1 else (tensor,)
