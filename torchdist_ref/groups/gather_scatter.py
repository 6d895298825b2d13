"""Collectives that move or reduce blocks: all_gather, gather, scatter, reduce_scatter, and their single-tensor forms.

Lists hold one tensor for each rank of the group. The single-tensor forms (``..._into_tensor``, ``..._tensor``,
``..._single``) treat a tensor as equal blocks, one for each rank. Checks, ranks and calls are as in `collectives`.
Do not add algorithms here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from torchdist_ref.calls import AllGather, Gather, ReduceScatter, Scatter
from torchdist_ref.errors import ArgumentError, on_rank
from torchdist_ref.groups.arguments import (
    REDUCE_SCATTER,
    SUM,
    Reduction,
    as_real,
    blocks_match,
    blocks_of,
    check_blocks,
    check_elements,
    check_one_dtype,
    check_tensor,
    check_tensors,
    member_group,
    premultiplied,
    reduction_name,
    root_of,
)
from torchdist_ref.groups.collectives import submit_lists
from torchdist_ref.groups.world import ProcessGroup
from torchdist_ref.work import Work

_ALL_GATHER = AllGather()
_gather = cache(Gather)
_scatter = cache(Scatter)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Work | None:
    """Gather the tensors of all ranks in a list on every rank.

    Args:
        tensor_list: Output, one tensor for each rank, in rank order: entry `r` has the shape of rank `r`'s `tensor`.
            Shapes may differ between ranks, but all ranks pass the same list of shapes. Entries must not share
            memory.
        tensor: Input: this rank's tensor, of the outputs' dtype.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: A list of the wrong length, an entry of this rank of the wrong size, or different dtypes.
        ArgumentTypeError: Not tensors.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        ...     dist.all_gather(gathered, torch.tensor([rank, 7 - rank]))
        ...     return [tensor.tolist() for tensor in gathered]
        >>> run(program, 2)
        [[[0, 7], [1, 6]], [[0, 7], [1, 6]]]

    Differentiable:
        No. `torchdist_ref.nn.functional.all_gather` is.

    Elsewhere:
        ``MPI_Allgather`` in MPI, ``MPI_Allgatherv`` for different sizes; ``ncclAllGather`` in NCCL,
        ``jax.lax.all_gather`` in JAX. Algorithms and their sources: `torchdist_ref.schedules`.
    """
    found = member_group("all_gather", group)
    if found is None:
        return None
    # Not a list of one tensor: the backend would take it for a repeated call on that tensor, and use that call's plan.
    if type(tensor_list) is list and len(tensor_list) > 1:
        work = found.backend.submit_repeated(_ALL_GATHER, (tensor,), tensor_list, not async_op)
        if work is not None:
            return work if async_op else None
    if tensor is None or not blocks_match(tensor_list, len(found.members), tensor):
        check_tensors("all_gather", "tensor_list", tensor_list, found.size())
        check_tensor("all_gather", "tensor", tensor)
        if check_one_dtype("all_gather", tensor_list, tensor, or_real=True):
            return all_gather(as_real(tensor_list), as_real([tensor])[0], found, async_op)
        _check_own("all_gather", "tensor_list", tensor_list, tensor, found)
    return submit_lists(found, _ALL_GATHER, (tensor,), tensor_list, async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Work | None:
    """Gather the tensors of all ranks in one tensor on every rank.

    Args:
        output_tensor: Output, with world size times the elements of the input: rank 0's first, then rank 1's.
        input_tensor: Input: this rank's tensor, of one shape and dtype on all ranks. It may be this rank's block of
            the output.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: An output of the wrong size, or different dtypes.
        ArgumentTypeError: Not tensors.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     output = torch.zeros(4, dtype=torch.int64)
        ...     dist.all_gather_into_tensor(output, torch.tensor([rank, 7 - rank]))
        ...     return output.tolist()
        >>> run(program, 2)
        [[0, 7, 1, 6], [0, 7, 1, 6]]

    Differentiable:
        No. `torchdist_ref.nn.functional.all_gather` is.

    Elsewhere:
        ``MPI_Allgather`` in MPI, ``ncclAllGather`` in NCCL, ``jax.lax.all_gather(tiled=True)`` in JAX.
    """
    found = member_group("all_gather_into_tensor", group)
    return (
        None
        if found is None
        else _gather_blocks("all_gather_into_tensor", output_tensor, input_tensor, found, async_op)
    )


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Work | None:
    """Gather the tensors of all ranks in one tensor: torch 2.13's name for `all_gather_into_tensor`.

    Args:
        output_tensor: Output: all inputs, concatenated or stacked in rank order, of the input's dtype. Results and
            errors are those of `all_gather_into_tensor`.
        input_tensor: Input: this rank's tensor, of one shape and dtype on all ranks.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.

    Differentiable:
        No. `torchdist_ref.nn.functional.all_gather` is.

    Elsewhere:
        ``MPI_Allgather`` in MPI, ``ncclAllGather`` in NCCL, ``jax.lax.all_gather(tiled=True)`` in JAX.
    """
    found = member_group("all_gather_single", group)
    return None if found is None else _gather_blocks("all_gather_single", output_tensor, input_tensor, found, async_op)


def _gather_blocks(operation: str, output: Tensor, input: Tensor, group: ProcessGroup, async_op: bool) -> Work | None:
    work = group.backend.submit_repeated(_ALL_GATHER, (input,), (output,), not async_op)
    if work is not None:
        return work if async_op else None
    check_tensor(operation, "output_tensor", output)
    check_tensor(operation, "input_tensor", input)
    if output.dtype is not input.dtype:
        check_one_dtype(operation, (output, input), or_real=True)
        output, input = as_real([output, input])
    if output.numel() != (count := input.numel() * len(group.members)):
        check_elements(operation, "output_tensor", output, count, "world size times the input")
    blocks = blocks_of(operation, "output_tensor", output, group, written=True)
    return submit_lists(group, _ALL_GATHER, (input,), blocks, async_op, operation)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather the tensors of all ranks in a list on one rank, the destination.

    Args:
        tensor: Input: this rank's tensor, of one shape and dtype on all ranks.
        gather_list: Output on the destination: one tensor for each rank. None elsewhere.
        dst: Global rank of the destination. Default: 0, unless `group_dst` is given.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.
        group_dst: Group rank of the destination.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: No list on the destination, a list on another rank, or wrong lengths, sizes or dtypes.
        ArgumentTypeError: Not tensors.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     gathered = [torch.zeros(1) for _ in range(3)] if rank == 0 else None
        ...     dist.gather(torch.tensor([rank / 2]), gathered, dst=0)
        ...     return gathered and [tensor.item() for tensor in gathered]
        >>> run(program, 3)
        [[0.0, 0.5, 1.0], None, None]

    Differentiable:
        No. `torchdist_ref.nn.functional.gather` is.

    Elsewhere:
        ``MPI_Gather`` in MPI; in NCCL ``ncclSend`` and ``ncclRecv`` in a group. JAX has none:
        ``jax.lax.all_gather`` gives the blocks to all. Algorithms and their sources: `torchdist_ref.schedules`.
    """
    found = member_group("gather", group)
    if found is None:
        return None
    root = root_of(found, "gather", dst, group_dst, "dst", default=0)
    if type(gather_list) is list:
        work = found.backend.submit_repeated(_gather(root), (tensor,), gather_list, not async_op)
        if work is not None:
            return work if async_op else None
    check_tensor("gather", "tensor", tensor)
    outputs = _root_list("gather", "gather_list", gather_list, tensor, found, root)
    return submit_lists(found, _gather(root), (tensor,), outputs, async_op)


def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = None,
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather the tensors of all ranks in one tensor on one rank, the destination. Since torch 2.14.

    Args:
        tensor: Input: this rank's tensor, of one shape and dtype on all ranks. On the destination it may be its own
            block of the output.
        gather_tensor: Output on the destination, of the input's dtype, with world size times its elements: rank 0's
            first, then rank 1's. Its shape is free: concatenated or stacked. Ignored on the other ranks.
        dst: Global rank of the destination. Default: 0, unless `group_dst` is given.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.
        group_dst: Group rank of the destination.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: No output on the destination, an output of the wrong size or dtype, or a destination that is
            not in the group.
        ArgumentTypeError: Not tensors.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     output = torch.zeros(3, 2, dtype=torch.int64) if rank == 1 else None
        ...     dist.gather_single(torch.tensor([rank, 7 - rank]), output, dst=1)
        ...     return output if output is None else output.tolist()
        >>> run(program, 3)
        [None, [[0, 7], [1, 6], [2, 5]], None]

    Differentiable:
        No. `torchdist_ref.nn.functional.gather` is.

    Elsewhere:
        ``MPI_Gather`` in MPI, ``ncclGather`` in NCCL. JAX has none: ``jax.lax.all_gather(tiled=True)`` gives the
        blocks to all.
    """
    found = member_group("gather_single", group)
    if found is None:
        return None
    root = root_of(found, "gather_single", dst, group_dst, "dst", default=0)
    return _gather_on_root("gather_single", tensor, gather_tensor, found, root, async_op)


def gather_into_tensor(
    tensor: Tensor,
    gather_tensor: Tensor | None = None,
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather the tensors of all ranks in one tensor on one rank: another name for `gather_single`. Since torch 2.14.

    Args:
        tensor: Input: this rank's tensor, of one shape and dtype on all ranks.
        gather_tensor: Output on the destination: all inputs, concatenated or stacked in rank order, of the input's
            dtype. Ignored on the other ranks. Results and errors are those of `gather_single`.
        dst: Global rank of the destination. Default: 0, unless `group_dst` is given.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.
        group_dst: Group rank of the destination.

    Differentiable:
        No. `torchdist_ref.nn.functional.gather` is.

    Elsewhere:
        ``MPI_Gather`` in MPI, ``ncclGather`` in NCCL. JAX has none: ``jax.lax.all_gather(tiled=True)`` gives the
        blocks to all.
    """
    found = member_group("gather_into_tensor", group)
    if found is None:
        return None
    root = root_of(found, "gather_into_tensor", dst, group_dst, "dst", default=0)
    return _gather_on_root("gather_into_tensor", tensor, gather_tensor, found, root, async_op)


def _gather_on_root(
    operation: str, input: Tensor, output: Tensor | None, group: ProcessGroup, root: int, async_op: bool
) -> Work | None:
    call = _gather(root)
    if group.rank() != root:
        check_tensor(operation, "tensor", input)
        return submit_lists(group, call, (input,), (), async_op, operation)
    if output is None:
        raise ArgumentError(
            f"{operation}: gather_tensor must be specified on the destination rank (group rank {root}){on_rank()}."
        )
    check_tensor(operation, "tensor", input)
    check_tensor(operation, "gather_tensor", output)
    check_one_dtype(operation, (input, output))
    if output.numel() != (count := input.numel() * len(group.members)):
        check_elements(operation, "gather_tensor", output, count, "world size times the input")
    blocks = blocks_of(operation, "gather_tensor", output, group, written=True)
    return submit_lists(group, call, (input,), blocks, async_op, operation)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Scatter a list of one rank, the source: every rank gets one of its tensors.

    Args:
        tensor: Output: this rank's tensor, of one shape and dtype on all ranks.
        scatter_list: Input on the source: one tensor for each rank. None elsewhere.
        src: Global rank of the source. Default: 0, unless `group_src` is given.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.
        group_src: Group rank of the source.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: No list on the source, a list on another rank, or wrong lengths, sizes or dtypes.
        ArgumentTypeError: Not tensors.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     block = torch.zeros(1)
        ...     blocks = [torch.tensor([r * r + 0.5]) for r in range(3)] if rank == 1 else None
        ...     dist.scatter(block, blocks, src=1)
        ...     return block.item()
        >>> run(program, 3)
        [0.5, 1.5, 4.5]

    Differentiable:
        No. `torchdist_ref.nn.functional.scatter` is.

    Elsewhere:
        ``MPI_Scatter`` in MPI; in NCCL ``ncclSend`` and ``ncclRecv`` in a group. JAX has none. Algorithms and
        their sources: `torchdist_ref.schedules`.
    """
    found = member_group("scatter", group)
    if found is None:
        return None
    check_tensor("scatter", "tensor", tensor)
    root = root_of(found, "scatter", src, group_src, default=0)
    if type(scatter_list) is list and not tensor.is_complex():
        work = found.backend.submit_repeated(_scatter(root), scatter_list, (tensor,), not async_op)
        if work is not None:
            return work if async_op else None
    if tensor.is_complex() or (scatter_list is not None and _is_complex(scatter_list)):
        # Other ranks do not know whether the list is complex, so real and imaginary parts are sent.
        listed = () if scatter_list is None else scatter_list
        check_tensors("scatter", "scatter_list", listed)
        check_one_dtype("scatter", listed, tensor, or_real=True)
        tensor, scatter_list = as_real([tensor])[0], scatter_list and as_real(scatter_list)
    inputs = _root_list("scatter", "scatter_list", scatter_list, tensor, found, root)
    return submit_lists(found, _scatter(root), inputs, (tensor,), async_op)


def _is_complex(tensors: Any) -> bool:
    """Return whether a list begins with a complex tensor; wrong arguments are refused later."""
    if type(tensors) is not list and not isinstance(tensors, Sequence):
        return False
    return bool(tensors) and isinstance(tensors[0], Tensor) and tensors[0].is_complex()


def _root_list(
    operation: str, argument: str, tensors: Sequence[Tensor] | None, tensor: Tensor, group: ProcessGroup, root: int
) -> Sequence[Tensor]:
    """Check the list that only the root passes, and return it; an empty one on the other ranks."""
    at_root = group.rank() == root
    if at_root and tensors is not None and blocks_match(tensors, len(group.members), tensor):
        return tensors
    if tensors is not None:
        check_tensors(operation, argument, tensors)
    if not at_root:
        if tensors:
            raise ArgumentError(
                f"{operation}: Argument ``{argument}`` must NOT be specified on non-root ranks "
                f"(root is group rank {root}, this is {group.rank()}){on_rank()}."
            )
        return ()
    if not tensors:
        raise ArgumentError(f"{operation}: Argument ``{argument}`` must be specified on root rank {root}{on_rank()}.")
    check_blocks(operation, argument, tensors, group.size(), "as tensor has", tensor)
    return tensors


def _check_own(
    operation: str, argument: str, tensors: Sequence[Tensor], tensor: Tensor, group: ProcessGroup, name: str = "tensor"
) -> None:
    """Compare the size of this rank's entry of a list; the other ranks compare theirs."""
    own = group.rank()
    if tensors[own].numel() != tensor.numel():
        check_elements(operation, f"{argument}[{own}]", tensors[own], tensor.numel(), f"as {name} has")


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Reduction = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce each tensor of a list over all ranks; rank `r` gets the result of entry `r`.

    Args:
        output: Output: this rank's reduced tensor.
        input_list: Input, one tensor for each rank, of the output's dtype: entry `r` has one shape on all ranks.
        op: Reduction. Default: ``ReduceOp.SUM``.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: A list of the wrong length, an entry of this rank of another size than the output, different
            dtypes, or a dtype that does not support the reduction.
        ArgumentTypeError: Not tensors, or not a ReduceOp.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     output = torch.zeros(1, dtype=torch.int64)
        ...     dist.reduce_scatter(output, [torch.tensor([rank + 10 * block]) for block in range(3)])
        ...     return output.item()
        >>> run(program, 3)
        [3, 33, 63]

    Differentiable:
        No. `torchdist_ref.nn.functional.reduce_scatter` is.

    Elsewhere:
        ``MPI_Reduce_scatter`` in MPI, ``ncclReduceScatter`` in NCCL, ``jax.lax.psum_scatter`` in JAX.
        Algorithms and their sources: `torchdist_ref.schedules`.
    """
    found = member_group("reduce_scatter", group)
    if found is None:
        return None
    call = REDUCE_SCATTER[reduction_name(op, "reduce_scatter")]
    # As in `all_gather`.
    if type(input_list) is list and len(input_list) > 1 and call.reduction != "premul_sum":
        work = found.backend.submit_repeated(call, input_list, (output,), not async_op)
        if work is not None:
            return work if async_op else None
    if output is None or not blocks_match(input_list, len(found.members), output):
        check_tensor("reduce_scatter", "output", output)
        check_tensors("reduce_scatter", "input_list", input_list, found.size())
        check_one_dtype("reduce_scatter", input_list, output)
        _check_own("reduce_scatter", "input_list", input_list, output, found, "output")
    return _submit_reduce_scatter("reduce_scatter", found, call, input_list, output, op, async_op)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Reduction = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce a tensor over all ranks; rank `r` gets block `r` of the result.

    Args:
        output: Output: this rank's block.
        input: Input, with world size times the elements of the output; of one shape and dtype on all ranks.
        op: Reduction. Default: ``ReduceOp.SUM``.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: An input of the wrong size, different dtypes, or a dtype that does not support the reduction.
        ArgumentTypeError: Not tensors, or not a ReduceOp.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     output = torch.zeros(2, dtype=torch.int64)
        ...     dist.reduce_scatter_tensor(output, torch.arange(4) + rank)
        ...     return output.tolist()
        >>> run(program, 2)
        [[1, 3], [5, 7]]

    Differentiable:
        No. `torchdist_ref.nn.functional.reduce_scatter` is.

    Elsewhere:
        ``MPI_Reduce_scatter_block`` in MPI, ``ncclReduceScatter`` in NCCL, ``jax.lax.psum_scatter(tiled=True)``
        in JAX.
    """
    found = member_group("reduce_scatter_tensor", group)
    return (
        None if found is None else _reduce_scatter_blocks("reduce_scatter_tensor", output, input, op, found, async_op)
    )


def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Reduction = SUM, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Work | None:
    """Reduce a tensor over all ranks, one block for each: torch 2.13's name for `reduce_scatter_tensor`.

    Args:
        output: Output: this rank's block of the result, of the input's dtype. Results and errors are those of
            `reduce_scatter_tensor`.
        input: Input: one block for each rank, concatenated or stacked; one shape and dtype on all ranks.
        op: Reduction. Default: ``ReduceOp.SUM``.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.

    Differentiable:
        No. `torchdist_ref.nn.functional.reduce_scatter` is.

    Elsewhere:
        ``MPI_Reduce_scatter_block`` in MPI, ``ncclReduceScatter`` in NCCL, ``jax.lax.psum_scatter(tiled=True)``
        in JAX.
    """
    found = member_group("reduce_scatter_single", group)
    return (
        None if found is None else _reduce_scatter_blocks("reduce_scatter_single", output, input, op, found, async_op)
    )


def _reduce_scatter_blocks(
    operation: str, output: Tensor, input: Tensor, op: Any, group: ProcessGroup, async_op: bool
) -> Work | None:
    call = REDUCE_SCATTER[reduction_name(op, operation)]
    if call.reduction != "premul_sum":
        work = group.backend.submit_repeated(call, (input,), (output,), not async_op)
        if work is not None:
            return work if async_op else None
    check_tensor(operation, "output", output)
    check_tensor(operation, "input", input)
    if output.dtype is not input.dtype:
        check_one_dtype(operation, (output, input))
    if input.numel() != (count := output.numel() * len(group.members)):
        check_elements(operation, "input", input, count, "world size times the output")
    blocks = blocks_of(operation, "input", input, group)
    return _submit_reduce_scatter(operation, group, call, blocks, output, op, async_op)


def _submit_reduce_scatter(
    operation: str,
    group: ProcessGroup,
    call: ReduceScatter,
    inputs: Sequence[Tensor],
    output: Tensor,
    op: Any,
    async_op: bool,
) -> Work | None:
    if call.reduction == "premul_sum":
        inputs = [premultiplied(operation, tensor, op) for tensor in inputs]
    return submit_lists(group, call, inputs, (output,), async_op, operation)
