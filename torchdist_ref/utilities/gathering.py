"""Every rank's tensor on every rank: with gradients that find their way back, and with shapes that differ.

These are differentiable or forgiving forms of `all_gather`; users get them from `utilities.distributed`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.groups import ProcessGroup

__all__ = ["AllGatherGrad", "all_gather_ddp_if_available", "gather_all_tensors"]


def member_count(operation: str, group: ProcessGroup | int | None) -> int:
    """How many ranks the group has. A rank outside it has nothing to give and nothing to divide by."""
    size = groups.get_world_size(group)
    if size < 0:
        hint = "Call it on the group's members only."
        expected = "a group that this rank is in"
        raise ArgumentError(explain(operation, "group", expected, group, rank=groups.get_rank(), hint=hint))
    return size


class AllGatherGrad(torch.autograd.Function):
    """Give every rank the tensors of all ranks, and every rank the gradient that all ranks have for its own.

    Used as ``AllGatherGrad.apply(tensor, group)``. Forward stacks the tensors: the result has shape ``(ranks, ...)``.
    Backward adds up what the ranks have for a row and returns it to the rank whose row it is, as if the losses of all
    ranks were one sum in one program. So every rank has to run backward. It can be differentiated again.

    Rows are in the order of the group's ranks, also where the group is not all ranks (there, Lightning 1.7 takes sizes
    and rows of the whole world).

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> from torchdist_ref.utilities.distributed import AllGatherGrad
        >>> def program(rank):
        ...     tensor = torch.tensor([2.0 + rank], requires_grad=True)
        ...     rows = AllGatherGrad.apply(tensor)
        ...     (rows.prod() * (rank + 1)).backward()
        ...     return rows.tolist(), tensor.grad.item()
        >>> run(program, 2)
        [([[2.0], [3.0]], 9.0), ([[2.0], [3.0]], 6.0)]
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | int | None = None) -> Tensor:
        """Gather.

        Args:
            ctx: Autograd's context.
            tensor: This rank's tensor; one shape and dtype on all ranks.
            group: Which ranks. Default: all.

        Returns:
            The tensors of all ranks, stacked in rank order.

        Raises:
            ArgumentError: This rank is not in the group.
            MismatchError: Shapes or dtypes differ.
        """
        # Backward may run on a thread of autograd's, so which group is meant is settled here.
        ctx.group = groups.GroupMember.WORLD if group is None else group
        rows = tensor.new_empty((member_count("AllGatherGrad", group), *tensor.shape))
        groups.all_gather_into_tensor(rows, tensor.contiguous(), ctx.group)
        return rows

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor, None]:
        """Add up what the ranks have for each row, and return this rank's row.

        Args:
            ctx: Autograd's context.
            grad_output: One tensor, the gradient of this rank's loss for the stacked result.

        Returns:
            The gradient for the tensor, and None for the group.
        """
        return _SumOfMyRow.apply(grad_output[0], ctx.group), None  # type: ignore[no-untyped-call]


class _SumOfMyRow(torch.autograd.Function):
    """The transpose of AllGatherGrad, whose transpose it is again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup | int) -> Tensor:
        ctx.group = group
        row = rows.new_empty(rows.shape[1:])
        groups.reduce_scatter_tensor(row, rows.contiguous(), group=group)
        return row

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor, None]:
        return AllGatherGrad.apply(grad_output[0], ctx.group), None  # type: ignore[no-untyped-call]


def all_gather_ddp_if_available(
    tensor: Tensor, group: ProcessGroup | int | None = None, sync_grads: bool = False
) -> Tensor:
    """Give every rank the tensors of all ranks, stacked; in a program of one process, the tensor itself.

    Args:
        tensor: This rank's tensor; one shape and dtype on all ranks.
        group: Which ranks. Default: all.
        sync_grads: Whether gradients flow back to the ranks that gave the tensors, see `AllGatherGrad`. Default: no.

    Returns:
        A tensor of shape ``(ranks, ...)`` on every rank, or `tensor` if there is no process group.

    Raises:
        ArgumentError: This rank is not in the group.
        MismatchError: Shapes or dtypes differ.

    Example:
        >>> import torch
        >>> from torchdist_ref.testing import run
        >>> from torchdist_ref.utilities.distributed import all_gather_ddp_if_available
        >>> run(lambda rank: all_gather_ddp_if_available(torch.tensor([rank, 7])).tolist(), 2)
        [[[0, 7], [1, 7]], [[0, 7], [1, 7]]]
        >>> all_gather_ddp_if_available(torch.tensor([0, 7])).tolist()
        [0, 7]
    """
    if not groups.is_initialized():
        return tensor
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        gathered: Tensor = AllGatherGrad.apply(tensor, group)  # type: ignore[no-untyped-call]
    return gathered


def gather_all_tensors(result: Tensor, group: ProcessGroup | int | None = None) -> list[Tensor]:
    """Give every rank the tensors of all ranks, whatever their shapes. Gradients don't follow.

    The ranks tell each other their shapes; then each tensor travels, filled up to the size of the largest. So one
    large tensor among small ones costs as if all were large.

    Args:
        result: This rank's tensor. Shapes may differ from rank to rank, in number of dimensions too; the dtype not.
        group: Which ranks. Default: all.

    Returns:
        One tensor for each rank, in rank order, in its own shape.

    Raises:
        ArgumentError: This rank is not in the group.
        NotInitializedError: There is no group yet.
        MismatchError: Dtypes differ.

    Example:
        >>> import torch
        >>> from torchdist_ref.testing import run
        >>> from torchdist_ref.utilities.distributed import gather_all_tensors
        >>> def program(rank):
        ...     return [tensor.tolist() for tensor in gather_all_tensors(torch.arange(2 * rank + 1))]
        >>> run(program, 2)
        [[[0], [0, 1, 2]], [[0], [0, 1, 2]]]
    """
    shapes: list[Any] = [None] * member_count("gather_all_tensors", group)
    groups.all_gather_object(shapes, result.shape, group)
    largest = max(shape.numel() for shape in shapes)
    mine = result.new_zeros(largest)
    mine[: result.numel()] = result.detach().flatten()
    everyone = [torch.empty_like(mine) for _ in shapes]
    groups.all_gather(everyone, mine, group)
    return [flat[: shape.numel()].view(shape) for flat, shape in zip(everyone, shapes, strict=True)]
