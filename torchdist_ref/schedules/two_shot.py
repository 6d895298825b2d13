"""Two shots: divide the reduction among the ranks in one round, collect the result in a second one.

Every rank reduces one chunk, reading it from everybody, and then everybody reads the finished chunks. On
shared memory this is the least work possible for large tensors; `direct` saves the second hand-over for
small ones.

Steps 2. Bytes taken by a rank: ``2 (n - 1)/n m``; reduced: ``(n - 1)/n m`` (``m``: the whole buffer).
Source: the scheme of DeepSpeed's and Gloo's shared-memory all-reduce ("distributed" variant).

Do not add here: variants with more rounds.
"""

from __future__ import annotations

from torchdist_ref.schedules.compose import then
from torchdist_ref.schedules.direct import others
from torchdist_ref.schedules.schedule import Move, Schedule, arriving, carry


def reduce_scatter_in_place(world: int) -> Schedule:
    """Chunk ``c`` of everybody's ``data`` is reduced on rank ``c``."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry(peer, rank, ("data", rank), reduce=True) for peer in others(rank, world)]

    rounds = arriving(world, min(1, world - 1), arrivals, period=1)
    return Schedule("direct reduce_scatter in place", world, rounds, world)


def all_gather_in_place(world: int) -> Schedule:
    """Chunk ``c`` of rank ``c``'s ``data`` goes to everybody."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry(peer, rank, ("data", peer)) for peer in others(rank, world)]

    rounds = arriving(world, min(1, world - 1), arrivals, period=1)
    return Schedule("direct all_gather in place", world, rounds, world)


def gather_in_place(world: int, root: int = 0) -> Schedule:
    """Chunk ``c`` of rank ``c``'s ``data`` goes to the root."""
    moves = tuple(carry(peer, root, ("data", peer)) for peer in others(root, world))
    return Schedule("direct gather in place", world, (moves,) if moves else (), world)


def all_reduce(world: int) -> Schedule:
    """A direct reduce-scatter, then a direct all-gather."""
    return then(reduce_scatter_in_place(world), all_gather_in_place(world), name="two_shot all_reduce")


def reduce(world: int, root: int = 0) -> Schedule:
    """A direct reduce-scatter, then the root reads the finished chunks."""
    return then(reduce_scatter_in_place(world), gather_in_place(world, root), name="two_shot reduce")
