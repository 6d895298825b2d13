"""all_to_all and all_to_all_single: one block from every rank to every rank, of equal or unequal sizes.

Without split sizes all blocks are equal, and every rank knows it. With split sizes a rank knows only its own; the
backend exchanges the others'. Do not add that exchange here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchdist_ref.calls import AllToAll
from torchdist_ref.errors import BackendArgumentError, explain
from torchdist_ref.groups.arguments import (
    check_blocks,
    check_elements,
    check_one_dtype,
    check_tensor,
    check_writable,
    in_rows,
    member_group,
)
from torchdist_ref.groups.collectives import submit
from torchdist_ref.groups.world import ProcessGroup
from torchdist_ref.work import Work

_ALL_TO_ALL, _UNEVEN = AllToAll(), AllToAll(uneven=True)


_NAME = "all_to_all_single"


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Every rank gives every rank a tensor.

    Args:
        output_tensor_list: Output: entry `s` becomes what rank `s` has for this rank.
        input_tensor_list: Input: entry `d` goes to rank `d`. All tensors of the call have one size.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Lists of the wrong length, different sizes or dtypes.
        ArgumentTypeError: Not lists of tensors.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     got = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        ...     dist.all_to_all(got, [torch.tensor([10 * rank + d]) for d in range(3)])
        ...     return [tensor.item() for tensor in got]
        >>> run(program, 3)
        [[0, 10, 20], [1, 11, 21], [2, 12, 22]]

    The operation is MPI's ``MPI_Alltoall``.
    """
    found = member_group("all_to_all", group)
    if found is None:
        return None
    size, why = found.size(), "as input_tensor_list[0] has; all_to_all_single takes unequal ones"
    check_blocks("all_to_all", "input_tensor_list", input_tensor_list, size, why)
    check_blocks("all_to_all", "output_tensor_list", output_tensor_list, size, why, input_tensor_list[0])
    return submit(found, _ALL_TO_ALL, input_tensor_list, output_tensor_list, async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Every rank gives every rank a block of its tensor.

    Args:
        output: Output: the blocks that the ranks have for this one, in rank order, along the first dimension.
        input: Input: block `d` goes to rank `d`. It must not overlap the output.
        output_split_sizes: How many rows of the output come from each rank. Default: equally many.
        input_split_sizes: How many rows of the input go to each rank. Default: equally many. All ranks give
            sizes, or none does.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Sizes that don't fit the tensors or the number of ranks, or dtypes that differ.
        ArgumentTypeError: Not tensors.
        NotInitializedError: There is no group yet.
        MismatchError: A rank sends another number of rows than the other expects. On ``ref``, all ranks get this, and
            nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     output = torch.zeros(2 * rank + 2, dtype=torch.int64)
        ...     rows = [rank + 1, rank + 1]
        ...     dist.all_to_all_single(output, torch.arange(3) + 10 * rank, rows, [1, 2])
        ...     return output.tolist()
        >>> run(program, 2)
        [[0, 10], [1, 2, 11, 12]]

    The operation is MPI's ``MPI_Alltoallv``.
    """
    found = member_group(_NAME, group)
    if found is None:
        return None
    check_tensor(_NAME, "output", output)
    check_tensor(_NAME, "input", input)
    check_writable(_NAME, "output", output)
    if output.dtype is not input.dtype:
        check_one_dtype(_NAME, [output, input])
    outputs = _blocks("output", output, output_split_sizes, found)
    # A tensor without a gradient is its own detached self, which takes a microsecond to make.
    inputs = _blocks("input", input.detach() if input.requires_grad else input, input_split_sizes, found)
    if output_split_sizes or input_split_sizes:
        check_elements(
            _NAME,
            f"output_split_sizes[{found.rank()}]",
            outputs[found.rank()],
            inputs[found.rank()].numel(),
            "what this rank keeps",
        )
        work = submit(found, _UNEVEN, list(inputs), list(outputs), async_op)
        if work is not None:
            work.outputs = [output]
        return work
    if output.numel() != input.numel():
        check_elements(_NAME, "output", output, input.numel(), "as the input has")
    return submit(found, _ALL_TO_ALL, inputs, outputs, async_op)


def _blocks(name: str, tensor: Tensor, sizes: Sequence[int] | None, group: ProcessGroup) -> Sequence[Tensor]:
    shape = tensor.shape
    length = shape[0] if shape else 1
    if not sizes:
        size = len(group.members)
        if length % size:
            _wrong(name, f"a tensor whose first dimension divides by {size}", list(shape), group)
        return in_rows(tensor, size)
    _check_sizes(f"{name}_split_sizes", sizes, length, group)
    blocks: Sequence[Tensor] = (tensor if tensor.dim() else tensor.view(1)).detach().split(list(sizes))
    return blocks


def _check_sizes(name: str, sizes: Any, length: int, group: ProcessGroup) -> None:
    if not isinstance(sizes, Sequence) or not all(isinstance(size, int) and size >= 0 for size in sizes):
        _wrong(name, "a list of numbers of rows, from 0 up", sizes, group)
    if len(sizes) != group.size():
        _wrong(name, f"one number for each of {group.size()} ranks", sizes, group)
    if sum(sizes) != length:
        _wrong(name, f"numbers that add up to the tensor's {length} rows", sizes, group)


def _wrong(argument: str, expected: str, got: Any, group: ProcessGroup) -> None:
    raise BackendArgumentError(explain(_NAME, argument, expected, got))
