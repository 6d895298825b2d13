"""A trace as a picture: one row per rank, time from left to right, a bar for everything that takes time.

The upper third of a row is sending, the middle one receiving, the lower one reducing, since a rank may do all
three at once. What does not fit is left out, and the picture says so.

Do not add here: arrows between ranks. A schedule draws those (`draw`).
"""

from __future__ import annotations

from collections.abc import Iterator

from torchdist_ref.schedules import svg
from torchdist_ref.schedules.events import Event, Trace

LEFT, TOP, ROW, WIDTH = 76.0, 40.0, 34.0, 860.0
MOST_RANKS, MOST_EVENTS = 64, 4000
LANES = {"send": (0, svg.GREY), "recv": (1, svg.BLUE), "reduce": (2, svg.ORANGE), "copy": (2, svg.GREY)}
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def timeline(trace: Trace) -> str:
    """A trace as SVG text.

    Args:
        trace: what `simulate` returned. Beyond 64 ranks or 4,000 events the rest is left out, and the picture
            says so.

    Returns:
        One ``<svg>`` element with title and description; equal traces give equal bytes.

    >>> from torchdist_ref.schedules import build, simulate
    >>> "ring all_reduce" in timeline(simulate(build("all_reduce", "ring", 4), 1 << 20))
    True
    """
    rows = min(1 + max((event.rank for event in trace), default=0), MOST_RANKS)
    events = [event for event in trace if event.rank < rows and event.end > event.start]
    height = TOP + ROW * rows + 44
    title = f"{trace.title}, {trace.world} ranks: {duration(trace.total)}"
    parts = [svg.text(LEFT - 60, 20, title, anchor="start", font_weight="bold")]
    parts += [svg.text(LEFT - 60, TOP + ROW * (rank + 0.6), f"rank {rank}", anchor="start") for rank in range(rows)]
    parts += [_bar(event, trace.total) for event in events[:MOST_EVENTS]]
    parts += _axis(trace.total, TOP + ROW * rows)
    parts.append(svg.text(LEFT - 60, height - 6, _note(trace, rows, len(events)), anchor="start"))
    return svg.document(LEFT + WIDTH + 20, height, title, _description(trace), parts)


def duration(seconds: float) -> str:
    """A time for people, with three digits.

    >>> duration(0.00125), duration(0)
    ('1.25 ms', '0 s')
    """
    scale, unit = next((pair for pair in UNITS if seconds >= pair[0]), UNITS[0] if seconds == 0 else UNITS[-1])
    return f"{seconds / scale:.3g} {unit}"


def _bar(event: Event, total: float) -> str:
    lane, colour = LANES[event.kind]
    x, width = LEFT + WIDTH * event.start / total, WIDTH * (event.end - event.start) / total
    y = TOP + ROW * event.rank + 3 + 9 * lane
    towards = {"send": "to", "recv": "from"}.get(event.kind, "of")
    words = f"rank {event.rank}: {event.kind} {event.label} {towards} rank {event.peer}, {event.nbytes:g} bytes, "
    words += f"{duration(event.start)} to {duration(event.end)}"
    return svg.element("rect", svg.tip(words), x=x, y=y, width=max(width - 0.5, 0.5), height=8, fill=colour, rx=1)


def _axis(total: float, y: float) -> Iterator[str]:
    yield svg.element("line", x1=LEFT, y1=y, x2=LEFT + WIDTH, y2=y, stroke=svg.GREY)
    for quarter in range(5):
        anchor = "end" if quarter == 4 else "middle"
        yield svg.text(LEFT + WIDTH * quarter / 4, y + 14, duration(total * quarter / 4), anchor)


def _note(trace: Trace, rows: int, events: int) -> str:
    left_out = []
    if rows < trace.world and not trace.note:
        left_out.append(f"the first {rows} of {trace.world} ranks")
    if events > MOST_EVENTS:
        left_out.append(f"the first {MOST_EVENTS} of {events} events")
    words = [trace.note, f"shown: {' and '.join(left_out)}" if left_out else ""]
    return " · ".join(word for word in ["grey: send · blue: receive · orange: reduce", *words] if word)


def _description(trace: Trace) -> str:
    return (
        f"What each rank is busy with while {trace.title} runs on {trace.world} ranks, which takes "
        f"{duration(trace.total)}: one row per rank, time from left to right, one bar per message or reduction."
    )
