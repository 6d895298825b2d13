"""Output of all benchmarks: sizes and times as text, tables, plots, and the JSON report.

A table is a list of columns: a title, and a function from a result to the text of its cell. The report's form is
`SCHEMA`: all times are seconds, all sizes bytes. A change that breaks a reader gets a new number; new keys do not.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

SCHEMA = 3
# Title of a column, and the text of its cell for a result.
Column = tuple[str, Callable[[Any], str]]
Panel = tuple[Callable[[Any, Any], None], Any]
_PACKAGES = ("torch", "torchdist_ref", "numpy", "mpi4py")
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(i?B)?", re.IGNORECASE)
_UNITS = {"us": 1e6, "ms": 1e3, "MiB": 2**-20}


def parse_size(text: str) -> int:
    """Return bytes from a number with an optional K, M or G, each 1024 times the one before.

    >>> parse_size("4"), parse_size("64K"), parse_size("1 MiB")
    (4, 65536, 1048576)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise ArgumentTypeError(f"expected sizes such as 4, 64K or 16M, got {text!r}")
    return int(found[1]) * _FACTORS[found[2].upper()]


def show_size(nbytes: int) -> str:
    """Return bytes in the largest unit that leaves a whole number.

    >>> show_size(4), show_size(65536), show_size(1536)
    ('4 B', '64 KiB', '1536 B')
    """
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def show_number(value: float) -> str:
    """Return a number with two to four significant digits and no exponent.

    >>> [show_number(x) for x in (0.01234, 1.234, 12.34, 123.4, 12345.6)]
    ['0.012', '1.23', '12.3', '123', '12,346']
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def show_time(seconds: float, unit: str) -> str:
    """Return seconds, or bytes, in another unit.

    >>> show_time(5.2e-6, "us"), show_time(0.0187, "ms")
    ('5.20', '18.7')
    """
    return show_number(seconds * _UNITS[unit])


def table(columns: Sequence[Column], results: Iterable[Any], left: int = 1) -> str:
    """Return results as lines of text; the first `left` columns are left-aligned, the others right-aligned.

    >>> print(table([("op", lambda pair: pair[0]), ("us", lambda pair: f"{pair[1]}")], [("all", 12.0), ("any", 1.5)]))
    op     us
    all  12.0
    any   1.5
    """
    lines = [[title for title, _ in columns], *([text(result) for _, text in columns] for result in results)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    row = "  ".join(f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths))
    return "\n".join(row.format(*line).rstrip() for line in lines)


def cell(key: str, title: str = "") -> Column:
    """Return the column of a part of the results' cells."""
    return title, lambda result: str(result.cell[key])


def figure(title: str, names: Iterable[str], value: Callable[[Any], float]) -> Column:
    """Return the column of a number, "-" for results without samples of these contestants."""
    needed = set(names)
    return title, lambda result: show_number(value(result)) if needed <= result.samples.keys() else "-"


def time(name: str, unit: str) -> Column:
    """Return the column of a contestant's median; ``~`` marks times taken beside other processes."""
    title, text = figure(f"{name} {unit}", [name], lambda result: result.median(name) * _UNITS[unit])
    return title, lambda result: text(result) + ("~" if result.noisy and name in result.samples else "")


def ratio(title: str, of: str, to: str) -> Column:
    """Return the column of one contestant's time over another's."""
    return figure(title, (of, to), lambda result: result.ratio(of, to))


class ProgressBar:
    """Bar of the rounds of a measurement, on standard error if that is a terminal and the package `rich` is there."""

    def __init__(self) -> None:
        self._bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import Progress

            # Drawn on `show` alone: a thread that redraws would disturb the measurement.
            self._bar = Progress(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._task = self._bar.add_task("")

    def show(self, text: str, done: int, rounds: int) -> None:
        """Draw the bar."""
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._task, description=text, completed=done, total=rounds, refresh=True)

    def clear(self) -> None:
        """Remove the bar, so that something else can be printed."""
        if self._bar is not None:
            self._bar.stop()


def draw(target: Any, rows: Sequence[Sequence[Panel]], size: tuple[float, float]) -> None:
    """Write a figure with rows of panels as SVG, for pages of any color; equal panels give equal files.

    Args:
        target: Path, or a file.
        rows: Panels: a function of axes and results, and the results.
        size: Width and height of a panel, in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    from torchdist_ref.schedules.drawing import GRAY

    inked: Any = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    # Ids in the file are made from the salt; by default they are made from a random number.
    fixed: Any = {"svg.hashsalt": "torchdist_ref", "svg.fonttype": "none", "legend.frameon": False}
    across = max(map(len, rows), default=1)
    with matplotlib.rc_context({**dict.fromkeys(inked, GRAY), **fixed, "font.size": 9, "grid.color": GRAY}):
        figure = Figure(figsize=(size[0] * across, size[1] * max(1, len(rows))), layout="constrained")
        for number, row in enumerate(rows):
            for column, (panel, results) in enumerate(row, 1):
                panel(figure.add_subplot(len(rows), across, number * across + column), results)
        plain = {"Date": None, "Creator": "torchdist_ref.benchmark"}
        figure.savefig(target, format="svg", transparent=True, metadata=plain)


def finish(panel: Any, title: str, legend: int = 0, **properties: str) -> None:
    """Set a panel's title and other properties, a grid, and a legend in letters of some size."""
    panel.set_title(title, fontsize=10)
    panel.set(**properties)
    panel.grid(alpha=0.3)
    if legend:
        panel.legend(fontsize=legend)


def report(
    benchmark: str, settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a report that JSON can encode: results with the settings, the machine, the versions and the date.

    Args:
        benchmark: Name of the command.
        settings: Its options.
        results: Flat entries.
        notes: Remarks, such as the reason why a backend was left out.
    """
    left_out = ("benchmark", "json", "plot")
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": {name: value for name, value in settings.items() if name not in left_out},
        "machine": machine(),
        "versions": versions(),
        "notes": list(notes),
        "results": list(results),
    }


def machine() -> dict[str, Any]:
    """Return the processor, the part of it that this process may use, and the load."""
    system = platform.uname()
    return {
        "system": f"{system.system} {system.release}",
        "architecture": system.machine,
        "processor": _line_of("/proc/cpuinfo", "model name") or system.processor,
        "processors": os.cpu_count(),
        "processors_for_us": len(os.sched_getaffinity(0)),
        "memory_kib": int((_line_of("/proc/meminfo", "MemTotal") or "0").split()[0]),
        "load_average": list(os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that take part."""
    # The first that is found is the one that is imported.
    found = {name: each.version for name in _PACKAGES for each in [*distributions(name=name)][:1]}
    return {"python": sys.version.split()[0], **found}


def _line_of(path: str, key: str) -> str:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
