"""Coalesced collectives: every tensor of a list is a call of its own, and the caller waits once.

Do not add collectives on one tensor here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, strided
from torch.futures import Future

from torchdist_ref.backends.operands import (
    check_distinct,
    check_writable,
    is_in_memory,
    refuse_unsupported,
    unwrapped,
    without_overlap,
)
from torchdist_ref.calls import AllGather, Call
from torchdist_ref.errors import ArgumentTypeError, BackendArgumentError, explain
from torchdist_ref.groups.arguments import (
    ALL_REDUCE,
    SUM,
    Reduction,
    as_real,
    check_elements,
    check_not_empty,
    check_one_dtype,
    check_tensors,
    member_group,
    reduction_name,
)
from torchdist_ref.groups.collectives import submit, submit_premultiplied
from torchdist_ref.groups.world import ProcessGroup
from torchdist_ref.work import JoinedWork, Work

_ALL_GATHER = AllGather()


def all_reduce_coalesced(
    tensors: Tensor | list[Tensor], op: Reduction = SUM, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Future[Any] | None:
    """Reduce each tensor of a list over all ranks, in place.

    Args:
        tensors: Input and output: the same shapes on all ranks, of one dtype. A single tensor is a list of one.
        op: Reduction. Default: ``ReduceOp.SUM``.
        group: Process group. Default: all ranks.
        async_op: Return a `torch.futures.Future` at once instead of waiting. Default: False.

    Returns:
        If `async_op`, a `torch.futures.Future` (as in torch, and unlike the other collectives) with the list of
        tensors as its value; else None.

    Raises:
        ArgumentError: An empty list, different dtypes, or a dtype that does not support the reduction.
        ArgumentTypeError: Not tensors, or not a ReduceOp.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensors = [torch.tensor([rank]), torch.tensor([1, rank * rank])]
        ...     dist.all_reduce_coalesced(tensors)
        ...     return [tensor.tolist() for tensor in tensors]
        >>> run(program, 3)[0]
        [[3], [3, 5]]

    Differentiable:
        No. `torchdist_ref.nn.functional.all_reduce` is.

    Elsewhere:
        In NCCL ``ncclAllReduce`` inside ``ncclGroupStart`` and ``ncclGroupEnd``; ``jax.lax.psum`` of a tree in
        JAX. MPI has none.
    """
    operation = "all_reduce_coalesced"
    listed = [tensors] if isinstance(tensors, Tensor) else tensors
    check_tensors(operation, "tensors", listed)
    check_not_empty(operation, "tensors", listed)
    check_one_dtype(operation, listed, or_real=True)
    found = member_group(operation, group)
    if found is None:
        return None
    call = ALL_REDUCE[reduction_name(op, operation)]
    for index, tensor in enumerate(listed):
        if not tensor.is_contiguous():
            check_writable(operation, f"tensors[{index}]", tensor)
    operands = [(tensor,) for tensor in listed]
    requests, copy_back = without_overlap(found.rank(), [(call, operand, operand) for operand in operands])
    _check_before_any_begins(found, requests)
    if call.reduction == "premul_sum":
        parts = [submit_premultiplied(found, operation, call, t, op, async_op) for _, (t,), _ in requests]
    else:
        parts = [submit(found, *request, async_op) for request in requests]
    return _joined(operation, listed, parts, copy_back, async_op)


def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
) -> Future[Any] | None:
    """Gather the tensor lists of all ranks on every rank.

    Args:
        output_tensor_lists: Output, one list for each rank: list `r` becomes the tensors of rank `r`.
        input_tensor_list: Input: this rank's tensors; the same shapes on all ranks, of one dtype.
        group: Process group. Default: all ranks.
        async_op: As for `all_reduce_coalesced`.

    Returns:
        As for `all_reduce_coalesced`; the value of the future is the list of lists.

    Raises:
        ArgumentError: Lists of the wrong length, tensors of the wrong size, or different dtypes.
        ArgumentTypeError: Not lists of tensors.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     inputs = [torch.tensor([rank]), torch.tensor([5, rank])]
        ...     outputs = [[torch.zeros_like(tensor) for tensor in inputs] for _ in range(2)]
        ...     dist.all_gather_coalesced(outputs, inputs)
        ...     return [[tensor.tolist() for tensor in tensors] for tensors in outputs]
        >>> run(program, 2)[0]
        [[[0], [5, 0]], [[1], [5, 1]]]

    Differentiable:
        No. `torchdist_ref.nn.functional.all_gather` is.

    Elsewhere:
        In NCCL ``ncclAllGather`` inside ``ncclGroupStart`` and ``ncclGroupEnd``; ``jax.lax.all_gather`` of a
        tree in JAX. MPI has none.
    """
    found = member_group("all_gather_coalesced", group)
    if found is None:
        return None
    matches = _lists_match(output_tensor_lists, input_tensor_list, found.size())
    if not matches and _check_lists(output_tensor_lists, input_tensor_list, found):
        lists = [as_real(outputs) for outputs in output_tensor_lists]
        return all_gather_coalesced(lists, as_real(input_tensor_list), found, async_op)
    requests, copy_back = without_overlap(
        found.rank(),
        [
            (_ALL_GATHER, (tensor,), [outputs[index] for outputs in output_tensor_lists])
            for index, tensor in enumerate(input_tensor_list)
        ],
    )
    if copy_back is not None:
        named = {
            f"output_tensor_lists[{rank}][{index}]": output
            for rank, outputs in enumerate(output_tensor_lists)
            for index, output in enumerate(outputs)
        }
        check_distinct("all_gather_coalesced", list(named), list(named.values()))
    _check_before_any_begins(found, requests)
    parts = [submit(found, *request, async_op) for request in requests]
    return _joined("all_gather_coalesced", output_tensor_lists, parts, copy_back, async_op)


def _check_before_any_begins(group: ProcessGroup, requests: Sequence[tuple[Call, Any, Any]]) -> None:
    """Raise for a tensor that the backend would refuse when the calls before it have begun on this rank."""
    # The backend checks the first call itself, before any call begins. Backend `fake` accepts tensors without memory.
    for request in requests[1:] if group.backend.name != "fake" else ():
        if any(tensor.is_meta or not is_in_memory(tensor) for side in request[1:] for tensor in side):
            call, inputs, outputs = unwrapped(request)
            refuse_unsupported(call, inputs, outputs, group.backend.name)


def _joined(
    operation: str,
    outputs: Sequence[Any],
    parts: Sequence[Work | None],
    copy_back: Callable[[], None] | None,
    async_op: bool,
) -> Future[Any] | None:
    # Without `async_op`, the backend has waited for each part.
    if async_op:
        return JoinedWork(operation, outputs, [part for part in parts if part is not None], copy_back).get_future()
    if copy_back is not None:
        copy_back()
    return None


def _lists_match(lists: Any, inputs: Any, size: int) -> bool:
    """Return whether lists are as `_check_lists` requires: one pass over valid lists, without an error text."""
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
        for tensor, count in zip(outputs, counts, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dtype is not dtype or tensor.numel() != count:
                return False
            if tensor.layout is not strided or not tensor.is_contiguous():
                return False
    return True


def _check_lists(lists: Any, inputs: Any, group: ProcessGroup) -> bool:
    """Check the lists, and return whether complex and real tensors are mixed."""
    operation = "all_gather_coalesced"
    check_tensors(operation, "input_tensor_list", inputs)
    check_not_empty(operation, "input_tensor_list", inputs)
    if not isinstance(lists, Sequence):
        raise ArgumentTypeError(explain(operation, "output_tensor_lists", "a list of lists of tensors", lists))
    if len(lists) != group.size():
        expected = f"a list of {group.size()} lists, one for each rank"
        raise BackendArgumentError(explain(operation, "output_tensor_lists", expected, len(lists)))
    mixed = False
    for rank, outputs in enumerate(lists):
        argument = f"output_tensor_lists[{rank}]"
        check_tensors(operation, argument, outputs, len(inputs))
        mixed |= check_one_dtype(operation, [*inputs, *outputs], or_real=True)
    for rank, outputs in enumerate([] if mixed else lists):
        argument = f"output_tensor_lists[{rank}]"
        for index, output in enumerate(outputs):
            check_writable(operation, f"{argument}[{index}]", output)
            why = f"as input_tensor_list[{index}] has"
            check_elements(operation, f"{argument}[{index}]", output, inputs[index].numel(), why)
    return mixed
