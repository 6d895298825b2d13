"""reduce_scatter: reduce over all ranks and leave each rank its block. Checks and ranks as in `collectives`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchdist_ref.groups.arguments import (
    REDUCE_SCATTER,
    SUM,
    check_elements,
    check_one_dtype,
    check_tensor,
    check_tensors,
    member_group,
    rows,
    word_of,
)
from torchdist_ref.groups.collectives import submit
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.premultiplied import all_multiplied
from torchdist_ref.work import Work


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
