"""Comparison of this checkout with an older one: ``--against-checkout DIR`` of four of the benchmarks.

This checkout runs once and the old one twice, A and B, in one run. Each of the three has processes of its own, which
run `checkout_rank`. The three take turns in every round, and the order rotates, so that a slow phase of the machine
slows down all of them. A against B shows what the machine's noise alone does to a ratio.

Do not add measuring code here: it runs in the ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import exp, log
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torchdist_ref
from torchdist_ref import processes
from torchdist_ref.benchmark import checkout_rank, collectives, ddp, harness, report, start, store
from torchdist_ref.benchmark.report import show_micros, show_size
from torchdist_ref.benchmark.timing import LINE_BYTES, calls_for, durations, rotated
from torchdist_ref.errors import ArgumentError, DistBackendError, explain

THIS, OLD_A, OLD_B = "this", "old A", "old B"
# A cell counts as slower from this ratio on, if the two runs of the old checkout differ by less.
TOLERATED_RATIO = 1.03
CALIBRATION_CALLS = 3
EXIT_SECONDS = 10.0
BACKENDS = ("ref", "gloo")


@dataclass(frozen=True)
class Comparison:
    """Times of one cell: operation and size, model and hook, store operation and clients, or start.

    Attributes:
        cell: Name of the cell by its parts.
        this: Seconds of a call in this checkout, one value a round.
        old: The same of the two runs of the old checkout.
    """

    cell: Mapping[str, Any]
    this: Sequence[float]
    old: tuple[Sequence[float], Sequence[float]]

    @property
    def ratio(self) -> float:
        """Median of this checkout over the median of the old one's rounds, A and B together."""
        return median(self.this) / median([*self.old[0], *self.old[1]])

    @property
    def old_spread(self) -> float:
        """Larger median of A and B over the smaller one: at least 1.

        >>> Comparison({}, [3.0], ([2.0], [1.0])).old_spread
        2.0
        """
        first, second = sorted(map(median, self.old))
        return second / first

    @property
    def slower(self) -> bool:
        """Whether this checkout is slower by more than the tolerated ratio and than the noise between A and B."""
        return self.ratio > max(TOLERATED_RATIO, self.old_spread)

    @property
    def name(self) -> str:
        """Parts of the cell as one text."""
        shown = (show_size(part) if key == "bytes" and part else str(part) for key, part in self.cell.items())
        return ", ".join(shown)

    def as_json(self) -> dict[str, Any]:
        """Return a flat entry of a report."""
        return {
            "cell": dict(self.cell),
            "this_seconds": list(self.this),
            "old_seconds": [list(samples) for samples in self.old],
            "ratio": self.ratio,
            "old_spread": self.old_spread,
            "slower": self.slower,
        }


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the n-th root of the product of n ratios.

    >>> round(geometric_mean([0.5, 2.0, 8.0]), 6)
    2.0
    """
    return exp(sum(map(log, ratios)) / len(ratios))


@dataclass(frozen=True)
class ComparisonPlan:
    """Cells to measure, and how.

    Attributes:
        benchmark: Name of the command.
        cells: Parts of each cell by name.
        world: Ranks of a checkout.
        repetitions: Rounds.
        seconds: Length of a checkout's turn; 0 for one call.
    """

    benchmark: str
    cells: Sequence[Mapping[str, Any]]
    world: int
    repetitions: int
    seconds: float


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, and write the report."""
    old = Path(options.against_checkout)
    if not (old / "torchdist_ref" / "__init__.py").is_file():
        expected = "a folder with a package torchdist_ref"
        raise ArgumentError(explain("benchmark", "--against-checkout", expected, options.against_checkout))
    plan = PLANS[options.benchmark](options)
    bar = report.ProgressBar(len(plan.cells))
    results = []
    for result in compare(plan, old, Path(torchdist_ref.__file__).parents[1]):
        results.append(result)
        bar.advance(result.name)
    bar.clear()
    print(show(results))
    settings = {"against_checkout": str(old), "world": plan.world, "repetitions": plan.repetitions}
    content = report.report(f"{plan.benchmark} against checkout", settings, [each.as_json() for each in results])
    content["geometric_mean"] = geometric_mean([each.ratio for each in results])
    content["slower"] = [each.name for each in results if each.slower]
    report.write(options.json, content)
    return 0


def show(results: Sequence[Comparison]) -> str:
    """Return the table, the geometric mean, and the cells that are slower."""
    rows = [
        [
            each.name,
            *(show_micros(median(samples)) for samples in (each.this, *each.old)),
            f"{each.ratio:.3f}",
            f"{each.old_spread:.3f}",
        ]
        for each in results
    ]
    titles = ["cell", f"{THIS} us", f"{OLD_A} us", f"{OLD_B} us", "this / old", "old spread"]
    mean = geometric_mean([each.ratio for each in results])
    slower = "; ".join(each.name for each in results if each.slower) or "none"
    return (
        f"{report.columns(titles, rows)}\n\ngeometric mean of this / old over {len(results)} cells: {mean:.3f}\n"
        f"slower than {TOLERATED_RATIO} and than the old spread: {slower}"
    )


def _collectives_plan(options: argparse.Namespace) -> ComparisonPlan:
    names = _own_backends(options)
    settings = collectives.checked(options, names)
    cells = [
        {"backend": name, "op": op.name, "bytes": size} for name in names for op, size in collectives.cases(settings)
    ]
    return ComparisonPlan("collectives", cells, settings.world, settings.repetitions, settings.seconds)


def _ddp_plan(options: argparse.Namespace) -> ComparisonPlan:
    settings = ddp.checked(options)
    cells = [{"model": model, "hook": hook} for model in settings.models for hook in settings.hooks]
    return ComparisonPlan("ddp", cells, settings.world, settings.repetitions, settings.seconds)


def _store_plan(options: argparse.Namespace) -> ComparisonPlan:
    clients = harness.numbers("benchmark store", "--clients", options.clients)
    operations = (*store.OPERATIONS, store.BARRIER)
    cells = [{"operation": operation, "clients": count} for count in clients for operation in operations]
    return ComparisonPlan("store", cells, 1 + max(clients), options.repetitions, options.seconds)


def _start_plan(options: argparse.Namespace) -> ComparisonPlan:
    worlds = harness.numbers("benchmark start", "--worlds", options.worlds)
    cells = [
        {"backend": name, "operation": operation, "world": world}
        for name in _own_backends(options)
        for world in worlds
        for operation in (start.INIT, start.CYCLE)
    ]
    return ComparisonPlan("start", cells, max(worlds), options.repetitions, 0.0)


PLANS: dict[str, Callable[[argparse.Namespace], ComparisonPlan]] = {
    "collectives": _collectives_plan,
    "ddp": _ddp_plan,
    "store": _store_plan,
    "start": _start_plan,
}


def _own_backends(options: argparse.Namespace) -> list[str]:
    """Return the backends to measure: those of ``--backends`` that are the library's own."""
    found = [name for name in options.backends.split(",") if name in BACKENDS]
    if not found:
        expected = f"one of {', '.join(BACKENDS)} with --against-checkout"
        raise ArgumentError(explain("benchmark", "--backends", expected, options.backends))
    return found


def compare(plan: ComparisonPlan, old: Path, this: Path) -> Iterator[Comparison]:
    """Measure every cell of a plan in this checkout and twice in an old one.

    Raises:
        DistBackendError: A rank failed.
    """
    with _ranks(plan, this, THIS) as new, _ranks(plan, old, OLD_A) as first, _ranks(plan, old, OLD_B) as second:
        sides = {THIS: new, OLD_A: first, OLD_B: second}
        for number, cell in enumerate(plan.cells):
            for side in sides.values():
                side.ask({"cell": cell, "number": number})
            calls = 1
            if plan.seconds:
                least = [min(side.turn(CALIBRATION_CALLS)) for side in sides.values()]
                calls = calls_for(least, plan.seconds)
            samples: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(plan.repetitions):
                for name in rotated([*sides], turn):
                    samples[name].append(median(sides[name].turn(calls)))
            yield Comparison(cell, samples[THIS], (samples[OLD_A], samples[OLD_B]))


class CheckoutRanks:
    """Ranks of one run of one checkout, as seen by the parent."""

    def __init__(self, name: str, benchmark: str, connections: Sequence[Connection]) -> None:
        self._name, self._connections = name, connections
        # Other benchmarks time each call; these send the time of all calls of a turn.
        self._in_a_row = benchmark != "collectives"

    def ask(self, *orders: Any) -> list[Any]:
        """Send each rank its order, or all the same one, and return the replies."""
        for rank, connection in enumerate(self._connections):
            # A rank that has ended left the reason as its reply, or the end of the stream.
            with suppress(BrokenPipeError):
                connection.send(orders[rank % len(orders)])
        return [self._reply(rank) for rank in range(len(self._connections))]

    def _reply(self, rank: int) -> Any:
        try:
            reply = self._connections[rank].recv()
        except (EOFError, ConnectionResetError):
            reply = "the process ended"
        if isinstance(reply, str):
            raise DistBackendError(f"benchmark: rank {rank} of the checkout {self._name!r} failed: {reply}")
        return reply

    def turn(self, calls: int) -> list[float]:
        """Return the seconds of each call of a turn, or of their mean."""
        times = [reply for reply in self.ask({"calls": calls, "port": start.free_port()}) if reply]
        return durations(times, calls if self._in_a_row else 1)


@contextmanager
def _ranks(plan: ComparisonPlan, checkout: Path, name: str) -> Iterator[CheckoutRanks]:
    """Start the ranks of one checkout; they have ended when the block ends."""
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    pairs = [Pipe() for _ in range(plan.world)]
    memory = os.memfd_create("torchdist_ref", os.MFD_CLOEXEC)
    children: list[processes.Child] = []
    with tempfile.TemporaryDirectory(prefix="torchdist_ref-") as folder:
        try:
            os.ftruncate(memory, len(plan.cells) * plan.world * LINE_BYTES)
            for _, end in pairs:
                # -P keeps the folder of the script off the path.
                command = [sys.executable, "-P", checkout_rank.__file__, str(end.fileno()), str(memory)]
                children.append(processes.spawn(command, env=environment, pass_fds=(end.fileno(), memory)))
                end.close()
            side = CheckoutRanks(name, plan.benchmark, [here for here, _ in pairs])
            task = {
                "benchmark": plan.benchmark,
                "cells": len(plan.cells),
                "world": plan.world,
                "checkout": str(checkout),
                "folder": folder,
            }
            side.ask(*({**task, "rank": rank} for rank in range(plan.world)))
            yield side
            for here, _ in pairs:
                here.send(None)
            for child in children:
                child.wait(EXIT_SECONDS)
        finally:
            for child in children:
                child.terminate(EXIT_SECONDS)
            for pair in pairs:
                for each in pair:
                    each.close()
            os.close(memory)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--against-checkout",
        metavar="DIR",
        help="compare this checkout with an older one, which runs twice; a folder with a package torchdist_ref",
    )
