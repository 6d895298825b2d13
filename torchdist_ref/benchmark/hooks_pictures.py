"""Pictures of `benchmark hooks`, as SVG: plots of times, errors and losses, and the timeline of one step of each hook.

Pictures have no background and middle tones, so that they are readable on light and on dark pages; equal results give
equal files. Each panel of the plot is a function, for use by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchdist_ref.benchmark.hooks_results import HookResult, select
from torchdist_ref.benchmark.hooks_watch import Span
from torchdist_ref.benchmark.report import Panel, draw
from torchdist_ref.schedules import drawing
from torchdist_ref.schedules.drawing import BLUE, GRAY, ORANGE, duration

# Middle tones, distinct on white and on black.
COLORS = (BLUE, ORANGE, "#3a9152", "#a45bb0", "#9a8127", "#c14a6e", "#2a9d9d", GRAY)
# Curves that coincide with others: left out of a plot that has more curves than colors.
COINCIDING = ("allreduce", "bf16", "powersgd-2", "fp16-powersgd-2", "bf16-powersgd-2", "quantize-channel")
MAX_CURVES = len(COLORS)
# Relative error. Averages nearer to the exact one are as exact as single precision can be.
EXACT_ERROR = 1e-6
TICKS = [digit * 10.0**power for power in range(-2, 6) for digit in (1, 2, 5)]
MARKERS = ("o", "s", "D", "^", "v")
# Pixels.
LEFT, WIDTH, BAR, GAP, HEAD = 92.0, 720.0, 14.0, 3.0, 26.0
# Pixels a character. In a narrower bar a word does not fit; the tooltip has it.
CHARACTER = 7.0
ROWS = {"compute": BLUE, "buckets": GRAY, "calls": ORANGE}
LEGEND = "blue: computing · orange: waiting, and calls · gray: a bucket in flight"


def plot(path: str, results: Sequence[HookResult]) -> None:
    """Write a figure with a row of panels for each task and backend: step times, errors, and loss on each link.

    Args:
        path: File to write.
        results: Results to show.
    """
    kinds = dict.fromkeys((result.task, result.backend) for result in results)
    draw(path, [list(_panels(select(results, task=task, backend=backend))) for task, backend in kinds], (4.6, 4.0))


def _panels(results: Sequence[HookResult]) -> Iterator[Panel]:
    yield times, results
    yield errors, results
    for link in dict.fromkeys(result.link for result in results):
        yield losses, select(results, link=link)


def times(panel: Any, results: Sequence[HookResult]) -> None:
    """Draw milliseconds a step: a line for each hook, a mark for each link."""
    hooks = list(dict.fromkeys(result.hook for result in results))[::-1]
    for number, link in enumerate(dict.fromkeys(result.link for result in results)):
        here = select(results, link=link)
        name = f"{link} (modeled)" if here[0].modeled else link
        heights = [hooks.index(result.hook) for result in here]
        marker = {"marker": MARKERS[number % len(MARKERS)], "color": COLORS[number % len(COLORS)]}
        panel.plot([1e3 * result.step for result in here], heights, linestyle="", label=name, **marker)
    panel.set_yticks(range(len(hooks)), hooks)
    panel.set(xscale="log", xlabel="milliseconds a step", title=_title(results, "time of a step"))
    steps = [1e3 * result.step for result in results]
    ticks = [tick for tick in TICKS if min(steps) / 1.5 <= tick <= max(steps) * 1.5]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(loc="best", fontsize=8)


def errors(panel: Any, results: Sequence[HookResult]) -> None:
    """Draw the relative error of the gradients, and beside each mark the bytes of a step."""
    here = [result for result in select(results, link=results[0].link) if result.mean_error > EXACT_ERROR][::-1]
    for height, result in enumerate(here):
        panel.plot(result.mean_error, height, "o", color=BLUE, markersize=5)
        beside = {"xytext": (7, -3), "textcoords": "offset points", "fontsize": 7}
        panel.annotate(f"{result.sent_bytes:,.0f} B", (result.mean_error, height), **beside)
    panel.set_yticks(range(len(here)), [result.hook for result in here])
    panel.set(xscale="log", xlabel="relative error; beside it, bytes a step", title=_title(results, "error"))
    low, high = panel.get_xlim()
    panel.set_xlim(low, high * 30)
    panel.grid(alpha=0.3)


def losses(panel: Any, results: Sequence[HookResult]) -> None:
    """Draw loss against time on one link, smoothed over a few steps; of many hooks those that differ."""
    crowded = len(results) > MAX_CURVES
    drawn = [result for result in results if not (crowded and result.hook in COINCIDING)]
    for number, result in enumerate(drawn):
        style = {
            "color": COLORS[number % MAX_CURVES],
            "linewidth": 1.4,
            "linestyle": "-" if number < MAX_CURVES else "--",
        }
        panel.plot(result.clock, smooth(result.losses), label=result.hook, **style)
    modeled = ", modeled" if results[0].modeled else ""
    panel.set(xlabel="seconds", ylabel="loss")
    panel.set_title(_title(results, f"loss, {results[0].link}{modeled}"))
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


def smooth(values: Sequence[float], width: int = 4) -> list[float]:
    """Return each value's mean with those before it, `width` in all.

    >>> smooth([4.0, 2.0, 0.0], 2)
    [4.0, 3.0, 1.0]
    """
    parts = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def _title(results: Sequence[HookResult], what: str) -> str:
    return f"{results[0].task} on {results[0].backend}: {what}"


def write_timelines(path: str, results: Sequence[HookResult]) -> None:
    """Write a picture of the recorded steps to a file."""
    Path(path).write_text(timelines(results), encoding="utf-8")


def timelines(results: Sequence[HookResult]) -> str:
    """Draw the recorded step of each result, on rank 0. Steps on one link have one scale.

    Returns:
        One ``<svg>`` element with title and description, readable on light and on dark pages.

    >>> spans = [("compute", "forward", 0.0, 0.01), ("buckets", "bucket 0", 0.002, 0.01)]
    >>> one = HookResult("text", "ref", "fast", "none", 2, 8, 0, 0, None, [0.5], [0.01], [3.0], 1, spans=spans)
    >>> "none: text on ref, fast, 10 ms" in timelines([one])
    True
    """
    groups: dict[tuple[str, str, str], dict[str, Sequence[Span]]] = {}
    for one in results:
        if one.spans:
            steps = groups.setdefault((one.task, one.backend, one.link), {})
            steps[f"{one.hook}: {one.task} on {one.backend}, {one.link}"] = one.spans
    return picture(list(groups.values()))


def picture(groups: Sequence[Mapping[str, Sequence[Span]]]) -> str:
    """Draw steps by their names, those of a group on one scale, as SVG text.

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
        parts += drawing.time_axis(LEFT, WIDTH, y + 4, total, "start")
        y += 32
    names = "; ".join(name for group in groups for name in group)
    about = f"Three rows for each of: {names}. Computation, buckets in flight, the backend's calls."
    parts.append(drawing.text(4, y + 14, LEGEND, anchor="start"))
    return drawing.document(LEFT + WIDTH + 20, y + 24, "One training step", about, parts)


def _lines(spans: Sequence[Span]) -> list[list[Span]]:
    """Assign spans that overlap to different lines, each to the first line that is free."""
    lines: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span[2]):
        free = next((line for line in lines if line[-1][3] <= span[2]), None)
        if free is None:
            lines.append(free := [])
        free.append(span)
    return lines


def _rows(spans: Sequence[Span]) -> list[tuple[str, list[list[Span]]]]:
    return [(row, _lines([span for span in spans if span[0] == row]) or [[]]) for row in ROWS]


def _height(spans: Sequence[Span]) -> float:
    return HEAD + sum(len(lines) * BAR + GAP for _, lines in _rows(spans)) + 8


def _step(name: str, spans: Sequence[Span], y: float, total: float) -> Iterator[str]:
    length = duration(max(span[3] for span in spans))
    yield drawing.text(4, y + 16, f"{name}, {length}", anchor="start", font_weight="bold")
    y += HEAD
    for row, lines in _rows(spans):
        yield drawing.text(4, y + BAR - 3, row, anchor="start")
        for line in lines:
            yield from (_bar(span, y, total) for span in line)
            y += BAR
        y += GAP


def _bar(span: Span, y: float, total: float) -> str:
    row, what, begin, end = span
    x, width = LEFT + WIDTH * begin / total, max(WIDTH * (end - begin) / total, 1.0)
    color = drawing.ORANGE if what == "wait" else ROWS[row]
    words = drawing.tip(f"{what}: {duration(begin)} to {duration(end)}")
    bar = drawing.element("rect", words, x=x, y=y, width=width, height=BAR - 2, fill=color, rx=2)
    short = what.split(",")[0]
    if width < CHARACTER * len(short):
        return bar
    return bar + drawing.text(x + width / 2, y + BAR - 4.5, short, fill="#fff", font_size=11, pointer_events="none")
