"""What each tutorial is for: a map and a table of all of them, and the same at the head of each.

A notebook says it in its metadata, under ``torchdist_ref`` and ``lesson``: the part of the course that it belongs to, a
short name, its goal, the tutorials that it builds on, and the minutes that it takes with its exercises.

`.. curriculum::`
    A drawing in which an arrow leads from each tutorial to those that build on it, and a table for each part.
`.. lesson:: NAME`
    Goal, time, what to read before, and where to go next.
"""

from __future__ import annotations

import json
from html import escape
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from docutils.parsers.rst import Directive
from site_directives import picture
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

TUTORIALS = Path(__file__).parents[2] / "tutorials"
PARTS = {
    "First steps": "Ranks, collectives, and a model that four ranks train together. Read these first.",
    "Gradients": "What DDP does with gradients, and how to send fewer bytes.",
    "Parallelism from scratch": "Split a model, its layers, experts and tokens over the ranks, and then all at once.",
    "How it works": "Below the calls: algorithms, stores, backends, and what torch's own modules send.",
    "When it fails": "Faults on purpose, a job that resumes, and a cluster that is simulated.",
}
"""Parts of the course in reading order, and what they have in common."""
WIDTH, HEIGHT, ACROSS, DOWN = 174, 44, 204, 58


class Lesson(NamedTuple):
    """What a tutorial says of itself.

    Attributes:
        name: Name of its file, without the ending.
        title: Title of its page.
        part: Part of the course, one of `PARTS`.
        short: Name for the map, of at most 20 letters.
        goal: What a reader can do or has seen afterwards, in one sentence.
        after: Names of the tutorials that it builds on.
        minutes: Minutes to read it and to do its exercises.
    """

    name: str
    title: str
    part: str
    short: str
    goal: str
    after: list[str]
    minutes: int


def lessons() -> dict[str, Lesson]:
    """Return all tutorials in the order of their numbers, by name."""
    found = {}
    for path in sorted(TUTORIALS.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        title = "".join(notebook["cells"][0]["source"]).splitlines()[0].removeprefix("# ")
        found[path.stem] = Lesson(path.stem, title, **notebook["metadata"]["torchdist_ref"]["lesson"])
    return found


def next_ones(name: str) -> list[str]:
    """Return the tutorials that build on one."""
    return [each.name for each in lessons().values() if name in each.after]


def column(name: str, known: dict[str, Lesson]) -> int:
    """Return how many tutorials have to be read before one, one after the other."""
    return max((1 + column(each, known) for each in known[name].after), default=0)


def places(known: dict[str, Lesson]) -> dict[str, tuple[int, int]]:
    """Return column and row of each tutorial in the map. A tutorial stands beside the first that builds on it."""
    found: dict[str, tuple[int, int]] = {}
    rows = count()

    def place(name: str) -> int:
        follow = [each for each in next_ones(name) if known[each].after[0] == name]
        first, *_ = [place(each) for each in follow] or [next(rows)]
        found[name] = column(name, known), first
        return first

    for name, lesson in known.items():
        if not lesson.after:
            place(name)
    return found


def svg(known: dict[str, Lesson]) -> str:
    """Return the map of the tutorials."""
    at = places(known)
    corner = {name: (across * ACROSS, row * DOWN) for name, (across, row) in at.items()}
    arrows, boxes = [], []
    for name, lesson in known.items():
        x, y = corner[name]
        for before in lesson.after:
            a, b = corner[before][0] + WIDTH, corner[before][1] + HEIGHT / 2
            middle, end = (a + x) / 2, y + HEIGHT / 2
            arrows.append(f'<path d="M{a:g} {b:g} C{middle:g} {b:g} {middle:g} {end:g} {x:g} {end:g}"/>')
        number = name.partition("_")[0]
        boxes.append(
            f'<a href="{name}.html"><title>{escape(lesson.goal)}</title>'
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
            f'<text x="{x + 12}" y="{y + 27}"><tspan class="number">{number}</tspan> {escape(lesson.short)}</text></a>'
        )
    width = max(x for x, _ in corner.values()) + WIDTH + 2
    height = max(y for _, y in corner.values()) + HEIGHT + 2
    shape = f'viewBox="-1 -1 {width} {height}" width="{width}" height="{height}"'
    title = "The tutorials, and which of them build on which; the tables below say the same"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="curriculum" role="img" {shape}><title>{title}</title>'
        f"{''.join(arrows)}{''.join(boxes)}</svg>"
    )


def link(name: str, known: dict[str, Lesson]) -> addnodes.pending_xref:
    """Return a link to a tutorial, with its number."""
    return page_link(f"/tutorials/{name}", f"{name.partition('_')[0]} {known[name].short}")


def page_link(target: str, text: str) -> addnodes.pending_xref:
    """Return a link to a page."""
    where = {"refdomain": "std", "reftype": "doc", "reftarget": target, "refexplicit": True, "refwarn": True}
    return addnodes.pending_xref("", nodes.inline("", text), **where)


def joined(links: list[addnodes.pending_xref]) -> list[nodes.Node]:
    """Return links with commas between them."""
    found: list[nodes.Node] = []
    for each in links:
        found += [nodes.Text(", "), each] if found else [each]
    return found


def table(part: str, known: dict[str, Lesson]) -> nodes.table:
    """Return the table of one part of the course."""
    titles: list[list[nodes.Node]] = [[nodes.Text(each)] for each in ("tutorial", "goal", "read before", "minutes")]
    rows = [titles]
    for each in known.values():
        if each.part == part:
            before = joined([link(name, known) for name in each.after]) or [nodes.Text("nothing")]
            rows.append([[link(each.name, known)], [nodes.Text(each.goal)], before, [nodes.Text(str(each.minutes))]])
    group = nodes.tgroup(cols=len(titles))
    group += [nodes.colspec(colwidth=width) for width in (24, 48, 18, 10)]
    found = [nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in row)) for row in rows]
    group += [nodes.thead("", found[0]), nodes.tbody("", *found[1:])]
    return nodes.table("", group)


def head(name: str, known: dict[str, Lesson]) -> nodes.container:
    """Return what stands at the head of a tutorial. Sphinx takes a bare list of fields there for metadata."""
    lesson, follow = known[name], [link(each, known) for each in next_ones(name)]
    lines: dict[str, list[nodes.Node]] = {"Goal": [nodes.Text(lesson.goal)]}
    if lesson.after:
        lines["Read before"] = joined([link(each, known) for each in lesson.after])
    lines["Time"] = [nodes.Text(f"{lesson.minutes} minutes, with the exercises")]
    lines["Next"] = joined(follow) or [page_link("/tutorials/index", "another part of the course")]
    fields = [
        nodes.field("", nodes.field_name("", title), nodes.field_body("", nodes.paragraph("", "", *content)))
        for title, content in lines.items()
    ]
    return nodes.container("", nodes.field_list("", *fields), classes=["lesson"])


class CurriculumDirective(Directive):
    """Draw the map, and write a table for each part."""

    def run(self) -> list[nodes.Node]:
        """Read the notebooks."""
        known = lessons()
        found: list[nodes.Node] = [picture(svg(known), "An arrow leads from a tutorial to those that build on it.")]
        for part, sentence in PARTS.items():
            found += [nodes.rubric("", part), nodes.paragraph("", sentence), table(part, known)]
        return found


class LessonDirective(Directive):
    """Write the goal, the time, and the tutorials before and after."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Read the notebooks."""
        return [head(self.arguments[0], lessons())]


class MoveBelowTitle(SphinxTransform):
    """Put what `nbsphinx_prolog` writes above a notebook below its title."""

    default_priority = 410

    def apply(self, **kwargs: Any) -> None:
        """Visit the pages below tutorials/ that have something above their first section."""
        first = next(iter(self.document.findall(nodes.section)), None)
        if self.env.docname in {f"tutorials/{name}" for name in lessons()} and first is not None:
            above = self.document.children[: self.document.index(first)]
            for number, node in enumerate(above, 1):
                self.document.remove(node)
                first.insert(number, node)


def setup(app: Sphinx) -> dict[str, object]:
    """Register the directives."""
    app.add_directive("curriculum", CurriculumDirective)
    app.add_directive("lesson", LessonDirective)
    app.add_transform(MoveBelowTitle)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
