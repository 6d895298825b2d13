"""Output of all benchmarks: sizes and times as text, tables, a progress bar, plots' style, and the JSON report.

The report's form is `SCHEMA`: all times are seconds, all sizes bytes. A change that breaks a reader gets a new number;
new keys do not. Tables and bars are `rich`'s, which `check_rich` asks for.
"""

from __future__ import annotations

import datetime
import importlib.util
import io
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from torchdist_ref.errors import ArgumentError, UnsupportedError, explain

SCHEMA = 2
Panel = tuple[Callable[[Any, Any], None], Any]
_PACKAGES = ("torch", "torchdist_ref", "numpy", "mpi4py")
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(i?B)?", re.IGNORECASE)
# Characters, more than a line of a table has.
_WIDTH = 10_000


def parse_size(text: str) -> int:
    """Return bytes from a number with an optional K, M or G, each 1024 times the one before.

    >>> parse_size("4"), parse_size("64K"), parse_size("1 MiB")
    (4, 65536, 1048576)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise ArgumentError(explain("benchmark", "--sizes", "sizes such as 4, 64K or 16M, with commas between", text))
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


def show_micros(seconds: float) -> str:
    """Return seconds as microseconds.

    >>> show_micros(5.2e-6)
    '5.20'
    """
    return show_number(seconds * 1e6)


def show_millis(seconds: float) -> str:
    """Return seconds as milliseconds.

    >>> show_millis(0.0187)
    '18.7'
    """
    return show_number(seconds * 1e3)


def check_rich() -> None:
    """Raise if `rich` is missing.

    Raises:
        UnsupportedError: It is not installed.
    """
    if importlib.util.find_spec("rich") is None:
        raise UnsupportedError("benchmark: tables need the package rich: pip install -e '.[benchmark]'.")


def columns(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows under titles; the first `left` columns are left-aligned, the others right-aligned.

    >>> print(columns(["op", "us"], [["barrier", "1.5"], ["all", "12.0"]]))
    op         us
    barrier   1.5
    all      12.0
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for number, title in enumerate(titles):
        table.add_column(Text(title), justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


class ProgressBar:
    """Bar of so many steps on a terminal; elsewhere a line for each heading. On standard error.

    Args:
        steps: Number of calls of `advance`.
        stream: Stream to draw on (default: standard error).

    Attributes:
        stream: Stream.
        text: The last heading.

    >>> bar = ProgressBar(2, io.StringIO())
    >>> bar.heading("all_reduce"); bar.advance("4 B"); bar.advance("1 KiB"); bar.clear()
    >>> print(bar.stream.getvalue(), end="")
    all_reduce ...
    """

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self.stream = stream or sys.stderr
        self._moves, self.text = self.stream.isatty(), ""
        # Drawn on `advance` alone: a thread that redraws would disturb the measurement.
        self._bar = Progress(
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            console=Console(file=self.stream, color_system=None),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=max(1, steps))

    def heading(self, text: str) -> None:
        """Begin a part of the work."""
        if text != self.text:
            self.text = text
            if self._moves:
                self._draw("", 0)
            else:
                print(f"{text} ...", file=self.stream, flush=True)

    def advance(self, text: str = "") -> None:
        """Complete one step."""
        if self._moves:
            self._draw(text, 1)

    def clear(self) -> None:
        """Remove the bar, so that something else can be printed; the next call draws it again."""
        if self._moves:
            self._bar.stop()

    def _draw(self, text: str, steps: int) -> None:
        self._bar.start()
        self._bar.update(self._task, advance=steps, description=f"{self.text} {text}", refresh=True)


def draw(path: str, rows: Sequence[Sequence[Panel]], size: tuple[float, float]) -> None:
    """Write a figure with rows of panels as SVG; equal panels give equal files. Without matplotlib, print that instead.

    Args:
        path: File to write.
        rows: Panels: a function of axes and results, and the results.
        size: Width and height of a panel, in inches.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    from matplotlib.figure import Figure

    across = max(map(len, rows), default=1)
    with style():
        figure = Figure(figsize=(size[0] * across, size[1] * max(1, len(rows))), layout="constrained")
        for number, row in enumerate(rows):
            for column, (panel, results) in enumerate(row, 1):
                panel(figure.add_subplot(len(rows), across, number * across + column), results)
        save(figure, path)
    print(f"wrote {path}")


@contextmanager
def style() -> Iterator[None]:
    """Set matplotlib's settings for pages of any color, and for equal files from equal figures."""
    import matplotlib

    from torchdist_ref.schedules.drawing import GRAY

    ink: Any = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), GRAY
    )
    # Ids in the file are made from the salt; by default they are made from a random number.
    fixed: Any = {"svg.hashsalt": "torchdist_ref", "svg.fonttype": "none", "legend.frameon": False}
    with matplotlib.rc_context({**ink, **fixed, "font.size": 9, "grid.color": GRAY}):
        yield


def save(figure: Any, target: Any) -> None:
    """Write a figure as SVG, without background and date."""
    plain = {"Date": None, "Creator": "torchdist_ref.benchmark"}
    figure.savefig(target, format="svg", transparent=True, metadata=plain)


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
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": dict(settings),
        "machine": machine(),
        "versions": versions(),
        "notes": list(notes),
        "results": list(results),
    }


def write(path: str | None, content: Mapping[str, Any]) -> None:
    """Write a report to a file, if there is a path, indented for people."""
    if path:
        Path(path).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"wrote {path}")


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
    return {"python": sys.version.split()[0], **{name: found for name in _PACKAGES if (found := _version(name))}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _line_of(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
