"""A schedule as a picture: ranks side by side, rounds from top to bottom, an arrow for everything that moves.

Blue arrows replace what was there, orange ones (marked ``+``) are reduced into it; a dot is local work. All moves
of a round with the same two ends are one arrow. Which slots arrive stands below its head, where no two labels
can meet; the tooltip lists every move. What does not fit is left out, and the picture says so.

Do not add here: times. A trace draws those (`timeline`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchdist_ref.schedules import svg
from torchdist_ref.schedules.messages import Message, messages
from torchdist_ref.schedules.schedule import Schedule

COLUMN, BAND, ARROW, LEFT, TOP = 112.0, 100.0, 60.0, 76.0, 58.0
MOST_RANKS, MOST_ROUNDS = 32, 40


def draw(schedule: Schedule) -> str:
    """A schedule as SVG text.

    Args:
        schedule: to draw. Beyond 32 ranks or 40 rounds the rest is left out, and the picture says so.

    Returns:
        One ``<svg>`` element with title and description, readable on light and dark pages; equal schedules
        give equal bytes.

    >>> from torchdist_ref.schedules import build
    >>> draw(build("broadcast", "tree", 4)).count("<polygon")
    3
    """
    ranks, rounds = min(schedule.world, MOST_RANKS), min(len(schedule.rounds), MOST_ROUNDS)
    height = TOP + BAND * max(rounds, 1) + 34
    parts = [svg.text(LEFT - 40, 20, schedule.name, anchor="start", font_weight="bold")]
    parts += [svg.text(_x(rank), TOP - 14, f"rank {rank}") for rank in range(ranks)]
    for step in range(rounds):
        parts += _band(step, messages(schedule.rounds[step]), ranks)
    parts.append(svg.text(LEFT - 40, height - 8, _omitted(schedule, ranks, rounds), anchor="start"))
    width = max(LEFT + COLUMN * ranks, 420.0)
    return svg.document(width, height, schedule.name, _description(schedule), parts)


def _x(rank: int) -> float:
    return LEFT + COLUMN * (rank + 0.35)


def _band(step: int, found: Sequence[Message], ranks: int) -> Iterator[str]:
    top = TOP + BAND * step
    yield svg.text(LEFT - 40, top + 32, f"round {step + 1}", anchor="start")
    yield svg.element(
        "line",
        x1=LEFT - 40,
        y1=top + BAND - 4,
        x2=_x(ranks - 1) + 40,
        y2=top + BAND - 4,
        stroke=svg.GREY,
        stroke_width=0.5,
        stroke_dasharray="2 4",
    )
    for x in map(_x, range(ranks)):
        yield svg.element("line", x1=x, y1=top - 2, x2=x, y2=top + ARROW, stroke=svg.GREY, stroke_width=0.6)
    shown = [part for part in found if max(part.src, part.dst) < ranks]
    yield from (_arrow(part, top) for part in shown)
    for rank in range(ranks):
        yield from _labels([part for part in shown if part.dst == rank], top + ARROW)


def _arrow(part: Message, top: float) -> str:
    tooltip, colour = "\n".join(map(str, part.moves)), svg.ORANGE if part.reduced else svg.BLUE
    if part.src == part.dst:
        return svg.element("circle", svg.tip(tooltip), cx=_x(part.dst), cy=top + ARROW - 4, r=4, fill=colour)
    return svg.arrow(_x(part.src), top + 4, _x(part.dst), top + ARROW, colour, tooltip)


def _labels(parts: Sequence[Message], y: float) -> Iterator[str]:
    """What arrives on one rank: two lines, or how many messages there are."""
    if len(parts) > 2:
        yield svg.text(_x(parts[0].dst), y + 13, f"{len(parts)} messages")
        return
    for line, part in enumerate(parts, 1):
        colour = svg.ORANGE if part.reduced else svg.BLUE
        yield svg.text(_x(part.dst), y + 13 * line, _short(part.label), fill=colour)


def _short(label: str) -> str:
    return label if len(label) <= 16 else label[:15] + "…"


def _omitted(schedule: Schedule, ranks: int, rounds: int) -> str:
    shown = [(ranks, schedule.world, "ranks"), (rounds, len(schedule.rounds), "rounds")]
    left_out = [f"the first {few} of {all_} {what}" for few, all_, what in shown if few < all_]
    return f"Shown: {' and '.join(left_out)}." if left_out else "blue: copied · orange, +: reduced · dot: local"


def _description(schedule: Schedule) -> str:
    return (
        f"{schedule.name} on {schedule.world} ranks in {len(schedule.rounds)} rounds: one column per rank, one band "
        "per round from top to bottom, one arrow per message from sender to receiver."
    )
