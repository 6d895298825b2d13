"""Differentiable collectives in which every rank gives and gets; users get them from `functional`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from torchdist_ref.nn import transposes
from torchdist_ref.nn.arguments import Group, member_group, reduction_here
from torchdist_ref.nn.transposes import apply

__all__ = ["all_gather", "all_reduce", "all_to_all", "all_to_all_single", "reduce_scatter"]


def reduce_scatter(output: Tensor, input_list: list[Tensor], op: Any = ReduceOp.SUM, group: Group = None) -> Tensor:
    """Reduce what the ranks have for each rank. Backwards, each gradient goes to all that had a part in it.

    Args:
        output: Output: written to as well; it has the shape and dtype of every input.
        input_list: Input: entry `r` counts for rank `r`; one shape and dtype on all ranks.
        op: How to reduce. Default: the sum.
        group: Which ranks. Default: all.

    Returns:
        This rank's result, in the memory of `output`.

    Raises:
        ArgumentError: A list of the wrong length, shapes or dtypes that differ, or this rank is not in the group.
        MismatchError: Ranks called different things.

    Example:
        >>> import torch
        >>> from torchdist_ref.nn.functional import reduce_scatter
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     inputs = [torch.tensor([10.0 * rank + r], requires_grad=True) for r in range(2)]
        ...     result = reduce_scatter(torch.empty(1), inputs)
        ...     (result * (rank + 1)).sum().backward()
        ...     return result.item(), [tensor.grad.item() for tensor in inputs]
        >>> run(program, 2)
        [(10.0, [1.0, 2.0]), (12.0, [1.0, 2.0])]
    """
    found = member_group("reduce_scatter", group)
    if (local := reduction_here(op)) is None:
        return apply(transposes.ReduceScatter(found, op, output), *input_list)[0]
    result = local(torch.stack(all_to_all([torch.empty_like(output) for _ in input_list], input_list, found)))
    output.detach().copy_(result.detach())
    return result


def all_gather(tensor: Tensor, group: Group = None) -> tuple[Tensor, ...]:
    """Give every rank the tensors of all. Backwards, each gets the sum of what the ranks have for its own.

    Args:
        tensor: Input: this rank's tensor; one shape and dtype on all ranks.
        group: Which ranks. Default: all.

    Returns:
        One new tensor for each rank, in rank order.

    Raises:
        ArgumentError: This rank is not in the group.
        MismatchError: Ranks called different things.

    Example:
        >>> import torch
        >>> from torchdist_ref.nn.functional import all_gather
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = torch.tensor([2.0 + rank], requires_grad=True)
        ...     first, second = all_gather(tensor)
        ...     (first * second * (rank + 1)).sum().backward()
        ...     return tensor.grad.item()
        >>> run(program, 2)
        [9.0, 6.0]
    """
    return apply(transposes.AllGather(member_group("all_gather", group)), tensor)


def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Group = None
) -> tuple[Tensor, ...]:
    """Every rank gives every rank a tensor. Backwards, each gradient returns to the rank whose tensor it was.

    Args:
        output_tensor_list: Output: written to as well; entry `s` becomes what rank `s` has for this rank.
        input_tensor_list: Input: entry `d` goes to rank `d`. All tensors of the call have one size.
        group: Which ranks. Default: all.

    Returns:
        What this rank got, in the memory of the outputs.

    Raises:
        ArgumentError: Lists of the wrong length, different sizes or dtypes, or this rank is not in the group.
        MismatchError: Ranks called different things.

    Example:
        >>> import torch
        >>> from torchdist_ref.nn.functional import all_to_all
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     inputs = [torch.tensor([10.0 * rank + d], requires_grad=True) for d in range(2)]
        ...     first, second = all_to_all([torch.empty(1), torch.empty(1)], inputs)
        ...     (first * (rank + 1) + second).sum().backward()
        ...     return first.item(), second.item(), [tensor.grad.item() for tensor in inputs]
        >>> run(program, 2)
        [(0.0, 10.0, [1.0, 2.0]), (1.0, 11.0, [1.0, 1.0])]
    """
    shapes = tuple(tensor.shape for tensor in output_tensor_list)
    come_back = tuple(tensor.shape for tensor in input_tensor_list)
    outputs = tuple(output_tensor_list)
    return apply(transposes.AllToAll(member_group("all_to_all", group), shapes, come_back, outputs), *input_tensor_list)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Every rank gives every rank some rows of its tensor. Backwards, their gradients return to where they were.

    Args:
        output: Output: written to as well; the rows that the ranks have for this one, in rank order.
        input: Input: block `d` of its rows goes to rank `d`.
        output_split_sizes: How many rows of the output come from each rank. Default: equally many.
        input_split_sizes: How many rows of the input go to each rank. Default: equally many.
        group: Which ranks. Default: all.

    Returns:
        What this rank got, in the memory of `output`.

    Raises:
        ArgumentError: Sizes that don't fit the tensors or the ranks, or this rank is not in the group.
        MismatchError: A rank sends another number of rows than this one expects.

    Example:
        >>> import torch
        >>> from torchdist_ref.nn.functional import all_to_all_single
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     input = torch.arange(3.0).requires_grad_()
        ...     result = all_to_all_single(torch.empty(2 * rank + 2), input, [rank + 1, rank + 1], [1, 2])
        ...     (result * (rank + 1)).sum().backward()
        ...     return result.tolist(), input.grad.tolist()
        >>> run(program, 2)
        [([0.0, 0.0], [1.0, 2.0, 2.0]), ([1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 2.0])]
    """
    found = member_group("all_to_all_single", group)
    sizes = output_split_sizes, input_split_sizes
    return apply(transposes.AllToAllSingle(found, output.shape, input.shape, *sizes, output), input)[0]


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None) -> Tensor:
    """Reduce the tensors of all ranks to all. Backwards, each gets the sum of all gradients, as far as it counts.

    Args:
        tensor: Input: this rank's tensor; one shape and dtype on all ranks. It stays as it is.
        op: How to reduce. Default: the sum.
        group: Which ranks. Default: all.

    Returns:
        A new tensor with the result, on every rank.

    Raises:
        ArgumentError: This rank is not in the group, or the reduction makes no sense for the dtype.
        MismatchError: Ranks called different things.

    Example:
        >>> import torch
        >>> from torch.distributed import ReduceOp
        >>> from torchdist_ref.nn.functional import all_reduce
        >>> from torchdist_ref.testing import run
        >>> def program(rank, op):
        ...     tensor = torch.tensor([2.0 + rank], requires_grad=True)
        ...     result = all_reduce(tensor, op)
        ...     (result * (rank + 1)).sum().backward()
        ...     return result.item(), tensor.grad.item()
        >>> run(program, 2, ReduceOp.SUM)
        [(5.0, 3.0), (5.0, 3.0)]
        >>> run(program, 2, ReduceOp.MAX)
        [(3.0, 0.0), (3.0, 3.0)]
    """
    found = member_group("all_reduce", group)
    if (local := reduction_here(op)) is not None:
        return local(torch.stack(all_gather(tensor, found)))
    return apply(transposes.AllReduce(found, op), tensor)[0]
