"""Binomial tree: in every step, everybody who has it tells somebody who has not.

The number of informed ranks doubles, so that ``ceil(log2 n)`` steps reach everybody: the least possible.
All are written for root 0 (`compose.rooted` shifts them); reduce is broadcast backwards and gather is
scatter backwards.

broadcast, reduce: steps ``ceil(log2 n)``, bytes on the longest path ``ceil(log2 n) m``.
scatter, gather: steps ``ceil(log2 n)``, bytes ``(n - 1)/n m`` at the root: both are optimal.
Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.

Do not add here: trees of other shapes (a chain is in `chain`).
"""

from __future__ import annotations

from .compose import renamed, reversed_, rooted, then
from .direct import DATA, TOKEN
from .schedule import Move, Schedule, Slot, arriving, carry


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


def scatter(world: int, root: int = 0) -> Schedule:
    """Halve and pass on: a rank hands over all the blocks of the half of its ranks that it does not serve.

    Rank ``v`` (counted from the root) with lowest set bit ``d`` hears from ``v - d`` and then serves
    ``v .. v + d - 1``. Blocks in transit wait in the scratch slot of their owner's number.
    """
    count = max(1, steps(world))

    def arrivals(step: int, rank: int) -> list[Move]:
        here, half = (rank - root) % world, 1 << (count - 1 - step)
        own = [Move(root, root, ("in", root), ("out", 0))] if here == step == 0 else []
        if here % (2 * half) != half:
            return own
        source = (rank - half) % world
        served = [(v + root) % world for v in range(here, min(here + half, world))]
        return [
            Move(source, rank, ("in" if source == root else "tmp", b), ("out", 0) if b == rank else ("tmp", b))
            for b in served
        ]

    return Schedule("tree scatter", world, arriving(world, count, arrivals), world)


def gather(world: int, root: int = 0) -> Schedule:
    """The scatter backwards."""
    backwards = reversed_(scatter(world, root))
    return renamed(backwards, {"in": "out", "out": "in"}, name="tree gather")
