"""Hierarchical: within each host first, then between hosts, so that the slow network carries as little as it can.

One rank per host, its leader, speaks for the others. Within a host ranks read each other's memory, so that the
direct algorithms serve there; between the leaders the classic ones do. The root, if there is one, is its
host's leader. Operations on blocks are in `hierarchical_blocks`.

With ``h`` hosts: steps of the outer algorithm on ``h`` ranks, plus one or two rounds within the hosts.
Source: Karonis et al., "Exploiting hierarchy in parallel computer networks", 2000; MPICH's and NCCL's trees.

Do not add here: where ranks are (the caller says), or more than two levels.
"""

from __future__ import annotations

from collections.abc import Callable

from torchdist_ref.schedules import direct, dissemination, doubling, halving, tree
from torchdist_ref.schedules.compose import alongside, on_ranks, reversed_, segmented, then
from torchdist_ref.schedules.schedule import Schedule, carry

Hosts = tuple[int, ...]
MOST_CHUNKS = 64


def teams(hosts: Hosts, root: int = 0) -> list[list[int]]:
    """The ranks of each host, leader first; the root leads its host, and its host comes first.

    >>> teams((7, 7, 9, 9), root=3)
    [[3, 2], [0, 1]]
    """
    order = [root, *(r for r in range(len(hosts)) if r != root)]
    found: dict[int, list[int]] = {}
    for rank in order:
        found.setdefault(hosts[rank], []).append(rank)
    return list(found.values())


def period(groups: list[list[int]]) -> int:
    """After how many ranks the next host begins, where hosts are filled in order with equally many; else 0.

    >>> period(teams((7, 7, 9, 9))), period(teams((7, 9, 7, 9)))
    (2, 0)
    """
    size = len(groups[0])
    return size if all(team == list(range(i * size, (i + 1) * size)) for i, team in enumerate(groups)) else 0


def _within(groups: list[list[int]], world: int, make: Callable[[int], Schedule], chunks: int) -> Schedule:
    """The same schedule inside every host, at the same time, on a tensor divided like that of the leaders."""
    parts = (segmented(make(len(team)), chunks, stagger=0) for team in groups)
    return alongside(*(on_ranks(part, team, world) for part, team in zip(parts, groups, strict=True)))


def _between(groups: list[list[int]], world: int, outer: Schedule) -> Schedule:
    return on_ranks(outer, [team[0] for team in groups], world)


def all_reduce(hosts: Hosts) -> Schedule:
    """Reduce to the leaders, halving-doubling between them, broadcast from them.

    Halving-doubling divides the tensor by the number of leaders, within the hosts too. With very many of them
    the schedule would have more arrows than anybody can store, so that then they swap whole tensors.
    """
    world, groups = len(hosts), teams(hosts)
    swap = halving if len(groups) <= MOST_CHUNKS else doubling
    outer = _between(groups, world, swap.all_reduce(len(groups)))
    up, down = (_within(groups, world, make, outer.chunks) for make in (direct.reduce, direct.broadcast))
    return then(up, outer, down, name="hierarchical all_reduce")


def reduce(hosts: Hosts, root: int = 0) -> Schedule:
    """Reduce to the leaders, then along a tree of leaders to the root."""
    world, groups = len(hosts), teams(hosts, root)
    outer = _between(groups, world, tree.reduce(len(groups)))
    return then(_within(groups, world, direct.reduce, 1), outer, name="hierarchical reduce")


def broadcast(hosts: Hosts, root: int = 0) -> Schedule:
    """Along a tree of leaders, then from each leader to its host."""
    world, groups = len(hosts), teams(hosts, root)
    outer = _between(groups, world, tree.broadcast(len(groups)))
    return then(outer, _within(groups, world, direct.broadcast, 1), name="hierarchical broadcast")


def barrier(hosts: Hosts) -> Schedule:
    """Report to the leader; leaders disseminate; leaders give the word."""
    world, groups = len(hosts), teams(hosts)
    moves = tuple(carry(rank, team[0], direct.TOKEN) for team in groups for rank in team[1:])
    up = Schedule("report", world, (moves,) if moves else (), chunks=0)
    outer = _between(groups, world, dissemination.barrier(len(groups)))
    return then(up, outer, reversed_(up), name="hierarchical barrier")
