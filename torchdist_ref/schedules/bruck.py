"""Bruck: any world in ``ceil(log2 n)`` steps, by passing on to the rank ``2^t`` away.

Distances are counted from each rank, round the circle, so that no power of two is needed. An all-gather hears,
from ``2^t`` ranks further on, the ``2^t`` blocks gathered there. An all-to-all sends a block that must travel
``k`` ranks in the steps given by the set bits of ``k``: few steps, but blocks travel more than once.

all_gather: steps ``ceil(lg n)``, bytes ``(n - 1)/n m``. all_to_all: steps ``ceil(lg n)``, bytes ``lg n m/2``.
Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications", 1997.

Do not add here: exchanges without forwarding (`pairwise`).
"""

from __future__ import annotations

from torchdist_ref.schedules.schedule import Move, Schedule, Slot, arriving, carry
from torchdist_ref.schedules.tree import steps


def all_gather(world: int) -> Schedule:
    """Blocks are put where they belong at once, so that no rotation is needed in the end."""

    def arrivals(step: int, rank: int) -> list[Move]:
        if step == 0:
            return [Move(rank, rank, ("in", 0), ("out", rank))]
        distance = 1 << (step - 1)
        peer = (rank + distance) % world
        count = min(distance, world - distance)
        return [carry(peer, rank, ("out", (peer + k) % world)) for k in range(count)]

    rounds = arriving(world, 1 + steps(world), arrivals, period=1)
    return Schedule("bruck all_gather", world, rounds, world)


def all_to_all(world: int) -> Schedule:
    """A block that has ``k`` ranks to go waits between its steps in scratch slot ``k``."""

    def arrivals(step: int, rank: int) -> list[Move]:
        if step == 0:
            return [Move(rank, rank, ("in", rank), ("out", rank))]
        bit = 1 << (step - 1)
        peer = (rank - bit) % world

        def hop(k: int) -> Move:
            read: Slot = ("tmp", k) if k & (bit - 1) else ("in", (peer + k) % world)
            write: Slot = ("tmp", k) if k >= 2 * bit else ("out", (rank - k) % world)
            return Move(peer, rank, read, write)

        return [hop(k) for k in range(world) if k & bit]

    rounds = arriving(world, 1 + steps(world), arrivals, period=1)
    return Schedule("bruck all_to_all", world, rounds, world)
