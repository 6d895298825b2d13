"""``benchmark faults``: how long from a rank's death, from calls that differ, from Ctrl-C, to the error on the others.

Every trial of a death or of a Ctrl-C has fresh processes. Ctrl-C is sent to a rank that waits in a call. Only the
backend that compares calls takes part in the mismatches: on others, ranks that call different things hang, crash, or
get wrong numbers.

Times are of a clock that all processes share. Survivors stay alive after their error until all have theirs, so that no
rank learns of the fault from another's exit.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch

from torchdist_ref import errors, groups, testing
from torchdist_ref.benchmark import competitors, ranks
from torchdist_ref.benchmark.harness import AddOption, Harness, Settings, among, at_least, many
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.report import Column, cell, figure, parse_size, table
from torchdist_ref.benchmark.rounds import Action, RankContext, Result

# Seconds in which survivors repeat their call, and wait for each other. Less than the grace of `testing.run`.
SURVIVOR_SECONDS = 2.0
# Seconds from the start line to the fault, at least.
FAULT_DELAY_SECONDS = 0.04
RECV = "recv"
WAITING, BUSY, MISMATCH, INTERRUPT = "others wait", "all busy", "mismatch", "Ctrl-C"
COMPARING = "ref"
OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", RECV)
MISMATCHES_PER_TRIAL = 10
SECONDS = "seconds"


def add_options(add: AddOption) -> None:
    """Add the options of the command."""
    add("--ops", default=",".join(OPS), type=among([*OPERATIONS, RECV]), help="operations")
    add("--backends", default="ref,gloo", type=many(str), help="backends")
    add("--world", default=3, type=at_least(2), help="ranks")
    add("--size", default="64K", type=parse_size, help="bytes of the whole buffer")
    add("--trials", default=10, type=at_least(1), help="of each kind")


def strike(fault: str, backend: str, op: str, nbytes: int, world: int, seed: int) -> list[float | None]:
    """Kill the last rank with SIGKILL, or send Ctrl-C to rank 0, and wait for the errors.

    Args:
        fault: `WAITING`: the others wait in a call for the rank that dies. `BUSY`: it makes calls itself. `INTERRUPT`:
            rank 0 alone makes a call.
        backend: A backend, as in ``--backends``.
        op: An operation, or ``recv``: every rank waits for a message of the last one.
        nbytes: Of the whole buffer.
        world: Ranks.
        seed: Seed of the moment.

    Returns:
        The seconds until the error, of each survivor of a death, or of rank 0; None for an error that did not come, or
        only because other ranks had ended.
    """
    struck: list[float] = []
    program = partial(_until_error, fault=fault, backend=backend, op=op, nbytes=nbytes, seed=seed)
    try:
        ends = ranks.run_ranks(program, world, lambda side, when: struck.append(when))[:1]
    except testing.RankError as error:
        if fault == INTERRUPT or not struck or error.rank != world - 1:
            raise
        ends = [error.outcomes[rank].value if rank in error.outcomes else None for rank in range(world - 1)]
    return [end - struck[0] if end and end - struck[0] < SURVIVOR_SECONDS else None for end in ends]


def _until_error(context: RankContext, fault: str, backend: str, op: str, nbytes: int, seed: int) -> float | None:
    """Repeat a call, since some backends' calls return although a rank is missing; return the time of the error."""
    action = _action(competitors.join([backend], context)[0], context, op, nbytes)
    last, interrupts = context.world - 1, fault == INTERRUPT
    victim = 0 if interrupts else last
    context.wait()
    if context.rank == victim:
        moment = FAULT_DELAY_SECONDS * (1 + random.Random(seed).random())
        signum = signal.SIGINT if interrupts else signal.SIGKILL
        threading.Thread(target=_signal, args=(context, moment, signum), daemon=True).start()
    calls = {WAITING: context.rank != victim, BUSY: True, INTERRUPT: context.rank == victim}[fault]
    when, end = None, perf_counter() + SURVIVOR_SECONDS
    try:
        while calls and perf_counter() < end:
            action()
    except (RuntimeError, KeyboardInterrupt):
        when = perf_counter()
    # Ranks that make no call wait for an error as long as it counts, and for the rank that has it.
    context.start_line.poll(range(context.world if interrupts else last), SURVIVOR_SECONDS * (1 if calls else 2))
    return when


def _signal(context: RankContext, moment: float, signum: int) -> None:
    sleep(moment)
    context.report(perf_counter(), from_any_rank=True)
    os.kill(os.getpid(), signum)


def _action(competitor: competitors.Competitor, context: RankContext, op: str, nbytes: int) -> Action:
    if op == RECV:
        into = torch.zeros(max(1, nbytes // 4))
        return lambda: competitor.api.recv(into, context.world - 1, group=competitor.group)
    buffers = OPERATIONS[op].buffers(context.rank, context.world, nbytes, torch.float32)
    action = competitor.bind(OPERATIONS[op], buffers)
    action()
    return action


# By the difference: the calls of even and of odd ranks.
MISMATCHES: dict[str, Callable[[int], Any]] = {
    "shape": lambda rank: groups.all_reduce(torch.full((4 + rank % 2,), 0.5)),
    "dtype": lambda rank: groups.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int32)[rank % 2])),
    "operation": lambda rank: groups.barrier() if rank % 2 else groups.all_reduce(torch.ones(4)),
    "root": lambda rank: groups.broadcast(torch.ones(4), rank % 2),
}


def _mismatch(context: RankContext, backend: str, kind: str, trials: int) -> list[float]:
    """Let ranks make different calls, repeatedly on one group; return the seconds to this rank's errors."""
    competitors.join([backend], context)
    times = []
    for _ in range(trials):
        context.wait()
        begin = perf_counter()
        with suppress(errors.MismatchError):
            MISMATCHES[kind](context.rank)
            raise AssertionError("ranks made different calls and got no error")
        times.append(perf_counter() - begin)
    return times


def trial(fault: str, what: str, backend: str, settings: Settings) -> list[float | None]:
    """Return the seconds to the errors of all trials of a kind of fault."""
    if fault == MISMATCH:
        trials = settings.trials * MISMATCHES_PER_TRIAL
        found = ranks.run_ranks(partial(_mismatch, backend=backend, kind=what, trials=trials), 2)
        return [seconds for each in found for seconds in each]
    world = 2 if fault == INTERRUPT else settings.world
    struck = [strike(fault, backend, what, settings.size, world, seed) for seed in range(settings.trials)]
    return [seconds for each in struck for seconds in each]


def run(harness: Harness) -> None:
    """Run all trials."""
    settings = harness.settings
    settings.backends = backends = harness.choose_backends()
    kinds = [(fault, op) for op in settings.ops for fault in (WAITING, BUSY) if (fault, op) != (BUSY, RECV)]
    cases = [(*kind, name) for kind in kinds for name in backends]
    cases += [(MISMATCH, kind, COMPARING) for kind in MISMATCHES if COMPARING in backends]
    cases += [(INTERRUPT, settings.ops[0], name) for name in backends]
    for fault, what, backend in cases:
        harness.head(f"{fault}, {what}")
        harness.results.append(result(fault, what, backend, trial(fault, what, backend, settings)))


def result(fault: str, what: str, backend: str, seconds: Sequence[float | None]) -> Result:
    """Return the times to the errors that came, ascending, and the number of those that did not come in time.

    >>> result(BUSY, "barrier", "ref", [0.3, 0.1, None, 0.2]).more["late"]
    1
    """
    known = sorted(each for each in seconds if each is not None)
    where = {"fault": fault, "in": what, "backend": backend}
    counts = {"trials": len(seconds), "late": len(seconds) - len(known)}
    return Result(where, {SECONDS: known} if known else {}, more=counts)


def most(known: Sequence[float]) -> float:
    """Return the time that 95 % of the errors did not exceed, from ascending times."""
    return known[min(len(known) - 1, int(0.95 * len(known)))]


def errors_column(title: str, of: Callable[[Sequence[float]], float]) -> Column:
    """Return the column of a figure of the errors that came, in milliseconds."""
    return figure(title, [SECONDS], lambda each: of(each.samples[SECONDS]) * 1e3)


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table."""
    times = [errors_column("median ms", median), errors_column("95 % ms", most), errors_column("worst ms", max)]
    late: Column = "late", lambda result: "{late} of {trials}".format_map(result.more)
    columns = [*(cell(key, key) for key in ("fault", "in", "backend")), *times, late]
    return f"{table(columns, results, left=3)}\nlate: no error within {SURVIVOR_SECONDS:g} s"
