"""Differentiable collectives in which one rank gives or gets everything; users get them from `functional`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.nn import transposes
from torchdist_ref.nn.arguments import Group, member_group, reduction_here
from torchdist_ref.nn.transposes import apply

__all__ = ["broadcast", "gather", "reduce", "scatter"]


def broadcast(tensor: Tensor, src: int, group: Group = None) -> Tensor:
    """Give every rank the tensor of one. Backwards, that rank gets the sum of all gradients, the others zeros.

    Args:
        tensor: Input: on the source what is sent; elsewhere any tensor of its shape and dtype. It stays as it is.
        src: The source, as a global rank.
        group: Which ranks. Default: all.

    Returns:
        A new tensor with the source's values, on every rank.

    Raises:
        ArgumentError: The source or this rank is not in the group.
        MismatchError: Ranks called different things.

    Example:
        >>> import torch
        >>> from torchdist_ref.nn.functional import broadcast
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = torch.tensor([5.0 * rank], requires_grad=True)
        ...     result = broadcast(tensor, src=1)
        ...     (result * (rank + 1)).sum().backward()
        ...     return result.item(), tensor.grad.item()
        >>> run(program, 2)
        [(5.0, 0.0), (5.0, 3.0)]
    """
    found = member_group("broadcast", group)
    return apply(transposes.Broadcast(found, groups.get_group_rank(found, src)), tensor)[0]


def gather(tensor: Tensor, dst: int = 0, group: Group = None) -> tuple[Tensor, ...]:
    """Give one rank the tensors of all. Backwards, each rank gets the gradient that this one has for its tensor.

    Args:
        tensor: Input: this rank's tensor; one shape and dtype on all ranks.
        dst: The destination, as a global rank. Default: 0.
        group: Which ranks. Default: all.

    Returns:
        One tensor for each rank, with its values on the destination and zeros elsewhere.

    Raises:
        ArgumentError: The destination or this rank is not in the group.
        MismatchError: Ranks called different things.

    Example:
        >>> import torch
        >>> from torchdist_ref.nn.functional import gather
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = torch.tensor([2.0 + rank], requires_grad=True)
        ...     first, second = gather(tensor, dst=1)
        ...     (first * second).sum().backward()
        ...     return first.item(), tensor.grad.item()
        >>> run(program, 2)
        [(0.0, 3.0), (2.0, 2.0)]
    """
    found = member_group("gather", group)
    return apply(transposes.Gather(found, groups.get_group_rank(found, dst)), tensor)


def scatter(tensors: list[Tensor] | tuple[Tensor, ...], src: int = 0, group: Group = None) -> Tensor:
    """Give each rank its tensor of one rank's list. Backwards, that rank gets their gradients, the others zeros.

    Args:
        tensors: Input: one tensor for each rank, all of one shape. Elsewhere than on the source only the shape counts.
        src: The source, as a global rank. Default: 0.
        group: Which ranks. Default: all.

    Returns:
        This rank's part, a new tensor.

    Raises:
        ArgumentError: The source or this rank is not in the group, or shapes differ.
        MismatchError: Ranks called different things.

    Example:
        >>> import torch
        >>> from torchdist_ref.nn.functional import scatter
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensors = [torch.tensor([10.0 * rank + r], requires_grad=True) for r in range(2)]
        ...     mine = scatter(tensors, src=1)
        ...     (mine * (rank + 1)).sum().backward()
        ...     return mine.item(), [tensor.grad.item() for tensor in tensors]
        >>> run(program, 2)
        [(10.0, [0.0, 0.0]), (11.0, [1.0, 2.0])]
    """
    found = member_group("scatter", group)
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ArgumentError(explain("scatter", "tensors", "tensors of one shape", shapes, rank=found.rank()))
    return apply(transposes.Scatter(found, groups.get_group_rank(found, src)), *tensors)[0]


def reduce(tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: Group = None) -> Tensor:
    """Reduce the tensors of all ranks to one. Backwards, all get that rank's gradient, as far as they count for it.

    Args:
        tensor: Input: this rank's tensor; one shape and dtype on all ranks. It stays as it is.
        dst: The destination, as a global rank.
        op: How to reduce. Default: the sum.
        group: Which ranks. Default: all.

    Returns:
        A new tensor, which holds the result on the destination and zeros elsewhere.

    Raises:
        ArgumentError: The destination or this rank is not in the group.
        MismatchError: Ranks called different things.

    Example:
        >>> import torch
        >>> from torchdist_ref.nn.functional import reduce
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = torch.tensor([2.0 + rank], requires_grad=True)
        ...     result = reduce(tensor, dst=0)
        ...     (7 * result).sum().backward()
        ...     return result.item(), tensor.grad.item()
        >>> run(program, 2)
        [(5.0, 7.0), (0.0, 7.0)]
    """
    found = member_group("reduce", group)
    if (local := reduction_here(op)) is not None:
        return local(torch.stack(gather(tensor, dst, found)))
    return apply(transposes.Reduce(found, groups.get_group_rank(found, dst), op), tensor)[0]
