"""torch 2.13's names for the collectives that see one tensor as equal blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchdist_ref.groups.arguments import SUM, member_group
from torchdist_ref.groups.gathering import gather_into
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.reduce_scattering import scatter_from
from torchdist_ref.work import Work


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
