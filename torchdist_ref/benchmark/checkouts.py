"""Comparison of this checkout with an older one: ``--against-checkout DIR`` of four of the benchmarks.

This checkout runs once and the old one twice, A and B, in one run of the command. Each of the three has ranks of its
own, which take turns in every round, in an order that rotates, so that a slow phase of the machine slows down all of
them. A against B shows what the machine's noise alone does to a ratio.

Do not add measuring code here: the ranks run that of the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import torchdist_ref
from torchdist_ref.benchmark import ranks, report
from torchdist_ref.benchmark.harness import Harness
from torchdist_ref.benchmark.report import show_micros, show_size
from torchdist_ref.benchmark.rounds import Result
from torchdist_ref.benchmark.settings import Option
from torchdist_ref.errors import ArgumentError, explain

SIDES = ("this", "old A", "old B")
COMMANDS = ("collectives", "ddp", "start", "store")
# A cell counts as slower from this ratio on, if the two runs of the old checkout differ by less.
TOLERATED_RATIO = 1.03
BACKENDS = ("ref", "gloo")


def check_checkout(command: str, option: str, folder: str) -> str:
    """Check that a folder has the package."""
    if not Path(folder, "torchdist_ref", "__init__.py").is_file():
        raise ArgumentError(explain(command, option, "a folder with a package torchdist_ref", folder))
    return folder


OPTION = Option(
    None,
    "compare this checkout with an older one, which runs twice; a folder with a package torchdist_ref",
    check_checkout,
    "DIR",
)


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
        shown = (show_size(part) if key == "size_bytes" and part else str(part) for key, part in self.cell.items())
        return ", ".join(shown)

    def as_json(self) -> dict[str, Any]:
        """Return a flat entry of a report."""
        old = [list(samples) for samples in self.old]
        figures = {"ratio": self.ratio, "old_spread": self.old_spread, "slower": self.slower}
        return {"cell": dict(self.cell), "this_seconds": list(self.this), "old_seconds": old, **figures}


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the n-th root of the product of n ratios.

    >>> round(geometric_mean([0.5, 2.0, 8.0]), 6)
    2.0
    """
    return exp(sum(map(log, ratios)) / len(ratios))


class CheckoutHarness(Harness):
    """Run of one command on this checkout, and on an old one twice."""

    compares_checkouts = True

    @property
    def name(self) -> str:
        """Name in the report."""
        return f"{super().name} against checkout"

    def run(self, program: ranks.Program, world: int, *_: Any, **__: Any) -> list[Any]:
        """Run a program on ranks of all checkouts at once."""
        old = Path(self.settings.against_checkout)
        checkouts = [Path(torchdist_ref.__file__).parents[1], old, old]
        self._pending: list[list[Result]] = [[] for _ in SIDES]
        ranks.run_checkouts(program, world, self.on_report, dict(zip(SIDES, checkouts, strict=True)))
        return []

    def on_report(self, side: int, event: Any) -> None:
        """Handle the headings and numbers of the first side, and the results of all."""
        if not isinstance(event, Result):
            if side == 0 and not isinstance(event, int):
                super().on_report(side, event)
            return
        self._pending[side].append(event)
        while all(self._pending):
            this, *old = (results.pop(0) for results in self._pending)
            for contestant, samples in this.samples.items():
                # Without a choice of contestants the cell has its whole name.
                cell = {"backend": contestant, **this.cell} if "backends" in self.settings else this.cell
                first, second = (result.samples[contestant] for result in old)
                self.results.append(Comparison(cell, samples, (first, second)))
            self.bar.advance(self.results[-1].name)

    def choose_backends(self, forked: bool = True) -> list[str]:
        """Return the backends of ``--backends`` that are the library's own."""
        found = [name for name in self.settings.backends if name in BACKENDS]
        if not found:
            expected = f"one of {', '.join(BACKENDS)} with --against-checkout"
            raise ArgumentError(explain("benchmark", "--backends", expected, ",".join(self.settings.backends)))
        return found

    def show(self, results: list[Any]) -> str:
        """Return the table, the geometric mean, and the cells that are slower."""
        return show(results)

    def finish(self) -> None:
        """Do nothing: a comparison has no pictures."""

    def entries(self) -> list[Any]:
        """Return the comparisons."""
        return [each.as_json() for each in self.results]

    def summary(self) -> dict[str, Any]:
        """Return the geometric mean, and the names of the cells that are slower."""
        slower = [each.name for each in self.results if each.slower]
        return {"geometric_mean": geometric_mean([each.ratio for each in self.results]), "slower": slower}


def show(results: Sequence[Comparison]) -> str:
    """Return the table, the geometric mean, and the cells that are slower."""
    rows = [
        [each.name, *(show_micros(median(samples)) for samples in (each.this, *each.old))]
        + [f"{each.ratio:.3f}", f"{each.old_spread:.3f}"]
        for each in results
    ]
    titles = ["cell", *(f"{side} us" for side in SIDES), "this / old", "old spread"]
    mean = geometric_mean([each.ratio for each in results])
    slower = "; ".join(each.name for each in results if each.slower) or "none"
    return (
        f"{report.columns(titles, rows)}\n\ngeometric mean of this / old over {len(results)} cells: {mean:.3f}\n"
        f"slower than {TOLERATED_RATIO} and than the old spread: {slower}"
    )
