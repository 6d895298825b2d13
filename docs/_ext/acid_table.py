"""Table of recorded acid tests: what each backend does with each check.

`.. acid::`
    One row for each check and one column for each file in docs/acid, then what was found where a check did not pass.

A file is a ``report.json`` of ``python -m torchdist_ref.acid --report``, without the code of the checks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from site_directives import table
from sphinx.application import Sphinx

from torchdist_ref.acid import CHECKS

FOLDER = Path(__file__).parents[1] / "acid"
ORDER = ("ref", "gloo")
MOST_LISTED = 10
"""A backend that fails more checks than these has one reason for them, which the page says."""


def reports() -> dict[str, dict[str, Any]]:
    """Return the recorded reports by the names of their files, ours first."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
    return {name: found[name] for name in [*ORDER, *(name for name in found if name not in ORDER)]}


class AcidDirective(Directive):
    """Show the recorded reports."""

    def run(self) -> list[nodes.Node]:
        """Read the files."""
        found = reports()
        for path in FOLDER.glob("*.json"):
            self.state.document.settings.env.note_dependency(str(path))
        by_name = [{each["name"]: each for each in report["checks"]} for report in found.values()]
        header = ("check", "demand", *found)
        rows = [
            (
                check.name,
                check.demand,
                *(known[check.name]["outcome"] if check.name in known else "new" for known in by_name),
            )
            for check in CHECKS
            if not check.large
        ]
        listed: list[nodes.Node] = []
        for name, report in found.items():
            wrong = [each for each in report["checks"] if each["outcome"] not in ("pass", "not run")]
            if 0 < len(wrong) <= MOST_LISTED:
                items = [
                    nodes.list_item("", nodes.paragraph("", f"{each['name']} ({each['outcome']}): {each['detail']}"))
                    for each in wrong
                ]
                listed += [nodes.paragraph("", f"{name}:"), nodes.bullet_list("", *items)]
        about = "; ".join(
            f"{name}: {report['summary']}, with {report['about']['versions']}, on {report['about']['date']}"
            for name, report in found.items()
        )
        return [nodes.paragraph("", f"{about}."), table("acid", header, rows), *listed]


def setup(app: Sphinx) -> dict[str, object]:
    """Register the directive."""
    app.add_directive("acid", AcidDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
