"""Plots of recorded figures as SVG: a row for each thing that was measured, a mark for each figure.

A figure that was recorded as a range, such as "0.58 to 0.64", is a bar from its least to its largest value. Plots are
as wide as a phone at most, and the words of a row are above its marks, so that text is never smaller than 11 pixels.

Do not add here: reading of records (`speed`, `measured`), or text of the pages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from html import escape
from math import ceil, floor, log10

# A figure, or a range of figures; None as its lower end where only the upper one is recorded.
Span = tuple[float | None, float]
WIDTH, LEFT, RIGHT, LINE, TOP = 350, 10, 12, 40, 10
CHARACTERS = 52
RANGE = re.compile(r"(?P<low>[\d./,]+) to (?P<high>[\d./,]+)")


def span(text: str) -> Span | None:
    """Return the figures in a cell of a table; None if it has none.

    >>> span("1.4"), span("0.58 to 0.64"), span("1/7 to 1"), span("up to 8"), span("-21%"), span("all sizes")
    ((1.4, 1.4), (0.58, 0.64), (0.14285714285714285, 1.0), (None, 8.0), None, None)
    """
    if found := RANGE.fullmatch(text):
        return number(found["low"]), number(found["high"])
    if text.startswith("up to ") and (high := number(text.removeprefix("up to "))) is not None:
        return None, high
    value = number(text)
    return None if value is None else (value, value)


def number(text: str) -> float | None:
    """Return a positive number, which may be a fraction or have commas; None for other text."""
    try:
        found = float(Fraction(text.replace(",", "")))
    except ValueError:
        return None
    return found if found > 0 else None


def marks(rows: Sequence[tuple[str, Sequence[Span | None]]], series: Sequence[str], axis: str, even: bool) -> str:
    """Return a plot: rows from the top, one kind of mark for each series, a logarithmic axis below.

    Args:
        rows: Name of each row, and its figure for each series, None where there is none.
        series: Names of the series; a legend has them if there are several.
        axis: Title of the axis, with its unit.
        even: Whether figures are ratios, so that a line marks 1.
    """
    ends = [end for _, cells in rows for cell in cells if cell for end in cell if end]
    low, high = bounds([*ends, 1.0] if even else ends)
    lines = [wrapped(name) for name, _ in rows]
    tops = [TOP + sum(LINE + 14 * (len(line) - 1) for line in lines[:at]) for at in range(len(lines) + 1)]
    bottom = tops[-1] + 2
    height = bottom + 36 + (18 * -(-len(series) // 2) + 2 if len(series) > 1 else 0)

    def x(value: float) -> float:
        return LEFT + (log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' class='speeds' viewBox='0 0 {WIDTH} {height}' role='img' "
        f"aria-label='Plot: {escape(axis, quote=True)}. The table below it has the same figures.'>"
    ]
    before = -99.0
    for tick in ticks(low, high):
        kind = "grid even" if even and tick == 1 else "grid"
        parts.append(f"<line class='{kind}' x1='{x(tick):.1f}' x2='{x(tick):.1f}' y1='{TOP}' y2='{bottom}'/>")
        if x(tick) - before > 34 and x(tick) < WIDTH - 8:
            before = x(tick)
            anchor = "start" if before < 24 else "middle"
            parts.append(f"<text x='{before:.1f}' y='{bottom + 14}' text-anchor='{anchor}'>{tick:,.10g}</text>")
    parts.append(f"<text class='axis' x='{WIDTH - 4}' y='{bottom + 30}' text-anchor='end'>{escape(axis)}</text>")
    for (_, cells), words, top in zip(rows, lines, tops, strict=False):
        for at, line in enumerate(words):
            parts.append(f"<text class='row' x='4' y='{top + 13 + 14 * at}'>{escape(line)}</text>")
        middle = top + 14 * len(words) + 12
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{middle}' y2='{middle}'/>")
        for kind, cell in enumerate(cells):
            if cell:
                first, last = x(cell[0]) if cell[0] else None, x(cell[1])
                # Series that lie upon each other are drawn a little above and below the middle.
                y = middle + (kind - (len(series) - 1) / 2) * min(4.0, 12 / len(series))
                parts.append(drawn(kind, first, last, y))
    if len(series) > 1:
        for at, name in enumerate(series):
            left, y = 12 + at % 2 * 170, bottom + 50 + at // 2 * 18
            parts.append(mark(at, left, y - 4))
            parts.append(f"<text x='{left + 10}' y='{y}'>{escape(name)}</text>")
    return "".join([*parts, "</svg>"])


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the logarithms of the ends of an axis, a little beyond all values."""
    low, high = log10(min(values)), log10(max(values))
    margin = max(0.04 * (high - low), 0.03)
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two logarithms: powers of ten, with 2 and 5 where these are few.

    >>> ticks(0, 2), ticks(-0.4, 0.2)
    ([1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0], [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5])
    """
    steps = (1, 2, 5) if high - low > 0.8 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    steps = (1,) if high - low > 3 else steps
    every = [float(f"{step}e{power}") for power in range(floor(low), ceil(high) + 1) for step in steps]
    return [tick for tick in every if low - 1e-9 <= log10(tick) <= high]


def wrapped(name: str) -> list[str]:
    """Return the lines of a row's name."""
    lines = [""]
    for word in name.split():
        if len(lines[-1]) + len(word) > CHARACTERS:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def drawn(kind: int, first: float | None, last: float, y: float) -> str:
    """Return a figure: a mark, or a bar with a mark at each end that was recorded."""
    if first == last:
        return mark(kind, last, y)
    begin = LEFT if first is None else first
    bar = f"<line class='series s{kind}' x1='{begin:.1f}' x2='{last:.1f}' y1='{y:.1f}' y2='{y:.1f}'/>"
    return f"{bar}{'' if first is None else mark(kind, first, y)}{mark(kind, last, y)}"


def mark(kind: int, x: float, y: float) -> str:
    """Return the mark of a series; each has a shape of its own."""
    corners = {
        1: ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        2: ((0, -5), (5, 4), (-5, 4)),
        3: ((0, -5), (5, 0), (0, 5), (-5, 0)),
    }
    if kind in corners:
        points = " ".join(f"{x + i:.1f},{y + j:.1f}" for i, j in corners[kind])
        return f"<polygon class='mark s{kind}' points='{points}'/>"
    return f"<circle class='mark s{kind}' cx='{x:.1f}' cy='{y:.1f}' r='{4 if kind == 0 else 2.5}'/>"
