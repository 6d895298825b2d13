"""Runs of a program on simulated ranks: `run` and `explore`, and of an elastic job on simulated hosts: `run_job`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torchdist_ref.elastic.roster import Rules
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain
from torchdist_ref.ranks.outcomes import RankError
from torchdist_ref.schedules.network import Network
from torchdist_ref.simulation.elastic_job import OneJob, SimulatedJob
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
    failures are the library's own; only the transfer of bytes takes virtual time. Locks, queues, threads and clocks of
    Python that the program uses are simulated too, for its ranks alone. Each rank has a state of torch's default
    generator of its own, which begins as this process's. The addresses of hosts 0 and 1 are 10.0.0.1 and 10.0.0.2, and
    so on; ranks can serve a `TCPStore` there, and meet by ``tcp://``. Not simulated: other sockets, processes, torch's
    backends.

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
        faults: Failures to cause, such as `Kill`, `Stop` and `Cut`.
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


def run_job(
    fn: Callable[..., object],
    hosts: int,
    *args: object,
    workers: int = 1,
    min_hosts: int | None = None,
    max_hosts: int | None = None,
    max_restarts: int = 0,
    seed: int = 0,
    network: Network | None = None,
    faults: Sequence[Fault] = (),
    timeout: float | None = None,
) -> SimulatedJob:
    """Run an elastic job on simulated hosts, whose agents start workers and restart them when hosts change.

    The job is that of ``python -m torchdist_ref.launch --nnodes MIN:MAX --nproc-per-node WORKERS``, with the same code:
    agents meet, one of them coordinates, and all workers start again when a worker fails or a host is lost. A worker
    calls ``fn(rank, *args)`` with the default group initialized. All attempts get the same arguments, so an object
    among them can serve as the disk to which a program saves its state.

    Args:
        fn: Function; any callable, also a local function or lambda.
        hosts: Number of hosts, which all start at once, at least 1.
        *args: Further arguments, the same objects for all workers of all attempts.
        workers: Number of workers of each host.
        min_hosts: Smallest number of hosts with which the job runs. Default: all.
        max_hosts: Largest number of hosts that take part; the others are spares. Default: all.
        max_restarts: Number of restarts after failures of workers. Those after a change of hosts do not count.
        seed: As for `run`.
        network: As for `run`; its `hosts` are not used. Workers of a host are local to one another.
        faults: `EndHost`, `Kill` of the worker that has a rank at that time, and `Cut` of some hosts from all others.
        timeout: Virtual time at which the run ends, in seconds. Default: none.

    Returns:
        The values of the last attempt, all attempts, and the lines of the agents.

    Raises:
        RankError: The job failed: a worker raised too often, or too few hosts are left.
        RankTimeoutError: The job did not end before `timeout`.
        BlockedOutsideError: A rank waits for something that is not simulated.
        ArgumentError: An argument has a wrong value.

    Example:
        >>> import time
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.simulation import EndHost, run_job
        >>> def program(rank, saved):
        ...     for step in range(len(saved), 10):
        ...         time.sleep(1.0)
        ...         total = torch.ones(1)
        ...         dist.all_reduce(total)
        ...         if rank == 0:
        ...             saved.append(int(total))
        ...         dist.barrier()
        ...     return saved
        >>> job = run_job(program, 3, [], min_hosts=2, faults=[EndHost(host=2, at=4.5)])
        >>> job.values[0], [attempt.hosts for attempt in job.attempts]
        ([3, 3, 3, 3, 2, 2, 2, 2, 2, 2], [(0, 1, 2), (0, 1)])
    """
    operation = "simulation.run_job"
    for name, value in (("hosts", hosts), ("workers", workers)):
        if type(value) is not int or value < 1:
            raise ArgumentError(explain(operation, name, "a number, at least 1", value))
    least = hosts if min_hosts is None else min_hosts
    most = hosts if max_hosts is None else max_hosts
    for name, value, top in (("min_hosts", least, most), ("max_hosts", most, hosts)):
        if type(value) is not int or not 1 <= value <= top:
            raise ArgumentError(explain(operation, name, f"a number from 1 to {top}", value))
    if type(max_restarts) is not int or max_restarts < 0:
        raise ArgumentError(explain(operation, "max_restarts", "a number, 0 or more", max_restarts))
    rules = Rules("simulated job", least, most, max_restarts)
    return OneJob(fn, hosts, args, workers, rules, seed, network, faults, timeout).job()
