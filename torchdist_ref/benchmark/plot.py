"""A plot of the collectives: time over size, one panel for each operation, as SVG. The same figures, the same file."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from torchdist_ref.benchmark.results import BOUNDS, Row
from torchdist_ref.benchmark.units import show_size

_COLUMNS = 3


def available() -> bool:
    """Whether there is something to plot with."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: str, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Write the plot.

    Args:
        path: Where to; by custom it ends in ``.svg``.
        rows: What was measured. Operations without sizes are left out.
        names: The contestants, in the order of their colours.
    """
    import matplotlib
    from matplotlib.figure import Figure

    ops = list(dict.fromkeys(row.op for row in rows if row.size))
    # Ids in the file are made from the salt; by default they are made from a random number.
    with matplotlib.rc_context({"svg.hashsalt": "torchdist_ref", "svg.fonttype": "none"}):
        height = -(-len(ops) // _COLUMNS)
        figure = Figure(figsize=(4.2 * min(_COLUMNS, max(1, len(ops))), 3.2 * max(1, height)), layout="constrained")
        for place, op in enumerate(ops, 1):
            panel = figure.add_subplot(max(1, height), min(_COLUMNS, len(ops)), place)
            _panel(panel, op, [row for row in rows if row.op == op and row.size], names)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "torchdist_ref.benchmark"})


def _panel(panel: Any, op: str, rows: Sequence[Row], names: Sequence[str]) -> None:
    for name in (*names, *BOUNDS):
        there = [row for row in rows if name in row.samples]
        style = {"linestyle": ":", "color": "gray"} if name in BOUNDS else {"marker": "o", "markersize": 3}
        if there:
            panel.plot([r.size for r in there], [r.seconds(name) * 1e6 for r in there], label=name, **style)
    panel.set_title(f"{op}, {rows[0].world} ranks", fontsize=10)
    panel.set(xscale="log", yscale="log", ylabel="microseconds a call")
    panel.set_xticks([row.size for row in rows], [show_size(row.size) for row in rows], rotation=45, fontsize=7)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
