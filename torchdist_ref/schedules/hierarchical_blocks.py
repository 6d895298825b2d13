"""Hierarchical, for operations on blocks: what is bound for another host travels through both hosts' leaders.

So that between two hosts there is one message (of many blocks) in each direction, instead of one per pair of
ranks. Blocks in transit wait in scratch slots. Teams and leaders are those of `hierarchical`.

With ``h`` hosts: one round up, ``h - 1`` between hosts (gather and scatter: one), one down.
Source: Karonis et al. 2000; Träff, "Improved MPI all-to-all communication on a Giganet SMP cluster", 2002.

Do not add here: operations on whole tensors (`hierarchical`).
"""

from __future__ import annotations

from torchdist_ref.schedules import ring
from torchdist_ref.schedules.compose import each, on_ranks, renamed, reversed_, then
from torchdist_ref.schedules.hierarchical import Hosts, period, teams
from torchdist_ref.schedules.schedule import Arrivals, Move, Run, Schedule, Slot, arriving, carry, carry_run

Teams = list[list[int]]


def _by_rank(groups: Teams) -> dict[int, tuple[list[int], int]]:
    """Each rank's team, and that team's place among the others."""
    return {rank: (team, place) for place, team in enumerate(groups) for rank in team}


def _rounds(name: str, groups: Teams, world: int, count: int, arrivals: Arrivals) -> Schedule:
    """Rounds in which all hosts do the same."""
    return Schedule(name, world, arriving(world, count, arrivals, period(groups)), world)


def all_gather(hosts: Hosts) -> Schedule:
    """Leaders collect their host's blocks, pass the collections round a ring, and hand out all of them."""
    world, groups = len(hosts), teams(hosts)
    home = _by_rank(groups)

    def up(step: int, rank: int) -> list[Move]:
        team, _ = home[rank]
        return [Move(r, rank, ("in", 0), ("out", r)) for r in team] if rank == team[0] else []

    def down(step: int, rank: int) -> list[Run]:
        team, _ = home[rank]
        return [carry_run(team[0], rank, "out", range(world))] if rank != team[0] else []

    leaders = on_ranks(ring.all_gather_in_place(len(groups)), [team[0] for team in groups], world)
    outer = each(leaders, lambda m: [carry(m.src, m.dst, ("out", b)) for b in groups[m.read[1]]], symmetric=True)
    return then(
        _rounds("up", groups, world, 1, up),
        Schedule("between", world, outer.rounds, world),
        _rounds("down", groups, world, int(len(groups) < world), down),
        name="hierarchical all_gather",
    )


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
    home = _by_rank(groups)

    def arrivals(step: int, rank: int) -> list[Run] | list[Move]:
        team, place = home[rank]
        if step == len(groups):
            return [Move(team[0], rank, ("tmp", rank), ("out", 0))]
        if rank != team[0]:
            return []
        if step == 0:
            return [carry_run(r, rank, "in", range(world), reduce=r != rank, into="tmp") for r in team]
        source = groups[(place - step) % len(groups)]
        return [carry(source[0], rank, ("tmp", c), reduce=True) for c in team]

    return _rounds("hierarchical reduce_scatter", groups, world, len(groups) + 1, arrivals)


def all_to_all(hosts: Hosts) -> Schedule:
    """Blocks within a host go straight; the others wait at their leader in scratch slot ``from * n + to``."""
    world, groups = len(hosts), teams(hosts)
    home, count = _by_rank(groups), len(groups)

    def wait(s: int, d: int) -> Slot:
        return ("tmp", s * world + d)

    def elsewhere(place: int) -> list[int]:
        return [r for k in range(1, count) for r in groups[(place + k) % count]]

    def first(step: int, rank: int) -> list[Move]:
        team, place = home[rank]
        near = [Move(s, rank, ("in", rank), ("out", s)) for s in team]
        if rank != team[0]:
            return near
        return near + [Move(s, rank, ("in", d), wait(s, d)) for d in elsewhere(place) for s in team[1:]]

    def over(step: int, rank: int) -> list[Move]:
        team, place = home[rank]
        source = groups[(place - step - 1) % count] if rank == team[0] else []
        return [
            Move(source[0], rank, ("in", d) if s == source[0] else wait(s, d), ("out", s) if d == rank else wait(s, d))
            for s in source
            for d in team
        ]

    def last(step: int, rank: int) -> list[Move]:
        team, place = home[rank]
        return [Move(team[0], rank, wait(s, rank), ("out", s)) for s in elsewhere(place)] if rank != team[0] else []

    return then(
        _rounds("first", groups, world, 1, first),
        _rounds("over", groups, world, count - 1, over),
        _rounds("last", groups, world, int(1 < count < world), last),
        name="hierarchical all_to_all",
    )
