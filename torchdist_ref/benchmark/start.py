"""``benchmark start``: from nothing to a group of all ranks, and the whole cycle of making and leaving it.

Ranks have torch loaded already. Every backend meets through a store of its own library at a TCP address, as it would
under a launcher; a time is from the moment when the last rank began to the moment when the last rank was there.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch.distributed as theirs

from torchdist_ref import groups
from torchdist_ref.benchmark import competitors, report, table
from torchdist_ref.benchmark.crew import Place, go
from torchdist_ref.benchmark.progress import Progress
from torchdist_ref.benchmark.timing import durations
from torchdist_ref.benchmark.units import show_millis, show_number

INIT, CYCLE = "init", "init and destroy"


@dataclass(frozen=True)
class Settings:
    """What to measure: backends, numbers of ranks, and rounds."""

    backends: tuple[str, ...] = ("ref", "gloo", "torch:gloo")
    worlds: tuple[int, ...] = (2, 4)
    repetitions: int = 9


@dataclass(frozen=True)
class Result:
    """For one number of ranks: by what was timed and by backend, the seconds in each round."""

    world: int
    samples: Mapping[str, Mapping[str, Sequence[float]]]

    def ratio(self, what: str, of: str, to: str) -> float:
        """The median of same-round ratios."""
        pairs = zip(self.samples[what][of], self.samples[what][to], strict=True)
        return median(x / y for x, y in pairs)


def measure(place: Place, settings: Settings) -> None:
    """What each rank does. Reports a result."""
    samples: dict[str, dict[str, list[float]]] = {what: {n: [] for n in settings.backends} for what in (INIT, CYCLE)}
    for turn in range(settings.repetitions):
        first = turn % len(settings.backends)
        for name in settings.backends[first:] + settings.backends[:first]:
            made, gone = _cycle(place, name)
            samples[INIT][name].append(made)
            samples[CYCLE][name].append(gone)
        place.report(turn)
    place.report(Result(place.world, samples))


def _cycle(place: Place, name: str) -> tuple[float, float]:
    init, destroy = _doors(name, place.exchange(_free_port())[0], place)
    place.line_up()
    begin = perf_counter()
    init()
    made = perf_counter()
    # A rank that holds the store and leaves at once would take it from ranks that are still coming.
    place.line_up()
    destroy()
    gone = perf_counter()
    init_seconds, cycle_seconds = durations(place.exchange([(begin, made), (begin, gone)]))
    return init_seconds, cycle_seconds


def _doors(name: str, port: int, place: Place) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """How to make the default group of a backend, and how to leave it."""
    where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": place.rank, "world_size": place.world}
    api, backend = (theirs, name.partition(":")[2]) if ":" in name else (groups, name)
    return partial(api.init_process_group, backend, **where), api.destroy_process_group


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return int(probe.getsockname()[1])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    defaults = Settings()
    backend_names, worlds = ",".join(defaults.backends), ",".join(map(str, defaults.worlds))
    parser.add_argument("--backends", default=backend_names, metavar="A,B,...", help="backends (%(default)s)")
    parser.add_argument("--worlds", default=worlds, metavar="N,M,...", help="numbers of ranks (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=defaults.repetitions, metavar="N", help="rounds")


def main(options: argparse.Namespace) -> int:
    """Measure and print."""
    names, left_out = competitors.split(options.backends.split(","), forked=True)
    for each in left_out:
        print(each)
    worlds = tuple(int(world) for world in options.worlds.split(","))
    settings = Settings(tuple(names), worlds, options.repetitions)
    progress, results = Progress(len(worlds) * settings.repetitions), []

    def hear(event: Any) -> None:
        if isinstance(event, Result):
            results.append(event)
        else:
            progress.advance()

    for world in worlds:
        progress.heading(f"{world} ranks")
        go(lambda place: measure(place, settings), world, hear)
    progress.clear()
    print(show(results, names))
    if options.json:
        entries = [asdict(result) for result in results]
        report.write(options.json, report.report("start", asdict(settings), entries, [str(each) for each in left_out]))
        print(f"wrote {options.json}")
    return 0


def show(results: Sequence[Result], names: Sequence[str]) -> str:
    """The table: milliseconds, and how many times faster than the last backend."""
    against = names[-1]
    titles = ["", "ranks", *(f"{name} ms" for name in names), *(f"{name} x {against}" for name in names[:-1])]
    rows = [
        [
            what,
            str(result.world),
            *(show_millis(median(result.samples[what][name])) for name in names),
            *(show_number(result.ratio(what, against, name)) for name in names[:-1]),
        ]
        for result in results
        for what in (INIT, CYCLE)
    ]
    return table.columns(titles, rows)
