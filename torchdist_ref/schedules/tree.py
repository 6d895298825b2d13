"""Binomial tree: in every step, everybody who has it tells somebody who has not.

The number of informed ranks doubles, so that ``ceil(log2 n)`` steps reach everybody: the least possible.
Trees are written for root 0 and shifted; reduce is broadcast backwards and gather is scatter backwards.

broadcast, reduce: steps ``ceil(log2 n)``, bytes on the longest path ``ceil(log2 n) m``.
scatter, gather: steps ``ceil(log2 n)``, bytes ``(n - 1)/n m`` at the root: both are optimal.
Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.

Do not add here: trees of other shapes (a chain is in `chain`).
"""

from __future__ import annotations

from dataclasses import replace

from torchdist_ref.schedules.compose import each, renamed, reversed_, rooted, then
from torchdist_ref.schedules.direct import DATA, TOKEN
from torchdist_ref.schedules.schedule import Move, Rounds, Schedule, Slot, arriving, carry


def steps(world: int) -> int:
    """``ceil(log2 world)``: how often 1 must double to reach ``world``."""
    return (world - 1).bit_length()


def _spread(name: str, world: int, slot: Slot, chunks: int) -> Schedule:
    """In step ``t`` ranks ``2^t .. 2^(t+1) - 1`` hear from the rank ``2^t`` below."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry(rank - (1 << step), rank, slot)] if rank >> step == 1 else []

    return Schedule(name, world, arriving(world, steps(world), arrivals), chunks)


def broadcast(world: int, root: int = 0) -> Schedule:
    """The root's tensor spreads along the tree."""
    return rooted(_spread("tree broadcast", world, DATA, chunks=1), root)


def reduce(world: int, root: int = 0) -> Schedule:
    """The broadcast backwards: everybody hands its partial result to where it would have heard from."""
    return reversed_(broadcast(world, root), reduce=True, name="tree reduce")


def all_reduce(world: int) -> Schedule:
    """Up the tree, then down."""
    return then(reduce(world), broadcast(world), name="tree all_reduce")


def barrier(world: int) -> Schedule:
    """Everybody reports up the tree, then the word is passed down."""
    down = _spread("tree barrier", world, TOKEN, chunks=0)
    return then(reversed_(down), down, name="tree barrier")


def scatter_in_place(world: int) -> Schedule:
    """Chunk ``v`` of rank 0's ``data`` goes to rank ``v``: halve and pass on.

    A rank hands over the chunks of the half of its ranks that it will not serve itself: rank ``v`` with lowest
    set bit ``d`` hears from ``v - d`` and then serves ``v .. v + d - 1``.
    """
    count = steps(world)

    def arrivals(step: int, rank: int) -> list[Move]:
        half = 1 << (count - 1 - step)
        served = range(rank, min(rank + half, world)) if rank % (2 * half) == half else ()
        return [carry(rank - half, rank, ("data", chunk)) for chunk in served]

    return Schedule("tree scatter in place", world, arriving(world, count, arrivals), world)


def scatter(world: int, root: int = 0) -> Schedule:
    """The same between blocks: a block in transit waits in the scratch slot of its owner's number."""

    def block(move: Move) -> list[Move]:
        owner = (move.read[1] + root) % world
        read: Slot = ("in" if move.src == root else "tmp", owner)
        return [Move(move.src, move.dst, read, ("out", 0) if move.dst == owner else ("tmp", owner))]

    own: Rounds = Rounds(1, lambda step: (Move(root, root, ("in", root), ("out", 0)),))
    passed = each(rooted(scatter_in_place(world), root), block)
    return then(replace(passed, rounds=own), passed, name="tree scatter")


def gather(world: int, root: int = 0) -> Schedule:
    """The scatter backwards."""
    return renamed(reversed_(scatter(world, root)), {"in": "out", "out": "in"}, name="tree gather")
