"""Reports of an acid test: a table on the terminal, JSON, one page of HTML, and a badge."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torchdist_ref.acid.runs import CRASHED, FAILED, HUNG, KINDS, NOT_RUN, PASSED, REFUSED

Row = Mapping[str, Any]
"""One check: name, area, demand, source, outcome, detail, seconds and code."""
WRONG = (FAILED, CRASHED, HUNG)
_COLORS = {
    PASSED: "#2a7a3b",
    REFUSED: "#6b6b6b",
    FAILED: "#b3261e",
    CRASHED: "#b3261e",
    HUNG: "#b3261e",
    NOT_RUN: "#6b6b6b",
}
_WIDTH = 110


def counted(rows: Sequence[Row]) -> str:
    """Return how many checks had each outcome.

    >>> counted([{"outcome": "pass"}, {"outcome": "hang"}, {"outcome": "pass"}])
    '2 pass, 1 hang'
    """
    found = Counter(row["outcome"] for row in rows)
    return ", ".join(f"{found[kind]} {kind}" for kind in KINDS if found[kind])


def line(row: Row) -> str:
    """Return the line of the table for one check; what is wrong stands below its name.

    >>> line({"name": "barrier", "outcome": "pass", "detail": "", "seconds": 0.4})
    'pass     barrier (0.4 s)'
    """
    head = f"{row['outcome']:<8} {row['name']} ({row['seconds']:.1f} s)"
    detail = " ".join(row["detail"].split())
    return f"{head}\n         {detail[:_WIDTH]}{'...' if len(detail) > _WIDTH else ''}" if detail else head


def write(folder: Path, about: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Write ``report.json``, ``report.html`` and ``badge.svg`` into a folder, which is made if there is none.

    Args:
        folder: Folder.
        about: Facts of the run, such as the backend, versions and date, by name.
        rows: The checks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {"about": dict(about), "summary": counted(rows), "checks": [dict(row) for row in rows]}
    (folder / "report.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(html(about, rows), encoding="utf-8")
    (folder / "badge.svg").write_text(badge(rows), encoding="utf-8")


def badge(rows: Sequence[Row]) -> str:
    """Return a badge that says how many of the checks have passed."""
    passed = sum(row["outcome"] == PASSED for row in rows)
    color = _COLORS[FAILED if any(row["outcome"] in WRONG for row in rows) else PASSED]
    text = f"{passed} of {len(rows)}"
    left, right = 70, 14 + 7 * len(text)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="acid test: {text}"><title>acid test: {text}</title>'
        f'<rect width="{left}" height="20" fill="#444"/><rect x="{left}" width="{right}" height="20" fill="{color}"/>'
        f'<g fill="#fff" text-anchor="middle" font-family="sans-serif" font-size="11">'
        f'<text x="{left / 2:g}" y="14">acid test</text><text x="{left + right / 2:g}" y="14">{text}</text></g></svg>\n'
    )


def html(about: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Return the report as one page that fetches nothing."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in about.items())
    body = "".join(
        f'<tr><td style="color:{_COLORS[row["outcome"]]}"><b>{row["outcome"]}</b></td><td>{escape(row["name"])}'
        f"<details><summary>the calls</summary><pre>{escape(row['code'])}</pre></details></td>"
        f"<td>{escape(row['demand'])}<br><small>{escape(row['source'])}</small></td>"
        f"<td><pre>{escape(row['detail'])}</pre></td><td>{row['seconds']:.1f}</td></tr>"
        for row in rows
    )
    title = f"Acid test of {escape(about.get('backend', ''))}"
    style = (
        "body{font-family:sans-serif;margin:2em}table{border-collapse:collapse}td,th{border:1px solid #ccc;"
        "padding:.4em;vertical-align:top;text-align:left}pre{white-space:pre-wrap;margin:0;max-width:60ch}"
        "dt{font-weight:bold}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f"<h1>{title}</h1><p>{counted(rows)}</p><dl>{facts}</dl><table><thead><tr><th>outcome</th><th>check</th>"
        f"<th>demand</th><th>what was found</th><th>s</th></tr></thead><tbody>{body}</tbody></table></html>\n"
    )
