"""Timeline of a training step under DDP: `Spans` records it, `picture` draws it.

`Spans` takes the place of the reducer's exchange, records, and forwards; it doesn't change a computation. The backend's
calls are those of the group's recorder. Pictures have no background and middle tones, so that they are readable on
light and on dark pages; equal spans give equal files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchdist_ref import parallel
from torchdist_ref.recorder import CallRecord
from torchdist_ref.schedules import drawing
from torchdist_ref.schedules.drawing import BLUE, GRAY, ORANGE, duration

if TYPE_CHECKING:
    from torchdist_ref.algorithms.bucket import LaunchedBucket

Span = tuple[str, str, float, float]
# Pixels.
LEFT, WIDTH, BAR, GAP, HEAD = 92.0, 720.0, 14.0, 3.0, 26.0
# Pixels a character. In a narrower bar a word does not fit; the tooltip has it.
CHARACTER = 7.0
ROWS = {"compute": BLUE, "buckets": GRAY, "calls": ORANGE}
LEGEND = "blue: computing · orange: waiting, and calls · gray: a bucket in flight"


def calls_since(group: Any, begin: float) -> list[CallRecord]:
    """Return a group's calls that began after a moment and have ended; at most as many as its recorder keeps, 1,024."""
    return [record for record in group.recorder if record.start >= begin]


class Spans:
    """Timeline of one step of a model under DDP: row, name, begin and end of each span, in seconds.

    `part` names the parts of the step; buckets and the backend's calls have names of their own, and the wait for them
    at the end of backward is a part of its own, ``wait``.

    Args:
        model: A `DistributedDataParallel`, with a hook or without.

    >>> from torchdist_ref.benchmark.hooks_watch import Spans
    >>> import torch, torchdist_ref as dist
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     model = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
    ...     with Spans(model) as spans:
    ...         with spans.part("forward"):
    ...             loss = model(torch.ones(1, 2)).sum()
    ...         with spans.part("backward"):
    ...             loss.backward()
    ...     return [(row, what) for row, what, _, _ in spans]
    >>> run(program, 2)[0]  # doctest: +NORMALIZE_WHITESPACE
    [('compute', 'forward'), ('compute', 'backward'), ('compute', 'wait'), ('buckets', 'bucket 0'),
     ('calls', 'all_reduce, 12 bytes')]
    """

    def __init__(self, model: parallel.DistributedDataParallel) -> None:
        self._model = model
        self._inner = model.reducer.exchange
        self._spans: list[Span] = []
        self._launched: dict[int, float] = {}
        self._waits: list[float] = []

    def __enter__(self) -> Spans:
        self._entered = perf_counter()
        self._model.reducer.use(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._model.reducer.use(self._inner)
        for each in calls_since(self._model.process_group, self._entered):
            self._spans.append(("calls", f"{each.call.op}, {each.nbytes} bytes", each.start, each.end))

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Name the part of the step in this block; if it waits for buckets, it ends where the wait begins."""
        begin, self._waits = perf_counter(), []
        yield
        first, *_, last = self._waits or [perf_counter()] * 2
        self._spans.append(("compute", what, begin, first))
        if self._waits:
            self._spans.append(("compute", "wait", first, last))

    # The reducer uses these instead of the exchange's own, and the exchange's attributes.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def average_group(self) -> None:
        """None: the reducer then passes every bucket to `launch`."""
        return None

    def launch(self, bucket: LaunchedBucket) -> Any:
        """Record when a bucket is launched."""
        self._launched[bucket.index] = perf_counter()
        return self._inner.launch(bucket)

    def wait(self, bucket: LaunchedBucket, handle: Any) -> Tensor:
        """Record how long the step waits for a bucket."""
        begin = perf_counter()
        value = self._inner.wait(bucket, handle)
        self._waits += [begin, perf_counter()]
        launched = self._launched[bucket.index]
        self._spans.append(("buckets", f"bucket {bucket.index}", launched, self._waits[-1]))
        return value

    def __iter__(self) -> Iterator[Span]:
        zero = min(begin for _, _, begin, _ in self._spans)
        for row, what, begin, end in sorted(self._spans, key=lambda span: ([*ROWS].index(span[0]), span[2])):
            yield row, what, begin - zero, end - zero


def picture(groups: Sequence[Mapping[str, Sequence[Span]]]) -> str:
    """Draw steps by their names, those of a group on one scale, as SVG text.

    Args:
        groups: The spans of each step, as `Spans` yields them.

    Returns:
        One ``<svg>`` element with title and description, readable on light and on dark pages.

    >>> from torchdist_ref.benchmark.hooks_watch import picture
    >>> picture([{"mine": [("compute", "forward", 0.0, 2.0)]}]).count("mine, 2 s")
    1
    """
    parts: list[str] = []
    y = 4.0
    for group in groups:
        total = max(end for spans in group.values() for *_, end in spans)
        for name, spans in group.items():
            length = duration(max(end for *_, end in spans))
            parts.append(drawing.text(4, y + 16, f"{name}, {length}", anchor="start", font_weight="bold"))
            y += HEAD
            for row in ROWS:
                parts.append(drawing.text(4, y + BAR - 3, row, anchor="start"))
                for line in _lines([span for span in spans if span[0] == row]):
                    parts += [_bar(span, y, total) for span in line]
                    y += BAR
                y += GAP
            y += 8
        parts += drawing.time_axis(LEFT, WIDTH, y + 4, total, "start")
        y += 32
    names = "; ".join(name for group in groups for name in group)
    about = f"Three rows for each of: {names}. Computation, buckets in flight, the backend's calls."
    parts.append(drawing.text(4, y + 14, LEGEND, anchor="start"))
    return drawing.document(LEFT + WIDTH + 20, y + 24, "One training step", about, parts)


def _lines(spans: Sequence[Span]) -> list[list[Span]]:
    """Assign spans that overlap to different lines, each to the first line that is free; at least one line."""
    lines: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda span: span[2]):
        free = next((line for line in lines if not line or line[-1][3] <= span[2]), None)
        if free is None:
            lines.append(free := [])
        free.append(span)
    return lines


def _bar(span: Span, y: float, total: float) -> str:
    row, what, begin, end = span
    x, width = LEFT + WIDTH * begin / total, max(WIDTH * (end - begin) / total, 1.0)
    color = ORANGE if what == "wait" else ROWS[row]
    words = drawing.tip(f"{what}: {duration(begin)} to {duration(end)}")
    bar = drawing.element("rect", words, x=x, y=y, width=width, height=BAR - 2, fill=color, rx=2)
    short = what.split(",")[0]
    if width < CHARACTER * len(short):
        return bar
    return bar + drawing.text(x + width / 2, y + BAR - 4.5, short, fill="#fff", font_size=11, pointer_events="none")
