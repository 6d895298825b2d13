"""Run one function on N ranks and get N results, or one error that says which rank to look at.

This file is the door and the clock. The two kinds of ranks behind it have the same five methods, so a third kind
is a file of its own beside `thread_ranks` and `process_ranks`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TypeVar

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain
from torchdist_ref.testing.outcomes import Outcome, verdict
from torchdist_ref.testing.process_ranks import ProcessRanks
from torchdist_ref.testing.program import Program
from torchdist_ref.testing.thread_ranks import ThreadRanks

T = TypeVar("T")
_KINDS: dict[str, type[ThreadRanks] | type[ProcessRanks]] = {"threads": ThreadRanks, "processes": ProcessRanks}
# How long the others get after the first failure. Their group is aborted, so they need far less.
_GRACE = 3.0


def run(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    backend: str | None = "ref",
    ranks: str = "threads",
    timeout: float = 30.0,
    init: bool = True,
) -> list[T]:
    """Call ``fn(rank, *args)`` on every rank of a new group and return what each of them returned.

    Every rank has a default group of its own, initialised before and destroyed after the call, so that the function
    can use collectives at once. When one rank fails the group is aborted and the others get three seconds to end.

    Args:
        fn: The function; anything callable, a local function or lambda too.
        world_size: How many ranks, at least 1.
        *args: Further arguments. All ranks get the same objects (process ranks: copies of them).
        backend: The backend of the default group, as for `torchdist_ref.init_process_group`.
        ranks: ``"threads"`` of this process, or ``"processes"`` forked from it, which already have torch loaded and
            run it on one thread each. What process ranks print appears when all are done, in rank order, each line
            with its rank.
        timeout: Seconds until the ranks that are still running are stopped and named. Collectives inside give up
            a little sooner, at four fifths of it, because their own error says more.
        init: Whether to initialise the default group. Without it the ranks have no group and no store.

    Returns:
        The results in rank order. From process ranks they come back pickled.

    Raises:
        RankError: If a rank raised or died; the exception that it raised is the cause.
        RankTimeoutError: If none failed but some did not finish in time; it shows where they were.
        ArgumentError: If an argument has a wrong value.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import fill, run
        >>> def program(rank):
        ...     tensor = fill(rank, (3,))
        ...     dist.all_reduce(tensor)
        ...     return tensor.tolist()
        >>> run(program, 2)
        [[6.0, -3.0, 12.0], [6.0, -3.0, 12.0]]
    """
    _check(fn, world_size, ranks, timeout)
    with _KINDS[ranks](Program(fn, args, world_size, backend, timeout, init)) as crew:
        outcomes = _gather(crew.outcomes, world_size, timeout)
        stuck = crew.where(set(range(world_size)) - outcomes.keys())
        crew.show_output()
        return verdict(outcomes, stuck, world_size, timeout)


def _check(fn: object, world_size: int, ranks: str, timeout: float) -> None:
    if not callable(fn):
        raise ArgumentTypeError(explain("testing.run", "fn", "callable", fn))
    if not isinstance(world_size, int) or world_size < 1:
        raise ArgumentError(explain("testing.run", "world_size", "a number of ranks, at least 1", world_size))
    if ranks not in _KINDS:
        raise ArgumentError(explain("testing.run", "ranks", "'threads' or 'processes'", ranks))
    if not timeout > 0:
        raise ArgumentError(explain("testing.run", "timeout", "a positive number of seconds", timeout))


def _gather(arrivals: queue.SimpleQueue[Outcome], world_size: int, timeout: float) -> dict[int, Outcome]:
    """Take outcomes in order of arrival until all are in, or the time is up."""
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    while len(outcomes) < world_size:
        try:
            outcome = arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        outcomes[outcome.rank] = outcome
        if outcome.failed:
            deadline = min(deadline, time.monotonic() + _GRACE)
    return outcomes
