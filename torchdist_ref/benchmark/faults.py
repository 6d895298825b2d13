"""``benchmark faults``: how long from a rank's death, from calls that differ, from Ctrl-C, to the error on the others.

Every trial of a death has fresh processes. Ctrl-C is sent to a rank that waits in a call. Only backends that compare
calls take part in the mismatches: on others, ranks that call different things hang, crash, or get wrong numbers.

Times are of a clock that all processes share. Survivors stay alive after their error until all have theirs, so that no
rank learns of the fault from another's exit.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch

from torchdist_ref import errors, groups, testing
from torchdist_ref.benchmark import competitors, ranks
from torchdist_ref.benchmark.harness import Harness, Option, among, at_least, size, texts
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.report import columns, show_millis
from torchdist_ref.benchmark.rounds import Action, RankContext, Result

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
SECONDS = "seconds"
OPTIONS = {
    "ops": Option(",".join(OPS), "operations", among([*OPERATIONS, RECV])),
    "backends": Option("ref,gloo", "backends", texts),
    "world": Option(3, "ranks", at_least(2)),
    "size": Option("64K", "bytes of the whole buffer", size),
    "trials": Option(10, "of each kind", at_least(1)),
}


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
        program = partial(_until_death, backend=backend, op=op, nbytes=nbytes, busy=busy, seed=seed)
        ranks.run_ranks(program, world, lambda side, when: killed.append(when))
    except testing.RankError as error:
        if not killed or error.rank != world - 1:
            raise
        ends = [error.outcomes[rank].value if rank in error.outcomes else None for rank in range(world - 1)]
        return [None if end is None else in_time(end - killed[0]) for end in ends]
    raise AssertionError("a killed rank cannot have returned")


def in_time(seconds: float) -> float | None:
    """Return None for an error that came only because other ranks had ended."""
    return seconds if seconds < SURVIVOR_SECONDS else None


def _until_death(context: RankContext, backend: str, op: str, nbytes: int, busy: bool, seed: int) -> float | None:
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
    when = _call_until_error(action)
    context.start_line.poll(range(last), SURVIVOR_SECONDS)
    return when


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


def _call_until_error(action: Action, expected: tuple[type[BaseException], ...] = (RuntimeError,)) -> float | None:
    """Call repeatedly, since some backends' calls return although a rank is missing; return the time of the error."""
    end = perf_counter() + SURVIVOR_SECONDS
    try:
        while perf_counter() < end:
            action()
    except expected:
        return perf_counter()
    return None


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
    by_rank = ranks.run_ranks(lambda context: _mismatch(context, backend, kind, trials), world)
    return [seconds for times in by_rank for seconds in times]


def _mismatch(context: RankContext, backend: str, kind: str, trials: int) -> list[float]:
    competitors.join([backend], context)
    times = []
    for _ in range(trials):
        context.wait()
        begin = perf_counter()
        try:
            MISMATCHES[kind](context.rank)
        except errors.MismatchError:
            times.append(perf_counter() - begin)
        else:
            raise AssertionError("ranks made different calls and got no error")
    return times


def interrupt(backend: str, op: str, nbytes: int) -> float | None:
    """Send Ctrl-C to rank 0, which waits in a call for rank 1; return the seconds to the KeyboardInterrupt."""
    caught, sent = ranks.run_ranks(lambda context: _interrupted(context, backend, op, nbytes), 2)
    return None if caught is None or sent is None else in_time(caught - sent)


def _interrupted(context: RankContext, backend: str, op: str, nbytes: int) -> float | None:
    competitor = competitors.join([backend], context)[0]
    action = _action(competitor, context, op, nbytes)
    pids = context.exchange(os.getpid())
    if context.rank:
        sleep(FAULT_DELAY_SECONDS)
        when: float | None = perf_counter()
        os.kill(pids[0], signal.SIGINT)
    else:
        when = _call_until_error(action, (KeyboardInterrupt, RuntimeError))
    context.start_line.poll(range(2), SURVIVOR_SECONDS)
    return when


def trials(ops: Sequence[str], backends: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the kinds of fault, each with an operation or a difference, and a backend."""
    for op in ops:
        for fault in (WAITING, BUSY) if op != RECV else (WAITING,):
            yield from ((fault, op, name) for name in backends)
    for kind in MISMATCHES:
        yield from ((MISMATCH, kind, name) for name in backends if name in COMPARING_BACKENDS)
    yield from ((INTERRUPT, op, name) for op in ops[:1] for name in backends)


def run(harness: Harness) -> None:
    """Run all trials."""
    settings = harness.settings
    settings.backends = harness.choose_backends()
    kinds = list(trials(settings.ops, settings.backends))
    harness.begin(len(kinds))
    for fault, what, backend in kinds:
        harness.bar.heading(f"{fault}, {what}")
        seconds: list[float | None] = []
        if fault == MISMATCH:
            seconds += mismatches(backend, what, 2, settings.trials * MISMATCHES_PER_TRIAL)
        elif fault == INTERRUPT:
            seconds += [interrupt(backend, what, settings.size) for _ in range(settings.trials)]
        else:
            for seed in range(settings.trials):
                seconds += death(backend, what, settings.size, settings.world, fault == BUSY, seed)
        harness.results.append(result(fault, what, backend, seconds))
        harness.bar.advance(backend)


def result(fault: str, what: str, backend: str, seconds: Sequence[float | None]) -> Result:
    """Return the times to the errors that came, ascending, and the number of those that did not come in time.

    >>> result(BUSY, "barrier", "ref", [0.3, 0.1, None, 0.2]).more["late"]
    1
    """
    known = sorted(each for each in seconds if each is not None)
    cell = {"fault": fault, "in": what, "backend": backend}
    return Result(cell, {SECONDS: known}, more={"seconds": list(seconds), "late": len(seconds) - len(known)})


def row(result: Result) -> list[str]:
    """Return a row of the table: the median, the time that 95 % of the errors did not exceed, and the worst."""
    known = result.samples[SECONDS]
    figures = [median(known), known[min(len(known) - 1, int(0.95 * len(known)))], known[-1]] if known else []
    shown = list(map(show_millis, figures)) or ["-"] * 3
    return [*result.cell.values(), *shown, f"{result.more['late']} of {len(result.more['seconds'])}"]


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table."""
    return f"{columns(TITLES, list(map(row, results)), left=3)}\nlate: no error within {SURVIVOR_SECONDS:g} s"


def entries(harness: Harness) -> list[dict[str, Any]]:
    """Return an entry for each kind of fault, with all times."""
    return [{**each.cell, **each.more} for each in harness.results]
