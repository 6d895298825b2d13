"""``benchmark simulation``: how fast simulated ranks run in real time: their start and end, calls, and switches.

`simulation.run` runs one thread at a time, so its speed depends on the number of ranks times calls, and on how often
another rank continues (a switch). The first call of a kind, which plans it, belongs to the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import CLOCK_MONOTONIC, clock_gettime

import torch

from torchdist_ref.benchmark import report
from torchdist_ref.benchmark.harness import AddOption, Harness, at_least, many
from torchdist_ref.benchmark.rounds import Result, library
from torchdist_ref.simulation import run as simulate

START, CALL, SWITCH = "start and end", "call of a rank", "switch"


def add_options(add: AddOption) -> None:
    """Add the options of the command."""
    add("--worlds", default="4,16,64,256", type=many(at_least(1)), help="numbers of ranks")
    add("--sizes", default="4,1M", type=many(report.parse_size), help="bytes of the tensors of all_reduce")
    add("--calls", default=10, type=at_least(1), help="calls of each rank in a run")
    add("--repetitions", default=3, type=at_least(1), help="runs")


def run(harness: Harness) -> None:
    """Measure each number of ranks and each size."""
    settings = harness.settings
    for world in settings.worlds:
        for nbytes in settings.sizes:
            harness.head(f"{world} ranks, {report.show_size(nbytes)}")
            samples: dict[str, list[float]] = {START: [], CALL: [], SWITCH: []}
            for number in range(settings.repetitions):
                for name, seconds in times(world, nbytes, settings.calls).items():
                    samples[name].append(seconds)
                harness.bar.show("runs", number + 1, settings.repetitions)
            harness.results.append(Result({"world": world, "op": "all_reduce", "nbytes": nbytes}, samples))


def times(world: int, nbytes: int, calls: int) -> dict[str, float]:
    """Return the real seconds of one run: of its start and end, of each call of each rank, and of each switch."""
    # Virtual time takes the place of the other clocks in a run.
    began: list[float] = []
    ended: list[float] = []

    def program(rank: int) -> None:
        tensor = torch.full((max(1, nbytes // 4),), float(rank))
        library.all_reduce(tensor)
        began.append(clock_gettime(CLOCK_MONOTONIC))
        for _ in range(calls):
            library.all_reduce(tensor)
        ended.append(clock_gettime(CLOCK_MONOTONIC))

    first = clock_gettime(CLOCK_MONOTONIC)
    found = simulate(program, world)
    total, inner = clock_gettime(CLOCK_MONOTONIC) - first, max(ended) - min(began)
    return {START: total - inner, CALL: inner / (world * calls), SWITCH: total / max(1, found.switches)}


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table: milliseconds, and calls and switches a second."""
    lines = [f"{'ranks':>6} {'bytes':>8} {'start and end':>16} {'ranks x calls/s':>16} {'switches/s':>12}"]
    for each in results:
        seconds = {name: median(values) for name, values in each.samples.items()}
        lines.append(
            f"{each.cell['world']:>6} {report.show_size(each.cell['nbytes']):>8} {seconds[START] * 1e3:>13.1f} ms "
            f"{1 / seconds[CALL]:>16,.0f} {1 / seconds[SWITCH]:>12,.0f}"
        )
    return "\n".join(lines)
