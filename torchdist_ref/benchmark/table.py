"""Tables in plain text: columns of numbers under two lines of titles. What stands in them is for others to say."""

from __future__ import annotations

from collections.abc import Sequence

from torchdist_ref.benchmark.results import BOUNDS, DIRECT, LIMIT, Row
from torchdist_ref.benchmark.units import show_micros, show_number, show_size

_GAP = "  "


def columns(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lay out rows under titles; the first `left` columns to the left, the others to the right.

    >>> print(columns(["op", "us"], [["barrier", "1.5"], ["all", "12.0"]]))
    op         us
    barrier   1.5
    all      12.0
    """
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = [[*map(_pad, row, widths, [True] * left + [False] * len(widths))] for row in (titles, *rows)]
    return "\n".join(_GAP.join(line).rstrip() for line in lines)


def _pad(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)


def collectives(rows: Sequence[Row], names: Sequence[str], against: str) -> str:
    """The table of one or more operations: the bounds, then the contestants side by side.

    Args:
        rows: What was measured.
        names: The contestants, in the order of their columns, the bounds not among them.
        against: The one that the others are compared with: ``x gloo`` says how many times faster.

    Returns:
        Lines of text: microseconds a call; algorithm and bus bandwidth in GB/s; how many times faster than `against`,
        and how many times its bound (see `bound_of`). ``~`` marks times that were taken beside other processes.
    """
    bounds = [bound for bound in BOUNDS if any(bound in row.samples for row in rows)]
    titles = ["op", "size", *(f"{bound} us" for bound in bounds)]
    for name in names:
        titles += [f"{name} us", "GB/s", "bus", *_compared(name, against, bounds)]
    return columns(titles, [_line(row, names, against, bounds) for row in rows], left=1)


def bound_of(name: str, bounds: Sequence[str]) -> list[str]:
    """The bound that holds for a contestant, if it was measured: with registered buffers there is no staging.

    >>> bound_of("registered", ["limit", "direct"]), bound_of("gloo", ["limit", "direct"]), bound_of("ref", [])
    (['direct'], ['limit'], [])
    """
    return [bound for bound in bounds if bound == (DIRECT if name == "registered" else LIMIT)]


def _compared(name: str, against: str, bounds: Sequence[str]) -> list[str]:
    return ([f"x {against}"] if name != against else []) + [f"/ {bound}" for bound in bound_of(name, bounds)]


def _line(row: Row, names: Sequence[str], against: str, bounds: Sequence[str]) -> list[str]:
    cells = [row.op, show_size(row.size) if row.size else "-", *(_time(row, bound) for bound in bounds)]
    for name in names:
        cells += [_time(row, name), *_bandwidths(row, name), *_ratios(row, name, against, bound_of(name, bounds))]
    return cells


def _time(row: Row, name: str) -> str:
    return show_micros(row.seconds(name)) + ("~" if row.noisy else "") if name in row.samples else "-"


def _bandwidths(row: Row, name: str) -> list[str]:
    if name not in row.samples or not row.size:
        return ["-", "-"]
    return [show_number(value / 1e9) for value in (row.algorithm_bandwidth(name), row.bus_bandwidth(name))]


def _ratios(row: Row, name: str, against: str, bounds: Sequence[str]) -> list[str]:
    pairs = ([(against, name)] if name != against else []) + [(name, bound) for bound in bounds]
    return [show_number(row.ratio(*pair)) if set(pair) <= set(row.samples) else "-" for pair in pairs]
