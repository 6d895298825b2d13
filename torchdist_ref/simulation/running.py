"""Runs of a program on simulated ranks: `run` and `explore`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torchdist_ref.errors import ArgumentTypeError, explain
from torchdist_ref.ranks.outcomes import RankError
from torchdist_ref.schedules.network import Network
from torchdist_ref.simulation.faults import Fault
from torchdist_ref.simulation.one_run import OneRun
from torchdist_ref.simulation.result import SimulatedRun

T = TypeVar("T")
_MOST_RUNS_TO_SHORTEN = 200


@dataclass(frozen=True)
class FailingOrder:
    """Interleaving in which a program fails, as `explore` returns it.

    Attributes:
        seed: Seed with which it failed first.
        decisions: Decisions that still make it fail, as few as were found; `run` repeats them.
        error: The error of the run with these decisions.
        runs: Number of runs that were made.
    """

    seed: int
    decisions: dict[int, int]
    error: RankError
    runs: int


def run(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    seed: int = 0,
    network: Network | None = None,
    compute: float | str | Sequence[float] = 0.0,
    faults: Sequence[Fault] = (),
    timeout: float | None = None,
    backend: str | None = "ref",
    init: bool = True,
    decisions: dict[int, int] | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> SimulatedRun:
    """Call ``fn(rank, *args)`` on simulated ranks, on virtual time, in an order that the seed decides.

    Ranks are threads of which one runs at a time. The default group, the stores, collectives, messages and their
    failures are the library's own; only the bytes travel in virtual time. Locks, queues, threads and clocks of Python
    that the program uses are simulated too, for its ranks alone. Each rank has a state of torch's default generator of
    its own, which begins as this process's. Not simulated: sockets, processes, torch's backends.

    Args:
        fn: Function; any callable, also a local function or lambda.
        world_size: Number of ranks, at least 1.
        *args: Further arguments, the same objects for all ranks.
        seed: Seed of the interleaving. 0 is the plain order, in which a rank runs until it has to wait; every other
            seed gives another legal order.
        network: Times of messages, and hosts of the ranks. Default: everything arrives at once, on one host.
        compute: Virtual seconds for each second of processor time that ranks use between calls: 0 for none, 1 or
            ``"measured"`` for as long as it takes here. Two runs measure different times. To repeat such a run exactly,
            pass its `SimulatedRun.computed` here, and the same other arguments.
        faults: Deaths, stops and cuts of the plan.
        timeout: Virtual time at which the run ends, in seconds; ranks that still run then are named. Default: none.
        backend: Backend of the default group: ``"ref"`` or ``"fake"``.
        init: Whether to initialize the default group. Without it the program does so itself, with the store that
            `simulated_store` returns.
        decisions: Decisions of an earlier run to repeat, in place of those of the seed.
        progress: Function to call once in a second of real time, on this thread, with the virtual time in seconds and
            the number of ranks that have returned.

    Returns:
        The ranks' values and times, and the timeline.

    Raises:
        DeadlockError: Ranks wait for each other, and none of them has a time-out.
        RankError: A rank raised, or the plan has killed it. Its exception is the cause.
        RankTimeoutError: Some ranks did not return before `timeout`.
        BlockedOutsideError: A rank waits for something that is not simulated.
        ArgumentError: An argument has a wrong value, or the ranks need more memory than this machine has left.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.simulation import Network, run
        >>> def program(rank):
        ...     tensor = torch.full((1000,), float(rank))
        ...     dist.all_reduce(tensor)
        ...     return tensor[0].item()
        >>> result = run(program, 8, network=Network(alpha=1e-5))
        >>> result.values[0], result.values == [28.0] * 8
        (28.0, True)
    """
    options = network, compute, faults, timeout, backend, init, decisions, None, progress
    return OneRun(fn, world_size, args, seed, *options).result()


def explore(
    fn: Callable[..., object], world_size: int, *args: object, seeds: Iterable[int] = range(100), **options: Any
) -> FailingOrder | None:
    """Run a program with many interleavings, and return the first in which it fails, shortened; None if none does.

    Args:
        fn: As for `run`.
        world_size: As for `run`.
        *args: As for `run`.
        seeds: Seeds to try, in this order.
        **options: As for `run`.

    Returns:
        The seed, and the shortest list of decisions found with which it still fails in the same way.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.simulation import explore
        >>> def program(rank):
        ...     if rank:
        ...         dist.send(torch.tensor([rank]), 0)
        ...         return
        ...     source = dist.recv(torch.zeros(1, dtype=torch.int64))
        ...     assert source == 1, "rank 2 was first"
        ...     dist.recv(torch.zeros(1, dtype=torch.int64), 2)
        >>> explore(program, 3).error.__cause__
        AssertionError('rank 2 was first')
    """
    if not isinstance(seeds, Iterable):
        raise ArgumentTypeError(explain("simulation.explore", "seeds", "several seeds, such as range(100)", seeds))
    runs = 0
    for seed in seeds:
        runs += 1
        made: dict[int, int] = {}
        try:
            OneRun(fn, world_size, args, seed, made=made, **_defaults(options)).result()
        except RankError as error:
            return _shortened(fn, world_size, args, options, FailingOrder(seed, made, error, runs))
    return None


def _defaults(options: dict[str, Any]) -> dict[str, Any]:
    known = {
        "network": None,
        "compute": 0.0,
        "faults": (),
        "timeout": None,
        "backend": "ref",
        "init": True,
        "decisions": None,
    }
    for name in options:
        if name not in known:
            raise ArgumentTypeError(explain("simulation.explore", name, f"one of {', '.join(known)}", options[name]))
    return {**known, **options}


def _shortened(
    fn: Any, world_size: int, args: tuple[object, ...], options: dict[str, Any], found: FailingOrder
) -> FailingOrder:
    """Leave out decisions, half of them first, as long as the program fails in the same way."""
    kind, runs = type(found.error.__cause__), found.runs
    decisions, part = dict(found.decisions), max(1, len(found.decisions) // 2)
    error = found.error
    while decisions and runs < found.runs + _MOST_RUNS_TO_SHORTEN:
        numbers = sorted(decisions)
        for start in range(0, len(numbers), part):
            left_out = set(numbers[start : start + part])
            fewer = {number: chosen for number, chosen in decisions.items() if number not in left_out}
            runs += 1
            try:
                OneRun(fn, world_size, args, 0, **{**_defaults(options), "decisions": fewer}).result()
            except RankError as again:
                if type(again.__cause__) is kind:
                    decisions, error = fewer, again
                    break
        else:
            if part == 1:
                break
            part //= 2
    return FailingOrder(found.seed, decisions, error, runs)
