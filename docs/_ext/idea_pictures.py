"""Drawings of ideas for the glossary and the page on topologies, and times that the simulator computes for that page.

`.. idea:: NAME`
    The drawing that the function of this name makes.
`.. topology-times::`
    Predicted times of `all_reduce` by several algorithms on clusters of known links, by `schedules.simulate`.

A drawing is at most 345 pixels wide, so that a phone shows its text at full size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import cos, pi, sin
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from site_directives import picture, table
from sphinx.application import Sphinx

from torchdist_ref import schedules
from torchdist_ref.notebook.pictures import Box, Drawing
from torchdist_ref.schedules import Network
from torchdist_ref.schedules.drawing import BLUE, ORANGE, duration

IDEAS: dict[str, Callable[[], Drawing]] = {}


def idea(function: Callable[[], Drawing]) -> Callable[[], Drawing]:
    """Make a drawing available to the directive, under the name of its function."""
    IDEAS[function.__name__] = function
    return function


@idea
def job() -> Drawing:
    """Draw hosts, ranks, local ranks and a group."""
    made = Drawing("A job of four ranks on two hosts", "Ranks 0 and 2, one on each host, are also a group.")
    for host in range(2):
        member = made.box(10, 110 * host, f"rank {2 * host}", "local rank 0", f"group rank {host}", color=BLUE)
        other = made.box(150, 110 * host, f"rank {2 * host + 1}", "local rank 1", "", width=member.width)
        made.frame([member, other], f"host {host}")
    made.words(0, 200, "blue: the group of ranks 0 and 2", color=BLUE)
    return made


@idea
def bucket() -> Drawing:
    """Draw gradients in two buckets, and the collective of each."""
    made = Drawing("Two buckets", "Backward fills the first with the last layers; its all_reduce starts first.")
    for row, layers in enumerate(((4, 3), (2, 1))):
        members = [made.box(88 * n, 70 * row, f"layer {layer}") for n, layer in enumerate(layers)]
        frame = made.frame(members, f"bucket {row}")
        call = made.box(236, 70 * row, "all_reduce", color=ORANGE)
        made.arrow((frame.x + frame.width, call.center[1]), (call.x, call.center[1]), color=ORANGE)
    return made


def circle(made: Drawing, count: int, radius: float) -> list[Box]:
    """Draw ranks around a circle."""
    angles = [2 * pi * rank / count - pi / 2 for rank in range(count)]
    return [
        made.box(radius * cos(angle) - 30, radius * sin(angle) - 13, f"rank {rank}", width=60)
        for rank, angle in enumerate(angles)
    ]


@idea
def ring() -> Drawing:
    """Draw a ring of six ranks."""
    made = Drawing("A ring of six ranks", "Each rank sends to the next only, the last one to the first.")
    boxes = circle(made, 6, 100)
    for one, following in zip(boxes, [*boxes[1:], boxes[0]], strict=True):
        made.arrow(one, following, color=BLUE)
    return made


@idea
def tree() -> Drawing:
    """Draw the rounds of a broadcast along a binomial tree, from the catalogue's schedule."""
    made = Drawing("A tree of eight ranks", "The number of ranks that have the tensor doubles in each round.")
    columns = (0, 4, 2, 6, 1, 5, 3, 7)
    has = {0: made.box(0, 0, "0")}
    made.words(280, 17, "root")
    for step, moves in enumerate(schedules.build("broadcast", "tree", 8).rounds, 1):
        y, above = 50.0 * step, dict(has)
        made.words(280, y + 17, f"round {step}")
        for rank in above:
            has[rank] = made.box(34.0 * columns[rank], y, f"{rank}")
        for move in moves:
            has[move.dst] = made.box(34.0 * columns[move.dst], y, f"{move.dst}", color=BLUE)
            made.arrow(above[move.src], has[move.dst], color=BLUE)
    return made


@idea
def divided() -> Drawing:
    """Draw which part of the work each kind of parallelism divides."""
    made = Drawing("Kinds of parallelism", "Each kind gives each of two ranks one half of another thing.")
    kinds = {
        "data": ("batch rows 0-7", "rows 8-15"),
        "tensor": ("columns 0-7", "columns 8-15"),
        "context": ("tokens 0-7", "tokens 8-15"),
        "pipeline": ("layers 0-3", "layers 4-7"),
        "expert": ("experts 0, 1", "experts 2, 3"),
    }
    made.words(76, 0, "rank 0", color=BLUE)
    made.words(208, 0, "rank 1", color=ORANGE)
    for row, (name, halves) in enumerate(kinds.items()):
        made.words(0, 34 * row + 25, name)
        for column, (half, color) in enumerate(zip(halves, (BLUE, ORANGE), strict=True)):
            made.box(76 + 132 * column, 34 * row + 8, half, width=124, color=color)
    return made


@idea
def switched() -> Drawing:
    """Draw the accelerators of a host around a switch."""
    made = Drawing("NVLink with a switch", "Each accelerator has the same rate to each other one.")
    switch = made.box(85, 70, "NVSwitch", width=160, color=BLUE)
    for n in range(8):
        card = made.box(84 * (n % 4), 140 * (n // 4), f"GPU {n}", width=60)
        made.arrow(card, switch, color=BLUE)
    return made


@idea
def pcie() -> Drawing:
    """Draw accelerators below PCIe switches and a processor."""
    made = Drawing("A tree of PCIe", "Accelerators below different switches share the links to the processor.")
    processor = made.box(115, 0, "processor", width=110)
    for n in range(2):
        switch = made.box(14 + 174 * n, 64, "PCIe switch", width=130)
        made.arrow(switch, processor)
        for m in range(2):
            made.arrow(made.box(84 * (2 * n + m) + 6 * n, 128, f"GPU {2 * n + m}", width=64), switch)
    return made


@idea
def rails() -> Drawing:
    """Draw hosts whose cards of one number are on one switch."""
    made = Drawing("Rails", "The network card of GPU r of each host is connected to switch r.")
    tops = [made.box(62 + 69 * n, 72, f"rail {n}", width=60, color=ORANGE) for n in range(4)]
    for host in range(2):
        made.words(0, 144.0 * host + 17, f"host {host}")
        for n in range(4):
            made.arrow(made.box(62 + 69 * n, 144.0 * host, f"GPU {n}", width=60), tops[n], color=ORANGE)
    return made


def inner(world: int) -> dict[int, int]:
    """Return the parent of each rank in a binary tree whose odd ranks, but for the root, are leaves.

    >>> inner(8)
    {1: 2, 2: 4, 3: 2, 4: 0, 5: 6, 6: 4, 7: 6}
    """
    found = {}
    for rank in range(1, world):
        low = rank & -rank
        parent = (rank | 2 * low) & ~low
        found[rank] = parent if parent < world else rank & ~low
    return found


@idea
def double_tree() -> Drawing:
    """Draw two trees in which a leaf of one is an inner rank of the other."""
    made = Drawing(
        "Two binary trees over eight ranks", "A rank that is a leaf of one tree is an inner rank of the other."
    )
    for number, color in enumerate((BLUE, ORANGE)):
        place = range(8) if number == 0 else range(7, -1, -1)
        parents = {place[rank]: place[parent] for rank, parent in inner(8).items()}
        (root,) = {*range(8)} - {*parents}
        made.words(0, 190.0 * number - 8, f"tree {number}: half of the tensor", color=color)
        boxes = {}
        for rank in range(8):
            depth, at = 0, rank
            while at != root:
                at, depth = parents[at], depth + 1
            boxes[rank] = made.box(42.0 * rank, 190.0 * number + 44 * depth, f"{rank}", color=color)
        for rank, parent in parents.items():
            made.arrow(boxes[rank], boxes[parent], color=color)
    return made


@idea
def hierarchy() -> Drawing:
    """Draw an all_reduce in which one rank of each host communicates for the others."""
    made = Drawing(
        "A hierarchical all_reduce", "Ranks of a host reduce to their leader, and the leaders among each other."
    )
    leaders = []
    for host in range(2):
        row, own = (0.0, 62.0) if host == 0 else (222.0, 160.0)
        others = [made.box(108 * n, row, f"rank {4 * host + n + 1}", width=90) for n in range(3)]
        leaders.append(made.box(78, own, f"rank {4 * host}, leader", width=150, color=ORANGE))
        for other in others:
            made.arrow(other, leaders[host], color=BLUE)
        made.frame([*others, leaders[host]], f"host {host}")
    for one, following in (leaders, leaders[::-1]):
        x = one.center[0] + (20 if one is leaders[0] else -20)
        down = one is leaders[0]
        start = (x, one.y + one.height) if down else (x, one.y)
        made.arrow(start, (x, following.y if down else following.y + following.height), color=ORANGE)
    return made


CLUSTERS = (
    ("8 ranks, one host, NVLink", 8, "nvlink", "400gbps"),
    ("8 ranks, one host, PCIe", 8, "pcie", "400gbps"),
    ("64 ranks, 8 hosts, NVLink, 400 Gbit/s", 64, "nvlink", "400gbps"),
    ("64 ranks, 8 hosts, NVLink, 100 Gbit/s", 64, "nvlink", "100gbps"),
    ("64 ranks, 8 hosts, PCIe, 100 Gbit/s", 64, "pcie", "100gbps"),
)
ALGORITHMS = ("ring", "tree", "halving_doubling", "hierarchical")
SIZES = ((64 << 10, "64 KiB"), (256 << 20, "256 MiB"))


@cache
def predicted(within: str, between: str, world: int, algorithm: str, nbytes: int) -> float:
    """Return the simulated seconds of an all_reduce with eight ranks on each host."""
    hosts = tuple(rank // 8 for rank in range(world))
    network = Network.preset(within, between, hosts=hosts)
    return schedules.simulate(schedules.build("all_reduce", algorithm, world, hosts=hosts), nbytes, network).total


def times() -> list[tuple[str, ...]]:
    """Return a row of predicted times for each cluster and size."""
    rows = []
    for name, world, within, between in CLUSTERS:
        for nbytes, size in SIZES:
            cells = [duration(predicted(within, between, world, algorithm, nbytes)) for algorithm in ALGORITHMS]
            rows.append((name, size, *cells))
    return rows


class IdeaDirective(Directive):
    """Draw one idea."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Call the function of this name."""
        made = IDEAS[self.arguments[0]]()
        return [picture(made.svg(), f"{made.title}.")]


class TopologyTimesDirective(Directive):
    """Show predicted times by cluster, size and algorithm."""

    def run(self) -> list[nodes.Node]:
        """Simulate them."""
        header = ("cluster", "size", *(f"`{algorithm}`" for algorithm in ALGORITHMS))
        return [table("topology-times", header, times())]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives with Sphinx."""
    app.add_directive("idea", IdeaDirective)
    app.add_directive("topology-times", TopologyTimesDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
