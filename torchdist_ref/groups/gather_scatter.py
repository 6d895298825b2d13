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

from torchdist_ref.calls import AllGather, Gather, Scatter
from torchdist_ref.errors import ArgumentError, on_rank
from torchdist_ref.groups.arguments import (
    REDUCE_SCATTER,
    SUM,
    all_multiplied,
    blocks_fit,
    check_blocks,
    check_elements,
    check_one_dtype,
    check_tensor,
    check_tensors,
    member_group,
    root_of,
    rows,
    word_of,
)
from torchdist_ref.groups.collectives import submit
from torchdist_ref.groups.world import ProcessGroup
from torchdist_ref.work import Work

_ALL_GATHER = AllGather()


_gather = cache(Gather)


_scatter = cache(Scatter)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Work | None:
    """Give every rank the tensors of all ranks.

    Args:
        tensor_list: Output: one tensor for each rank, in rank order; entry `r` has the shape of rank `r`'s
            `tensor`. Shapes may differ from rank to rank (on ``ref``), but all ranks pass the same list of them.
            Entries that share memory hold one rank's numbers afterwards; which rank's is not said.
        tensor: Input: this rank's tensor.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The list has the wrong length, or this rank's entry the wrong size, or dtypes differ.
        ArgumentTypeError: Not tensors.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     everybody = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        ...     dist.all_gather(everybody, torch.tensor([rank, 7 - rank]))
        ...     return [tensor.tolist() for tensor in everybody]
        >>> run(program, 2)
        [[[0, 7], [1, 6]], [[0, 7], [1, 6]]]

    The operation is MPI's ``MPI_Allgather``.
    """
    found = member_group("all_gather", group)
    if found is None:
        return None
    check_tensors("all_gather", "tensor_list", tensor_list, found.size())
    check_tensor("all_gather", "tensor", tensor)
    check_one_dtype("all_gather", tensor_list, tensor)
    mine = found.rank()
    if tensor_list[mine].numel() != tensor.numel():
        why = "as the tensor that this rank gives"
        check_elements("all_gather", f"tensor_list[{mine}]", tensor_list[mine], tensor.numel(), why)
    return submit(found, _ALL_GATHER, (tensor,), tensor_list, async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Work | None:
    """Give every rank the tensors of all ranks, one after the other in one tensor.

    Args:
        output_tensor: Output, world size times as many elements as the input: rank 0's first.
        input_tensor: Input: this rank's tensor; the same shape on all ranks. May be this rank's part of the output.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The output has the wrong size, or dtypes differ.
        ArgumentTypeError: Not tensors.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     output = torch.zeros(4, dtype=torch.int64)
        ...     dist.all_gather_into_tensor(output, torch.tensor([rank, 7 - rank]))
        ...     return output.tolist()
        >>> run(program, 2)
        [[0, 7, 1, 6], [0, 7, 1, 6]]
    """
    found = member_group("all_gather_into_tensor", group)
    return (
        None if found is None else gather_into("all_gather_into_tensor", output_tensor, input_tensor, found, async_op)
    )


def gather_into(operation: str, output: Tensor, input: Tensor, group: ProcessGroup, async_op: bool) -> Work | None:
    """What `all_gather_into_tensor` does, under either of its names."""
    check_tensor(operation, "output_tensor", output)
    check_tensor(operation, "input_tensor", input)
    check_one_dtype(operation, (output, input))
    wanted = input.numel() * group.size()
    check_elements(operation, "output_tensor", output, wanted, "world size times the input")
    return submit(group, _ALL_GATHER, (input,), rows(operation, "output_tensor", output, group), async_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Give one rank the tensors of all ranks.

    Args:
        tensor: Input: this rank's tensor; the same shape on all ranks.
        gather_list: Output, on the destination only: one tensor for each rank.
        dst: The destination, as a global rank. Default: 0, if `group_dst` is not given.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.
        group_dst: The destination, as a rank in the group.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: A list where none belongs or none where one does, wrong lengths, sizes or dtypes.
        ArgumentTypeError: Not tensors.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     everybody = [torch.zeros(1) for _ in range(3)] if rank == 0 else None
        ...     dist.gather(torch.tensor([rank / 2]), everybody, dst=0)
        ...     return everybody and [tensor.item() for tensor in everybody]
        >>> run(program, 3)
        [[0.0, 0.5, 1.0], None, None]

    The operation is MPI's ``MPI_Gather``.
    """
    found = member_group("gather", group)
    if found is None:
        return None
    check_tensor("gather", "tensor", tensor)
    root = root_of(found, "gather", 0 if dst is None and group_dst is None else dst, group_dst, "dst")
    outputs = _list_of_root("gather", "gather_list", gather_list, tensor, found, root)
    return submit(found, _gather(root), (tensor,), outputs, async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Give every rank its tensor of a list that one rank has.

    Args:
        tensor: Output: this rank's tensor; the same shape on all ranks.
        scatter_list: Input, on the source only: one tensor for each rank.
        src: The source, as a global rank. Default: 0, if `group_src` is not given.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.
        group_src: The source, as a rank in the group.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: A list where none belongs or none where one does, wrong lengths, sizes or dtypes.
        ArgumentTypeError: Not tensors.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     mine = torch.zeros(1)
        ...     dist.scatter(mine, [torch.tensor([r * r + 0.5]) for r in range(3)] if rank == 1 else None, src=1)
        ...     return mine.item()
        >>> run(program, 3)
        [0.5, 1.5, 4.5]

    The operation is MPI's ``MPI_Scatter``.
    """
    found = member_group("scatter", group)
    if found is None:
        return None
    check_tensor("scatter", "tensor", tensor)
    root = root_of(found, "scatter", 0 if src is None and group_src is None else src, group_src)
    inputs = _list_of_root("scatter", "scatter_list", scatter_list, tensor, found, root)
    return submit(found, _scatter(root), inputs, (tensor,), async_op)


def _list_of_root(
    operation: str, argument: str, given: Sequence[Tensor] | None, tensor: Tensor, group: ProcessGroup, root: int
) -> Sequence[Tensor]:
    """The list that only the root has; empty elsewhere."""
    at_root = group.rank() == root
    if at_root and given is not None and blocks_fit(given, group.size(), tensor):
        return given
    if given is not None:
        check_tensors(operation, argument, given)
    if not at_root:
        if given:
            raise ArgumentError(
                f"{operation}: Argument ``{argument}`` must NOT be specified on non-root ranks "
                f"(root is group rank {root}, this is {group.rank()}){on_rank()}."
            )
        return ()
    if not given:
        raise ArgumentError(f"{operation}: Argument ``{argument}`` must be specified on root rank {root}{on_rank()}.")
    check_blocks(operation, argument, given, group.size(), "as tensor has", tensor)
    return given


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce a list of tensors over all ranks; rank `r` gets the reduced entry `r`.

    Args:
        output: Output: this rank's reduced tensor.
        input_list: Input: one tensor for each rank; entry `r` has one shape on all ranks.
        op: How to reduce. Default: the sum.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The list has the wrong length, this rank's entry not the size of the output, dtypes differ.
        ArgumentTypeError: Not tensors, or not a ReduceOp.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     output = torch.zeros(1, dtype=torch.int64)
        ...     dist.reduce_scatter(output, [torch.tensor([rank + 10 * block]) for block in range(3)])
        ...     return output.item()
        >>> run(program, 3)
        [3, 33, 63]

    The operation is MPI's ``MPI_Reduce_scatter``.
    """
    found = member_group("reduce_scatter", group)
    if found is None:
        return None
    check_tensor("reduce_scatter", "output", output)
    check_tensors("reduce_scatter", "input_list", input_list, found.size())
    check_one_dtype("reduce_scatter", input_list, output)
    mine = found.rank()
    if input_list[mine].numel() != output.numel():
        check_elements("reduce_scatter", f"input_list[{mine}]", input_list[mine], output.numel(), "as the output has")
    return _submit("reduce_scatter", found, input_list, output, op, async_op)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce a tensor over all ranks; rank `r` gets block `r` of the result.

    Args:
        output: Output: this rank's block.
        input: Input, world size times as many elements as the output; one shape on all ranks.
        op: How to reduce. Default: the sum.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The input has the wrong size, or dtypes differ.
        ArgumentTypeError: Not tensors, or not a ReduceOp.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     output = torch.zeros(2, dtype=torch.int64)
        ...     dist.reduce_scatter_tensor(output, torch.arange(4) + rank)
        ...     return output.tolist()
        >>> run(program, 2)
        [[1, 3], [5, 7]]
    """
    found = member_group("reduce_scatter_tensor", group)
    return None if found is None else scatter_from("reduce_scatter_tensor", output, input, op, found, async_op)


def scatter_from(
    operation: str, output: Tensor, input: Tensor, op: Any, group: ProcessGroup, async_op: bool
) -> Work | None:
    """What `reduce_scatter_tensor` does, under either of its names."""
    check_tensor(operation, "output", output)
    check_tensor(operation, "input", input)
    check_one_dtype(operation, (output, input))
    check_elements(operation, "input", input, output.numel() * group.size(), "world size times the output")
    return _submit(operation, group, rows(operation, "input", input, group), output, op, async_op)


def _submit(
    operation: str, group: ProcessGroup, inputs: Sequence[Tensor], output: Tensor, op: Any, async_op: bool
) -> Work | None:
    call = REDUCE_SCATTER[word_of(op, operation)]
    if call.reduction == "premul_sum":
        inputs = all_multiplied(operation, inputs, op)
    return submit(group, call, inputs, (output,), async_op)


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Work | None:
    """Give every rank the tensors of all ranks, one after the other in one tensor.

    Args:
        output_tensor: Output, world size times as many elements as the input: rank 0's first.
        input_tensor: Input: this rank's tensor; the same shape on all ranks.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The output has the wrong size, or dtypes differ.
        ArgumentTypeError: Not tensors.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example: as for `all_gather_into_tensor`, the older name of the same operation.
    """
    found = member_group("all_gather_single", group)
    return None if found is None else gather_into("all_gather_single", output_tensor, input_tensor, found, async_op)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: Any = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce a tensor over all ranks; rank `r` gets block `r` of the result.

    Args:
        output: Output: this rank's block.
        input: Input, world size times as many elements as the output; one shape on all ranks.
        op: How to reduce. Default: the sum.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The input has the wrong size, or dtypes differ.
        ArgumentTypeError: Not tensors, or not a ReduceOp.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example: as for `reduce_scatter_tensor`, the older name of the same operation.
    """
    found = member_group("reduce_scatter_single", group)
    return None if found is None else scatter_from("reduce_scatter_single", output, input, op, found, async_op)
