"""all_gather and reduce_scatter on several tensors a rank; the idea is in `multigpu`.

Where torch's own page numbered the blocks ``k * world_size + j``, `j` is a place in the list of rank `k` and the factor
is the length of that list: the two are the same only where a rank has as many tensors as there are ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchdist_ref.calls import AllGather
from torchdist_ref.groups.arguments import REDUCE_SCATTER, SUM, member_group, word_of
from torchdist_ref.groups.collectives import submit
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.joined import joined
from torchdist_ref.groups.tensor_lists import check_alike, check_lists, combined_of, copy_each, packed
from torchdist_ref.work import Work


def all_gather_multigpu(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Give every tensor's list the tensors of all ranks.

    Args:
        output_tensor_lists: Output: one list for each of this rank's tensors, each with all tensors of all ranks:
            tensor `j` of group rank `k` at place ``k * len(input_tensor_list) + j``.
        input_tensor_list: Input; equally many on all ranks.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Lists of the wrong length, or tensors of different sizes or dtypes.
        ArgumentTypeError: Not lists of tensors.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

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
    """
    name = "all_gather_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    check_alike(name, "input_tensor_list", input_tensor_list)
    total = len(input_tensor_list) * found.size()
    check_lists(name, "output_tensor_lists", output_tensor_lists, len(input_tensor_list), total, input_tensor_list[0])
    mine = packed(input_tensor_list)
    everybody = mine.new_empty((found.size(), *mine.shape))
    parts = [submit(found, AllGather(), (mine,), list(everybody.unbind()), True)]
    rows = everybody.view(total, -1)
    outputs = [output for outputs in output_tensor_lists for output in outputs]
    every = [*rows] * len(output_tensor_lists)
    return joined(name, output_tensor_lists, parts, async_op, lambda: copy_each(every, outputs))


def reduce_scatter_multigpu(
    output_tensor_list: list[Tensor],
    input_tensor_lists: list[list[Tensor]],
    op: Any = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce lists over all lists of all ranks, and give every output its place of the result.

    Args:
        output_tensor_list: Output: entry `j` of group rank `k` becomes place ``k * len(output_tensor_list) + j``.
        input_tensor_lists: Input: one list for each output, each with a tensor for every output of every rank.
        op: How to reduce. Default: the sum. AVG divides by the number of all lists.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Lists of the wrong length, tensors of different sizes or dtypes, or a reduction that makes no
            sense for them.
        ArgumentTypeError: Not lists of tensors, or not a ReduceOp.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     outputs = [torch.tensor([0]), torch.tensor([0])]
        ...     inputs = [[torch.tensor([place + 10 * rank]) for place in range(4)] for _ in outputs]
        ...     dist.reduce_scatter_multigpu(outputs, inputs)
        ...     return [tensor.item() for tensor in outputs]
        >>> run(program, 2)
        [[20, 24], [28, 32]]
    """
    name = "reduce_scatter_multigpu"
    found = member_group(name, group)
    if found is None:
        return None
    check_alike(name, "output_tensor_list", output_tensor_list)
    count = len(output_tensor_list)
    check_lists(name, "input_tensor_lists", input_tensor_lists, count, count * found.size(), output_tensor_list[0])
    word = word_of(op, name)
    combined = combined_of(name, [packed(inputs) for inputs in input_tensor_lists], op)
    result = combined.new_empty((count, combined.shape[1]))
    blocks = list(combined.view(found.size(), *result.shape).unbind())
    parts = [submit(found, REDUCE_SCATTER[word], blocks, (result,), True)]
    return joined(name, output_tensor_list, parts, async_op, lambda: copy_each(result, output_tensor_list))
