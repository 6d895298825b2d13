"""Pictures of schedules and traces, as SVG text: the same value gives the same bytes.

`draw` shows a schedule: ranks side by side, rounds from top to bottom, an arrow for every message. `timeline` shows a
trace: one row per rank, time from left to right, a bar for every event. The functions below them write SVG elements,
also for the benchmark's timelines.

Colors are middle tones with enough contrast on white and on black, so that a picture is readable on pages of any theme.
Every picture has a title and a description for screen readers, and small elements have tooltips.

Do not add here: times (`simulate`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from html import escape

from torchdist_ref.schedules.schedule import Message, Schedule, messages, picture
from torchdist_ref.schedules.simulate import Trace, TraceEvent

GRAY, BLUE, ORANGE = "#767676", "#2b7bb9", "#c2571a"
FONT = "font-family='ui-monospace,Menlo,Consolas,monospace' font-size='11'"
# Lengths in pixels.
NARROWEST, LETTER, MAX_LABEL, MARGIN, ROUND_NAMES = 52.0, 6.6, 16, 4.0, 54.0
BAND, ARROW, LEFT, TOP = 100.0, 60.0, 76.0, 58.0
MAX_DRAWN_RANKS, MAX_DRAWN_ROUNDS = 32, 40
TIMELINE_TOP, ROW, TIMELINE_WIDTH = 40.0, 34.0, 860.0
MAX_TIMELINE_RANKS, MAX_TIMELINE_EVENTS = 64, 4000
# Third of a row and color of each kind of event: a rank may send, receive and reduce at the same time.
THIRDS = {"send": (0, GRAY), "recv": (1, BLUE), "reduce": (2, ORANGE), "copy": (2, GRAY)}
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def draw(schedule: Schedule) -> str:
    """Return a schedule as SVG text.

    Blue arrows copy, orange ones (marked ``+``) reduce; a dot is local work. The slots that arrive are listed below
    the arrow's head, and a tooltip lists every move. A note lists what is omitted.

    Args:
        schedule: to draw. Beyond 32 ranks or 40 rounds the rest is omitted.

    Returns:
        One ``<svg>`` element with title and description, readable on light and dark pages; equal schedules
        give equal bytes.

    >>> from torchdist_ref.schedules import draw
    >>> from torchdist_ref.schedules import build
    >>> draw(build("broadcast", "tree", 4)).count("<polygon")
    3
    """
    ranks, rounds = min(schedule.world, MAX_DRAWN_RANKS), min(len(schedule.rounds), MAX_DRAWN_ROUNDS)
    steps = [
        [part for part in messages(found) if max(part.src, part.dst) < ranks] for found in schedule.rounds[:rounds]
    ]
    longest = max((len(line) for found in steps for lines in _labels(found, ranks) for line, _ in lines), default=0)
    column = max(LETTER * longest + 6, NARROWEST)
    centers = [ROUND_NAMES + column * (rank + 0.5) for rank in range(ranks)]
    height = TOP + BAND * max(rounds, 1) + 34
    parts = [text(MARGIN, 20, schedule.name, anchor="start", font_weight="bold")]
    parts += [text(x, TOP - 14, f"rank {rank}") for rank, x in enumerate(centers)]
    for step, found in enumerate(steps):
        parts += _band(step, found, centers)
    note = _omitted(schedule, ranks, rounds)
    parts.append(text(MARGIN, height - 8, note, anchor="start"))
    width = max(ROUND_NAMES + column * ranks, LETTER * max(len(note), len(schedule.name)) + 2 * MARGIN)
    description = (
        f"{schedule.name} on {schedule.world} ranks in {len(schedule.rounds)} rounds: one column per rank, one band "
        "per round from top to bottom, one arrow per message from sender to receiver."
    )
    return document(width, height, schedule.name, description, parts)


def _band(step: int, shown: Sequence[Message], centers: Sequence[float]) -> Iterator[str]:
    """Draw one round; ``centers`` are the columns of the ranks."""
    top = TOP + BAND * step
    yield text(MARGIN, top + 32, f"round {step + 1}", anchor="start")
    below = {"stroke": GRAY, "stroke_width": 0.5, "stroke_dasharray": "2 4"}
    yield element("line", x1=MARGIN, y1=top + BAND - 4, x2=centers[-1] + 24, y2=top + BAND - 4, **below)
    for x in centers:
        yield element("line", x1=x, y1=top - 2, x2=x, y2=top + ARROW, stroke=GRAY, stroke_width=0.6)
    yield from (_message(part, top, centers) for part in shown)
    for x, lines in zip(centers, _labels(shown, len(centers)), strict=True):
        yield from (text(x, top + ARROW + 13 * n, line, fill=color) for n, (line, color) in enumerate(lines, 1))


def _message(part: Message, top: float, centers: Sequence[float]) -> str:
    tooltip, color = "\n".join(map(str, part.moves)), ORANGE if part.reduced else BLUE
    if part.src == part.dst:
        return element("circle", tip(tooltip), cx=centers[part.dst], cy=top + ARROW - 4, r=4, fill=color)
    return arrow(centers[part.src], top + 4, centers[part.dst], top + ARROW, color, tooltip)


def _labels(shown: Sequence[Message], ranks: int) -> Iterator[list[tuple[str, str]]]:
    """Return, for each rank, text and color of the messages that arrive: at most two lines, or their number."""
    for rank in range(ranks):
        parts = [part for part in shown if part.dst == rank]
        if len(parts) > 2:
            yield [(f"{len(parts)} messages", GRAY)]
            continue
        lines = [part.label if len(part.label) <= MAX_LABEL else part.label[: MAX_LABEL - 1] + "…" for part in parts]
        yield [(line, ORANGE if part.reduced else BLUE) for line, part in zip(lines, parts, strict=True)]


def _omitted(schedule: Schedule, ranks: int, rounds: int) -> str:
    shown = [(ranks, schedule.world, "ranks"), (rounds, len(schedule.rounds), "rounds")]
    left_out = [f"the first {few} of {all_} {what}" for few, all_, what in shown if few < all_]
    return f"Shown: {' and '.join(left_out)}." if left_out else "blue: copied · orange, +: reduced · dot: local"


def timeline(trace: Trace) -> str:
    """Return a trace as SVG text.

    The upper third of a row is sending, the middle one receiving, the lower one reducing.

    Args:
        trace: from `simulate`. Beyond 64 ranks or 4,000 events the rest is omitted, with a note.

    Returns:
        One ``<svg>`` element with title and description; equal traces give equal bytes.

    >>> from torchdist_ref.schedules import timeline
    >>> from torchdist_ref.schedules import build, simulate
    >>> "ring all_reduce" in timeline(simulate(build("all_reduce", "ring", 4), 1 << 20))
    True
    """
    rows = min(1 + max((event.rank for event in trace), default=0), MAX_TIMELINE_RANKS)
    events = [event for event in trace if event.rank < rows and event.end > event.start]
    bottom = TIMELINE_TOP + ROW * rows
    title = f"{trace.title}, {trace.world} ranks: {duration(trace.total)}"
    parts = [text(LEFT - 60, 20, title, anchor="start", font_weight="bold")]
    for rank in range(rows):
        parts.append(text(LEFT - 60, TIMELINE_TOP + ROW * (rank + 0.6), f"rank {rank}", anchor="start"))
    parts += [_event(event, trace.total) for event in events[:MAX_TIMELINE_EVENTS]]
    parts += time_axis(LEFT, TIMELINE_WIDTH, bottom, trace.total)
    parts.append(text(LEFT - 60, bottom + 38, _note(trace, rows, len(events)), anchor="start"))
    description = (
        f"What each rank is busy with while {trace.title} runs on {trace.world} ranks, which takes "
        f"{duration(trace.total)}: one row per rank, time from left to right, one bar per message or reduction."
    )
    return document(LEFT + TIMELINE_WIDTH + 20, bottom + 44, title, description, parts)


def duration(seconds: float) -> str:
    """Return a time as text, with three digits.

    >>> duration(0.00125), duration(0)
    ('1.25 ms', '0 s')
    """
    scale, unit = next((pair for pair in UNITS if seconds >= pair[0]), UNITS[0] if seconds == 0 else UNITS[-1])
    return f"{seconds / scale:.3g} {unit}"


def _event(event: TraceEvent, total: float) -> str:
    third, color = THIRDS[event.kind]
    x = LEFT + TIMELINE_WIDTH * event.start / total
    width = TIMELINE_WIDTH * (event.end - event.start) / total
    y = TIMELINE_TOP + ROW * event.rank + 3 + 9 * third
    toward = {"send": "to", "recv": "from"}.get(event.kind, "of")
    words = f"rank {event.rank}: {event.kind} {event.label} {toward} rank {event.peer}, {event.nbytes:g} bytes, "
    words += f"{duration(event.start)} to {duration(event.end)}"
    return element("rect", tip(words), x=x, y=y, width=max(width - 0.5, 0.5), height=8, fill=color, rx=1)


def time_axis(left: float, width: float, y: float, total: float, first_anchor: str = "middle") -> Iterator[str]:
    """Draw an axis from 0 to ``total`` seconds, with a label at every quarter."""
    yield element("line", x1=left, y1=y, x2=left + width, y2=y, stroke=GRAY)
    for quarter in range(5):
        anchor = (first_anchor, "middle", "middle", "middle", "end")[quarter]
        yield text(left + width * quarter / 4, y + 14, duration(total * quarter / 4), anchor)


def _note(trace: Trace, rows: int, events: int) -> str:
    left_out = []
    if rows < trace.world and not trace.note:
        left_out.append(f"the first {rows} of {trace.world} ranks")
    if events > MAX_TIMELINE_EVENTS:
        left_out.append(f"the first {MAX_TIMELINE_EVENTS} of {events} events")
    words = [trace.note, f"shown: {' and '.join(left_out)}" if left_out else ""]
    return " · ".join(word for word in ["gray: send · blue: receive · orange: reduce", *words] if word)


picture.register(Schedule, draw)
picture.register(Trace, timeline)


def number(value: float) -> str:
    """Return a coordinate as short text.

    >>> number(2.0), number(1 / 3)
    ('2', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def element(name: str, *inner: str, **attributes: object) -> str:
    """Return one element; underscores in attribute names become hyphens.

    >>> element("line", x1=0, stroke_width=2.5)
    "<line x1='0' stroke-width='2.5'/>"
    """
    parts = [name, *(f"{key.replace('_', '-')}='{_value(value)}'" for key, value in attributes.items())]
    return f"<{' '.join(parts)}>{''.join(inner)}</{name}>" if inner else f"<{' '.join(parts)}/>"


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else escape(str(value))


def tip(words: str) -> str:
    """Return a tooltip, to put inside an element."""
    return element("title", escape(words))


def text(x: float, y: float, words: str, anchor: str = "middle", fill: str = GRAY, **attributes: object) -> str:
    """Return a line of text whose baseline is at ``y``."""
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, fill=fill, **attributes)


def arrow(x1: float, y1: float, x2: float, y2: float, color: str, tooltip: str) -> str:
    """Return a line with a head at its end."""
    length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-9)
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    bx, by = x2 - 8 * ux, y2 - 8 * uy
    corners = ((x2, y2), (bx - 3 * uy, by + 3 * ux), (bx + 3 * uy, by - 3 * ux))
    head = element("polygon", points=" ".join(f"{number(x)},{number(y)}" for x, y in corners), fill=color)
    line = element("line", x1=x1, y1=y1, x2=bx, y2=by, stroke=color, stroke_width=1.5)
    return element("g", tip(tooltip), line, head)


def document(width: float, height: float, title: str, description: str, parts: Iterable[str]) -> str:
    """Return a whole picture.

    Args:
        width: in pixels; pictures shrink with the page but do not grow.
        height: in pixels.
        title: name, for screen readers and as a tooltip.
        description: content, in a sentence or two.
        parts: elements.
    """
    body = "\n".join(parts)
    # Several pictures may share one page, so ids must differ: they are made from the content.
    mark = sha256((title + description + body).encode()).hexdigest()[:8]
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {number(width)} {number(height)}' "
        f"width='{number(width)}' style='max-width:100%;height:auto' role='img' "
        f"aria-labelledby='t{mark} d{mark}' {FONT}>"
    )
    named = f"<title id='t{mark}'>{escape(title)}</title>\n<desc id='d{mark}'>{escape(description)}</desc>"
    return f"{head}\n{named}\n{body}\n</svg>\n"
