"""monitored_barrier at the front door: which group, how long. How ranks learn who is missing is `debug.monitored`."""

from __future__ import annotations

from datetime import timedelta

from torchdist_ref.debug.monitored import meet
from torchdist_ref.errors import ArgumentTypeError, BackendArgumentError, explain, on_rank
from torchdist_ref.groups.arguments import member_group
from torchdist_ref.groups.destroyed import refuse_destroyed
from torchdist_ref.groups.group import ProcessGroup


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
    meet(
        found.store,
        found.rank(),
        found.members,
        allowed,
        found.name,
        lambda: found.backend.trouble(others, "monitored_barrier"),
    )
