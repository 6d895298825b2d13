"""Run one function on N ranks: return N results, or raise one error that names the rank to look at.

Ranks are threads of this process, or the forked processes of `process_ranks`. Both runners have the same five methods.
A thread cannot be killed, so a hanging thread rank is asked to give up through its group, and is left behind as a
daemon if it does not. A rank that must be killed, or must not share memory, has to be a process.
"""

from __future__ import annotations

import atexit
import contextvars
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain
from torchdist_ref.groups import world
from torchdist_ref.ranks.outcomes import Outcome, RankProgram, RunLimits, user_frames, values_or_error
from torchdist_ref.stores import HashStore
from torchdist_ref.testing.process_ranks import ProcessRanks

T = TypeVar("T")
LIMITS = RunLimits()
"""Limits of the runs of `run`."""
_SIMULATED = "simulated"


def run(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    backend: str | None = "ref",
    ranks: str = "threads",
    timeout: float = 30.0,
    init: bool = True,
    seeds: int = 1,
) -> list[T]:
    """Call ``fn(rank, *args)`` on every rank of a new group and return the results.

    Every rank has its own default group, initialized before the call and destroyed after it, so the function can use
    collectives at once. When one rank fails, the group is aborted and the others have three seconds to end.

    Args:
        fn: Function; any callable, also a local function or lambda.
        world_size: Number of ranks, at least 1.
        *args: Further arguments. All ranks receive the same objects (process ranks: copies of them).
        backend: Backend of the default group, as for `torchdist_ref.init_process_group`.
        ranks: ``"threads"`` of this process, which share its generator of random numbers: what one of them draws after
            `torch.manual_seed` depends on the others. ``"processes"`` are forked from it, with torch already loaded and
            one compute thread each. If this process has started an accelerator, which no fork survives, they are new
            processes, which import the function from its module. The output of process ranks appears when all have
            ended, in rank order, each line with its rank. ``"simulated"`` are those of `torchdist_ref.simulation.run`,
            on virtual time.
        timeout: Time in seconds after which ranks that are still running are stopped and named. Collectives fail at
            four fifths of it, because their own error explains more. Virtual time for simulated ranks.
        seeds: Number of interleavings in which simulated ranks run; the results are those of the last one. Default: 1.
        init: Whether to initialize the default group. Without it the ranks have no group and no store.

    Returns:
        The results in rank order. Those of process ranks are pickled and unpickled.

    Raises:
        RankError: A rank raised or died. Its exception is the cause.
        RankTimeoutError: No rank failed, but some did not finish in time. The message shows their stacks.
        ArgumentError: An argument has a wrong value.

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
    if ranks == _SIMULATED:
        return _simulated(fn, world_size, args, backend, timeout, init, seeds)
    return supervise(_RUNNERS[ranks](RankProgram(fn, args, world_size, backend, timeout, init), LIMITS))


def supervise(runner: ThreadRanks | ProcessRanks) -> list[Any]:
    """Run a program, and return the results or raise the error that `run` raises."""
    program = runner.program
    with runner:
        outcomes = _gather(runner)
        stuck = runner.stacks(set(range(program.world_size)) - outcomes.keys())
        runner.show_output()
        return values_or_error(outcomes, stuck, program.world_size, program.timeout)


def _check(fn: object, world_size: int, ranks: str, timeout: float) -> None:
    if not callable(fn):
        raise ArgumentTypeError(explain("testing.run", "fn", "callable", fn))
    if not isinstance(world_size, int) or world_size < 1:
        raise ArgumentError(explain("testing.run", "world_size", "a number of ranks, at least 1", world_size))
    if ranks not in _RUNNERS and ranks != _SIMULATED:
        raise ArgumentError(explain("testing.run", "ranks", "'threads', 'processes' or 'simulated'", ranks))
    if not isinstance(timeout, int | float):
        raise ArgumentTypeError(explain("testing.run", "timeout", "a number of seconds", timeout))
    if not timeout > 0:
        raise ArgumentError(explain("testing.run", "timeout", "a positive number of seconds", timeout))


def _simulated(
    fn: Callable[..., T],
    world_size: int,
    args: tuple[object, ...],
    backend: str | None,
    timeout: float,
    init: bool,
    seeds: int,
) -> list[T]:
    """Call a function on simulated ranks, in as many interleavings as `seeds` says, and return the last results."""
    from torchdist_ref.simulation import run as simulate

    options: dict[str, Any] = {"backend": backend, "timeout": timeout, "init": init}
    return [simulate(fn, world_size, *args, seed=seed, **options) for seed in range(max(1, seeds))][-1].values


def _gather(runner: ThreadRanks | ProcessRanks) -> dict[int, Outcome]:
    """Collect outcomes in order of arrival until all are there or the time is over."""
    outcomes: dict[int, Outcome] = {}
    program, limits = runner.program, runner.limits
    deadline = limits.clock.now() + program.timeout
    while len(outcomes) < program.world_size:
        left = deadline - limits.clock.now()
        try:
            outcome = runner.outcomes.get(timeout=max(0.0, left))
        except queue.Empty:
            break
        outcomes[outcome.rank] = outcome
        if outcome.failed:
            deadline = min(deadline, limits.clock.now() + limits.grace)
    return outcomes


class ThreadRanks:
    """Runner of a `RankProgram` on threads.

    Each thread runs in its own context (`contextvars`), in which `torchdist_ref.groups` keeps the world of that rank.

    Args:
        program: Program of each rank.
        limits: Times of the run.

    Attributes:
        program, limits: As given.
        outcomes: Queue of the outcomes, in order of arrival.
    """

    def __init__(self, program: RankProgram, limits: RunLimits) -> None:
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.program, self.limits = program, limits
        self._store = HashStore()
        self._contexts = [contextvars.copy_context() for _ in range(program.world_size)]
        self._threads = [
            threading.Thread(target=context.run, args=(self._run, rank), name=f"rank {rank}", daemon=True)
            for rank, context in enumerate(self._contexts)
        ]

    def __enter__(self) -> ThreadRanks:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank, thread in enumerate(self._threads):
            if thread.is_alive():
                self._abort(rank, f"the run was given up: {error!r}")
        _join(self._threads, self.limits.join)
        _left_behind.update(thread for thread in self._threads if thread.is_alive())

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the current stack of each of the ranks."""
        frames = sys._current_frames()  # noqa: SLF001 (the documented name)
        return {rank: _format_stack(frames.get(self._threads[rank].ident or 0)) for rank in ranks}

    def show_output(self) -> None:
        """Do nothing: the output of threads has already been printed."""

    def _run(self, rank: int) -> None:
        # A new thread starts with the number of cores, whatever number of threads this process has set.
        torch.set_num_threads(torch.get_num_threads())
        try:
            with world.thread_rank():
                outcome = self.program(rank, lambda: self._store)
        except BaseException as error:
            # Raised while entering or leaving the world, not by the function.
            outcome = Outcome(rank, error=error)
        self.outcomes.put(outcome)

    def _abort(self, rank: int, reason: str) -> None:
        # A copy, because the thread is still inside the context itself.
        self._contexts[rank].copy().run(world.abort, reason)


_left_behind: set[threading.Thread] = set()
"""Threads of ranks that had not ended when their run gave them up."""
_EXIT_SECONDS = 5.0
"""Time that they have at the exit of the interpreter.

Python ends a daemon thread in the middle of a function of torch's by an exception that C++ does not expect: the process
would abort. Ranks whose groups were aborted end by themselves, though with a hundred of them not within a second.
"""


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


@atexit.register
def _join_left_behind() -> None:
    _join(_left_behind, _EXIT_SECONDS)


def _format_stack(frame: FrameType | None) -> str:
    frames = traceback.extract_stack(frame) if frame else traceback.StackSummary()
    return "".join(traceback.format_list(user_frames(frames))).rstrip()


_RUNNERS: dict[str, type[ThreadRanks] | type[ProcessRanks]] = {"threads": ThreadRanks, "processes": ProcessRanks}
