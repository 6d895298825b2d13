"""Collectives for use inside a model: each returns its result as a new tensor, and gradients flow back through it.

The names and arguments are those of ``torch.distributed.nn.functional``. Sums, averages and moves are linear, so their
gradients are collectives too (`gradients`). For a product, minimum or maximum, each rank gathers the tensors of all
ranks and reduces them by itself, so that torch can differentiate the reduction. Calls that change their arguments are
in `torchdist_ref.groups`.

The loss that is differentiated is the sum of the losses of all ranks. So every rank has to run backward, through the
same collectives in the same order. Do not add the gradient of a linear collective here: it is in `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain
from torchdist_ref.groups import ProcessGroup
from torchdist_ref.nn import gradients
from torchdist_ref.nn.gradients import apply
from torchdist_ref.schedules.reduction_tree import combined
from torchdist_ref.torch_internals.torch_modes import outside_modes

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

Group = ProcessGroup | int | None


def member_group(operation: str, group: Group) -> ProcessGroup:
    """Return the group itself, since backward may run on a thread of autograd, where the default group may differ.

    Raises:
        NotInitializedError: There is no default group.
        ArgumentError: This rank is not in the group.
    """
    found = groups.world.resolve(group, operation)
    if found is not None:
        return found
    hint = "Call it on the group's members only."
    raise ArgumentError(explain(operation, "group", "a group that this rank is in", group, hint=hint))


def _check_tensor(operation: str, argument: str, value: Any) -> None:
    """Raise unless the value is a tensor."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(explain(operation, argument, "a tensor", type(value).__name__))


def _check_tensors(operation: str, argument: str, values: Any) -> None:
    """Raise unless the values are a list or tuple of tensors."""
    if not isinstance(values, list | tuple) or not all(isinstance(value, Tensor) for value in values):
        raise ArgumentTypeError(explain(operation, argument, "a list of tensors", type(values).__name__))


def _product(stacked: Tensor) -> Tensor:
    """Return the product over the first dimension, in the tensors' dtype, with the bits of a call without gradients."""
    wide = stacked.float() if stacked.is_floating_point() and stacked.itemsize < 4 else stacked
    return combined(wide.unbind(), torch.mul).to(stacked.dtype)


def _minimum(stacked: Tensor) -> Tensor:
    """Return the minimum over the first dimension."""
    return stacked.amin(0)


def _maximum(stacked: Tensor) -> Tensor:
    """Return the maximum over the first dimension."""
    return stacked.amax(0)


_NONLINEAR = ((ReduceOp.PRODUCT, _product), (ReduceOp.MIN, _minimum), (ReduceOp.MAX, _maximum))


def nonlinear_reduction(op: object, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """Return the function of stacked tensors that each rank runs for a reduction that is not linear, or None.

    None too for minimum and maximum of complex numbers, which the collective then refuses.
    """
    found = next((function for known, function in _NONLINEAR if op == known), None)
    return None if dtype.is_complex and found is not _product else found


def broadcast(tensor: Tensor, src: int, group: Group = None) -> Tensor:
    """Copy one rank's tensor to all ranks. Backward gives that rank the sum of all gradients, the others zeros.

    Args:
        tensor: Input: on the source the values; elsewhere any tensor of its shape and dtype. It is not changed.
        src: The source, as a global rank.
        group: The process group. Default: the default group.

    Returns:
        A new tensor with the source's values, on every rank.

    Raises:
        ArgumentError: The source or this rank is not in the group.
        MismatchError: Ranks made different calls.

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

    Differentiable:
        Yes, any number of times. The gradient of the sum is a reduce.

    Elsewhere:
        ``MPI_Bcast`` in MPI and ``ncclBroadcast`` in NCCL, without gradients; ``jax.lax.pbroadcast`` in JAX,
        with them.
    """
    _check_tensor("broadcast", "tensor", tensor)
    found = member_group("broadcast", group)
    return apply(gradients.BroadcastMap(found, found.group_rank(src, "broadcast", "src")), tensor)[0]


def gather(tensor: Tensor, dst: int = 0, group: Group = None) -> tuple[Tensor, ...]:
    """Collect the tensors of all ranks on one rank. Backward gives each rank the gradient of its tensor.

    Args:
        tensor: Input: this rank's tensor; one shape and dtype on all ranks.
        dst: The destination, as a global rank. Default: 0.
        group: The process group. Default: the default group.

    Returns:
        One tensor for each rank, with its values on the destination and zeros elsewhere.

    Raises:
        ArgumentError: The destination or this rank is not in the group.
        MismatchError: Ranks made different calls.

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

    Differentiable:
        Yes, any number of times. The gradient of the sum is a scatter.

    Elsewhere:
        ``MPI_Gather`` in MPI and ``ncclSend`` and ``ncclRecv`` in NCCL, without gradients; none in JAX.
    """
    _check_tensor("gather", "tensor", tensor)
    found = member_group("gather", group)
    return apply(gradients.GatherMap(found, found.group_rank(dst, "gather", "dst")), tensor)


def scatter(tensors: list[Tensor] | tuple[Tensor, ...], src: int = 0, group: Group = None) -> Tensor:
    """Send each rank its tensor of one rank's list. Backward gives that rank all gradients, the others zeros.

    Args:
        tensors: Input: one tensor for each rank, all of one shape. Only the source's values are used.
        src: The source, as a global rank. Default: 0.
        group: The process group. Default: the default group.

    Returns:
        This rank's part, a new tensor.

    Raises:
        ArgumentError: The source or this rank is not in the group, or shapes differ.
        MismatchError: Ranks made different calls.

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

    Differentiable:
        Yes, any number of times. The gradient of the sum is a gather.

    Elsewhere:
        ``MPI_Scatter`` in MPI and ``ncclSend`` and ``ncclRecv`` in NCCL, without gradients; none in JAX.
    """
    _check_tensors("scatter", "tensors", tensors)
    groups.arguments.check_not_empty("scatter", "tensors", tensors)
    found = member_group("scatter", group)
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ArgumentError(explain("scatter", "tensors", "tensors of one shape", shapes, rank=found.rank()))
    return apply(gradients.ScatterMap(found, found.group_rank(src, "scatter", "src")), *tensors)[0]


def reduce(tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: Group = None) -> Tensor:
    """Reduce the tensors of all ranks to one rank. Backward gives all ranks its gradient, scaled by their share.

    Args:
        tensor: Input: this rank's tensor; one shape and dtype on all ranks. It is not changed.
        dst: The destination, as a global rank.
        op: The reduction. Default: the sum.
        group: The process group. Default: the default group.

    Returns:
        A new tensor, which holds the result on the destination and zeros elsewhere.

    Raises:
        ArgumentError: The destination or this rank is not in the group.
        MismatchError: Ranks made different calls.

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

    Differentiable:
        Yes, any number of times. The gradient of the sum is a broadcast.

    Elsewhere:
        ``MPI_Reduce`` in MPI and ``ncclReduce`` in NCCL, without gradients; none in JAX.
    """
    _check_tensor("reduce", "tensor", tensor)
    found = member_group("reduce", group)
    if (local := nonlinear_reduction(op, tensor.dtype)) is not None:
        return local(torch.stack(gather(tensor, dst, found)))
    return apply(gradients.ReduceMap(found, found.group_rank(dst, "reduce", "dst"), op), tensor)[0]


def reduce_scatter(output: Tensor, input_list: list[Tensor], op: Any = ReduceOp.SUM, group: Group = None) -> Tensor:
    """Reduce entry `r` of all ranks' lists to rank `r`. Backward sends each rank's gradient to all ranks.

    Args:
        output: Output: also written; it has the shape and dtype of every input.
        input_list: Input: entry `r` is reduced on rank `r`; one shape and dtype on all ranks.
        op: The reduction. Default: the sum.
        group: The process group. Default: the default group.

    Returns:
        This rank's result, in the memory of `output`.

    Raises:
        ArgumentError: A list has the wrong length, shapes or dtypes differ, or this rank is not in the group.
        MismatchError: Ranks made different calls.

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

    Differentiable:
        Yes, any number of times. The gradient of the sum is an all_gather.

    Elsewhere:
        ``MPI_Reduce_scatter`` in MPI and ``ncclReduceScatter`` in NCCL, without gradients;
        ``jax.lax.psum_scatter`` in JAX, with them.
    """
    _check_tensor("reduce_scatter", "output", output)
    _check_tensors("reduce_scatter", "input_list", input_list)
    found = member_group("reduce_scatter", group)
    if (local := nonlinear_reduction(op, output.dtype)) is None:
        return apply(gradients.ReduceScatterMap(found, op, output), *input_list)[0]
    result = local(torch.stack(all_to_all([torch.empty_like(output) for _ in input_list], input_list, found)))
    with outside_modes():
        output.copy_(result)
    return result


def all_gather(tensor: Tensor, group: Group = None) -> tuple[Tensor, ...]:
    """Collect the tensors of all ranks on all ranks. Backward gives each the sum of its tensor's gradients.

    Args:
        tensor: Input: this rank's tensor; one shape and dtype on all ranks.
        group: The process group. Default: the default group.

    Returns:
        One new tensor for each rank, in rank order.

    Raises:
        ArgumentError: This rank is not in the group.
        MismatchError: Ranks made different calls.

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

    Differentiable:
        Yes, any number of times. The gradient of the sum is a reduce_scatter.

    Elsewhere:
        ``MPI_Allgather`` in MPI and ``ncclAllGather`` in NCCL, without gradients; ``jax.lax.all_gather`` in
        JAX, with them.
    """
    _check_tensor("all_gather", "tensor", tensor)
    return apply(gradients.AllGatherMap(member_group("all_gather", group)), tensor)


def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Group = None
) -> tuple[Tensor, ...]:
    """Send a tensor from every rank to every rank. Backward sends each gradient to the rank that sent the tensor.

    Args:
        output_tensor_list: Output: also written; entry `s` receives the tensor from rank `s`.
        input_tensor_list: Input: entry `d` goes to rank `d`. All tensors of the call have one size.
        group: The process group. Default: the default group.

    Returns:
        The received tensors, in the memory of the outputs.

    Raises:
        ArgumentError: Lists have the wrong length, sizes or dtypes differ, or this rank is not in the group.
        MismatchError: Ranks made different calls.

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

    Differentiable:
        Yes, any number of times. The gradient of the sum is an all_to_all.

    Elsewhere:
        ``MPI_Alltoall`` in MPI and ``ncclSend`` and ``ncclRecv`` in NCCL, without gradients;
        ``jax.lax.all_to_all`` in JAX, with them.
    """
    _check_tensors("all_to_all", "output_tensor_list", output_tensor_list)
    _check_tensors("all_to_all", "input_tensor_list", input_tensor_list)
    groups.arguments.check_not_empty("all_to_all", "input_tensor_list", input_tensor_list)
    shapes = tuple(tensor.shape for tensor in output_tensor_list)
    input_shapes = tuple(tensor.shape for tensor in input_tensor_list)
    outputs = tuple(output_tensor_list)
    return apply(
        gradients.AllToAllMap(member_group("all_to_all", group), shapes, input_shapes, outputs), *input_tensor_list
    )


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Send rows of a tensor from every rank to every rank. Backward sends their gradients back to the senders.

    Args:
        output: Output: also written; the rows received from the ranks, in rank order.
        input: Input: block `d` of its rows goes to rank `d`.
        output_split_sizes: The number of rows received from each rank. Default: equal numbers.
        input_split_sizes: The number of rows sent to each rank. Default: equal numbers.
        group: The process group. Default: the default group.

    Returns:
        The received rows, in the memory of `output`.

    Raises:
        ArgumentError: Sizes do not fit the tensors or the ranks, or this rank is not in the group.
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

    Differentiable:
        Yes, any number of times. The gradient of the sum is an all_to_all_single.

    Elsewhere:
        ``MPI_Alltoallv`` in MPI and ``ncclSend`` and ``ncclRecv`` in NCCL, without gradients;
        ``jax.lax.all_to_all`` in JAX, with them.
    """
    _check_tensor("all_to_all_single", "output", output)
    groups.arguments.check_tensor("all_to_all_single", "input", input)
    found = member_group("all_to_all_single", group)
    receive = (
        None if output_split_sizes is None else groups.alltoall.split_sizes("output_split_sizes", output_split_sizes)
    )
    send = None if input_split_sizes is None else groups.alltoall.split_sizes("input_split_sizes", input_split_sizes)
    return apply(gradients.AllToAllSingleMap(found, output.shape, input.shape, receive, send, output), input)[0]


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None) -> Tensor:
    """Reduce the tensors of all ranks to all ranks. Backward gives each the sum of all gradients, scaled.

    Args:
        tensor: Input: this rank's tensor; one shape and dtype on all ranks. It is not changed.
        op: The reduction. Default: the sum.
        group: The process group. Default: the default group.

    Returns:
        A new tensor with the result, on every rank.

    Raises:
        ArgumentError: This rank is not in the group, or the reduction is not defined for the dtype.
        MismatchError: Ranks made different calls.

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

    Differentiable:
        Yes, any number of times. The gradient of the sum is an all_reduce.

    Elsewhere:
        ``MPI_Allreduce`` in MPI and ``ncclAllReduce`` in NCCL, without gradients; ``jax.lax.psum`` in JAX, with
        them.
    """
    _check_tensor("all_reduce", "tensor", tensor)
    found = member_group("all_reduce", group)
    if (local := nonlinear_reduction(op, tensor.dtype)) is not None:
        return local(torch.stack(all_gather(tensor, found)))
    return apply(gradients.AllReduceMap(found, op), tensor)[0]
