"""Results of `benchmark hooks`: figures of one hook on one task, backend and link; their table and pictures.

All hooks of one task, backend and link take turns in the same rounds, so a ratio compares turns of the same number, and
is their median. The first turn does not count: DDP rebuilds its buckets, and PowerSGD begins.

Each panel of the plot is a function, for use by itself. Do not add measuring here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import accumulate, cycle
from pathlib import Path
from statistics import fmean, median
from typing import Any

from torchdist_ref.benchmark import report
from torchdist_ref.benchmark.hooks_watch import Span, picture
from torchdist_ref.benchmark.report import show_number, show_time
from torchdist_ref.schedules.drawing import BLUE, GRAY, ORANGE

LEGEND = """\
bytes: bytes that a rank sends in a step; x less: than without compression.
error: of the gradients, relative to their exact average.
x none: a step's time by the first hook's, so that less than 1 is faster.
loss: the mean over the ranks at the end.
(modeled): computed from bytes, not measured."""
# Middle tones, distinct on white and on black.
COLORS = (BLUE, ORANGE, "#3a9152", "#a45bb0", "#9a8127", "#c14a6e", "#2a9d9d", GRAY)
MARKERS = ("o", "s", "D", "^", "v")
# Curves that coincide with others: left out of a plot that has more curves than colors.
COINCIDING = ("allreduce", "bf16", "powersgd-2", "fp16-powersgd-2", "bf16-powersgd-2", "quantize-channel")
# Relative error. Averages nearer to the exact one are as exact as single precision can be.
EXACT_ERROR = 1e-6


@dataclass(frozen=True)
class HookResult:
    """Figures of one hook on one task, backend and link.

    Attributes:
        task: Name of the task.
        backend: Name of the backend.
        link: Name of the link between the ranks.
        hook: Name of the hook.
        world: Number of ranks.
        parameters: Number of the model's parameters.
        sent_bytes: Bytes of the hook's calls in a step.
        wire_bytes: Bytes that the host sent over its cable in a step, headers included; None without a cable.
        error: Relative error of the gradients, of each step in which it was measured.
        seconds: Time of each step, from the last rank's begin to the last rank's end.
        losses: Loss of each step, the mean over the ranks.
        turn: Number of steps of a turn. The first turn doesn't count.
        modeled: Whether the times were computed from those of the fast link.
        spans: Timeline of one step on rank 0.
    """

    task: str
    backend: str
    link: str
    hook: str
    world: int
    parameters: int
    sent_bytes: float
    wire_bytes: float | None
    error: Sequence[float]
    seconds: Sequence[float]
    losses: Sequence[float]
    turn: int
    modeled: bool = False
    spans: Sequence[Span] = ()

    def turns(self) -> list[float]:
        """Return the mean time of a step of each turn that counts: steps of a hook may differ."""
        ends = range(2 * self.turn, len(self.seconds) + 1, self.turn)
        return [sum(self.seconds[end - self.turn : end]) / self.turn for end in ends]

    @property
    def step(self) -> float:
        """Time of a step: the median over the turns."""
        return median(self.turns())

    def ratio(self, other: HookResult) -> float:
        """Return how many times longer a step takes than with another hook.

        >>> one = HookResult("text", "ref", "fast", "noop", 2, 8, 0, None, [0.5], [9, 1, 2, 9], [3.0] * 4, turn=1)
        >>> one.ratio(replace(one, seconds=[1, 1, 1, 1]))
        2.0
        """
        return float(median(x / y for x, y in zip(self.turns(), other.turns(), strict=True)))

    @property
    def link_name(self) -> str:
        """Name of the link in tables and pictures."""
        return f"{self.link} (modeled)" if self.modeled else self.link

    @property
    def mean_error(self) -> float:
        """Mean relative error of the gradients."""
        return fmean(self.error)

    @property
    def clock(self) -> list[float]:
        """Seconds since the beginning, at the end of each step."""
        return list(accumulate(self.seconds))

    def on(self, link: str, bits_per_second: float) -> HookResult:
        """Return the result modeled on a slower link, if communication and computation do not overlap.

        >>> fast = HookResult("text", "ref", "fast", "none", 2, 8, 1e6, None, [0.0], [9, 0.02], [4.0, 3.0], 1)
        >>> fast.on("100mbit", 1e8).step
        0.1
        """
        seconds = [one + 8 * self.sent_bytes / bits_per_second for one in self.seconds]
        return replace(self, link=link, seconds=seconds, modeled=True, spans=())

    def entry(self) -> dict[str, Any]:
        """Return a flat entry of a report."""
        return asdict(self)


def from_json(entry: Mapping[str, Any]) -> HookResult:
    """Return a result from its entry in a report; older reports have further keys."""
    known = {each.name: entry[each.name] for each in fields(HookResult)}
    return HookResult(**{**known, "spans": [tuple(span) for span in entry["spans"]]})


def select(results: Sequence[HookResult], **wanted: str) -> list[HookResult]:
    """Return those with these attributes, in order: ``select(results, task="text", link="100mbit")``."""
    return [one for one in results if all(getattr(one, name) == value for name, value in wanted.items())]


def table(results: Sequence[HookResult], ratios: bool = True) -> str:
    """Return the table of one task on one backend.

    Args:
        results: Results of any number of hooks and links. The others are compared with the first hook.
        ratios: Whether to compare times. Without, the table is narrower.

    Returns:
        Lines of text; all times are medians over the turns, in milliseconds.
    """
    first = results[0]
    whole = 4 * first.parameters * 2 * (first.world - 1) / first.world
    columns: list[report.Column] = [
        ("hook", lambda mine: mine.hook),
        ("bytes", lambda mine: f"{mine.sent_bytes:,.0f}"),
        ("x less", lambda mine: show_number(whole / mine.sent_bytes) if mine.sent_bytes else "-"),
        ("error", lambda mine: f"{mine.mean_error:.2g}"),
    ]
    for link in dict.fromkeys(result.link for result in results):
        there = {result.hook: result for result in select(results, link=link)}
        against = next(iter(there.values()))
        times = {hook: show_time(result.step, "ms") for hook, result in there.items()}
        columns.append((f"{against.link_name} ms", partial(_text, times)))
        if ratios:
            found = {hook: show_number(result.ratio(against)) for hook, result in there.items()}
            columns.append((f"x {against.hook}", partial(_text, found)))
    columns.append(("loss", lambda mine: f"{mine.losses[-1]:.3f}"))
    head = f"{first.task}: {first.parameters:,} parameters, {first.world} ranks on {first.backend}"
    rows = {result.hook: result for result in reversed(results)}
    return f"{head}\n{report.table(columns, [rows[hook] for hook in dict.fromkeys(each.hook for each in results)])}"


def _text(texts: Mapping[str, str], result: HookResult) -> str:
    return texts.get(result.hook, "-")


def plot(path: str, results: Sequence[HookResult]) -> None:
    """Write a figure with a row of panels for each task and backend: step times, errors, and loss on each link.

    Args:
        path: File to write.
        results: Results to show.
    """
    rows: list[list[report.Panel]] = []
    for task, backend in dict.fromkeys((result.task, result.backend) for result in results):
        here = select(results, task=task, backend=backend)
        links = dict.fromkeys(result.link for result in here)
        rows.append([(times, here), (errors, here), *((losses, select(here, link=link)) for link in links)])
    report.draw(path, rows, (4.6, 4.0))


def times(panel: Any, results: Sequence[HookResult]) -> None:
    """Draw milliseconds a step: a line for each hook, a mark for each link."""
    from matplotlib.ticker import LogLocator

    hooks = list(dict.fromkeys(result.hook for result in results))[::-1]
    for link, marker, color in zip(dict.fromkeys(result.link for result in results), cycle(MARKERS), cycle(COLORS)):
        here = select(results, link=link)
        heights = [hooks.index(result.hook) for result in here]
        panel.plot([1e3 * each.step for each in here], heights, marker, color=color, label=here[0].link_name)
    panel.set_yticks(range(len(hooks)), hooks)
    report.finish(panel, _title(results, "time of a step"), 8, xscale="log", xlabel="milliseconds a step")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()


def errors(panel: Any, results: Sequence[HookResult]) -> None:
    """Draw the relative error of the gradients, and beside each mark the bytes of a step."""
    here = [result for result in select(results, link=results[0].link) if result.mean_error > EXACT_ERROR][::-1]
    for height, result in enumerate(here):
        panel.plot(result.mean_error, height, "o", color=BLUE, markersize=5)
        beside = {"xytext": (7, -3), "textcoords": "offset points", "fontsize": 7}
        panel.annotate(f"{result.sent_bytes:,.0f} B", (result.mean_error, height), **beside)
    panel.set_yticks(range(len(here)), [result.hook for result in here])
    label = "relative error; beside it, bytes a step"
    report.finish(panel, _title(results, "error"), xscale="log", xlabel=label)
    low, high = panel.get_xlim()
    panel.set_xlim(low, high * 30)


def losses(panel: Any, results: Sequence[HookResult]) -> None:
    """Draw loss against time on one link, smoothed over a few steps; of many hooks those that differ."""
    crowded = len(results) > len(COLORS)
    drawn = [result for result in results if not (crowded and result.hook in COINCIDING)]
    for number, result in enumerate(drawn):
        style = {"color": COLORS[number % len(COLORS)], "linestyle": "-" if number < len(COLORS) else "--"}
        panel.plot(result.clock, smooth(result.losses), label=result.hook, linewidth=1.4, **style)
    title = _title(results, f"loss, {results[0].link}{', modeled' * results[0].modeled}")
    report.finish(panel, title, 7, xlabel="seconds", ylabel="loss")


def _title(results: Sequence[HookResult], what: str) -> str:
    return f"{results[0].task} on {results[0].backend}: {what}"


def smooth(values: Sequence[float], width: int = 4) -> list[float]:
    """Return each value's mean with those before it, `width` in all.

    >>> smooth([4.0, 2.0, 0.0], 2)
    [4.0, 3.0, 1.0]
    """
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def timelines(results: Sequence[HookResult]) -> str:
    """Draw the recorded step of each result, on rank 0. Steps on one link have one scale.

    >>> spans = [("compute", "forward", 0.0, 0.01), ("buckets", "bucket 0", 0.002, 0.01)]
    >>> one = HookResult("text", "ref", "fast", "none", 2, 8, 0, None, [0.5], [0.01], [3.0], 1, spans=spans)
    >>> "none: text on ref, fast, 10 ms" in timelines([one])
    True
    """
    groups: dict[tuple[str, str, str], dict[str, Sequence[Span]]] = {}
    for one in results:
        if one.spans:
            steps = groups.setdefault((one.task, one.backend, one.link), {})
            steps[f"{one.hook}: {one.task} on {one.backend}, {one.link}"] = one.spans
    return picture(list(groups.values()))


def timeline(path: str, results: Sequence[HookResult]) -> None:
    """Write the recorded steps as one picture."""
    Path(path).write_text(timelines(results), encoding="utf-8")
