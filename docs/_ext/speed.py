"""Speed tables of the documentation, generated from reports of the benchmark.

`.. speed:: 2 seconds`
    Microseconds a call of `ref` on two ranks, by operation and size: a plot, and its figures in a table that is folded.
`.. speed:: 2 gloo`
    Time of Gloo over that of `ref`; likewise `mpich`, `openmpi`. `limit`: time of a call over its limit.
    With the option `namespaces`: the halves of the ranks are on hosts of their own.

`python docs/_ext/speed.py mpich=FILE openmpi=FILE ...` makes `docs/explanation/speed.json` from reports of
``python -m torchdist_ref.benchmark --json``, in which ``mpi4py`` is the MPI that the file is given for. Several
reports of one cell count as one with all their rounds.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from plots import marks, span

RECORDED = Path(__file__).parents[1] / "explanation" / "speed.json"
Cell = dict[str, list[float]]


def condense(reports: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Reduce reports to the figures of the page: for each cell the median time, and the median ratios to others."""
    cells: defaultdict[tuple[bool, int, str, int], Cell] = defaultdict(lambda: defaultdict(list))
    for mpi, report in reports:
        for rows in by_cell(report["results"]).values():
            ref = rows["ref"]
            cell = cells[bool(report["settings"]["namespaces"]), ref["world"], ref["op"], ref["size_bytes"]]
            cell["seconds"] += ref["samples_seconds"]
            for other in rows.keys() - {"ref"}:
                pairs = list(zip(rows[other]["samples_seconds"], ref["samples_seconds"], strict=True))
                cell[mpi if other == "mpi4py" else other] += [b / a if other == "limit" else a / b for a, b in pairs]
    entries = [
        dict(zip(("namespaces", "world", "op", "bytes"), key, strict=True))
        | {name: round_off(found) for name, found in cell.items()}
        for key, cell in cells.items()
    ]
    last = max((report for _, report in reports), key=lambda report: str(report["date"]))
    return {"date": last["date"][:10], "machine": last["machine"], "versions": last["versions"], "cells": entries}


def round_off(found: list[float]) -> float:
    """Return the median, in three digits."""
    return float(f"{median(found):.3g}")


def by_cell(results: list[dict[str, Any]]) -> dict[tuple[int, str, int], dict[str, dict[str, Any]]]:
    """Group the entries of a report: for each number of ranks, operation and size those of all backends."""
    found: defaultdict[tuple[int, str, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for entry in results:
        found[entry["world"], entry["op"], entry["size_bytes"]][entry["backend"]] = entry
    return found


class SpeedDirective(Directive):
    """Table of one figure of all operations and sizes for a number of ranks."""

    required_arguments = 2
    option_spec: ClassVar[dict[str, Any]] = {"namespaces": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Read the recorded figures, and return their table."""
        where, what = ("namespaces" in self.options, int(self.arguments[0])), self.arguments[1]
        cells = json.loads(RECORDED.read_text(encoding="utf-8"))["cells"]
        cells = [cell for cell in cells if (cell["namespaces"], cell["world"]) == where]
        sizes = sorted({column(cell) for cell in cells} - {0})
        by_op: dict[str, dict[int, str]] = {}
        for cell in cells:
            by_op.setdefault(cell["op"], {})[column(cell)] = figure(cell, what)
        # Operations without bytes are in the first column.
        first = {op: {sizes[0]: found[0], **found} if 0 in found else found for op, found in by_op.items()}
        header = ("operation", *map(named, sizes))
        rows = [(op, *(found.get(size, "") for size in sizes)) for op, found in first.items()]
        return plotted(header, rows, AXES[what], even=what != "seconds")


AXES = {
    "seconds": "time of a call on ref, in µs",
    "limit": "time on ref / limit (1 = no overhead)",
    "gloo": "time on Gloo / time on ref",
    "mpich": "time on MPICH / time on ref",
    "openmpi": "time on Open MPI / time on ref",
}
"""Titles of the axes of plots."""


def plotted(header: tuple[str, ...], rows: list[tuple[str, ...]], axis: str, *, even: bool) -> list[nodes.Node]:
    """Return a table as a plot, with the table below it, folded.

    Columns in which every figure can be drawn are series; the text of the columns before them names the rows.
    """
    named_by = next(at for at in range(1, len(header)) if all(span(row[at]) for row in rows if row[at]))
    # A row that has a number for a name needs to say of what.
    names = [", ".join(row[:named_by]) if span(row[0]) is None else f"{header[0]}: {row[0]}" for row in rows]
    shown = [(name, [span(cell) for cell in row[named_by:]]) for name, row in zip(names, rows, strict=True)]
    drawing = f'<div class="drawing plot">{marks(shown, header[named_by:], axis, even)}</div>'
    begin = f'{drawing}<details class="figures"><summary>Figures: {escape(axis)}</summary>'
    return [nodes.raw("", begin, format="html"), table(header, rows), nodes.raw("", "</details>", format="html")]


def column(cell: dict[str, Any]) -> int:
    """Return the size that was asked for: blocks for all ranks may need a few bytes more."""
    return 4 if 0 < cell["bytes"] <= 64 else int(cell["bytes"])


def named(size: int) -> str:
    """Return a size as text."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if size >= unit:
            return f"{size // unit} {letter}iB"
    return f"{size} B"


def figure(cell: dict[str, Any], what: str) -> str:
    """Return one figure in two digits; times in microseconds."""
    if what not in cell:
        return ""
    value = cell[what] * (1e6 if what == "seconds" else 1)
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.1f}" if rounded >= 1 else f"{rounded:.2g}"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> nodes.table:
    """Build a table node, the figures to the right."""
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=1) for _ in header]
    group += nodes.thead("", line(header))
    group += nodes.tbody("", *map(line, rows))
    return nodes.table("", group)


def line(cells: tuple[str, ...]) -> nodes.row:
    """Build one row of a table."""
    first, *rest = cells
    figures = [nodes.entry("", nodes.paragraph("", cell), classes=["text-right"]) for cell in rest]
    return nodes.row("", nodes.entry("", nodes.paragraph("", first)), *figures)


def setup(app: Any) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("speed", SpeedDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    given = [argument.partition("=")[::2] for argument in sys.argv[1:]]
    kept = condense([(mpi, json.loads(Path(path).read_text(encoding="utf-8"))) for mpi, path in given])
    RECORDED.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
