"""Coalesced collectives: every tensor of a list is a call of its own, and the caller waits once.

Do not add collectives on one tensor here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, strided
from torch.futures import Future

from torchdist_ref.calls import AllGather
from torchdist_ref.errors import ArgumentTypeError, BackendArgumentError, explain
from torchdist_ref.groups.arguments import (
    ALL_REDUCE,
    SUM,
    check_elements,
    check_one_dtype,
    check_tensors,
    check_writable,
    member_group,
    word_of,
)
from torchdist_ref.groups.collectives import Joined, submit, submit_multiplied
from torchdist_ref.groups.world import ProcessGroup
from torchdist_ref.work import Work

_ALL_GATHER = AllGather()


def all_reduce_coalesced(
    tensors: Tensor | list[Tensor], op: Any = SUM, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Future[Any] | None:
    """Reduce each tensor of a list over all ranks, in place.

    Args:
        tensors: Input and output: on all ranks the same shapes, of one dtype. A single tensor is a list of one.
        op: How to reduce. Default: the sum.
        group: Which ranks. Default: all.
        async_op: Return at once with a Future to wait for.

    Returns:
        With `async_op` a `torch.futures.Future` (as in torch, and unlike the other collectives), whose value is
        the list of tensors; else None.

    Raises:
        ArgumentError: Dtypes differ, or the reduction makes no sense for them.
        ArgumentTypeError: Not tensors, or not a ReduceOp.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensors = [torch.tensor([rank]), torch.tensor([1, rank * rank])]
        ...     dist.all_reduce_coalesced(tensors)
        ...     return [tensor.tolist() for tensor in tensors]
        >>> run(program, 3)[0]
        [[3], [3, 5]]
    """
    operation = "all_reduce_coalesced"
    given = [tensors] if isinstance(tensors, Tensor) else tensors
    check_tensors(operation, "tensors", given)
    if not given:
        raise BackendArgumentError(explain(operation, "tensors", "a list of at least one tensor", given))
    check_one_dtype(operation, given)
    found = member_group(operation, group)
    if found is None:
        return None
    call = ALL_REDUCE[word_of(op, operation)]
    for index, tensor in enumerate(given):
        if not tensor.is_contiguous():
            check_writable(operation, f"tensors[{index}]", tensor)
    if call.reduction == "premul_sum":
        parts = [submit_multiplied(found, operation, call, tensor, op, async_op) for tensor in given]
    else:
        parts = [submit(found, call, (tensor,), (tensor,), async_op) for tensor in given]
    return _future(operation, given, parts) if async_op else None


def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Future[Any] | None:
    """Give every rank the lists of tensors of all ranks.

    Args:
        output_tensor_lists: Output: list `r` becomes the tensors of rank `r`.
        input_tensor_list: Input: this rank's tensors; on all ranks the same shapes, of one dtype.
        group: Which ranks. Default: all.
        async_op: Return at once with a Future to wait for.

    Returns:
        With `async_op` a `torch.futures.Future` (as in torch, and unlike the other collectives), whose value is
        the list of lists; else None.

    Raises:
        ArgumentError: Lists of the wrong length, tensors of the wrong size, or dtypes that differ.
        ArgumentTypeError: Not lists of tensors.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     mine = [torch.tensor([rank]), torch.tensor([5, rank])]
        ...     everybody = [[torch.zeros_like(tensor) for tensor in mine] for _ in range(2)]
        ...     dist.all_gather_coalesced(everybody, mine)
        ...     return [[tensor.tolist() for tensor in tensors] for tensors in everybody]
        >>> run(program, 2)[0]
        [[[0], [5, 0]], [[1], [5, 1]]]
    """
    found = member_group("all_gather_coalesced", group)
    if found is None:
        return None
    if not _alike(output_tensor_lists, input_tensor_list, len(found.members)):
        _check_gathered(output_tensor_lists, input_tensor_list, found)
    parts = [
        submit(found, _ALL_GATHER, (tensor,), [outputs[index] for outputs in output_tensor_lists], async_op)
        for index, tensor in enumerate(input_tensor_list)
    ]
    return _future("all_gather_coalesced", output_tensor_lists, parts) if async_op else None


def _future(operation: str, outputs: Sequence[Any], parts: Sequence[Work | None]) -> Future[Any]:
    return Joined(operation, outputs, [part for part in parts if part is not None]).get_future()


def _alike(lists: Any, inputs: Any, size: int) -> bool:
    """What `_check_gathered` asks, in one pass over lists that are as they should be."""
    if type(lists) is not list or type(inputs) is not list or len(lists) != size or not inputs:
        return False
    dtype, counts = getattr(inputs[0], "dtype", None), []
    for tensor in inputs:
        if not isinstance(tensor, Tensor) or tensor.dtype is not dtype or tensor.layout is not strided:
            return False
        counts.append(tensor.numel())
    for outputs in lists:
        if type(outputs) is not list or len(outputs) != len(counts):
            return False
        for index, tensor in enumerate(outputs):
            if not isinstance(tensor, Tensor) or tensor.dtype is not dtype or tensor.numel() != counts[index]:
                return False
            if tensor.layout is not strided or not tensor.is_contiguous():
                return False
    return True


def _check_gathered(lists: Any, inputs: Any, group: ProcessGroup) -> None:
    operation = "all_gather_coalesced"
    check_tensors(operation, "input_tensor_list", inputs)
    if not inputs:
        expected = "a list of at least one tensor"
        raise BackendArgumentError(explain(operation, "input_tensor_list", expected, inputs))
    if not isinstance(lists, Sequence):
        raise ArgumentTypeError(explain(operation, "output_tensor_lists", "a list of lists of tensors", lists))
    if len(lists) != group.size():
        expected = f"a list of {group.size()} lists, one a rank"
        raise BackendArgumentError(explain(operation, "output_tensor_lists", expected, len(lists)))
    for rank, outputs in enumerate(lists):
        _check_list(operation, f"output_tensor_lists[{rank}]", outputs, inputs)


def _check_list(operation: str, argument: str, outputs: Any, inputs: Sequence[Tensor]) -> None:
    check_tensors(operation, argument, outputs, len(inputs))
    check_one_dtype(operation, [*inputs, *outputs])
    for index, output in enumerate(outputs):
        check_writable(operation, f"{argument}[{index}]", output)
        why = f"as input_tensor_list[{index}] has"
        check_elements(operation, f"{argument}[{index}]", output, inputs[index].numel(), why)
