"""Hierarchical, for operations on blocks: what is bound for another host travels through both hosts' leaders.

So that between two hosts there is one message (of many blocks) in each direction, instead of one per pair of
ranks. Blocks in transit wait in scratch slots. Teams and leaders are those of `hierarchical`.

With ``h`` hosts: one round up, ``h - 1`` between hosts (gather and scatter: one), one down.
Source: Karonis et al. 2000; Träff, "Improved MPI all-to-all communication on a Giganet SMP cluster", 2002.

Do not add here: operations on whole tensors (`hierarchical`).
"""

from __future__ import annotations

from collections.abc import Iterator

from torchdist_ref.schedules import ring
from torchdist_ref.schedules.compose import each, on_ranks, renamed, reversed_
from torchdist_ref.schedules.hierarchical import Hosts, teams
from torchdist_ref.schedules.schedule import Move, Round, Schedule, carry

Teams = list[list[int]]


def _meetings(groups: Teams) -> Iterator[list[tuple[list[int], list[int]]]]:
    """For each step, who tells whom: every host one other host, as in `pairwise`."""
    count = len(groups)
    for step in range(1, count):
        yield [(groups[i], groups[(i + step) % count]) for i in range(count)]


def all_gather(hosts: Hosts) -> Schedule:
    """Leaders collect their host's blocks, pass the collections round a ring, and hand out all of them."""
    world, groups = len(hosts), teams(hosts)
    up = tuple(Move(r, team[0], ("in", 0), ("out", r)) for team in groups for r in team)
    down = tuple(carry(team[0], r, ("out", b)) for team in groups for r in team[1:] for b in range(world))
    leaders = on_ranks(ring.all_gather_in_place(len(groups)), [team[0] for team in groups], world)
    outer = each(leaders, lambda m: [carry(m.src, m.dst, ("out", b)) for b in groups[m.read[1]]])
    rounds = (up, *outer.rounds, *([down] if down else []))
    return Schedule("hierarchical all_gather", world, rounds, world)


def gather(hosts: Hosts, root: int = 0) -> Schedule:
    """Leaders collect their host's blocks and hand them to the root."""
    world, groups = len(hosts), teams(hosts, root)
    home, away = groups[0], groups[1:]
    near = tuple(Move(r, root, ("in", 0), ("out", r)) for r in home)
    up = tuple(Move(r, team[0], ("in", 0), ("tmp", r)) for team in away for r in team[1:])
    over = tuple(
        Move(team[0], root, ("in", 0) if r == team[0] else ("tmp", r), ("out", r)) for team in away for r in team
    )
    return Schedule("hierarchical gather", world, (near + up, over) if over else (near,), world)


def scatter(hosts: Hosts, root: int = 0) -> Schedule:
    """The gather backwards."""
    return renamed(reversed_(gather(hosts, root)), {"in": "out", "out": "in"}, name="hierarchical scatter")


def reduce_scatter(hosts: Hosts) -> Schedule:
    """Leaders sum up each chunk over their host; each sum goes to its owner's leader; leaders hand them out."""
    world, groups = len(hosts), teams(hosts)
    up = tuple(
        Move(r, team[0], ("in", c), ("tmp", c), reduce=r != team[0])
        for team in groups for c in range(world) for r in team
    )
    over = [
        tuple(carry(a[0], b[0], ("tmp", c), reduce=True) for a, b in meeting for c in b)
        for meeting in _meetings(groups)
    ]
    down = tuple(Move(team[0], c, ("tmp", c), ("out", 0)) for team in groups for c in team)
    return Schedule("hierarchical reduce_scatter", world, (up, *over, down), world)


def all_to_all(hosts: Hosts) -> Schedule:
    """Blocks within a host go straight; the others wait at their leader in scratch slot ``from * n + to``."""
    world, groups = len(hosts), teams(hosts)
    near = [Move(s, d, ("in", d), ("out", s)) for team in groups for s in team for d in team]
    far = [(a, b) for meeting in _meetings(groups) for a, b in meeting]
    up = [Move(s, a[0], ("in", d), ("tmp", s * world + d)) for a, b in far for s in a[1:] for d in b]
    down = [Move(b[0], d, ("tmp", s * world + d), ("out", s)) for a, b in far for s in a for d in b[1:]]

    def over(a: list[int], b: list[int], s: int, d: int) -> Move:
        wait = ("tmp", s * world + d)
        return Move(a[0], b[0], ("in", d) if s == a[0] else wait, ("out", s) if d == b[0] else wait)

    outer: list[Round] = [
        tuple(over(a, b, s, d) for a, b in meeting for s in a for d in b) for meeting in _meetings(groups)
    ]
    rounds = (tuple(near + up), *outer, *([tuple(down)] if down else []))
    return Schedule("hierarchical all_to_all", world, rounds, world)


