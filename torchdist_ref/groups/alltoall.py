"""all_to_all and all_to_all_single: one block from every rank to every rank, of equal or unequal sizes.

Without split sizes all blocks are equal, and every rank knows it. With split sizes a rank knows only its own; the
backend exchanges the others'. Do not add that exchange here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from torchdist_ref.backends.operands import check_writable
from torchdist_ref.calls import AllToAll
from torchdist_ref.errors import BackendArgumentError, explain
from torchdist_ref.groups.arguments import (
    as_real,
    check_blocks,
    check_elements,
    check_one_dtype,
    check_tensor,
    check_tensors,
    contiguous_blocks,
    member_group,
    refuse_nested,
)
from torchdist_ref.groups.collectives import submit_lists
from torchdist_ref.groups.world import ProcessGroup, as_integer
from torchdist_ref.work import Work

_EVEN, _UNEVEN = AllToAll(), AllToAll(uneven=True)


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send one tensor of a list to each rank, and receive one from each rank.

    Args:
        output_tensor_list: Output, one tensor for each rank: entry `s` becomes entry `r` of rank `s`'s input list,
            where `r` is this rank.
        input_tensor_list: Input, one tensor for each rank: entry `d` goes to rank `d`. All tensors of the call have
            one number of elements and one dtype.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Lists of the wrong length, different sizes or dtypes.
        ArgumentTypeError: Not lists of tensors.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     received = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        ...     dist.all_to_all(received, [torch.tensor([10 * rank + d]) for d in range(3)])
        ...     return [tensor.item() for tensor in received]
        >>> run(program, 3)
        [[0, 10, 20], [1, 11, 21], [2, 12, 22]]

    Differentiable:
        No. `torchdist_ref.nn.functional.all_to_all` is.

    Elsewhere:
        ``MPI_Alltoall`` in MPI, ``jax.lax.all_to_all`` in JAX; in NCCL ``ncclSend`` and ``ncclRecv`` inside
        ``ncclGroupStart`` and ``ncclGroupEnd``. Algorithms and their sources: `torchdist_ref.schedules`.
    """
    found = member_group("all_to_all", group)
    if found is None:
        return None
    # Not a list of one tensor: the backend would take it for a repeated call on that tensor, and use that call's plan.
    if type(output_tensor_list) is list and type(input_tensor_list) is list and len(input_tensor_list) > 1:
        work = found.backend.submit_repeated(_EVEN, input_tensor_list, output_tensor_list, not async_op)
        if work is not None:
            return work if async_op else None
    size, why = found.size(), "as input_tensor_list[0] has; for different sizes use all_to_all_single"
    mixed = check_blocks("all_to_all", "input_tensor_list", input_tensor_list, size, why, or_real=True)
    first = input_tensor_list[0]
    if mixed or check_blocks("all_to_all", "output_tensor_list", output_tensor_list, size, why, first, or_real=True):
        check_tensors("all_to_all", "output_tensor_list", output_tensor_list)
        return all_to_all(as_real(output_tensor_list), as_real(input_tensor_list), found, async_op)
    return submit_lists(found, _EVEN, input_tensor_list, output_tensor_list, async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send one block of a tensor to each rank, and receive one from each rank.

    Args:
        output: Output, of the input's dtype: the blocks received, in rank order, along the first dimension.
        input: Input: block `d` goes to rank `d`. It may share memory with the output.
        output_split_sizes: Number of rows of the output that come from each rank. Default: equal blocks.
        input_split_sizes: Number of rows of the input that go to each rank. Default: equal blocks. Either all ranks
            pass sizes, or none does.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: Split sizes that do not match the tensor or the number of ranks; different dtypes.
        ArgumentTypeError: Not tensors.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: A rank sends another number of rows than its peer expects. On ``ref`` all ranks raise this, and
            no tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

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

    Differentiable:
        No. `torchdist_ref.nn.functional.all_to_all_single` is.

    Elsewhere:
        ``MPI_Alltoallv`` in MPI, ``jax.lax.all_to_all`` and ``ragged_all_to_all`` in JAX; in NCCL ``ncclSend``
        and ``ncclRecv`` inside ``ncclGroupStart`` and ``ncclGroupEnd``.
    """
    operation = "all_to_all_single"
    found = member_group(operation, group)
    if found is None:
        return None
    if output_split_sizes is not None:
        output_split_sizes = split_sizes("output_split_sizes", output_split_sizes)
    if input_split_sizes is not None:
        input_split_sizes = split_sizes("input_split_sizes", input_split_sizes)
    if not output_split_sizes and not input_split_sizes:
        repeated = found.backend.submit_repeated(_EVEN, (input,), (output,), not async_op)
        if repeated is not None:
            return repeated if async_op else None
    check_tensor(operation, "output", output)
    check_tensor(operation, "input", input)
    check_writable(operation, "output", output)
    if output.dtype is not input.dtype:
        check_one_dtype(operation, [output, input], or_real=True)
        output, input = as_real([output, input])
    outputs = _split("output", output, output_split_sizes, found)
    # `detach` takes a microsecond, so it is called only for tensors that require a gradient.
    inputs = _split("input", input.detach() if input.requires_grad else input, input_split_sizes, found)
    if output_split_sizes or input_split_sizes:
        own = found.rank()
        argument = f"output_split_sizes[{own}]"
        check_elements(operation, argument, outputs[own], inputs[own].numel(), "as this rank sends to itself")
        work = submit_lists(found, _UNEVEN, list(inputs), list(outputs), async_op, operation)
        if work is not None:
            work.outputs = [output]
        return work
    if output.numel() != input.numel():
        check_elements(operation, "output", output, input.numel(), "as the input has")
    return submit_lists(found, _EVEN, inputs, outputs, async_op, operation)


def split_sizes(name: str, sizes: Any) -> list[int]:
    """Return numbers of rows as a list of int: those of a sequence, a NumPy array or a tensor, as torch's Gloo accepts.

    Raises:
        BackendArgumentError: No such numbers.
    """
    # The sum of the numbers is compared with the number of rows later.
    listed = sizes if isinstance(sizes, list | tuple) else getattr(sizes, "tolist", lambda: sizes)()
    if not isinstance(listed, Sequence) or (numbers := [as_integer(size) for size in listed]).count(None):
        _refuse(name, "a list of numbers of rows, from 0 up", sizes)
    return numbers  # type: ignore[return-value]


def _split(name: str, tensor: Tensor, sizes: Sequence[int] | None, group: ProcessGroup) -> Sequence[Tensor]:
    try:
        shape = tensor.shape
    except RuntimeError:
        refuse_nested("all_to_all_single", tensor)
        raise
    length = shape[0] if shape else 1
    if not sizes:
        size = len(group.members)
        if length % size:
            _refuse(name, f"a tensor whose first dimension divides by {size}", list(shape))
        return contiguous_blocks(tensor, size)
    _check_sizes(f"{name}_split_sizes", sizes, length, group)
    blocks: Sequence[Tensor] = (tensor if tensor.dim() else tensor.view(1)).detach().split(list(sizes))
    return blocks


def _check_sizes(name: str, sizes: Sequence[int], length: int, group: ProcessGroup) -> None:
    if min(sizes) < 0:
        _refuse(name, "a list of numbers of rows, from 0 up", sizes)
    if len(sizes) != group.size():
        _refuse(name, f"one number for each of {group.size()} ranks", sizes)
    if sum(sizes) != length:
        _refuse(name, f"numbers that add up to the tensor's {length} rows", sizes)


def _refuse(argument: str, expected: str, got: Any) -> NoReturn:
    raise BackendArgumentError(explain("all_to_all_single", argument, expected, got))
