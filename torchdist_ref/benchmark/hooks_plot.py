"""Plots of the hook laboratory: how long steps take on each link, error against bytes, loss against time. As SVG.

The background is left out and the ink is a middle grey, so that a plot can be read on light and on dark pages. Each
panel is a function, for those who want it alone, as the tutorial does. The same figures, the same file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchdist_ref.benchmark.hooks_results import Result, select
from torchdist_ref.schedules.drawing import BLUE, GREY, ORANGE

# Middle tones, told apart on white and on black.
_COLOURS = (BLUE, ORANGE, "#3a9152", "#a45bb0", "#9a8127", "#c14a6e", "#2a9d9d", GREY)
# Curves that others lie upon: left out of a plot that has more than `_CROWD` of them.
_ALIKE = ("allreduce", "bf16", "powersgd-2", "fp16-powersgd-2", "bf16-powersgd-2", "quantize-channel")
_CROWD = len(_COLOURS)
# What is nearer to the exact average than this is as exact as single precision can be.
_EXACT = 1e-6
_TICKS = [digit * 10.0**power for power in range(-2, 6) for digit in (1, 2, 5)]
_MARKERS = ("o", "s", "D", "^", "v")


def draw(path: str, results: Sequence[Result]) -> None:
    """Write a figure with a row of panels for each task and backend: step times, errors, and loss on each link.

    Args:
        path: Where to; by custom it ends in ``.svg``.
        results: What was measured.
    """
    from matplotlib.figure import Figure

    kinds = dict.fromkeys((result.task, result.backend) for result in results)
    rows = [list(_panels(select(results, task=task, backend=backend))) for task, backend in kinds]
    columns = max(map(len, rows))
    with style():
        figure = Figure(figsize=(4.6 * columns, 4.0 * len(rows)), layout="constrained")
        for number, row in enumerate(rows):
            for place, (panel, found) in enumerate(row, 1):
                panel(figure.add_subplot(len(rows), columns, number * columns + place), found)
        save(figure, path)


def _panels(results: Sequence[Result]) -> Iterator[tuple[Any, Sequence[Result]]]:
    yield times, results
    yield errors, results
    for link in dict.fromkeys(result.link for result in results):
        yield losses, select(results, link=link)


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib's settings for pages of any colour, and for files that don't change by themselves."""
    import matplotlib

    ink: Any = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), GREY
    )
    # Ids in the file are made from the salt; by default they are made from a random number.
    fixed: Any = {"svg.hashsalt": "torchdist_ref", "svg.fonttype": "none", "legend.frameon": False}
    with matplotlib.rc_context({**ink, **fixed, "font.size": 9, "grid.color": GREY}):
        yield


def save(figure: Any, target: Any) -> None:
    """Write a figure as SVG, without background and date."""
    plain = {"Date": None, "Creator": "torchdist_ref.benchmark"}
    figure.savefig(target, format="svg", transparent=True, metadata=plain)


def times(panel: Any, results: Sequence[Result]) -> None:
    """Milliseconds a step: a line for each hook, a mark for each link."""
    hooks = list(dict.fromkeys(result.hook for result in results))[::-1]
    for number, link in enumerate(dict.fromkeys(result.link for result in results)):
        here = select(results, link=link)
        name = f"{link} (modelled)" if here[0].modelled else link
        places = [hooks.index(result.hook) for result in here]
        marker = {"marker": _MARKERS[number % len(_MARKERS)], "color": _COLOURS[number % len(_COLOURS)]}
        panel.plot([1e3 * result.step for result in here], places, linestyle="", label=name, **marker)
    panel.set_yticks(range(len(hooks)), hooks)
    panel.set(xscale="log", xlabel="milliseconds a step", title=_title(results, "time of a step"))
    steps = [1e3 * result.step for result in results]
    ticks = [tick for tick in _TICKS if min(steps) / 1.5 <= tick <= max(steps) * 1.5]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(loc="best", fontsize=8)


def errors(panel: Any, results: Sequence[Result]) -> None:
    """Relative error of the gradients, and beside each mark the bytes of a step."""
    here = [result for result in select(results, link=results[0].link) if result.mean_error > _EXACT][::-1]
    for place, result in enumerate(here):
        panel.plot(result.mean_error, place, "o", color=BLUE, markersize=5)
        beside = {"xytext": (7, -3), "textcoords": "offset points", "fontsize": 7}
        panel.annotate(f"{result.sent_bytes:,.0f} B", (result.mean_error, place), **beside)
    panel.set_yticks(range(len(here)), [result.hook for result in here])
    panel.set(xscale="log", xlabel="relative error; beside it, bytes a step", title=_title(results, "error"))
    low, high = panel.get_xlim()
    panel.set_xlim(low, high * 30)
    panel.grid(alpha=0.3)


def losses(panel: Any, results: Sequence[Result]) -> None:
    """Loss against time on one link, smoothed over a few steps; of many hooks those that differ."""
    crowded = len(results) > _CROWD
    drawn = [result for result in results if not (crowded and result.hook in _ALIKE)]
    for number, result in enumerate(drawn):
        style = {"color": _COLOURS[number % _CROWD], "linewidth": 1.4, "linestyle": "-" if number < _CROWD else "--"}
        panel.plot(result.clock, smooth(result.losses), label=result.hook, **style)
    modelled = ", modelled" if results[0].modelled else ""
    panel.set(xlabel="seconds", ylabel="loss")
    panel.set_title(_title(results, f"loss, {results[0].link}{modelled}"))
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


def smooth(values: Sequence[float], width: int = 4) -> list[float]:
    """Each value's mean with those before it, `width` in all.

    >>> smooth([4.0, 2.0, 0.0], 2)
    [4.0, 3.0, 1.0]
    """
    parts = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def _title(results: Sequence[Result], what: str) -> str:
    return f"{results[0].task} on {results[0].backend}: {what}"
