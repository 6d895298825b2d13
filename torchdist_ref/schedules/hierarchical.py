"""Hierarchical: within each host first, then between hosts, so that the slow network carries as little as it can.

One rank per host, its leader, communicates for the others. Within a host ranks read each other's memory, so the direct
algorithms serve there; between the leaders the classic ones do. The root, if there is one, is its host's leader.

Operations on blocks send what is meant for another host through both hosts' leaders. So between two hosts there is
one message of many blocks in each direction, instead of one per pair of ranks. Blocks in transit are in scratch slots.

A reduction combines the ranks along the `reduction_tree` if each host is a subtree of it (see `are_subtrees` there).
Otherwise the order is another one, so `choose` picks another algorithm, and this one runs only where it is asked for.

With ``h`` hosts: steps of the outer algorithm on ``h`` ranks, plus one or two rounds within the hosts.
Source: Karonis et al., "Exploiting hierarchy in parallel computer networks", 2000; MPICH's and NCCL's trees;
Träff, "Improved MPI all-to-all communication on a Giganet SMP cluster", 2002.

Do not add here: the detection of hosts (an argument names them), or more than two levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchdist_ref.schedules import bruck, direct, halving_doubling, ring, tree
from torchdist_ref.schedules.compose import alongside, each, on_ranks, renamed, reversed_, segmented, then
from torchdist_ref.schedules.schedule import Arrivals, Move, Run, Schedule, Slot, arriving, carry, carry_run, to_targets

Hosts = tuple[int, ...]
MAX_LEADER_CHUNKS = 64


def teams(hosts: Hosts, root: int = 0) -> list[list[int]]:
    """Return the ranks of each host, leader first; the root leads its host, and its host comes first.

    >>> teams((7, 7, 9, 9), root=3)
    [[3, 2], [0, 1]]
    """
    order = [root, *(r for r in range(len(hosts)) if r != root)]
    found: dict[int, list[int]] = {}
    for rank in order:
        found.setdefault(hosts[rank], []).append(rank)
    return list(found.values())


def period(groups: list[list[int]]) -> int:
    """Return the ranks per host if hosts are filled in order with equally many; else 0.

    >>> period(teams((7, 7, 9, 9))), period(teams((7, 9, 7, 9)))
    (2, 0)
    """
    size = len(groups[0])
    return size if all(team == list(range(i * size, (i + 1) * size)) for i, team in enumerate(groups)) else 0


def _within(groups: list[list[int]], world: int, make: Callable[[int], Schedule], chunks: int) -> Schedule:
    """Run a schedule inside every host, at the same time, on a tensor divided like that of the leaders."""
    parts = (segmented(make(len(team)), chunks, stagger=0) for team in groups)
    return alongside(*(on_ranks(part, team, world) for part, team in zip(parts, groups, strict=True)))


def _between(groups: list[list[int]], world: int, outer: Schedule) -> Schedule:
    """Run a schedule on the leaders."""
    return on_ranks(outer, [team[0] for team in groups], world)


def all_reduce(hosts: Hosts) -> Schedule:
    """Reduce to the leaders, run halving-doubling between them, broadcast from them.

    Halving-doubling divides the tensor by the number of leaders, within the hosts too. With more than
    `MAX_LEADER_CHUNKS` leaders the moves would need too much memory, so leaders exchange whole tensors.
    """
    world, groups = len(hosts), teams(hosts)
    few = len(groups) <= MAX_LEADER_CHUNKS
    exchange = halving_doubling.all_reduce if few else halving_doubling.doubling_all_reduce
    outer = _between(groups, world, exchange(len(groups)))
    up, down = (_within(groups, world, make, outer.chunks) for make in (direct.reduce, direct.broadcast))
    return then(up, outer, down, name="hierarchical all_reduce")


def reduce(hosts: Hosts, root: int = 0) -> Schedule:
    """Reduce to the leaders, then along a tree of leaders to the root. Hosts stay in order: they are subtrees."""
    world, groups = len(hosts), teams(hosts)
    leaders = [root if root in team else team[0] for team in groups]
    ends = [team.index(leader) for team, leader in zip(groups, leaders, strict=True)]
    up = (on_ranks(direct.reduce(len(team), end), team, world) for team, end in zip(groups, ends, strict=True))
    outer = on_ranks(tree.reduce(len(groups), leaders.index(root)), leaders, world)
    return then(alongside(*up), outer, name="hierarchical reduce")


def broadcast(hosts: Hosts, root: int = 0) -> Schedule:
    """Broadcast along a tree of leaders, then from each leader to its host."""
    world, groups = len(hosts), teams(hosts, root)
    outer = _between(groups, world, tree.broadcast(len(groups)))
    return then(outer, _within(groups, world, direct.broadcast, 1), name="hierarchical broadcast")


def barrier(hosts: Hosts) -> Schedule:
    """Notify the leaders, run dissemination between them, notify the ranks of each host."""
    world, groups = len(hosts), teams(hosts)
    moves = tuple(carry(rank, team[0], direct.SIGNAL) for team in groups for rank in team[1:])
    up = Schedule("notify leaders", world, (moves,) if moves else (), chunks=0)
    outer = _between(groups, world, bruck.dissemination_barrier(len(groups)))
    return then(up, outer, reversed_(up), name="hierarchical barrier")


def _by_rank(groups: list[list[int]]) -> dict[int, tuple[list[int], int]]:
    """Return each rank's team, and that team's index."""
    return {rank: (team, index) for index, team in enumerate(groups) for rank in team}


def _rounds(
    name: str, groups: list[list[int]], world: int, count: int, arrivals: Arrivals, leaving: Arrivals | None = None
) -> Schedule:
    """Make a schedule of rounds in which all hosts do the same. By default a rank sends within its host only."""
    home = _by_rank(groups)
    leaving = leaving or to_targets(arrivals, lambda step, rank: home[rank][0])
    return Schedule(name, world, arriving(world, count, arrivals, leaving, period(groups)), world)


def all_gather(hosts: Hosts) -> Schedule:
    """Gather on the leaders, pass these collections round a ring of leaders, copy all of them within each host."""
    world, groups = len(hosts), teams(hosts)
    home = _by_rank(groups)

    def up(step: int, rank: int) -> list[Move]:
        team, _ = home[rank]
        return [Move(r, rank, ("in", 0), ("out", r)) for r in team] if rank == team[0] else []

    def down(step: int, rank: int) -> list[Run]:
        team, _ = home[rank]
        return [carry_run(team[0], rank, "out", range(world))] if rank != team[0] else []

    leaders = on_ranks(ring.all_gather_in_place(len(groups)), [team[0] for team in groups], world)
    outer = each(leaders, lambda m: [carry(m.src, m.dst, ("out", b)) for b in groups[m.read[1]]], period(groups) > 0)
    return then(
        _rounds("up", groups, world, 1, up),
        Schedule("between", world, outer.rounds, world),
        _rounds("down", groups, world, int(len(groups) < world), down),
        name="hierarchical all_gather",
    )


def gather(hosts: Hosts, root: int = 0) -> Schedule:
    """Gather on the leaders, then on the root."""
    world, groups = len(hosts), teams(hosts, root)
    home, away = groups[0], groups[1:]
    near = tuple(Move(r, root, ("in", 0), ("out", r)) for r in home)
    up = tuple(Move(r, team[0], ("in", 0), ("tmp", r)) for team in away for r in team[1:])
    over = tuple(
        Move(team[0], root, ("in", 0) if r == team[0] else ("tmp", r), ("out", r)) for team in away for r in team
    )
    return Schedule("hierarchical gather", world, (near + up, over) if over else (near,), world)


def scatter(hosts: Hosts, root: int = 0) -> Schedule:
    """Reverse the gather."""
    return renamed(reversed_(gather(hosts, root)), {"in": "out", "out": "in"}, name="hierarchical scatter")


def reduce_scatter(hosts: Hosts) -> Schedule:
    """Reduce each chunk on the leader of each host, then on its owner's leader, and copy it to its owner.

    A leader receives from all other leaders in one round, so that it can combine them along the `reduction_tree`.
    """
    world, groups = len(hosts), teams(hosts)
    home = _by_rank(groups)

    def arrivals(step: int, rank: int) -> list[Run] | list[Move]:
        team, index = home[rank]
        if step == 2:
            return [Move(team[0], rank, ("tmp", rank), ("out", 0))]
        if rank != team[0]:
            return []
        if step == 0:
            return [carry_run(r, rank, "in", range(world), reduce=r != rank, into="tmp") for r in team]
        others = (groups[(index + k) % len(groups)] for k in range(1, len(groups)))
        return [carry(other[0], rank, ("tmp", c), reduce=True) for other in others for c in team]

    within = to_targets(arrivals, lambda step, rank: home[rank][0])

    def leaving(step: int, rank: int) -> Iterable[Run | Move]:
        if step != 1:
            return within(step, rank)
        if rank != home[rank][0][0]:
            return ()
        return [carry(rank, team[0], ("tmp", c), reduce=True) for team in groups if team[0] != rank for c in team]

    return _rounds("hierarchical reduce_scatter", groups, world, 3, arrivals, leaving)


def all_to_all(hosts: Hosts) -> Schedule:
    """Copy blocks within a host; send the others through the leaders, in scratch slot ``from * n + to``."""
    world, groups = len(hosts), teams(hosts)
    home, count = _by_rank(groups), len(groups)

    def via(s: int, d: int) -> Slot:
        return ("tmp", s * world + d)

    def elsewhere(index: int) -> list[int]:
        return [r for k in range(1, count) for r in groups[(index + k) % count]]

    def first(step: int, rank: int) -> list[Move]:
        team, index = home[rank]
        near = [Move(s, rank, ("in", rank), ("out", s)) for s in team]
        if rank != team[0]:
            return near
        return near + [Move(s, rank, ("in", d), via(s, d)) for d in elsewhere(index) for s in team[1:]]

    def over(step: int, rank: int) -> list[Move]:
        team, index = home[rank]
        source = groups[(index - step - 1) % count] if rank == team[0] else []
        return [
            Move(
                source[0],
                rank,
                ("in", d) if s == source[0] else via(s, d),
                ("out", s) if d == rank else via(s, d),
            )
            for s in source
            for d in team
        ]

    def target(step: int, rank: int) -> list[int]:
        team, index = home[rank]
        return groups[(index + step + 1) % count][:1] if rank == team[0] else []

    def last(step: int, rank: int) -> list[Move]:
        team, index = home[rank]
        return [Move(team[0], rank, via(s, rank), ("out", s)) for s in elsewhere(index)] if rank != team[0] else []

    return then(
        _rounds("first", groups, world, 1, first),
        _rounds("over", groups, world, count - 1, over, to_targets(over, target)),
        _rounds("last", groups, world, int(1 < count < world), last),
        name="hierarchical all_to_all",
    )
