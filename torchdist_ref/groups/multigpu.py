"""The five ``..._multigpu`` collectives on several tensors per rank, which torch removed in 2.2.

Each function combines this rank's tensors, makes one call among the ranks, and copies the result to this rank's other
tensors. The outcome is as if every tensor had been on a rank of its own. Tensors of one call have one size and dtype.
`ref` and `gloo` accept any number of CPU tensors.

torch's documentation numbered blocks ``k * world_size + j``, where `j` is an index into the list of rank `k`. The
factor is the length of that list, which equals the world size only if each rank has as many tensors as there are ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.backends.operands import check_writable
from torchdist_ref.backends.reductions import reduction
from torchdist_ref.calls import AllGather, Broadcast, Call
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.groups.arguments import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    SUM,
    Reduction,
    check_elements,
    check_not_empty,
    check_one_dtype,
    check_tensors,
    member_group,
    premultiplied,
    reduce_call,
    reduction_name,
    root_of,
)
from torchdist_ref.groups.collectives import join
from torchdist_ref.groups.world import ProcessGroup
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.work import JoinedWork, Work


def broadcast_multigpu(
    tensor_list: list[Tensor],
    src: int,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    src_tensor: int = 0,
) -> Work | None:
    """Copy one tensor of one rank to all tensors of all ranks.

    Args:
        tensor_list: Tensors of one shape and dtype, equally many on all ranks. On the source, entry `src_tensor` is the
            input; all other tensors are outputs.
        src: Global rank of the source.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` instead of waiting. Default: False.
        src_tensor: Index of the input in the source's list. Default: 0.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The source is not in the group, no such tensor, or tensors of different sizes or dtypes.
        ArgumentTypeError: Not a list of tensors.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensors = [torch.tensor([10 * rank]), torch.tensor([10 * rank + 1])]
        ...     dist.broadcast_multigpu(tensors, src=1, src_tensor=1)
        ...     return [tensor.item() for tensor in tensors]
        >>> run(program, 2)
        [[11, 11], [11, 11]]

    Differentiable:
        No.

    Elsewhere:
        In NCCL ``ncclBroadcast`` for each device inside ``ncclGroupStart`` and ``ncclGroupEnd``; ``jax.pmap``
        in JAX. MPI has none.
    """
    name = "broadcast_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    _check_alike(name, "tensor_list", tensor_list)
    root = root_of(found, name, src, None)
    source = _entry(name, "src_tensor", tensor_list, src_tensor if root == found.rank() else 0)
    scratch = source.clone(memory_format=torch.contiguous_format)
    return _run(name, found, Broadcast(root), [scratch], [scratch], [scratch] * len(tensor_list), tensor_list, async_op)


def all_reduce_multigpu(
    tensor_list: list[Tensor], op: Reduction = SUM, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Work | None:
    """Reduce all tensors of all ranks to one value, which each of them receives.

    Args:
        tensor_list: Input and output: tensors of one shape and dtype, equally many on all ranks.
        op: Reduction; AVG divides by the number of all tensors. Default: ``ReduceOp.SUM``.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` instead of waiting. Default: False.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Tensors of different sizes or dtypes, or a dtype that does not support the reduction.
        ArgumentTypeError: Not a list of tensors, or not a ReduceOp.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensors = [torch.tensor([10 * rank]), torch.tensor([10 * rank + 1])]
        ...     dist.all_reduce_multigpu(tensors)
        ...     return [tensor.item() for tensor in tensors]
        >>> run(program, 2)
        [[22, 22], [22, 22]]

    Differentiable:
        No.

    Elsewhere:
        In NCCL ``ncclAllReduce`` for each device inside ``ncclGroupStart`` and ``ncclGroupEnd``; ``jax.pmap``
        in JAX. MPI has none.
    """
    name = "all_reduce_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    _check_alike(name, "tensor_list", tensor_list)
    call, scratch = ALL_REDUCE[reduction_name(op, name)], _combined(name, tensor_list, op)
    return _run(name, found, call, [scratch], [scratch], [scratch] * len(tensor_list), tensor_list, async_op)


def reduce_multigpu(
    tensor_list: list[Tensor],
    dst: int,
    op: Reduction = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Work | None:
    """Reduce all tensors of all ranks; one tensor of one rank receives the result.

    Args:
        tensor_list: Input: tensors of one shape and dtype, equally many on all ranks. On the destination, entry
            `dst_tensor` is the output; the other tensors keep their values.
        dst: Global rank of the destination.
        op: Reduction; AVG divides by the number of all tensors. Default: ``ReduceOp.SUM``.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` instead of waiting. Default: False.
        dst_tensor: Index of the output in the destination's list. Default: 0.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The destination is not in the group, no such tensor, tensors of different sizes or dtypes, or a
            dtype that does not support the reduction.
        ArgumentTypeError: Not a list of tensors, or not a ReduceOp.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensors = [torch.tensor([10 * rank]), torch.tensor([10 * rank + 1])]
        ...     dist.reduce_multigpu(tensors, dst=0, dst_tensor=1)
        ...     return [tensor.item() for tensor in tensors]
        >>> run(program, 2)
        [[0, 22], [10, 11]]

    Differentiable:
        No.

    Elsewhere:
        In NCCL ``ncclReduce`` for each device inside ``ncclGroupStart`` and ``ncclGroupEnd``; ``jax.pmap`` in
        JAX. MPI has none.
    """
    name = "reduce_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    _check_alike(name, "tensor_list", tensor_list)
    call = reduce_call(root_of(found, name, dst, None, "dst"), reduction_name(op, name))
    target = [_entry(name, "dst_tensor", tensor_list, dst_tensor)] if call.root == found.rank() else []
    scratch = _combined(name, tensor_list, op)
    return _run(name, found, call, [scratch], [scratch], [scratch] * len(target), target, async_op, tensor_list)


def all_gather_multigpu(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gather the tensors of all ranks in each of this rank's lists.

    Args:
        output_tensor_lists: Output, one list for each of this rank's tensors, each with all tensors of all ranks:
            tensor `j` of group rank `k` is entry ``k * len(input_tensor_list) + j``.
        input_tensor_list: Input; tensors of one shape and dtype, equally many on all ranks.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` instead of waiting. Default: False.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Lists of the wrong length, or tensors of different sizes or dtypes.
        ArgumentTypeError: Not lists of tensors.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensors = [torch.tensor([10 * rank]), torch.tensor([10 * rank + 1])]
        ...     outputs = [[torch.tensor([0]) for _ in range(4)] for _ in tensors]
        ...     dist.all_gather_multigpu(outputs, tensors)
        ...     return [[tensor.item() for tensor in output] for output in outputs]
        >>> run(program, 2)[1]
        [[0, 1, 10, 11], [0, 1, 10, 11]]

    Differentiable:
        No.

    Elsewhere:
        In NCCL ``ncclAllGather`` for each device inside ``ncclGroupStart`` and ``ncclGroupEnd``; ``jax.pmap``
        in JAX. MPI has none.
    """
    name = "all_gather_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    _check_alike(name, "input_tensor_list", input_tensor_list)
    total = len(input_tensor_list) * found.size()
    _check_lists(name, "output_tensor_lists", output_tensor_lists, len(input_tensor_list), total, input_tensor_list[0])
    rows = _stacked(input_tensor_list)
    gathered = rows.new_empty((found.size(), *rows.shape))
    sources = [*gathered.view(total, -1)] * len(output_tensor_lists)
    targets = [output for outputs in output_tensor_lists for output in outputs]
    blocks = list(gathered.unbind())
    return _run(name, found, AllGather(), [rows], blocks, sources, targets, async_op, output_tensor_lists)


def reduce_scatter_multigpu(
    output_tensor_list: list[Tensor],
    input_tensor_lists: list[list[Tensor]],
    op: Reduction = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce lists over all lists of all ranks; each output receives one entry of the result.

    Args:
        output_tensor_list: Output, tensors of one shape and dtype: entry `j` of group rank `k` becomes entry
            ``k * len(output_tensor_list) + j``.
        input_tensor_lists: Input, one list for each output, each with a tensor for every output of every rank.
        op: Reduction; AVG divides by the number of all lists. Default: ``ReduceOp.SUM``.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` instead of waiting. Default: False.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Lists of the wrong length, tensors of different sizes or dtypes, or a dtype that does not
            support the reduction.
        ArgumentTypeError: Not lists of tensors, or not a ReduceOp.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     outputs = [torch.tensor([0]), torch.tensor([0])]
        ...     inputs = [[torch.tensor([index + 10 * rank]) for index in range(4)] for _ in outputs]
        ...     dist.reduce_scatter_multigpu(outputs, inputs)
        ...     return [tensor.item() for tensor in outputs]
        >>> run(program, 2)
        [[20, 24], [28, 32]]

    Differentiable:
        No.

    Elsewhere:
        In NCCL ``ncclReduceScatter`` for each device inside ``ncclGroupStart`` and ``ncclGroupEnd``;
        ``jax.pmap`` in JAX. MPI has none.
    """
    name = "reduce_scatter_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    _check_alike(name, "output_tensor_list", output_tensor_list)
    count = len(output_tensor_list)
    _check_lists(name, "input_tensor_lists", input_tensor_lists, count, count * found.size(), output_tensor_list[0])
    call = REDUCE_SCATTER[reduction_name(op, name)]
    combined = _combined(name, [_stacked(inputs) for inputs in input_tensor_lists], op)
    result = combined.new_empty((count, combined.shape[1]))
    blocks = list(combined.view(found.size(), *result.shape).unbind())
    return _run(name, found, call, blocks, [result], list(result), output_tensor_list, async_op)


def _check_alike(name: str, argument: str, tensors: Any) -> None:
    """Raise unless the value is a list of tensors of one size and dtype."""
    check_tensors(name, argument, tensors)
    check_not_empty(name, argument, tensors)
    check_one_dtype(name, tensors)
    for index, tensor in enumerate(tensors):
        check_elements(name, f"{argument}[{index}]", tensor, tensors[0].numel(), f"as {argument}[0] has")
        check_writable(name, f"{argument}[{index}]", tensor)


def _check_lists(name: str, argument: str, lists: Any, count: int, length: int, like: Tensor) -> None:
    """Raise unless there are `count` lists of `length` tensors, all of the size and dtype of `like`."""
    if not isinstance(lists, Sequence) or len(lists) != count:
        got = len(lists) if isinstance(lists, Sequence) else lists
        raise ArgumentError(explain(name, argument, f"a list of {count} lists, one for each tensor", got))
    for index, tensors in enumerate(lists):
        _check_alike(name, f"{argument}[{index}]", tensors)
        check_one_dtype(name, [like, *tensors])
        check_elements(name, f"{argument}[{index}][0]", tensors[0], like.numel(), "as the other list has")
        if len(tensors) != length:
            expected = f"a list of {length} tensors, one for each tensor of each rank"
            raise ArgumentError(explain(name, f"{argument}[{index}]", expected, len(tensors)))


def _entry(name: str, argument: str, tensors: Sequence[Tensor], index: int) -> Tensor:
    if not isinstance(index, int) or not 0 <= index < len(tensors):
        raise ArgumentError(explain(name, argument, f"an index into the list, from 0 to {len(tensors) - 1}", index))
    return tensors[index].detach()


@outside_modes()
def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors as the rows of one."""
    return torch.stack([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors])


@outside_modes()
def _combined(name: str, tensors: Sequence[Tensor], op: Any) -> Tensor:
    """Return this rank's tensors reduced to one, in scratch memory."""
    word = reduction_name(op, name)
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    local = reduction(word, total.dtype, name)
    for tensor in tensors[1:]:
        local.into(total, tensor.reshape(total.shape).to(total.device))
    total = premultiplied(name, total, op) if word == "premul_sum" else total
    return total / len(tensors) if word == "avg" else total


def _run(
    name: str,
    group: ProcessGroup,
    call: Call,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    async_op: bool,
    result: Sequence[Any] | None = None,
) -> Work | None:
    """Submit a call on scratch tensors; copy its results (`sources`) to the caller's tensors (`targets`) after it."""

    def copy_back() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source.view(target.shape))

    part = group.backend.submit(call, inputs, outputs, not async_op)
    return join(JoinedWork(name, targets if result is None else result, [part], copy_back), async_op)
