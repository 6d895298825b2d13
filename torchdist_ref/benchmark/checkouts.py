"""Comparison of this checkout with an older one: ``--against-checkout DIR`` of four of the benchmarks.

This checkout runs once and the old one twice, A and B, in one run of the command. Each of the three has ranks of its
own, which take turns in every round, in an order that rotates, so that a slow phase of the machine slows down all of
them. A against B shows what the machine's noise alone does to a ratio.

Do not add measuring code here: the ranks run that of the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torchdist_ref
from torchdist_ref.benchmark import ranks
from torchdist_ref.benchmark.harness import Harness, Option
from torchdist_ref.benchmark.report import columns, show_micros, show_size
from torchdist_ref.benchmark.rounds import Result
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


def compared(cell: Mapping[str, Any], *samples: Sequence[float]) -> Result:
    """Return the result of a cell whose contestants are the `SIDES`: seconds of a call, one value a round."""
    return Result(cell, dict(zip(SIDES, samples, strict=True)))


def ratio_to_old(result: Result) -> float:
    """Return this checkout's median over the median of the old one's rounds, A and B together."""
    this, *old = result.samples.values()
    return median(this) / median(chain(*old))


def old_spread(result: Result) -> float:
    """Return the larger median of A and B over the smaller one: at least 1.

    >>> old_spread(compared({}, [3.0], [2.0], [1.0]))
    2.0
    """
    first, second = sorted(map(result.median, SIDES[1:]))
    return second / first


def slower(result: Result) -> bool:
    """Return whether this checkout is slower by more than the tolerated ratio and than the noise between A and B."""
    return ratio_to_old(result) > max(TOLERATED_RATIO, old_spread(result))


def name(result: Result) -> str:
    """Return the parts of the cell as one text."""
    shown = (show_size(part) if key == "size_bytes" and part else str(part) for key, part in result.cell.items())
    return ", ".join(shown)


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
            sides = [results.pop(0) for results in self._pending]
            for contestant in sides[0].samples:
                # Without a choice of contestants the cell has its whole name.
                chosen = {"backend": contestant} if "backends" in self.settings else {}
                cell = {**chosen, **sides[0].cell}
                self.results.append(compared(cell, *(result.samples[contestant] for result in sides)))
            self.bar.advance(name(self.results[-1]))

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
        return [
            {
                "cell": dict(each.cell),
                "this_seconds": list(each.samples[SIDES[0]]),
                "old_seconds": [list(each.samples[side]) for side in SIDES[1:]],
                "ratio": ratio_to_old(each),
                "old_spread": old_spread(each),
                "slower": slower(each),
            }
            for each in self.results
        ]

    def summary(self) -> dict[str, Any]:
        """Return the geometric mean, and the names of the cells that are slower."""
        found = [name(each) for each in self.results if slower(each)]
        return {"geometric_mean": geometric_mean(map(ratio_to_old, self.results)), "slower": found}


def show(results: Sequence[Result]) -> str:
    """Return the table, the geometric mean, and the cells that are slower."""
    rows = [
        [name(each), *(show_micros(each.median(side)) for side in SIDES)]
        + [f"{ratio_to_old(each):.3f}", f"{old_spread(each):.3f}"]
        for each in results
    ]
    titles = ["cell", *(f"{side} us" for side in SIDES), "this / old", "old spread"]
    behind = "; ".join(map(name, filter(slower, results))) or "none"
    return (
        f"{columns(titles, rows)}\n\n"
        f"geometric mean of this / old over {len(results)} cells: {geometric_mean(map(ratio_to_old, results)):.3f}\n"
        f"slower than {TOLERATED_RATIO} and than the old spread: {behind}"
    )
