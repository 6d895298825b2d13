"""``benchmark start``: from nothing to a group of all ranks, and the whole cycle of making and destroying it.

Ranks have torch loaded already. Every backend meets through a store of its own library at a TCP address, as under a
launcher; a time is from the moment when the last rank began to the moment when the last rank completed.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import Any

import torch.distributed as torch_distributed

from torchdist_ref import groups
from torchdist_ref.benchmark import competitors, harness, report
from torchdist_ref.benchmark.harness import Result, take_turns
from torchdist_ref.benchmark.ranks import RankContext
from torchdist_ref.benchmark.report import show_millis, show_number
from torchdist_ref.benchmark.timing import durations

HOST = "127.0.0.1"
INIT, CYCLE = "init", "init and destroy"


def measure(context: RankContext, settings: argparse.Namespace) -> None:
    """Measure all backends on one rank. Reports a result for each part of the cycle, and numbers."""
    cycles: dict[str, list[float]] = {name: [] for name in settings.backends}

    def turn(name: str) -> list[float]:
        made, destroyed = _cycle(context, name)
        cycles[name].append(destroyed)
        return [made]

    turns = {name: partial(turn, name) for name in settings.backends}
    samples, disturbed = take_turns(context, turns, settings.repetitions, context.report)
    for what, found in ((INIT, samples), (CYCLE, cycles)):
        context.report(Result({"what": what, "world": context.world}, found, disturbed))


def _cycle(context: RankContext, name: str) -> tuple[float, float]:
    """Return the seconds of making the default group, and those of making and destroying it."""
    init, destroy = _functions(name, context.exchange(free_port())[0], context)
    context.wait()
    begin = perf_counter()
    init()
    made = perf_counter()
    # The rank that serves the store must not leave while others are still joining.
    context.wait()
    destroy()
    destroyed = perf_counter()
    init_seconds, cycle_seconds = durations(context.exchange([(begin, made), (begin, destroyed)]))
    return init_seconds, cycle_seconds


def _functions(name: str, port: int, context: RankContext) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the functions that make and destroy the default group of a backend."""
    where = {"init_method": f"tcp://{HOST}:{port}", "rank": context.rank, "world_size": context.world}
    api, backend = (torch_distributed, name.partition(":")[2]) if ":" in name else (groups, name)
    return partial(api.init_process_group, backend, **where), api.destroy_process_group


def free_port() -> int:
    """Return a port that was free just now."""
    with closing(socket.create_server((HOST, 0))) as probe:
        return int(probe.getsockname()[1])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    harness.add_options(
        parser,
        backends=("ref,gloo,torch:gloo", "backends"),
        worlds=("2,4", "numbers of ranks"),
        repetitions=(9, "rounds"),
    )


def main(options: argparse.Namespace) -> int:
    """Measure and print."""
    names, left_out = competitors.split(options.backends.split(","), forked=True)
    print(*left_out, sep="\n", end="\n" * bool(left_out))
    options.backends, options.worlds = names, harness.numbers("benchmark start", "--worlds", options.worlds)
    bar, results = report.ProgressBar(len(options.worlds) * options.repetitions), []
    for world in options.worlds:
        bar.heading(f"{world} ranks")
        results += harness.collect(partial(measure, settings=options), world, bar)
    print(show(results, names))
    entries = [
        {"world": first.cell["world"], "samples": {INIT: first.samples, CYCLE: second.samples}}
        for first, second in zip(results[::2], results[1::2], strict=True)
    ]
    report.write(options.json, report.report("start", harness.settings_of(options), entries, list(map(str, left_out))))
    return 0


def show(results: Sequence[Result], names: Sequence[str]) -> str:
    """Return the table: milliseconds, and how many times faster than the last backend."""
    against = names[-1]
    titles = ["", "ranks", *(f"{name} ms" for name in names), *(f"{name} x {against}" for name in names[:-1])]
    rows = [
        [
            each.cell["what"],
            str(each.cell["world"]),
            *(show_millis(each.median(name)) for name in names),
            *(show_number(each.ratio(against, name)) for name in names[:-1]),
        ]
        for each in results
    ]
    return report.columns(titles, rows)
