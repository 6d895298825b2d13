"""Calls and training steps on two real ranks and on two simulated ones: one program, two clocks.

`fit` looks for the network with which both take as long, `predict` compares them on other calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from statistics import median
from typing import Any, NamedTuple

import torch

from torchdist_ref import groups
from torchdist_ref.benchmark import competitors, report
from torchdist_ref.benchmark.ddp import make_step
from torchdist_ref.benchmark.harness import Harness
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.rounds import Action, RankContext, Result, calls_in_a_row, durations
from torchdist_ref.benchmark.training import LOCAL, REF
from torchdist_ref.processes.identity import HOST_VARIABLE
from torchdist_ref.schedules import Network
from torchdist_ref.simulation import run as simulate
from torchdist_ref.testing import namespaces

WORLD = 2
SIMULATED = "simulated"
SHARED_MEMORY, TCP = LINKS = ("shared memory", "TCP")
WARM_UP_STEPS, STEPS = 4, 3
SIMULATED_CALLS = 2
# Virtual seconds from the beginning of one simulated call to that of the next, which no call exceeds.
APART_SECONDS = 10.0


class TimedCall(NamedTuple):
    """Collective to time: operation, and bytes of the whole buffer."""

    op: str
    nbytes: int

    def bind(self, rank: int) -> Action:
        """Return the call on tensors of a rank of the current group."""
        operation = OPERATIONS[self.op]
        buffers = operation.buffers(rank, WORLD, self.nbytes, torch.float32)
        return operation.bind(groups, None, buffers)


class TimedStep(NamedTuple):
    """TimedStep of training to time: model and hook of DDP."""

    model: str
    hook: str

    def make(self, side: str = REF) -> Action:
        """Return the step under DDP of the current group, or of the bare model."""
        return make_step(self.model, side, None, self.hook, False)


def on_links(harness: Harness, program: Callable[..., None], links: Sequence[str] = LINKS) -> None:
    """Run a program on two processes, over shared memory and over TCP between two network namespaces.

    TCP is that of the loopback interface if these cannot be made, and a remark says so.
    """
    for link in links:
        reason = namespaces.missing() if link == TCP else ""
        if reason:
            harness.note(f"TCP is that of the loopback interface: {reason}.")
        apart = link == TCP and not reason
        harness.run(partial(program, link=link), WORLD, cable=inf if apart else None)


def join(context: RankContext, link: str) -> None:
    """Make the group of a rank. Ranks of one host count as two hosts where the link is TCP."""
    if link == TCP and not context.host:
        os.environ[HOST_VARIABLE] = f"host of rank {context.rank}"
    competitors.join([REF], context)


def time_calls(context: RankContext, link: str, calls: Sequence[TimedCall], rounds: int, seconds: float) -> None:
    """Measure calls in turns on one rank; rank 0 reports a result for each."""
    turns: dict[TimedCall, Callable[[], list[float]]] = {}
    for call in calls:
        action = call.bind(context.rank)
        count = context.calls(partial(context.timed, action, 3), seconds)
        turns[call] = partial(_median_of, context, action, count)
    samples: dict[TimedCall, list[float]] = {call: [] for call in calls}
    for _ in range(rounds):
        for call, turn in turns.items():
            samples[call] += turn()
    for call in calls:
        context.report(Result({"link": link, **call._asdict()}, {REF: samples[call]}))


def _median_of(context: RankContext, action: Action, count: int) -> list[float]:
    action()
    return [median(context.timed(action, count))]


def time_step(context: RankContext, link: str, step: TimedStep, rounds: int) -> None:
    """Measure steps under DDP, and those of the bare model, in turns."""
    actions = {REF: step.make(), LOCAL: step.make(LOCAL)}
    for action in actions.values():
        calls_in_a_row(action, WARM_UP_STEPS, context.wait)
    turns = {name: partial(context.timed, action, STEPS, loop=True) for name, action in actions.items()}
    context.compare({"link": link, **step._asdict()}, turns, rounds)


def simulated_calls(network: Network, calls: Sequence[TimedCall]) -> list[float]:
    """Return the virtual seconds of calls on two simulated ranks, each from a common start."""

    def program(rank: int) -> list[tuple[float, float]]:
        spans, start = [], 0.0
        for call in calls:
            action = call.bind(rank)
            for _ in range(SIMULATED_CALLS):
                start += APART_SECONDS
                time.sleep(max(0.0, start - time.monotonic()))
                begin = time.monotonic()
                action()
                spans.append((begin, time.monotonic()))
        return spans

    found = durations(simulate(program, WORLD, network=network).values)
    return found[SIMULATED_CALLS - 1 :: SIMULATED_CALLS]


def simulated_step(network: Network, step: TimedStep) -> float:
    """Return the virtual seconds of a step under DDP on two simulated ranks, with the computation measured here."""

    def program(rank: int) -> list[tuple[float, float]]:
        action, spans = step.make(), []
        for number in range(WARM_UP_STEPS + STEPS):
            groups.barrier()
            begin = time.monotonic()
            action()
            if number >= WARM_UP_STEPS:
                spans.append((begin, time.monotonic()))
        return spans

    return median(durations(simulate(program, WORLD, network=network, compute="measured").values))


def hosts_of(link: str) -> tuple[int, ...]:
    """Return the hosts of the two ranks of a link."""
    return (0, 1) if link == TCP else (0, 0)


def error_of(result: Result) -> float:
    """Return the relative error of the simulated time.

    >>> error_of(Result({}, {"ref": [2.0], "simulated": [3.0]}))
    0.5
    """
    return result.median(SIMULATED) / result.median(REF) - 1.0


def with_simulated(result: Result, seconds: float) -> Result:
    """Return a result with a simulated time beside the measured ones."""
    samples = {**result.samples, SIMULATED: [seconds] * len(result.samples[REF])}
    return Result(result.cell, samples, result.disturbed, result.more)


def table(results: Sequence[Result]) -> str:
    """Return the table of measured and simulated times, and the summary of their differences."""
    parts = []
    for keys, unit in ((("op", "nbytes"), "us"), (("model", "hook"), "ms")):
        found = [each for each in results if keys[0] in each.cell]
        columns = [report.cell("link"), report.cell(keys[0]), report.cell(keys[1])]
        columns += [report.time(REF, unit), report.time(SIMULATED, unit)]
        columns += [("error", lambda each: f"{error_of(each):+.0%}")]
        parts += [report.table(columns, found, left=2), summary(found)] if found else []
    return "\n\n".join(parts)


def summary(results: Sequence[Result]) -> str:
    """Return the median and the largest of the errors, in words."""
    errors = [abs(error_of(each)) for each in results]
    worst = max(results, key=lambda each: abs(error_of(each)))
    cell = ", ".join(map(str, worst.cell.values()))
    return f"median error {median(errors):.0%}, largest {error_of(worst):+.0%} ({cell}), {len(errors)} cells"


def recorded(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Return the tables of the documentation, in the form of its record of measurements: header, rows and values."""
    calls = [each for each in results if "op" in each.cell]
    steps = [each for each in results if "model" in each.cell]
    sizes = sorted({each.cell["nbytes"] for each in calls})
    errors = {tuple(each.cell.values()): f"{error_of(each):+.0%}" for each in results}
    by_op = dict.fromkeys((each.cell["link"], each.cell["op"]) for each in calls)
    columns = ["measured ms", "simulated ms", "error"]
    return {
        "simulated_calls": {
            "header": ["error of the simulated time", "operation", *map(report.show_size, sizes)],
            "rows": [[*key, *(errors.get((*key, size), "") for size in sizes)] for key in by_op],
            "values": _values(calls),
        },
        "simulated_steps": {
            "header": ["link", "model", "hook", *columns],
            "rows": [
                [*map(str, each.cell.values()), *_milliseconds(each), errors[(*each.cell.values(),)]] for each in steps
            ],
            "values": _values(steps),
        },
    }


def _milliseconds(result: Result) -> list[str]:
    return [report.show_time(result.median(name), "ms") for name in (REF, SIMULATED)]


def _values(results: Sequence[Result]) -> dict[str, str]:
    """Return the median and the largest of the errors of each link."""
    errors = [abs(error_of(each)) for each in results]
    return {"median": f"{median(errors):.0%}", "largest": f"{max(errors):.0%}"} if errors else {}
