"""Measured figures of the pages: each is read from `docs/measured.json`, with its date, machine and origin.

`.. measured:: NAME`
    A table of recorded figures, and below it when, where and how they were measured. With the option `plot`, the title
    of an axis: a plot of them, and the table folded. With `even`, a line marks the ratio 1.
:measured:`NAME.KEY`
    One recorded figure in a sentence; its title has the date, the machine and the origin.

Pages hold no measured number in their own text: `tests/docs/test_numbers.py` finds those that do.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from speed import plotted, table
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

RECORDED = Path(__file__).parents[1] / "measured.json"


def recorded(name: str) -> dict[str, Any]:
    """Return one entry of the record."""
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))["entries"][name]
    return found


def origin(entry: dict[str, Any]) -> str:
    """Return when, where and how an entry was measured."""
    machine = json.loads(RECORDED.read_text(encoding="utf-8"))["machines"][entry["machine"]]
    return f"Measured on {entry['date']} on {machine}, {entry['how']}."


class MeasuredDirective(Directive):
    """Table of one entry."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"plot": directives.unchanged, "even": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Read the entry, and return its table and origin."""
        self.state.document.settings.env.note_dependency(str(RECORDED))
        entry = recorded(self.arguments[0])
        note = nodes.paragraph("", origin(entry), classes=["measured"])
        header, rows = tuple(entry["header"]), [tuple(row) for row in entry["rows"]]
        if "plot" in self.options:
            return [*plotted(header, rows, self.options["plot"], even="even" in self.options), note]
        return [table(header, rows), note]


class MeasuredRole(SphinxRole):
    """One figure in a sentence."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Read the figure; text for readers, origin as a title."""
        self.env.note_dependency(str(RECORDED))
        name, _, key = self.text.partition(".")
        entry = recorded(name)
        figure = entry["values"][key]
        html = f'<span class="measured" title="{escape(origin(entry))}">{escape(figure)}</span>'
        return [nodes.raw("", html, format="html")], []


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive and the role with Sphinx."""
    app.add_directive("measured", MeasuredDirective)
    app.add_role("measured", MeasuredRole())
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
