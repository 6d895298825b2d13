"""Bruck, dissemination, pairwise: exchanges with a peer at a growing distance round the circle, for any world.

Distances are counted from each rank, round the circle, so that no power of two is needed.

**Bruck**: ``ceil(log2 n)`` steps, by forwarding to the rank ``2^t`` away. An all-gather receives, from ``2^t`` ranks
further on, the ``2^t`` blocks gathered there. An all-to-all sends a block that must travel ``k`` ranks in the steps
given by the set bits of ``k``: few steps, but blocks travel more than once.
all_gather: steps ``ceil(lg n)``, bytes ``(n - 1)/n m``. all_to_all: steps ``ceil(lg n)``, bytes ``lg n m/2``.
Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications", 1997.

**Dissemination** (`dissemination_barrier`): in step ``t`` notify the rank ``2^t`` after this one. After step ``t`` a
rank has been notified, directly or not, by the ``2^(t+1) - 1`` ranks before it. Steps ``ceil(lg n)``, the fewest
that a barrier can have; no bytes. Operations with data cannot use it: a sum would count some ranks twice. Source:
Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.

**Pairwise** (`pairwise_all_to_all`, `pairwise_reduce_scatter`): in step ``t`` receive from the rank ``t`` before this
one and send to the rank ``t`` after it. Every block goes straight to its destination, and no link is used twice in a
step. Steps ``n - 1``, bytes ``(n - 1)/n m``; reduce_scatter also reduces ``(n - 1)/n m``. It adds in another order on
each rank, so from 3 ranks on its sums do not have the bits of the `reduction_tree`, and it runs only where it is asked
for. Source: Thakur, Rabenseifner, Gropp 2005.

Do not add here: exchanges with the same neighbor in every step (`ring`).
"""

from __future__ import annotations

from torchdist_ref.schedules.direct import SIGNAL
from torchdist_ref.schedules.schedule import Move, Schedule, Slot, arriving, carry, to_targets
from torchdist_ref.schedules.tree import steps


def all_gather(world: int) -> Schedule:
    """Gather twice as many blocks in each step, written straight to their final slots: no rotation at the end."""

    def arrivals(step: int, rank: int) -> list[Move]:
        if step == 0:
            return [Move(rank, rank, ("in", 0), ("out", rank))]
        distance = 1 << (step - 1)
        peer = (rank + distance) % world
        count = min(distance, world - distance)
        return [carry(peer, rank, ("out", (peer + k) % world)) for k in range(count)]

    def target(step: int, rank: int) -> tuple[int]:
        return ((rank - (1 << step >> 1)) % world,)

    rounds = arriving(world, 1 + steps(world), arrivals, to_targets(arrivals, target), period=1)
    return Schedule("bruck all_gather", world, rounds, world)


def all_to_all(world: int) -> Schedule:
    """Forward by powers of two: a block that has ``k`` ranks to go is in scratch slot ``k`` between its steps."""

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

    def target(step: int, rank: int) -> tuple[int]:
        return ((rank + (1 << step >> 1)) % world,)

    rounds = arriving(world, 1 + steps(world), arrivals, to_targets(arrivals, target), period=1)
    return Schedule("bruck all_to_all", world, rounds, world)


def dissemination_barrier(world: int) -> Schedule:
    """Notify a rank at twice the distance in each step."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry((rank - (1 << step)) % world, rank, SIGNAL)]

    leaving = to_targets(arrivals, lambda step, rank: ((rank + (1 << step)) % world,))
    rounds = arriving(world, steps(world), arrivals, leaving, period=1)
    return Schedule("dissemination barrier", world, rounds, chunks=0)


def _pairwise(name: str, world: int, reduce: bool) -> Schedule:
    def arrivals(step: int, rank: int) -> list[Move]:
        peers = [rank] if step == 0 else []
        peers += [(rank - step - 1) % world] if world > 1 else []
        return [
            Move(peer, rank, ("in", rank), ("out", 0 if reduce else peer), reduce=reduce and peer != rank)
            for peer in peers
        ]

    leaving = to_targets(arrivals, lambda step, rank: (rank, (rank + step + 1) % world))
    return Schedule(name, world, arriving(world, max(1, world - 1), arrivals, leaving, period=1), world)


def pairwise_all_to_all(world: int) -> Schedule:
    """Copy the block from each peer to its own slot."""
    return _pairwise("pairwise all_to_all", world, reduce=False)


def pairwise_reduce_scatter(world: int) -> Schedule:
    """Reduce the chunk from each peer into the one result."""
    return _pairwise("pairwise reduce_scatter", world, reduce=True)
