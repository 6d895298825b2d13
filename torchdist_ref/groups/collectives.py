"""Collectives on one tensor: all_reduce, broadcast, reduce, barrier.

Each function checks its arguments, turns global ranks into group ranks, builds the call and hands it down;
there is nothing else here. Collectives on lists and blocks are in `blocks`. Don't add algorithms.

Rules for all of them: every member of the group calls the same function, in the same order, with tensors of
one shape and dtype. A rank that is not in the group gets a warning and None. Ranks that call different things
all get a `MismatchError`, and no tensor is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from torch import Tensor, sparse_coo

from torchdist_ref.calls import Barrier, Broadcast, Call
from torchdist_ref.groups.arguments import (
    ALL_REDUCE,
    SUM,
    check_tensor,
    check_writable,
    member_group,
    reduce_call,
    root_of,
    word_of,
)
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.premultiplied import submit_multiplied
from torchdist_ref.groups.sparse import sum_sparse
from torchdist_ref.work import Work

_BARRIER = Barrier()
_PREMUL_SUM = ALL_REDUCE["premul_sum"]
_broadcast = cache(Broadcast)


def submit(
    group: ProcessGroup, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], async_op: bool
) -> Work | None:
    """Hand a call to the group's backend: a Work where the caller wants one, else None once it is done."""
    work = group.backend.submit(call, inputs, outputs, not async_op)
    return work if async_op else None


def all_reduce(
    tensor: Tensor, op: Any = SUM, group: ProcessGroup | int | None = None, async_op: bool = False
) -> Work | None:
    """Reduce a tensor over all ranks, in place, so that every rank gets the result, bit for bit the same.

    Args:
        tensor: Input and output. Any shape and strides; nothing outside a strided view is touched. Sparse ones in
            coordinate format can be summed; they wait here for the other ranks, even if `async_op`.
        op: How to reduce. Default: the sum. ``ReduceOp.PREMUL_SUM(factor)`` adds what each rank has multiplied by a
            factor of its own, a float or a tensor of one element and of the same dtype.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The reduction makes no sense for the dtype.
        ArgumentTypeError: Not a tensor, or not a ReduceOp.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = torch.tensor([rank, 10 * rank])
        ...     dist.all_reduce(tensor)
        ...     return tensor.tolist()
        >>> run(program, 4)
        [[6, 60], [6, 60], [6, 60], [6, 60]]

    The operation is MPI's ``MPI_Allreduce``; algorithms and their sources are in `torchdist_ref.schedules`.
    """
    found = member_group("all_reduce", group)
    if found is None:
        return None
    if getattr(tensor, "layout", None) is sparse_coo:
        return sum_sparse(found, tensor, op, async_op)
    check_tensor("all_reduce", "tensor", tensor)
    check_writable("all_reduce", "tensor", tensor)
    call, operands = ALL_REDUCE[word_of(op, "all_reduce")], (tensor,)
    if call is _PREMUL_SUM:
        return submit_multiplied(found, "all_reduce", call, tensor, op, async_op)
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
        tensor: On the source the input; on the others the output.
        src: The source, as a global rank. Give this or `group_src`.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.
        group_src: The source, as a rank in the group.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The source is not in the group, or given twice or not at all.
        ArgumentTypeError: Not a tensor.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = torch.tensor([rank, rank * rank])
        ...     dist.broadcast(tensor, src=2)
        ...     return tensor.tolist()
        >>> run(program, 3)
        [[2, 4], [2, 4], [2, 4]]

    The operation is MPI's ``MPI_Bcast``.
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
    op: Any = SUM,
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce a tensor over all ranks to one of them.

    Args:
        tensor: Input; on the destination also the output. The others keep theirs or part of the sum: don't use it.
        dst: The destination, as a global rank. Give this or `group_dst`.
        op: How to reduce. Default: the sum.
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.
        group_dst: The destination, as a rank in the group.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        ArgumentError: The destination is not in the group, or the reduction makes no sense for the dtype.
        ArgumentTypeError: Not a tensor, or not a ReduceOp.
        NotInitializedError: There is no group yet.
        MismatchError: Ranks called different things. Nothing was written.
        DistBackendError: A rank died, gave up, or did not come in time.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     tensor = torch.tensor([rank + 1])
        ...     dist.reduce(tensor, dst=1, op=dist.ReduceOp.PRODUCT)
        ...     return tensor.tolist() if rank == 1 else "unspecified"
        >>> run(program, 3)
        ['unspecified', [6], 'unspecified']

    The operation is MPI's ``MPI_Reduce``.
    """
    found = member_group("reduce", group)
    if found is None:
        return None
    check_tensor("reduce", "tensor", tensor)
    check_writable("reduce", "tensor", tensor)
    call = reduce_call(root_of(found, "reduce", dst, group_dst, "dst"), word_of(op, "reduce"))
    if call.reduction == "premul_sum":
        return submit_multiplied(found, "reduce", call, tensor, op, async_op)
    return submit(found, call, (tensor,), (tensor,), async_op)


def barrier(
    group: ProcessGroup | int | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Wait until every rank of the group has called this.

    Args:
        group: Which ranks. Default: all.
        async_op: Return at once with a Work to wait for.
        device_ids: Accepted for torch's sake; only ``nccl`` would use it.
        timeout: How long to wait here at most, if not `async_op`. Default: the group's time-out.

    Returns:
        A `Work` if `async_op`, else None.

    Raises:
        NotInitializedError: There is no group yet.
        MismatchError: A rank called something else.
        DistBackendError: A rank died, gave up, or did not come in time.

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

    The operation is MPI's ``MPI_Barrier``.
    """
    found = member_group("barrier", group)
    if found is None:
        return None
    if async_op or timeout is None:
        return submit(found, _BARRIER, (), (), async_op)
    found.backend.submit(_BARRIER, (), (), False).wait(timeout)
    return None
