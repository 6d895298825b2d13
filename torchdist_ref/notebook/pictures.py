"""Drawings for tutorials and pages: boxes with arrows between them, and timelines, as SVG.

A drawing is as large as its content, so no text is cut off. Its colors are those of `torchdist_ref.schedules.drawing`,
which can be read on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchdist_ref.schedules import drawing
from torchdist_ref.schedules.drawing import BLUE, GRAY, ORANGE

LETTER, LINE, EDGE = 6.9, 16.0, 4.0
"""Width of a letter and height of a line of text, and the margin around the drawing, in pixels."""
KINDS = {"compute": BLUE, "communicate": ORANGE, "wait": GRAY, "lost": GRAY}
"""Color of each kind of bar in a timeline. Bars of computation and communication are filled, the others dashed."""
FILLED = ("compute", "communicate")
Point = tuple[float, float]


class Box(NamedTuple):
    """Rectangle of a drawing, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def center(self) -> Point:
        """Middle of the box."""
        return self.x + self.width / 2, self.y + self.height / 2

    def edge(self, toward: Point) -> Point:
        """Return the point of the edge on the line from the center to a point outside of the box."""
        (x, y), (a, b) = self.center, toward
        shares = [half / abs(way) for half, way in ((self.width / 2, a - x), (self.height / 2, b - y)) if way]
        share = min([*shares, 1.0])
        return x + share * (a - x), y + share * (b - y)


class Bar(NamedTuple):
    """Bar of a timeline.

    Attributes:
        start: Time at which it begins, in seconds.
        end: Time at which it ends, in seconds.
        text: Words inside the bar, if they fit, and in its tooltip.
        kind: One of ``"compute"``, ``"communicate"``, ``"wait"`` and ``"lost"``.
    """

    start: float
    end: float
    text: str
    kind: str = "compute"


class Drawing:
    """Drawing of boxes, arrows and words. A notebook shows it as a picture.

    Args:
        title: Name of the drawing, for screen readers.
        description: Content of the drawing in a sentence or two, for readers who cannot see it.

    >>> from torchdist_ref.notebook import Drawing
    >>> drawing = Drawing("Two ranks", "Rank 0 sends a tensor to rank 1.")
    >>> sender, receiver = drawing.box(0, 0, "rank 0"), drawing.box(200, 0, "rank 1")
    >>> drawing.arrow(sender, receiver, "tensor")
    >>> "tensor" in drawing.svg()
    True
    """

    def __init__(self, title: str, description: str) -> None:
        """Begin with an empty drawing."""
        self.title, self.description = title, description
        self._parts: list[str] = []
        self._corners: list[Point] = []

    def box(self, x: float, y: float, *lines: str, width: float = 0, height: float = 0, color: str = GRAY) -> Box:
        """Draw a rectangle around lines of text.

        Args:
            x: Left edge, in pixels.
            y: Upper edge, in pixels.
            lines: Text, one line below the other.
            width: Least width in pixels (default: that of the text).
            height: Least height in pixels (default: that of the text).
            color: Color of the edge and of the text, in CSS.

        Returns:
            The rectangle, for `arrow`.
        """
        longest = max(map(len, lines), default=0)
        box = Box(x, y, max(width, LETTER * longest + 16), max(height, LINE * len(lines) + 10))
        self._rectangle(box, color)
        top = box.center[1] - LINE * len(lines) / 2
        for number, line in enumerate(lines):
            self.words(box.center[0], top + LINE * (number + 0.75), line, "middle", color)
        return box

    def frame(self, inside: Sequence[Box], name: str, color: str = GRAY) -> Box:
        """Draw a dashed rectangle around boxes, with a name above them, and return it."""
        x, y = min(box.x for box in inside) - 10, min(box.y for box in inside) - 26
        right, bottom = (max(box.x + box.width for box in inside), max(box.y + box.height for box in inside))
        box = Box(x, y, max(right - x + 10, LETTER * len(name) + 16), bottom - y + 10)
        self._rectangle(box, color, stroke_dasharray="4 3")
        self.words(x + 8, y + 16, name, color=color)
        return box

    def arrow(self, start: Box | Point, end: Box | Point, label: str = "", color: str = GRAY) -> None:
        """Draw an arrow between the edges of two boxes, or between points, with a label at its middle."""
        centers = [each.center if isinstance(each, Box) else each for each in (start, end)]
        (a, b), (x, y) = (
            each.edge(other) if isinstance(each, Box) else each
            for each, other in ((start, centers[1]), (end, centers[0]))
        )
        self._parts.append(drawing.arrow(a, b, x, y, color, label or f"{self.title}: arrow"))
        self._corners += [(a, b), (x, y)]
        if label:
            flat = 5 * abs(y - b) < abs(x - a)
            above = (y - b) * (x - a) > 0
            middle = ((a + x) / 2, (b + y) / 2 - 5) if flat else ((a + x) / 2 + 10, (b + y) / 2 + (-6 if above else 14))
            self.words(*middle, label, "middle" if flat else "start", color)

    def words(self, x: float, y: float, text: str, anchor: str = "start", color: str = GRAY, **style: str) -> None:
        """Write a line of text whose baseline is at `y`; `anchor` is ``"start"``, ``"middle"`` or ``"end"``."""
        self._parts.append(drawing.text(x, y, text, anchor, color, **style))
        left = x - LETTER * len(text) * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        self._corners += [(left, y - 11), (left + LETTER * len(text), y + 4)]

    def bar(self, box: Box, text: str, kind: str) -> None:
        """Draw a bar of a timeline, with the text inside if it fits."""
        color, filled = KINDS[kind], kind in FILLED
        dashes = {} if filled else {"stroke_dasharray": "4 3"}
        self._rectangle(box, color, drawing.tip(text), fill=color if filled else "none", **dashes)
        if LETTER * len(text) + 4 <= box.width:
            fill = "#fff" if filled else color
            self.words(box.center[0], box.y + box.height / 2 + 4, text, "middle", fill)

    def _rectangle(self, box: Box, color: str, *inner: str, fill: str = "none", **style: str) -> None:
        size = {"x": float(box.x), "y": float(box.y), "width": float(box.width), "height": float(box.height)}
        self._parts.append(drawing.element("rect", *inner, **size, rx=4, fill=fill, stroke=color, **style))
        self._corners += [(box.x, box.y), (box.x + box.width, box.y + box.height)]

    def svg(self) -> str:
        """Return the drawing as one ``<svg>`` element with a title and a description."""
        left = min((x for x, _ in self._corners), default=0) - EDGE
        top = min((y for _, y in self._corners), default=0) - EDGE
        width = max((x for x, _ in self._corners), default=0) + EDGE - left
        height = max((y for _, y in self._corners), default=0) + EDGE - top
        moved = drawing.element("g", *self._parts, transform=f"translate({-left:g} {-top:g})")
        return drawing.document(width, height, self.title, self.description, [moved])

    def _repr_svg_(self) -> str:
        return self.svg()


def timelines(
    title: str, description: str, lanes: Mapping[str, Sequence[Bar]], *, width: float = 620, axis: bool = True
) -> Drawing:
    """Draw what happened when: one lane for each name, time from left to right.

    Args:
        title: Name of the drawing, for screen readers.
        description: Content of the drawing, for readers who cannot see it.
        lanes: Bars of each lane, by the name of the lane. Bars of one lane do not overlap.
        width: Pixels for the time of all bars (default: 620).
        axis: Whether times are written below the lanes (default: True).

    Returns:
        A drawing that a notebook shows.

    >>> from torchdist_ref.notebook import Bar, timelines
    >>> lanes = {"rank 0": [Bar(0.0, 2.0, "backward"), Bar(2.0, 3.0, "all_reduce", "communicate")]}
    >>> "all_reduce" in timelines("One step", "Rank 0 computes, then sends.", lanes).svg()
    True
    """
    made = Drawing(title, description)
    total = max(bar.end for bars in lanes.values() for bar in bars)
    left, kinds = LETTER * max(map(len, lanes)) + 12, {bar.kind for bars in lanes.values() for bar in bars}
    for row, (name, bars) in enumerate(lanes.items()):
        y = 30.0 * row
        made.words(0, y + 15, name)
        for bar in bars:
            x, span = left + width * bar.start / total, width * (bar.end - bar.start) / total
            made.bar(Box(x, y, max(span - 1, 1.0), 22), bar.text, bar.kind)
    bottom = 30.0 * len(lanes) + 4
    if axis:
        for quarter in range(5):
            made.words(left + width * quarter / 4, bottom + 12, drawing.duration(total * quarter / 4), "middle")
        bottom += 20
    legend = {"compute": "blue: computes", "communicate": "orange: communicates", "wait": "dashed: waits"}
    made.words(0, bottom + 14, " · ".join(words for kind, words in legend.items() if kind in kinds))
    return made
