"""Pages of the collectives: one template, filled from the data of each page and from the library.

The source of a page, `docs/collectives/*.md`, is data in YAML; `collective.md.jinja` is the template. Examples and the
calls that break a precondition run when the page is read, so a page shows what the library returns and raises.

`.. chooser::`
    One row for each page: the data that ranks have, the data that they want, and the call.
`.. collective-sheet::`
    One card for each operation: the picture, the data before and after in words, and the cost. It prints on one page.
`.. before-after:: all_reduce`
    Slots before and after an operation, drawn from its contract.
`.. splits:: 1 2 / 0 3`
    Rows before and after an all_to_all_single, whose ranks 0, 1 send so many to ranks 0, 1.
`.. costs:: all_reduce`
    Steps and bytes of each algorithm, counted.
`.. speed-plot:: all_reduce`
    Recorded time by size, beside the time that `simulate` predicts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import yaml
from collective_pictures import (
    before_after,
    conditions,
    constants_text,
    figures_table,
    note,
    speed_plot,
    splits_picture,
)
from docutils import nodes
from docutils.parsers.rst import Directive
from site_directives import table
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import torchdist_ref as dist
from torchdist_ref import schedules
from torchdist_ref.errors import GroupAbortedError
from torchdist_ref.testing import fill, run

# Pages of the folder that are not of a call.
OTHERS = ("index", "sheet", "workbench")
FOLDER = Path(__file__).parents[1] / "collectives"
TEMPLATE = Path(__file__).with_name("collective.md.jinja")
# Operations of the schedules whose benchmark has another name.
BENCHMARKS = {"send": "sendrecv"}
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def sources() -> list[Path]:
    """Return the data files of all pages, in the order of the chooser."""
    found = [path for path in FOLDER.glob("*.md") if path.stem not in OTHERS]
    return sorted(found, key=lambda path: int(data(path)["order"]))


def data(path: Path) -> dict[str, Any]:
    """Return the data of one page."""
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8").strip().strip("-"))
    return found


def render(page: dict[str, Any]) -> str:
    """Return the Markdown of a page."""
    links = ", ".join(f"{{func}}`~torchdist_ref.{name}`" for name in page["calls"])
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    measured = BENCHMARKS.get(page["schedule"], page["schedule"])
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        page={"note": "", "splits": "", **page},
        signature=f"Reference: {links}.",
        examples=[(code, {world: outputs(code, world) for world in worlds}) for code, worlds in examples(page)],
        breaches=[{**breach, "error": error(breach["code"])} for breach in page["preconditions"]],
        measured=None if page.get("unmeasured") else measured,
    )


def examples(page: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the examples of a page, each with the numbers of ranks that it runs on; that of a picture runs on 4."""
    return [(page["example"], (2, 4)), *((code, (4,)) for code in page.get("with_splits", []))]


def outputs(example: str, world: int) -> list[str]:
    """Run the function `program` of an example, and return one line for each rank."""
    names: dict[str, Any] = {}
    exec(example, names)
    return [f"rank {rank}: {found}" for rank, found in enumerate(run(names["program"], world))]


def error(code: str) -> str:
    """Run a wrong call on two ranks, and return the error of the first rank that has one of its own.

    >>> import torch
    >>> error("dist.broadcast(torch.ones(2), src=7)").partition(":")[0]
    'rank 0 raises ArgumentError'
    """
    found = run(attempt(code), 2)
    rank, caught = next((pair for pair in enumerate(found) if own(pair[1])), (0, None))
    if caught is None:
        raise RuntimeError(f"raises no error: {code}")
    return ADDRESS.sub("", f"rank {rank} raises {type(caught).__name__}: {caught}")


def attempt(code: str) -> Callable[[int], Exception | None]:
    """Return a program that runs some code and returns what it raises."""

    def program(rank: int) -> Exception | None:
        import torch

        try:
            exec(code, {"rank": rank, "dist": dist, "torch": torch, "fill": fill})
        except Exception as caught:
            return caught
        return None

    return program


def own(caught: Exception | None) -> bool:
    """Return whether a rank was wrong itself, and not only left alone by one that was."""
    return caught is not None and not isinstance(caught, GroupAbortedError)


def fill_in(app: Sphinx, docname: str, content: list[str]) -> None:
    """Replace the data of a page by the page."""
    path = Path(app.srcdir, f"{docname}.md")
    if path.parent == FOLDER and path.stem not in OTHERS:
        app.env.note_dependency(str(TEMPLATE), docname=docname)
        content[0] = render(data(path))


class ChooserDirective(SphinxDirective):
    """Table that leads from the data that ranks have and want to the page of a call."""

    def run(self) -> list[nodes.Node]:
        """Make one row for each page."""
        rows = []
        for path in sources():
            self.env.note_dependency(str(path))
            page = data(path)
            rows.append(f"| {page['have']} | {page['want']} | {{doc}}`{page['title']} </collectives/{path.stem}>` |")
        header = ["| I have … | I want … | call |", "|---|---|---|"]
        return [nodes.container("", *self.parse_text_to_nodes("\n".join([*header, *rows])), classes=["chooser"])]


# Calls of the sheet; the others have the picture of one of these.
SHEET = (
    *("broadcast", "scatter", "gather", "reduce", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"),
    *("send_recv", "barrier"),
)


class SheetDirective(SphinxDirective):
    """Cards of the operations."""

    def run(self) -> list[nodes.Node]:
        """Make one card for each call."""
        cards = nodes.container("", classes=["collective-sheet"])
        for path in (FOLDER / f"{name}.md" for name in SHEET):
            self.env.note_dependency(str(path))
            page = data(path)
            card = nodes.container("", classes=["sheet-card"])
            words = f"**{{doc}}`{page['title']} </collectives/{path.stem}>`**: {page['have']} → {page['want']}"
            card += self.parse_text_to_nodes(words)
            operation = page["schedule"]
            if operation != "barrier":
                card += nodes.raw("", f'<div class="drawing">{before_after(operation, 4)}</div>', format="html")
            large = schedules.choose(operation, 8, 64 << 20)
            card += nodes.paragraph("", f"{large}: {schedules.entry(operation, large).cost}", classes=["sheet-cost"])
            cards += card
        return [cards]


class BeforeAfterDirective(Directive):
    """Drawing of slots before and after an operation on four ranks."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Draw the contract."""
        drawing = f'<div class="drawing">{before_after(self.arguments[0], 4)}</div>'
        caption = nodes.caption("", f"{self.arguments[0]} on 4 ranks: what each rank holds before and after")
        return [nodes.figure("", nodes.raw("", drawing, format="html"), caption, classes=["drawn"])]


class SplitsDirective(Directive):
    """Drawing of rows before and after an all_to_all_single with split sizes."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Draw the rows of all ranks."""
        splits = [[int(size) for size in row.split()] for row in self.arguments[0].split("/")]
        drawing = f'<div class="drawing">{splits_picture(splits)}</div>'
        text = (
            "all_to_all_single on 4 ranks with split sizes: the rows that each rank holds. A line separates the parts "
            "for ranks 0, 1, 2, 3 before the call, and the parts from them after it."
        )
        return [nodes.figure("", nodes.raw("", drawing, format="html"), nodes.caption("", text), classes=["drawn"])]


class CostsDirective(Directive):
    """Table of the algorithms of one operation."""

    required_arguments = 1
    HEADER: ClassVar[tuple[str, ...]] = ("algorithm", "use", "steps, n = 8", "sent by one rank", "time")

    def run(self) -> list[nodes.Node]:
        """Count each schedule on 8 ranks."""
        operation = self.arguments[0]
        rows = [self.line(operation, algorithm) for algorithm in schedules.algorithms(operation)]
        said = conditions(operation), constants_text()
        return [table("algorithms", self.HEADER, rows), *(nodes.paragraph("", text) for text in said)]

    def line(self, operation: str, algorithm: str) -> tuple[str, ...]:
        """Return one row; a hierarchical algorithm is counted on two hosts."""
        hosts = (0, 0, 0, 0, 1, 1, 1, 1) if algorithm == "hierarchical" else None
        found = schedules.cost(schedules.build(operation, algorithm, 8, hosts=hosts))
        entry = schedules.entry(operation, algorithm)
        sent = f"{float(found.sent):.3g} m" if found.sent else f"{found.messages} signals in all"
        return algorithm, f"{entry.summary}; {entry.when}", str(found.steps), sent, entry.cost


class SpeedPlotDirective(Directive):
    """Plot of recorded and predicted times, and the same figures as a table."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Draw one plot for ranks on one host, and one for ranks on two."""
        found: list[nodes.Node] = []
        for apart, where in ((False, "two ranks on one host"), (True, "two ranks on two hosts, over TCP")):
            drawing = speed_plot(self.arguments[0], apart)
            if drawing:
                shown = nodes.raw("", f'<div class="drawing plot">{drawing}</div>', format="html")
                found.append(nodes.figure("", shown, nodes.caption("", caption(where)), classes=["drawn"]))
            explained = note(self.arguments[0], apart)
            if explained:
                found.append(nodes.paragraph("", f"On {where}: {explained[0].lower()}{explained[1:]}"))
            found.append(nodes.raw("", figures_table(self.arguments[0], apart, where), format="html"))
        return found


def caption(where: str) -> str:
    """Return what a plot shows."""
    return (
        f"Time of a call by size, {where}. Measured: medians of recorded runs. Predicted: simulate on the chosen "
        "schedule, with the constants a, b and g above."
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the template and the directives with Sphinx."""
    app.connect("source-read", fill_in)
    app.add_directive("chooser", ChooserDirective)
    app.add_directive("collective-sheet", SheetDirective)
    app.add_directive("before-after", BeforeAfterDirective)
    app.add_directive("splits", SplitsDirective)
    app.add_directive("costs", CostsDirective)
    app.add_directive("speed-plot", SpeedPlotDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
