"""``benchmark faults``: how long from a rank's death, from calls that differ, from Ctrl-C, to the error on the others.

Every trial of a death has fresh processes. Ctrl-C is sent to a rank that waits in a call. Only backends that compare
calls take part in the mismatches: on others, ranks that call different things hang, crash, or get wrong numbers.

Times are of a clock that all processes share. Survivors stay alive after their error until all have theirs, so that no
rank learns of the fault from another's exit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.benchmark import competitors, harness, report
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.ranks import RankContext, run_ranks
from torchdist_ref.benchmark.report import show_millis
from torchdist_ref.benchmark.timing import Action
from torchdist_ref.errors import ArgumentError, MismatchError
from torchdist_ref.testing import RankError

# Seconds in which survivors repeat their call, and wait for each other. Less than the grace of `testing.run`.
SURVIVOR_SECONDS = 2.0
# Seconds from the start line to the fault, at least.
FAULT_DELAY_SECONDS = 0.04
RECV = "recv"
WAITING, BUSY, MISMATCH, INTERRUPT = "others wait", "all busy", "mismatch", "Ctrl-C"
COMPARING_BACKENDS = ("ref",)
OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", RECV)
MISMATCHES_PER_TRIAL = 10
TITLES = ("fault", "in", "backend", "median ms", "95 % ms", "worst ms", "late")


@dataclass(frozen=True)
class ErrorTime:
    """Time and type of an error on one rank; `when` is None where none came in time."""

    when: float | None
    error: str = ""


def death(backend: str, op: str, nbytes: int, world: int, busy: bool, seed: int) -> list[float | None]:
    """Kill the last rank with SIGKILL and wait for the others' errors.

    Args:
        backend: A backend, as in ``--backends``.
        op: An operation, or ``recv``: every rank waits for a message of the last one.
        nbytes: Of the whole buffer.
        world: Ranks.
        busy: Whether the rank dies while it makes calls itself; else the others wait for it in a call.
        seed: Seed of the moment.

    Returns:
        For each survivor the seconds until its error; None where it had none.
    """
    killed: list[float] = []
    try:
        run_ranks(lambda context: _until_death(context, backend, op, nbytes, busy, seed), world, killed.append)
    except RankError as error:
        if not killed or error.rank != world - 1:
            raise
        errors = [
            error.outcomes[rank].value if rank in error.outcomes else ErrorTime(None) for rank in range(world - 1)
        ]
        return [in_time(each.when - killed[0]) if each.when is not None else None for each in errors]
    raise AssertionError("a killed rank cannot have returned")


def in_time(seconds: float) -> float | None:
    """Return None for an error that came only because other ranks had ended."""
    return seconds if seconds < SURVIVOR_SECONDS else None


def _until_death(context: RankContext, backend: str, op: str, nbytes: int, busy: bool, seed: int) -> ErrorTime:
    competitor = competitors.join([backend], context)[0]
    action = _action(competitor, context, op, nbytes)
    last = context.world - 1
    moment = FAULT_DELAY_SECONDS * (1 + random.Random(seed).random())
    context.wait()
    if context.rank == last:
        threading.Thread(target=_die, args=(context, moment), daemon=True).start()
        while busy and op != RECV:
            action()
        threading.Event().wait()
    error = _call_until_error(action)
    context.start_line.poll(range(last), SURVIVOR_SECONDS)
    return error


def _die(context: RankContext, moment: float) -> None:
    sleep(moment)
    context.report(perf_counter(), from_any_rank=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _action(competitor: competitors.Competitor, context: RankContext, op: str, nbytes: int) -> Action:
    if op == RECV:
        into = torch.zeros(max(1, nbytes // 4))
        return lambda: competitor.api.recv(into, context.world - 1, group=competitor.group)
    operation = OPERATIONS[op]
    action = operation.bind(
        competitor.api, competitor.group, operation.buffers(context.rank, context.world, nbytes, torch.float32)
    )
    action()
    return action


def _call_until_error(action: Action) -> ErrorTime:
    """Call repeatedly: some backends' calls return on some ranks although a rank is missing."""
    end = perf_counter() + SURVIVOR_SECONDS
    try:
        while perf_counter() < end:
            action()
    except RuntimeError as error:
        return ErrorTime(perf_counter(), type(error).__name__)
    return ErrorTime(None)


def _one(rank: int) -> torch.Tensor:
    return torch.full((4 + rank % 2,), 0.5)


# By the difference: the calls of even and of odd ranks.
MISMATCHES: dict[str, Callable[[int], Any]] = {
    "shape": lambda rank: groups.all_reduce(_one(rank)),
    "dtype": lambda rank: groups.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int32)[rank % 2])),
    "operation": lambda rank: groups.barrier() if rank % 2 else groups.all_reduce(torch.ones(4)),
    "root": lambda rank: groups.broadcast(torch.ones(4), rank % 2),
}


def mismatches(backend: str, kind: str, world: int, trials: int) -> list[float]:
    """Let ranks make different calls, repeatedly on one group; return the seconds to the error on each rank."""
    by_rank = run_ranks(lambda context: _mismatch(context, backend, kind, trials), world)
    return [seconds for times in by_rank for seconds in times]


def _mismatch(context: RankContext, backend: str, kind: str, trials: int) -> list[float]:
    competitors.join([backend], context)
    return [_until_mismatch(context, MISMATCHES[kind]) for _ in range(trials)]


def _until_mismatch(context: RankContext, call: Callable[[int], Any]) -> float:
    context.wait()
    begin = perf_counter()
    try:
        call(context.rank)
    except MismatchError:
        return perf_counter() - begin
    raise AssertionError("ranks made different calls and got no error")


def interrupt(backend: str, op: str, nbytes: int) -> float | None:
    """Send Ctrl-C to rank 0, which waits in a call for rank 1; return the seconds to the KeyboardInterrupt."""
    caught, sent = run_ranks(lambda context: _interrupted(context, backend, op, nbytes), 2)
    return in_time(caught - sent)


def _interrupted(context: RankContext, backend: str, op: str, nbytes: int) -> float:
    competitor = competitors.join([backend], context)[0]
    action = _action(competitor, context, op, nbytes)
    pids = context.exchange(os.getpid())
    if context.rank:
        sleep(FAULT_DELAY_SECONDS)
        when = perf_counter()
        os.kill(pids[0], signal.SIGINT)
    else:
        when = _until_interrupt(action)
    context.start_line.poll(range(2), SURVIVOR_SECONDS)
    return when


def _until_interrupt(action: Action) -> float:
    try:
        while True:
            action()
    except (KeyboardInterrupt, RuntimeError):
        return perf_counter()


@dataclass(frozen=True)
class FaultTimes:
    """Distribution of one fault's times.

    Attributes:
        fault: Kind of fault.
        what: The operation, or the difference between the calls.
        backend: The backend.
        seconds: Time to the error, of every rank that should have one, in every trial; None where none came in time.
    """

    fault: str
    what: str
    backend: str
    seconds: Sequence[float | None]

    @property
    def known(self) -> list[float]:
        """Times of the errors that came, ascending."""
        return sorted(seconds for seconds in self.seconds if seconds is not None)

    @property
    def late(self) -> int:
        """Number of errors that did not come in time."""
        return len(self.seconds) - len(self.known)

    def quantile(self, share: float) -> float:
        """Return the time that this share of the errors did not exceed.

        >>> FaultTimes(BUSY, "barrier", "ref", [0.3, 0.1, None, 0.2]).quantile(1.0)
        0.3
        """
        return self.known[min(len(self.known) - 1, int(share * len(self.known)))]

    def cells(self) -> list[str]:
        """Return a row of the table."""
        figures = [median(self.known), self.quantile(0.95), self.known[-1]] if self.known else []
        shown = list(map(show_millis, figures)) or ["-"] * 3
        return [self.fault, self.what, self.backend, *shown, f"{self.late} of {len(self.seconds)}"]


def trials(ops: Sequence[str], backends: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the kinds of fault, each with an operation or a difference, and a backend."""
    for op in ops:
        for fault in (WAITING, BUSY) if op != RECV else (WAITING,):
            yield from ((fault, op, name) for name in backends)
    for kind in MISMATCHES:
        yield from ((MISMATCH, kind, name) for name in backends if name in COMPARING_BACKENDS)
    yield from ((INTERRUPT, op, name) for op in ops[:1] for name in backends)


def run_trial(fault: str, what: str, backend: str, options: argparse.Namespace) -> FaultTimes:
    """Run one kind of fault as often as the options ask for."""
    seconds: list[float | None]
    if fault == MISMATCH:
        seconds = [*mismatches(backend, what, 2, options.trials * MISMATCHES_PER_TRIAL)]
    elif fault == INTERRUPT:
        seconds = [interrupt(backend, what, options.size) for _ in range(options.trials)]
    else:
        deaths = (
            death(backend, what, options.size, options.world, fault == BUSY, seed) for seed in range(options.trials)
        )
        seconds = [each for times in deaths for each in times]
    return FaultTimes(fault, what, backend, seconds)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    harness.add_options(
        parser,
        ops=(",".join(OPS), "operations"),
        backends=("ref,gloo", "backends"),
        world=(3, "ranks"),
        size=("64K", "bytes of the whole buffer"),
        trials=(10, "of each kind"),
    )


def main(options: argparse.Namespace) -> int:
    """Run all trials, and print."""
    ops = harness.names("benchmark faults", "--ops", options.ops, [*OPERATIONS, RECV])
    names, left_out = competitors.split(options.backends.split(","), forked=True)
    print(*left_out, sep="\n", end="\n" * bool(left_out))
    harness.check_least("benchmark faults", options, world=2, trials=1)
    if not names:
        raise ArgumentError("benchmark faults: no backend is left to try; see --backends.")
    options.size = report.parse_size(options.size)
    kinds = list(trials(ops, names))
    bar, results = report.ProgressBar(len(kinds)), []
    for fault, what, backend in kinds:
        bar.heading(f"{fault}, {what}")
        results.append(run_trial(fault, what, backend, options))
        bar.advance(backend)
    bar.clear()
    print(report.columns(TITLES, [result.cells() for result in results], left=3))
    print(f"late: no error within {SURVIVOR_SECONDS:g} s")
    settings = {"world": options.world, "trials": options.trials, "size": options.size}
    entries = [
        {"fault": each.fault, "in": each.what, "backend": each.backend, "seconds": list(each.seconds)}
        | {"late": each.late}
        for each in results
    ]
    report.write(options.json, report.report("faults", settings, entries, list(map(str, left_out))))
    return 0
