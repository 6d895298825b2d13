"""Collectives on one tensor: all_reduce, broadcast, reduce, barrier, monitored_barrier.

Each function checks its arguments, translates global ranks into group ranks, builds a call and submits it to the
group's backend. Collectives on lists and blocks are in `gather_scatter` and `alltoall`. Do not add algorithms here.

Rules for all of them: every member of the group calls the same function, in the same order, with tensors of one shape
and dtype. A rank outside the group gets a warning and None. If the ranks' calls differ, all of them raise
`MismatchError`, and no tensor is written.

PREMUL_SUM: each rank multiplies a copy of its input by its own factor, and the backend adds. torch offers it on NCCL
only; here it works on every backend, and factors may differ between ranks. The factor is first rounded to the tensors'
dtype, as NCCL does (its manual, ``ncclRedOpCreatePreMulSum``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from torch import Tensor, sparse_coo, strided

from torchdist_ref.backends.operands import are_apart, check_writable, flat_operands, unwrapped, without_overlap
from torchdist_ref.backends.reductions import start_sum
from torchdist_ref.calls import AllReduce, Barrier, Broadcast, Call, Reduce
from torchdist_ref.errors import ArgumentTypeError, BackendArgumentError, explain
from torchdist_ref.groups.arguments import (
    ALL_REDUCE,
    SUM,
    Reduction,
    check_outputs,
    check_tensor,
    member_group,
    premultiplied,
    reduce_call,
    reduction_name,
    refuse_nested,
    root_of,
)
from torchdist_ref.groups.world import ProcessGroup, refuse_unusable
from torchdist_ref.timeouts import timeout_of
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.work import JoinedWork, Work

_BARRIER = Barrier()
_SUM = ALL_REDUCE["sum"]
_PREMUL_SUM = ALL_REDUCE["premul_sum"]
_broadcast = cache(Broadcast)
Submitted = TypeVar("Submitted")


def submit(
    group: ProcessGroup, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], async_op: bool
) -> Work | None:
    """Submit a call to the group's backend: return its Work if `async_op`, else wait and return None."""
    try:
        work = group.backend.submit(call, inputs, outputs, not async_op)
    except RuntimeError as error:
        refuse_nested(call.op, *flat_operands(inputs), *flat_operands(outputs))
        return submit_inside(error, submit, group, call, inputs, outputs, async_op)
    return work if async_op else None


def submit_inside(
    refused: RuntimeError,
    submit_call: Callable[..., Submitted],
    group: ProcessGroup,
    call: Call,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *options: Any,
) -> Submitted:
    """Submit a call whose operands a backend has refused on the tensors inside them, as `unwrapped` finds them.

    Raises:
        RuntimeError: The error: it has another reason, or no operand wraps a tensor.
    """
    if not isinstance(refused, BackendArgumentError):
        raise refused
    read, written = unwrapped(inputs), unwrapped(outputs)
    if read is inputs and written is outputs:
        raise refused
    with outside_modes():
        return submit_call(group, call, read, read if inputs is outputs else written, *options)


def submit_lists(
    group: ProcessGroup,
    call: Call,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    async_op: bool,
    operation: str | None = None,
) -> Work | None:
    """Submit a call of several tensors, as `submit` does; tensors may share memory.

    The operation is the name of the public function for error messages. Default: the call's.
    """
    try:
        if are_apart(inputs, outputs):
            work = group.backend.submit(call, inputs, outputs, not async_op)
            return work if async_op else None
        check_outputs(operation or call.op, outputs)
        requests, copy_back = without_overlap(group.rank(), ((call, inputs, outputs),))
        if copy_back is None:
            work = group.backend.submit(call, inputs, outputs, not async_op)
            return work if async_op else None
    except RuntimeError as error:
        refuse_nested(operation or call.op, *flat_operands(inputs), *flat_operands(outputs))
        return submit_inside(error, submit_lists, group, call, inputs, outputs, async_op, operation)
    part = group.backend.submit(*requests[0], not async_op)
    return join(JoinedWork(call.op, flat_operands(outputs), [part], copy_back), async_op)


def all_reduce(
    tensor: Tensor, op: Reduction = SUM, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Work | None:
    """Reduce a tensor over all ranks, in place; every rank gets the same result, bit for bit.

    Args:
        tensor: Input and output, of one shape and dtype on all ranks. Memory between the elements of a strided view
            is left alone. Sparse COO tensors can be summed; that call waits for the other ranks even if `async_op`.
        op: Reduction. ``ReduceOp.PREMUL_SUM(factor)`` sums tensors that each rank has multiplied by its own factor, a
            float or a one-element tensor of the same dtype. Default: ``ReduceOp.SUM``.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The dtype does not support the reduction.
        ArgumentTypeError: Not a tensor, or not a ReduceOp.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = torch.tensor([rank, 10 * rank])
        ...     dist.all_reduce(tensor)
        ...     return tensor.tolist()
        >>> run(program, 4)
        [[6, 60], [6, 60], [6, 60], [6, 60]]

    Differentiable:
        No. `torchdist_ref.nn.functional.all_reduce` is.

    Elsewhere:
        ``MPI_Allreduce`` in MPI, ``ncclAllReduce`` in NCCL, ``jax.lax.psum`` (also ``pmin``, ``pmax``) in JAX.
        Algorithms and their sources: `torchdist_ref.schedules`.
    """
    found = member_group("all_reduce", group)
    if found is None:
        return None
    # This is the hot path: a check is a function call only where it may raise.
    layout = getattr(tensor, "layout", None)
    if layout is sparse_coo:
        return _sum_sparse(found, tensor, op, async_op)
    if layout is not strided:
        check_tensor("all_reduce", "tensor", tensor)
    if not tensor.is_contiguous():
        check_writable("all_reduce", "tensor", tensor)
    call, operands = _SUM if op is SUM else ALL_REDUCE[reduction_name(op, "all_reduce")], (tensor,)
    if call is _PREMUL_SUM:
        return submit_premultiplied(found, "all_reduce", call, tensor, op, async_op)
    return submit(found, call, operands, operands, async_op)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy one rank's tensor to all ranks of the group.

    Args:
        tensor: Input on the source, output on the other ranks; of one shape and dtype on all ranks.
        src: Global rank of the source. Pass this or `group_src`.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.
        group_src: Group rank of the source.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The source is not in the group, or given twice or not at all.
        ArgumentTypeError: Not a tensor.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = torch.tensor([rank, rank * rank])
        ...     dist.broadcast(tensor, src=2)
        ...     return tensor.tolist()
        >>> run(program, 3)
        [[2, 4], [2, 4], [2, 4]]

    Differentiable:
        No. `torchdist_ref.nn.functional.broadcast` is.

    Elsewhere:
        ``MPI_Bcast`` in MPI, ``ncclBroadcast`` in NCCL, ``jax.lax.pbroadcast`` in JAX. Algorithms and their
        sources: `torchdist_ref.schedules`.
    """
    found = member_group("broadcast", group)
    if found is None:
        return None
    check_tensor("broadcast", "tensor", tensor)
    check_writable("broadcast", "tensor", tensor)
    root = root_of(found, "broadcast", src, group_src)
    return submit(found, _broadcast(root), (tensor,), (tensor,), async_op)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Reduction = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce a tensor over all ranks; one rank gets the result.

    Args:
        tensor: Input, of one shape and dtype on all ranks; on the destination also the output. On the other ranks its
            values are unspecified afterward.
        dst: Global rank of the destination. Pass this or `group_dst`.
        op: Reduction. Default: ``ReduceOp.SUM``.
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.
        group_dst: Group rank of the destination.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The destination is not in the group, or the dtype does not support the reduction.
        ArgumentTypeError: Not a tensor, or not a ReduceOp.
        NotInitializedError: `init_process_group` was not called.
        MismatchError: The ranks' calls differ. No tensor was written.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = torch.tensor([rank + 1])
        ...     dist.reduce(tensor, dst=1, op=dist.ReduceOp.PRODUCT)
        ...     return tensor.tolist() if rank == 1 else "unspecified"
        >>> run(program, 3)
        ['unspecified', [6], 'unspecified']

    Differentiable:
        No. `torchdist_ref.nn.functional.reduce` is.

    Elsewhere:
        ``MPI_Reduce`` in MPI, ``ncclReduce`` in NCCL. JAX has none: ``jax.lax.psum`` gives the sum to all.
        Algorithms and their sources: `torchdist_ref.schedules`.
    """
    found = member_group("reduce", group)
    if found is None:
        return None
    check_tensor("reduce", "tensor", tensor)
    check_writable("reduce", "tensor", tensor)
    call = reduce_call(root_of(found, "reduce", dst, group_dst, "dst"), reduction_name(op, "reduce"))
    if call.reduction == "premul_sum":
        return submit_premultiplied(found, "reduce", call, tensor, op, async_op)
    return submit(found, call, (tensor,), (tensor,), async_op)


def barrier(
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Wait until every rank of the group has called this.

    On ``ref``, ``gloo`` and ``mpi`` a barrier orders the ranks' programs, not what they have submitted to devices: it
    has no tensor, so no stream to wait for. If peers rely on what a device writes, to a file or to memory that they
    map, call `torch.accelerator.synchronize` first. ``nccl`` runs it on the device that the group used last.

    Args:
        group: Process group. Default: all ranks.
        async_op: Return a `Work` at once instead of waiting. Default: False.
        device_ids: Accepted for compatibility with torch, and without effect: see above.
        timeout: Longest wait of this call, unless `async_op`. Default: the group's time-out.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        NotInitializedError: `init_process_group` was not called.
        ArgumentTypeError: `device_ids` is not a list of int.
        MismatchError: A rank made another call.
        DistBackendError: A rank died, aborted, or did not call in time.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> arrived = []
        >>> def program(rank):
        ...     arrived.append(rank)
        ...     dist.barrier()
        ...     return len(arrived)
        >>> run(program, 3)
        [3, 3, 3]

    Elsewhere:
        ``MPI_Barrier`` in MPI, ``jax.experimental.multihost_utils.sync_global_devices`` in JAX. NCCL has none:
        programs reduce one element.
    """
    found = member_group("barrier", group)
    if found is None:
        return None
    if device_ids is not None and not _are_devices(device_ids):
        raise ArgumentTypeError(explain("barrier", "device_ids", "a list of int, or None", device_ids))
    if async_op or timeout is None:
        return submit(found, _BARRIER, (), (), async_op)
    limit = timeout_of("barrier", timeout)
    found.backend.submit(_BARRIER, (), (), False).wait(limit)
    return None


def _are_devices(numbers: Any) -> bool:
    # torch accepts a single device number too.
    listed = numbers if isinstance(numbers, Sequence) else [numbers]
    return all(isinstance(number, int) for number in listed)


def monitored_barrier(
    group: ProcessGroup | int | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of the group has called this, and name the ranks that did not.

    It works with every backend through the store, and the group remains usable after a failure. Use it to find out
    where a job hangs; `barrier` is faster.

    Args:
        group: Process group. Default: all ranks.
        timeout: Longest wait for the other ranks, as a timedelta; as in torch, a float is seconds, with a warning.
            Default: the group's time-out.
        wait_all_ranks: Accepted for compatibility with torch: an error at the time-out names all missing ranks anyway.

    Raises:
        RankStalledError: Some ranks did not call in time. Also on a rank that calls after the others have given up.
        RankDiedError: A rank has died before all had called this. The others fail at once; the error names the dead.
        GroupAbortedError: A rank has left the group, or failed in it. The others fail at once; the error names it.
        ArgumentTypeError: The time-out is not a timedelta.
        ArgumentError: The time-out is not positive, or the group was destroyed.
        NotInitializedError: `init_process_group` was not called.

    Example:
        >>> from datetime import timedelta
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     if rank == 1:
        ...         return dist.recv(torch.zeros(1), 0)  # waits elsewhere
        ...     try:
        ...         dist.monitored_barrier(timeout=timedelta(seconds=0.1))
        ...     except dist.RankStalledError as error:
        ...         dist.send(torch.ones(1), 1)
        ...         return str(error).split(" (")[0]
        >>> run(program, 2)
        ['[Rank 0]: Rank 1 failed to pass monitoredBarrier in 100 ms', 0]

    Elsewhere:
        Nothing in MPI, NCCL or JAX. torch has it for Gloo.
    """
    found = member_group("monitored_barrier", group)
    if found is None:
        return
    if isinstance(timeout, float):
        # torch accepts seconds in this function only.
        warnings.warn("monitored_barrier: pass a timedelta; a number of seconds is accepted as in torch.", stacklevel=2)
        timeout = timedelta(seconds=timeout)
    refuse_unusable(found, "monitored_barrier")
    found.monitored_barrier(timeout_of("monitored_barrier", timeout, timedelta(seconds=found.timeout)))


def _sum_sparse(group: ProcessGroup, tensor: Tensor, op: Any, async_op: bool) -> Work | None:
    """Sum a COO tensor over all ranks, in place."""
    if reduction_name(op, "all_reduce") != "sum":
        raise BackendArgumentError(explain("all_reduce", "op", "ReduceOp.SUM for sparse tensors", op))
    works, add_up = start_sum(group.backend, group.size(), tensor)
    return join(JoinedWork("all_reduce", [tensor], works, add_up), async_op)


def submit_premultiplied(
    group: ProcessGroup, operation: str, call: AllReduce | Reduce, tensor: Tensor, op: Any, async_op: bool
) -> Work | None:
    """Submit a PREMUL_SUM in place: multiply a copy, reduce it, and copy the result back where there is one."""
    scaled = premultiplied(operation, tensor, op)
    has_result = not isinstance(call, Reduce) or call.root == group.rank()
    part = group.backend.submit(call, (scaled,), (scaled,), not async_op)
    copy_back = (lambda: tensor.copy_(scaled)) if has_result else None
    return join(JoinedWork(operation, [tensor], [part], copy_back), async_op)


def join(work: JoinedWork, async_op: bool) -> Work | None:
    """Return the Work if `async_op`, else wait for it and return None."""
    if async_op:
        return work
    work.wait()
    return None
