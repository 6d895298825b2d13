"""Drawings of the tree along which the values of the ranks are combined.

`.. reduction-tree:: 4 5 6 8`
    One tree for each number of ranks, drawn from `schedules.reduction_tree.combined`.
"""

from __future__ import annotations

from typing import NamedTuple

from docutils import nodes
from docutils.parsers.rst import Directive
from site_directives import picture
from sphinx.application import Sphinx

from torchdist_ref.schedules.reduction_tree import combined

WIDTH, HEIGHT, MARGIN = 34, 40, 18


class Node(NamedTuple):
    """Value in a tree.

    Attributes:
        x: Horizontal position, in ranks.
        level: Number of values between this one and the leaves, at most.
        below: The two values that it combines; none for a leaf.
    """

    x: float
    level: int
    below: tuple[Node, ...] = ()


def tree(world: int) -> Node:
    """Return the tree for a number of ranks."""
    leaves = [Node(float(rank), 0) for rank in range(world)]
    return combined(leaves, lambda a, b: Node((a.x + b.x) / 2, 1 + max(a.level, b.level), (a, b)))


def lines(node: Node, top: int) -> list[str]:
    """Return the elements of a drawing: a line to each value below, and a rank or a plus sign."""
    x, y = MARGIN + node.x * WIDTH, MARGIN + (top - node.level) * HEIGHT
    found = []
    for each in node.below:
        below = MARGIN + each.x * WIDTH, MARGIN + (top - each.level) * HEIGHT
        found.append(f'<line x1="{x:g}" y1="{y:g}" x2="{below[0]:g}" y2="{below[1]:g}" stroke="currentColor"/>')
        found += lines(each, top)
    sign = "+" if node.below else f"{node.x:g}"
    found.append(
        f'<circle cx="{x:g}" cy="{y:g}" r="12" fill="var(--pst-color-background, #fff)" stroke="currentColor"/>'
    )
    found.append(f'<text x="{x:g}" y="{y + 5:g}" text-anchor="middle" font-size="14" fill="currentColor">{sign}</text>')
    return found


def svg(world: int) -> str:
    """Return the drawing of the tree for a number of ranks.

    >>> svg(2).count("<line"), svg(5).count("<line")
    (2, 8)
    """
    top = tree(world)
    width, height = 2 * MARGIN + (world - 1) * WIDTH, 2 * MARGIN + top.level * HEIGHT
    shape = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    title = f"{world} ranks: {combined(map(str, range(world)), lambda a, b: f'({a} {b})')}"
    body = f"<title>{title}</title>{''.join(lines(top, top.level))}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {shape}>{body}</svg>'


class ReductionTreeDirective(Directive):
    """Draw the tree for each of some numbers of ranks."""

    required_arguments = 1
    optional_arguments = 8

    def run(self) -> list[nodes.Node]:
        """Draw them one after the other."""
        return [picture(svg(int(world)), f"{world} ranks") for world in self.arguments]


def setup(app: Sphinx) -> dict[str, object]:
    """Register the directive."""
    app.add_directive("reduction-tree", ReductionTreeDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
