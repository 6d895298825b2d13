"""One training step as a picture, for each hook: what computes, which buckets are under way, what the backend works on.

Time runs from left to right, on one scale for all hooks of one task, backend and link, so that the shorter step is the
shorter picture. What overlaps in time stands one above the other. It is drawn with the words of
`torchdist_ref.schedules.drawing`, as schedules are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchdist_ref.benchmark.hooks_results import Result
from torchdist_ref.benchmark.hooks_watch import Span
from torchdist_ref.schedules import drawing as svg
from torchdist_ref.schedules.drawing import duration

_LEFT, _WIDTH, _BAR, _GAP, _HEAD = 92.0, 740.0, 14.0, 3.0, 26.0
_ROWS = ("compute", "buckets", "calls")
_COLOURS = {"compute": svg.BLUE, "buckets": svg.GREY, "calls": svg.ORANGE}
_LEGEND = "blue: computing · orange: waiting, and calls · grey: a bucket under way"
# Narrower than this a bar has no room for its word; the tooltip has.
_ROOM = 7.0


def write(path: str, results: Sequence[Result]) -> None:
    """Write the picture of all results that have a step recorded to a file."""
    Path(path).write_text(draw(results), encoding="utf-8")


def draw(results: Sequence[Result]) -> str:
    """One step of each result that has one recorded, on rank 0. What is on one link is on one scale.

    Returns:
        One ``<svg>`` element with title and description, to be read on light and on dark pages.

    >>> spans = [("compute", "forward", 0.0, 0.01), ("buckets", "bucket 0", 0.002, 0.01)]
    >>> one = Result("text", "ref", "fast", "none", 2, 8, 0, 0, None, [0.5], [0.01], [3.0], 1, spans=spans)
    >>> "none: text on ref, fast, 10 ms" in draw([one])
    True
    """
    groups: dict[tuple[str, str, str], dict[str, Sequence[Span]]] = {}
    for one in results:
        if one.spans:
            steps = groups.setdefault((one.task, one.backend, one.link), {})
            steps[f"{one.hook}: {one.task} on {one.backend}, {one.link}"] = one.spans
    return picture(list(groups.values()))


def picture(groups: Sequence[Mapping[str, Sequence[Span]]]) -> str:
    """Steps by their names, those of a group on one scale, as SVG text.

    Args:
        groups: The spans of each step, as `Spans` yields them.

    >>> picture([{"mine": [("compute", "forward", 0.0, 2.0)]}]).count("mine, 2 s")
    1
    """
    parts: list[str] = []
    y = 4.0
    for group in groups:
        total = max(end for spans in group.values() for *_, end in spans)
        for name, spans in group.items():
            parts += _step(name, spans, y, total)
            y += _height(spans)
        parts += _axis(y + 4, total)
        y += 32
    names = "; ".join(name for group in groups for name in group)
    about = f"Three rows for each of: {names}. What the rank computes, buckets under way, the backend's calls."
    parts.append(svg.text(4, y + 14, _LEGEND, anchor="start"))
    return svg.document(_LEFT + _WIDTH + 20, y + 24, "One training step", about, parts)


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans that overlap on lines of their own, each on the first line that is free."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span[2]):
        free = next((lane for lane in lanes if lane[-1][3] <= span[2]), None)
        if free is None:
            lanes.append(free := [])
        free.append(span)
    return lanes


def _rows(spans: Sequence[Span]) -> list[tuple[str, list[list[Span]]]]:
    return [(row, _lanes([span for span in spans if span[0] == row]) or [[]]) for row in _ROWS]


def _height(spans: Sequence[Span]) -> float:
    return _HEAD + sum(len(lanes) * _BAR + _GAP for _, lanes in _rows(spans)) + 8


def _step(name: str, spans: Sequence[Span], y: float, total: float) -> Iterator[str]:
    length = duration(max(span[3] for span in spans))
    yield svg.text(4, y + 16, f"{name}, {length}", anchor="start", font_weight="bold")
    y += _HEAD
    for row, lanes in _rows(spans):
        yield svg.text(4, y + _BAR - 3, row, anchor="start")
        for lane in lanes:
            yield from (_bar(span, y, total) for span in lane)
            y += _BAR
        y += _GAP


def _bar(span: Span, y: float, total: float) -> str:
    row, what, begin, end = span
    x, width = _LEFT + _WIDTH * begin / total, max(_WIDTH * (end - begin) / total, 1.0)
    colour = svg.ORANGE if what == "wait" else _COLOURS[row]
    words = svg.tip(f"{what}: {duration(begin)} to {duration(end)}")
    bar = svg.element("rect", words, x=x, y=y, width=width, height=_BAR - 2, fill=colour, rx=2)
    short = what.split(",")[0]
    if width < _ROOM * len(short):
        return bar
    return bar + svg.text(x + width / 2, y + _BAR - 4.5, short, fill="#fff", font_size=10, pointer_events="none")


def _axis(y: float, total: float) -> Iterator[str]:
    yield svg.element("line", x1=_LEFT, y1=y, x2=_LEFT + _WIDTH, y2=y, stroke=svg.GREY)
    for quarter in range(5):
        anchor = ("start", "middle", "middle", "middle", "end")[quarter]
        yield svg.text(_LEFT + _WIDTH * quarter / 4, y + 14, duration(total * quarter / 4), anchor)
