"""``benchmark start``: from nothing to a group of all ranks, and the whole cycle of making and destroying it.

Ranks have torch loaded already. Every backend meets through a store of its own library at a TCP address, as under a
launcher; a time is from the moment when the last rank began to the moment when the last rank completed.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import Any

import torch.distributed as torch_distributed

from torchdist_ref.benchmark.harness import Harness, Option, Settings, at_least, numbers, texts
from torchdist_ref.benchmark.report import columns, show_millis, show_number
from torchdist_ref.benchmark.rounds import RankContext, Result, durations, library, take_turns

HOST = "127.0.0.1"
INIT, CYCLE = "init", "init and destroy"
OPTIONS = {
    "backends": Option("ref,gloo,torch:gloo", "backends", texts),
    "worlds": Option("2,4", "numbers of ranks", numbers),
    "repetitions": Option(9, "rounds", at_least(1)),
}


def measure(context: RankContext, settings: Settings) -> None:
    """Measure all backends on one rank. Reports a result for each part of the cycle, and numbers."""
    cycles: dict[str, list[float]] = {name: [] for name in settings.backends}

    def turn(name: str) -> list[float]:
        made, destroyed = _cycle(context, name)
        cycles[name].append(destroyed)
        return [made]

    turns = {name: partial(turn, name) for name in settings.backends}
    samples, disturbed = take_turns(context, turns, settings.repetitions, context.report)
    for what, found in ((INIT, samples), (CYCLE, cycles)):
        context.report(Result({"operation": what, "world": context.world}, found, disturbed))


def _cycle(context: RankContext, name: str) -> list[float]:
    """Return the seconds of making the default group, and those of making and destroying it."""
    method = f"tcp://{HOST}:{context.exchange(free_port())[0]}"
    api, backend = (torch_distributed, name.partition(":")[2]) if ":" in name else (library, name)
    context.wait()
    begin = perf_counter()
    api.init_process_group(backend, init_method=method, rank=context.rank, world_size=context.world)
    made = perf_counter()
    # The rank that serves the store must not leave while others are still joining.
    context.wait()
    api.destroy_process_group()
    return durations(context.exchange([(begin, made), (begin, perf_counter())]))


def free_port() -> int:
    """Return a port that was free just now."""
    with closing(socket.create_server((HOST, 0))) as probe:
        return int(probe.getsockname()[1])


def run(harness: Harness) -> None:
    """Measure for each number of ranks."""
    settings = harness.settings
    settings.backends = harness.choose_backends()
    harness.begin(len(settings.worlds) * settings.repetitions)
    for world in settings.worlds:
        harness.bar.heading(f"{world} ranks")
        harness.run(partial(measure, settings=settings), world)


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table: milliseconds, and how many times faster than the last backend."""
    *others, against = names = harness.settings.backends
    titles = ["", "ranks", *(f"{name} ms" for name in names), *(f"{name} x {against}" for name in others)]
    rows = [
        [each.cell["operation"], str(each.cell["world"]), *(show_millis(each.median(name)) for name in names)]
        + [show_number(each.ratio(against, name)) for name in others]
        for each in results
    ]
    return columns(titles, rows)


def entries(harness: Harness) -> list[dict[str, Any]]:
    """Return an entry for each number of ranks."""
    found: dict[int, dict[str, Any]] = {}
    for each in harness.results:
        found.setdefault(each.cell["world"], {})[each.cell["operation"]] = each.samples
    return [{"world": world, "samples": samples} for world, samples in found.items()]
