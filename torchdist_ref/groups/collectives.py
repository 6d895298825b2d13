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

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from time import monotonic
from typing import Any

from torch import Tensor, sparse_coo
from torch.futures import Future

from torchdist_ref.backends.reductions import start_sum
from torchdist_ref.calls import AllReduce, Barrier, Broadcast, Call, Reduce
from torchdist_ref.debug.monitored import run_monitored_barrier
from torchdist_ref.errors import (
    ArgumentTypeError,
    BackendArgumentError,
    RankStalledError,
    explain,
    on_rank,
)
from torchdist_ref.groups.arguments import (
    ALL_REDUCE,
    SUM,
    check_tensor,
    check_writable,
    member_group,
    multiplied,
    reduce_call,
    root_of,
    word_of,
)
from torchdist_ref.groups.world import ProcessGroup, refuse_destroyed
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


def monitored_barrier(
    group: ProcessGroup | int | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of the group has called this, and say which ones did not.

    It works with every backend, and the group can be used on after it has failed. For finding out where a job hangs;
    `barrier` is faster.

    Args:
        group: Which ranks. Default: all.
        timeout: How long to wait for the others. Default: the group's.
        wait_all_ranks: Accepted for torch's sake: all missing ranks are always named, on every rank that came.

    Raises:
        RankStalledError: Some ranks did not come in time. Also on a rank that came after the others had given up.
        ArgumentTypeError: The time-out is no timedelta.
        ArgumentError: It is not more than zero; or the group was destroyed.
        NotInitializedError: There is no group yet.

    Example:
        >>> from datetime import timedelta
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     if rank == 1:
        ...         return "elsewhere"
        ...     try:
        ...         dist.monitored_barrier(timeout=timedelta(seconds=0.1))
        ...     except dist.RankStalledError as error:
        ...         return str(error).split(" (")[0]
        >>> run(program, 2)
        ['[Rank 0]: Rank 1 failed to pass monitoredBarrier in 100 ms', 'elsewhere']
    """
    found = member_group("monitored_barrier", group)
    if found is None:
        return
    refuse_destroyed(found, "monitored_barrier")
    allowed = timedelta(seconds=found.timeout) if timeout is None else timeout
    if not isinstance(allowed, timedelta):
        raise ArgumentTypeError(
            f"monitored_barrier: Expected timeout argument to be of type datetime.timedelta, "
            f"got {timeout!r}{on_rank()}."
        )
    if allowed <= timedelta(0):
        raise BackendArgumentError(explain("monitored_barrier", "timeout", "more than zero", timeout))
    others = [rank for rank in range(found.size()) if rank != found.rank()]
    run_monitored_barrier(
        found.store,
        found.rank(),
        found.members,
        allowed,
        found.name,
        lambda: found.backend.failure(others, "monitored_barrier"),
    )


def sum_sparse(group: ProcessGroup, tensor: Tensor, op: Any, async_op: bool) -> Work | None:
    """The sum over all ranks, in place, of tensors in coordinate format; waits for the ranks also if asked not to.

    Raises:
        BackendArgumentError: Another reduction than the sum.
    """
    if word_of(op, "all_reduce") != "sum":
        raise BackendArgumentError(explain("all_reduce", "op", "ReduceOp.SUM where tensors are sparse", op))
    works, add_up = start_sum(group.backend, group.size(), tensor)
    return joined("all_reduce", [tensor], works, async_op, add_up)


def submit_multiplied(
    group: ProcessGroup, operation: str, call: AllReduce | Reduce, tensor: Tensor, op: Any, async_op: bool
) -> Work | None:
    """Hand down a reduction in place; the caller's tensor gets the result where one is due."""
    scaled = multiplied(operation, tensor, op)
    due = not isinstance(call, Reduce) or call.root == group.rank()
    part = group.backend.submit(call, (scaled,), (scaled,), not async_op)
    return joined(operation, [tensor], [part], async_op, lambda: tensor.detach().copy_(scaled) if due else None)


class Joined(Work):
    """Done when all its parts are, and what remains to do after them has been done here; fails as the first did.

    It never relies on a callback to make progress, so that it can be waited for inside one.
    """

    def __init__(
        self, name: str, outputs: Sequence[Any], parts: Sequence[Work], after: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(name, outputs)
        self._parts = tuple(parts)
        self._after = after
        self._once = threading.Lock()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """See `Work.wait`."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        end = None if seconds is None else monotonic() + seconds
        for part in self._parts:
            self._wait_for(part, None if end is None else max(0.0, end - monotonic()), seconds)
        self._conclude()
        return super().wait()

    def _wait_for(self, part: Work, left: float | None, allowed: float | None) -> None:
        try:
            part.wait(left)
        except Exception:
            # A part that failed is heard at the end: the others still write to the caller's tensors.
            if not part.is_completed():
                raise RankStalledError(
                    f"{self.name}: not done after {allowed} s of waiting; the call goes on."
                ) from None

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        if not self._over and all(part.is_completed() for part in self._parts):
            self._conclude()
        return self._over

    def is_success(self) -> bool:
        """See `Work.is_success`."""
        return self.is_completed() and super().is_success()

    def exception(self) -> BaseException | None:
        """See `Work.exception`."""
        return super().exception() if self.is_completed() else None

    def get_future(self) -> Future[Any]:
        """See `Work.get_future`."""
        future = super().get_future()
        if not self.is_completed():
            for part in self._parts:
                part.get_future().add_done_callback(self._part_done)
        return future

    def _part_done(self, _: Future[Any]) -> None:
        self.is_completed()

    def _conclude(self) -> None:
        with self._once:
            if self._over:
                return
            error = next((part.exception() for part in self._parts if part.exception() is not None), None)
            try:
                if error is None and self._after is not None:
                    self._after()
            except Exception as failure:
                error = failure
            self.finish() if error is None else self.fail(error)


def joined(
    name: str,
    outputs: Sequence[Any],
    parts: Sequence[Work | None],
    async_op: bool,
    after: Callable[[], Any] | None = None,
) -> Work | None:
    """The parts as one Work for the caller who wants one; else None, once all is done."""
    work = Joined(name, outputs, [part for part in parts if part is not None], after)
    if async_op:
        return work
    work.wait()
    return None
