"""Pairwise exchange: in step ``t`` hear from the rank ``t`` before you, and tell the rank ``t`` after you.

Every block goes straight from its owner to where it is wanted, and in each step every rank has exactly one
to hear from and one to tell, so that no link is asked for twice.

Steps ``n - 1``, bytes ``(n - 1)/n m``; reduce_scatter also reduces ``(n - 1)/n m``.
Source: Thakur, Rabenseifner, Gropp 2005.

Do not add here: anything that forwards (`bruck`, `ring`).
"""

from __future__ import annotations

from torchdist_ref.schedules.schedule import Move, Schedule, arriving


def _rounds(name: str, world: int, reduce: bool) -> Schedule:
    def arrivals(step: int, rank: int) -> list[Move]:
        peers = [rank] if step == 0 else []
        peers += [(rank - step - 1) % world] if world > 1 else []
        return [
            Move(peer, rank, ("in", rank), ("out", 0 if reduce else peer), reduce=reduce and peer != rank)
            for peer in peers
        ]

    return Schedule(name, world, arriving(world, max(1, world - 1), arrivals, period=1), world)


def all_to_all(world: int) -> Schedule:
    """The block from each peer goes to its own place."""
    return _rounds("pairwise all_to_all", world, reduce=False)


def reduce_scatter(world: int) -> Schedule:
    """The chunk from each peer is reduced into the one result."""
    return _rounds("pairwise reduce_scatter", world, reduce=True)
