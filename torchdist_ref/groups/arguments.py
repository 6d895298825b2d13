"""Argument rules that public functions share: groups, tensors, lists of tensors, reductions.

Every call pays for these checks, so each one tests values at hand and formats text only on failure. Do not add checks
that need another rank: backends compare the ranks' calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, strided
from torch.distributed import ReduceOp

from torchdist_ref.backends.base import RowBlocks
from torchdist_ref.calls import AllReduce, Reduce, ReduceScatter
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendArgumentError,
    UnsupportedError,
    explain,
    on_rank,
)
from torchdist_ref.groups.world import ProcessGroup, default_group, resolve, whole_number

SUM = ReduceOp.SUM


_WORDS = {
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


ALL_REDUCE = {word: AllReduce(word) for word in _WORDS.values()}


REDUCE_SCATTER = {word: ReduceScatter(word) for word in _WORDS.values()}


def member_group(operation: str, group: ProcessGroup | int | None) -> ProcessGroup | None:
    """The group to work on; None, with a warning, where this rank is not in it (torch's documented lenience)."""
    found = resolve(group, operation)
    if found is None:
        rank = default_group().rank()
        warnings.warn(
            f"Running {operation} on global rank {rank} which does not belong to the given group.", stacklevel=3
        )
    return found


def word_of(op: Any, operation: str) -> str:
    """The reduction that a `ReduceOp` means, as calls and backends name it."""
    if op is SUM:
        return "sum"
    # An instance of ReduceOp holds its member in `op`; members equal plain numbers, which are no reductions.
    member = getattr(op, "op", op)
    if not isinstance(member, type(SUM)) or member not in _WORDS:
        raise ArgumentTypeError(explain(operation, "op", "a ReduceOp (SUM, AVG, PRODUCT, MIN, ...)", op))
    if op is ReduceOp.PREMUL_SUM:
        expected = "a ReduceOp; PREMUL_SUM needs a factor, as in ReduceOp.PREMUL_SUM(0.5)"
        raise ArgumentTypeError(explain(operation, "op", expected, op))
    return _WORDS[member]


reduce_call = cache(Reduce)


def check_tensor(operation: str, argument: str, value: Any) -> None:
    """Raise unless the value is a dense tensor."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"{operation}: Invalid function argument. Expected parameter `{argument}` of type torch.Tensor\n"
            f"             but got {type(value)} instead.{on_rank()}"
        )
    if value.layout is not strided:
        _refuse_layout(operation, argument, value)


def check_tensors(operation: str, argument: str, value: Any, count: int | None = None) -> None:
    """Raise unless the value is a list of dense tensors, of this length."""
    if type(value) is not list and not isinstance(value, Sequence):
        _refuse_list(operation, argument, value)
    for index, item in enumerate(value):
        if not isinstance(item, Tensor):
            _refuse_list(operation, argument, value)
        if item.layout is not strided:
            _refuse_layout(operation, f"{argument}[{index}]", item)
    if count is not None and len(value) != count:
        raise BackendArgumentError(explain(operation, argument, f"a list of {count} tensors, one a rank", len(value)))


def _refuse_layout(operation: str, argument: str, tensor: Tensor) -> NoReturn:
    # Their values lie in several tensors, or where no backend can find them.
    raise UnsupportedError(explain(operation, argument, "a dense tensor (use .to_dense())", tensor.layout))


def _refuse_list(operation: str, argument: str, value: Any) -> NoReturn:
    raise ArgumentTypeError(
        f"{operation}: Invalid function argument. Expected parameter `{argument}` of type List[torch.Tensor]\n"
        f"             but got {type(value)} instead.{on_rank()}"
    )


def check_one_dtype(operation: str, tensors: Sequence[Tensor], like: Tensor | None = None) -> None:
    """Raise unless all tensors have one dtype, that of another tensor if one is given."""
    first = (tensors[0] if like is None else like).dtype
    for tensor in tensors:
        if tensor.dtype is not first:
            dtypes = {str(first), *(str(t.dtype) for t in tensors)}
            raise BackendArgumentError(
                f"{operation}: Invalid usage of tensors with different dtypes, "
                f"{' and '.join(sorted(dtypes))}{on_rank()}."
            )


def check_elements(operation: str, argument: str, tensor: Tensor, count: int, why: str) -> None:
    """Raise unless a tensor has this many elements."""
    if tensor.numel() != count:
        raise BackendArgumentError(explain(operation, argument, f"{count} elements ({why})", list(tensor.shape)))


def check_blocks(operation: str, argument: str, value: Any, count: int, why: str, like: Tensor | None = None) -> None:
    """Raise unless it is a list of so many tensors of one size and dtype: those of another tensor, if one is given."""
    if not blocks_fit(value, count, like):
        check_tensors(operation, argument, value, count)
        first = value[0] if like is None else like
        check_one_dtype(operation, value, first)
        for index, tensor in enumerate(value):
            check_elements(operation, f"{argument}[{index}]", tensor, first.numel(), why)


def blocks_fit(value: Any, count: int, like: Tensor | None) -> bool:
    """What `check_blocks` asks, in one pass over a list that is as it should be."""
    if type(value) is not list or len(value) != count:
        return False
    first = value[0] if like is None else like
    if not isinstance(first, Tensor):
        return False
    dtype, elements = first.dtype, first.numel()
    for tensor in value:
        if not isinstance(tensor, Tensor) or tensor.dtype is not dtype or tensor.numel() != elements:
            return False
        if tensor.layout is not strided:
            return False
    return True


def check_writable(operation: str, argument: str, tensor: Tensor) -> None:
    """Raise if two elements of an output are one place in memory."""
    if tensor.is_contiguous():
        return
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ArgumentError(
            explain(
                operation,
                argument,
                "a tensor whose elements don't overlap (use .clone())",
                f"strides {tensor.stride()}",
            )
        )


def root_of(
    group: ProcessGroup, operation: str, rank: int | None, group_rank: int | None, argument: str = "src"
) -> int:
    """The group rank that a pair of arguments like `src` and `group_src` means.

    Raises:
        ArgumentError: Both or neither given, or not in the group.
    """
    if rank is not None and group_rank is not None:
        raise ArgumentError(f"{operation}: Can't specify both {argument} and group_{argument}{on_rank()}.")
    if group_rank is not None:
        number = whole_number(group_rank)
        if number is None or not 0 <= number < group.size():
            expected = f"a group rank from 0 to {group.size() - 1}"
            raise BackendArgumentError(explain(operation, f"group_{argument}", expected, group_rank))
        return number
    if rank is None:
        raise ArgumentError(f"{operation}: Must specify {argument} or group_{argument}{on_rank()}.")
    return group.position(rank, operation, argument)


def rows(operation: str, argument: str, tensor: Tensor, group: ProcessGroup) -> Sequence[Tensor]:
    """A tensor whose elements divide by the number of ranks, as one equal block for each of them.

    Raises:
        BackendArgumentError: Its blocks can't be told apart where they lie: it has strides, and too few rows.
    """
    size = len(group.members)
    if not tensor.is_contiguous() and tensor.shape[0] % size:
        expected = f"a contiguous tensor, or one whose first dimension divides by {size}"
        raise BackendArgumentError(explain(operation, argument, expected, list(tensor.shape)))
    return in_rows(tensor, size)


def in_rows(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """A tensor whose blocks are one after the other, as so many of them."""
    return RowBlocks(tensor, size) if size > 1 else (tensor,)


def multiplied(operation: str, tensor: Tensor, op: Any) -> Tensor:
    """A copy of the tensor, times the factor of a PREMUL_SUM.

    Raises:
        ArgumentError: The tensor has no floating point numbers, or the factor is a tensor of another dtype.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        expected = "no ReduceOp.PREMUL_SUM where tensors are not floating point"
        raise ArgumentError(explain(operation, "op", expected, tensor.dtype))
    factor, real = op.__getstate__()[1], tensor.dtype.to_real()
    if isinstance(factor, Tensor) and factor.dtype != real:
        raise ArgumentError(explain(operation, "op", f"a PREMUL_SUM with a factor of {real}", factor.dtype))
    factor = torch.as_tensor(factor, dtype=real, device=tensor.device).detach().reshape(())
    plain = tensor.detach().contiguous()
    # torch stores 8-bit floats and does not multiply them.
    return (plain.float() * factor.float()).to(plain.dtype) if plain.itemsize == 1 else plain * factor


def all_multiplied(operation: str, tensors: Sequence[Tensor], op: Any) -> list[Tensor]:
    """Copies of the inputs of a reduction whose output is another tensor."""
    return [multiplied(operation, tensor, op) for tensor in tensors]
