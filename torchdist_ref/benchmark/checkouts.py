"""Comparison of this checkout with an older one: ``--against-checkout DIR`` of four of the benchmarks.

This checkout runs once and the old one twice, A and B, in one run of the command. Each of the three has ranks of its
own, which take turns in every round, in an order that rotates, so that a slow phase of the machine slows down all of
them. A against B shows what the machine's noise alone does to a ratio.

Do not add measuring code here: the ranks run that of the command.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torchdist_ref
from torchdist_ref.benchmark.report import show_size, table, time
from torchdist_ref.benchmark.rounds import Result

SIDES = ("this", "old A", "old B")
COMMANDS = ("collectives", "ddp", "start", "store")
# A cell counts as slower from this ratio on, if the two runs of the old checkout differ by less.
TOLERATED_RATIO = 1.03
BACKENDS = ("ref", "gloo")


def folder(path: str) -> str:
    """Check that a folder has the package."""
    if not Path(path, "torchdist_ref", "__init__.py").is_file():
        raise ArgumentTypeError(f"expected a folder with a package torchdist_ref, got {path!r}")
    return path


def folders(old: str | None) -> dict[str, Path]:
    """Return the folder of each side: of this checkout, and twice of the old one, if any."""
    this = {SIDES[0]: Path(torchdist_ref.__file__).parents[1]}
    return this | ({side: Path(old) for side in SIDES[1:]} if old else {})


def merged(sides: Sequence[Result], by_backend: bool) -> list[Result]:
    """Return a result for each contestant of a cell that all sides measured; the contestants of it are the `SIDES`."""
    return [
        Result(
            {**({"backend": contestant} if by_backend else {}), **sides[0].cell},
            {side: result.samples[contestant] for side, result in zip(SIDES, sides, strict=True)},
        )
        for contestant in sides[0].samples
    ]


def ratio_to_old(result: Result) -> float:
    """Return this checkout's median over the median of the old one's rounds, A and B together."""
    this, *old = result.samples.values()
    return median(this) / median(chain(*old))


def old_spread(result: Result) -> float:
    """Return the larger median of A and B over the smaller one: at least 1.

    >>> old_spread(Result({}, {"this": [3.0], "old A": [2.0], "old B": [1.0]}))
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


def show(results: Sequence[Result]) -> str:
    """Return the table, the geometric mean, and the cells that are slower."""
    ratios = [("this / old", ratio_to_old), ("old spread", old_spread)]
    figures = [(title, lambda result, of=of: f"{of(result):.3f}") for title, of in ratios]
    found = summary(results)
    return (
        f"{table([('cell', name), *(time(side, 'us') for side in SIDES), *figures], results)}\n\n"
        f"geometric mean of this / old over {len(results)} cells: {found['geometric_mean']:.3f}\n"
        f"slower than {TOLERATED_RATIO} and than the old spread: {'; '.join(found['slower']) or 'none'}"
    )


def entries(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the comparisons for the report."""
    return [
        {**each.entry(), "ratio": ratio_to_old(each), "old_spread": old_spread(each), "slower": slower(each)}
        for each in results
    ]


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return the geometric mean, and the names of the cells that are slower."""
    found = [name(each) for each in results if slower(each)]
    return {"geometric_mean": geometric_mean(map(ratio_to_old, results)), "slower": found}
