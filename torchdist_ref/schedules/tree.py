"""Binomial tree and pipelined chain: a tensor is spread from a root, or collected there.

**Tree**: in every step, each rank that has the tensor sends it to one that does not. The number of ranks that have
it doubles, so ``ceil(log2 n)`` steps reach all of them: the least possible. Trees are written for root 0 and shifted,
but for that of reduce; gather is scatter reversed.

broadcast, reduce: steps ``ceil(log2 n)``, bytes on the longest path ``ceil(log2 n) m``.
scatter, gather: steps ``ceil(log2 n)``, bytes ``(n - 1)/n m`` at the root: both are optimal.
Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.

**Chain** (`chain_broadcast`, ...): each rank passes the tensor on to the next, which is slow until the tensor is cut
into pieces. Then all links work at the same time, and a long tensor takes the time of sending it once, for any number
of ranks. With ``s`` pieces: steps ``n - 2 + s``, time ``(n - 2 + s)(a + m/s b)``. A chain adds rank after rank, which
from 3 ranks on is not the `reduction_tree`, so it runs only where it is asked for. Source: van de Geijn, "On global
combine operations", 1994; pipelining as in Träff, Ripke, Rougier 2008.

Do not add here: algorithms without a root.
"""

from __future__ import annotations

from dataclasses import replace

from torchdist_ref.schedules.compose import each, on_ranks, renamed, reversed_, rooted, segmented, then
from torchdist_ref.schedules.direct import DATA, SIGNAL
from torchdist_ref.schedules.reduction_tree import core_ranks, core_size, fold
from torchdist_ref.schedules.schedule import Move, Own, Rounds, Schedule, Slot, arriving, carry, to_targets

CHAIN_PIECES = 8


def steps(world: int) -> int:
    """Return ``ceil(log2 world)``: how often 1 must double to reach ``world``."""
    return (world - 1).bit_length()


def _spread(name: str, world: int, slot: Slot, chunks: int) -> Schedule:
    """Copy a slot of rank 0 to all: in step ``t`` ranks ``2^t .. 2^(t+1) - 1`` receive from the rank ``2^t`` below."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry(rank - (1 << step), rank, slot)] if rank >> step == 1 else []

    leaving = to_targets(arrivals, lambda step, rank: (rank + (1 << step),) if rank + (1 << step) < world else ())
    return Schedule(name, world, arriving(world, steps(world), arrivals, leaving), chunks)


def broadcast(world: int, root: int = 0) -> Schedule:
    """Spread the root's tensor along the tree."""
    return rooted(_spread("tree broadcast", world, DATA, chunks=1), root)


def reduce(world: int, root: int = 0) -> Schedule:
    """Combine neighbors in pairs, then pairs, then fours; in each step half of the ranks send what they have.

    The shape is that of a broadcast reversed, but the tree is not shifted to the root: that would combine other ranks
    first. Instead, rank ``i`` plays rank ``i ^ root``, which leaves the `reduction_tree` as it is.
    """
    core, ranks = core_size(world), core_ranks(world, root)
    end = ranks.index(root)

    def arrivals(step: int, rank: int) -> list[Move]:
        distance = 1 << step
        receives = (rank ^ end) % (2 * distance) == 0
        return [carry(rank ^ distance, rank, DATA, reduce=True)] if receives else []

    leaving = to_targets(arrivals, lambda step, rank: (rank ^ 1 << step,))
    inner = Schedule("pairs", core, arriving(core, steps(core), arrivals, leaving))
    return then(fold(world, 1, root), on_ranks(inner, ranks, world), name="tree reduce")


def all_reduce(world: int) -> Schedule:
    """Reduce up the tree, then broadcast down."""
    return then(reduce(world), broadcast(world), name="tree all_reduce")


def barrier(world: int) -> Schedule:
    """Notify the root up the tree, then every rank down the tree."""
    down = _spread("tree barrier", world, SIGNAL, chunks=0)
    return then(reversed_(down), down, name="tree barrier")


def scatter_in_place(world: int) -> Schedule:
    """Copy chunk ``v`` of rank 0's ``data`` to rank ``v``: halve and pass on.

    A rank passes on the chunks of the half of its ranks that it does not serve itself: rank ``v`` with lowest
    set bit ``d`` receives from ``v - d`` and then serves ``v .. v + d - 1``.
    """
    count = steps(world)

    def arrivals(step: int, rank: int) -> list[Move]:
        half = 1 << (count - 1 - step)
        served = range(rank, min(rank + half, world)) if rank % (2 * half) == half else ()
        return [carry(rank - half, rank, ("data", chunk)) for chunk in served]

    def target(step: int, rank: int) -> tuple[int, ...]:
        half = 1 << (count - 1 - step)
        return (rank + half,) if rank + half < world else ()

    leaving = to_targets(arrivals, target)
    return Schedule("tree scatter in place", world, arriving(world, count, arrivals, leaving), world)


def scatter(world: int, root: int = 0) -> Schedule:
    """Scatter between blocks: a block in transit is in the scratch slot of its owner's number."""

    def block(move: Move) -> list[Move]:
        owner = (move.read[1] + root) % world
        read: Slot = ("in" if move.src == root else "tmp", owner)
        return [Move(move.src, move.dst, read, ("out", 0) if move.dst == owner else ("tmp", owner))]

    def copy(step: int, rank: int) -> list[Move]:
        return [Move(root, root, ("in", root), ("out", 0))] if rank == root else []

    own = arriving(world, 1, copy, copy)
    passed = each(rooted(scatter_in_place(world), root), block)
    return then(replace(passed, rounds=own), passed, name="tree scatter")


def gather(world: int, root: int = 0) -> Schedule:
    """Reverse the scatter."""
    return renamed(reversed_(scatter(world, root)), {"in": "out", "out": "in"}, name="tree gather")


def chain_broadcast(world: int, root: int = 0, pieces: int = CHAIN_PIECES) -> Schedule:
    """Send from the root along the ranks, piece after piece (default 8 pieces)."""
    own = Own(
        lambda step, rank: [carry(step, rank, DATA)] if rank == step + 1 else [],
        lambda step, rank: [carry(rank, rank + 1, DATA)] if rank == step else [],
        lambda step: (step, step + 1),
    )
    rounds = Rounds(world - 1, lambda step: (carry(step, step + 1, DATA),), own=own)
    return rooted(segmented(Schedule("chain broadcast", world, rounds), pieces), root)


def chain_reduce(world: int, root: int = 0, pieces: int = CHAIN_PIECES) -> Schedule:
    """Reverse the broadcast along the chain."""
    return reversed_(chain_broadcast(world, root, pieces), reduce=True, name="chain reduce")


def chain_all_reduce(world: int) -> Schedule:
    """Reduce toward rank 0, then broadcast from it."""
    return then(chain_reduce(world), chain_broadcast(world), name="chain all_reduce")
