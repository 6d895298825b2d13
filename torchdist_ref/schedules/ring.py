"""Ring: every rank only ever receives from the rank before it; all links are busy all the time.

A chunk that travels once round the ring has met every rank: collecting contributions on the way it is a
reduce-scatter, left behind on the way it is an all-gather, and one after the other they are the all-reduce
that moves the fewest bytes. It needs no power of two and suits long messages; its price is ``n - 1`` steps.

all_reduce: steps ``2 (n - 1)``, bytes ``2 (n - 1)/n m``, reduced ``(n - 1)/n m``; the halves cost half.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

Do not add here: segmentation (`compose.segmented`) or anything with a second neighbour.
"""

from __future__ import annotations

from torchdist_ref.schedules.compose import then
from torchdist_ref.schedules.schedule import Move, Schedule, Slot, arriving, carry
from torchdist_ref.schedules.two_shot import gather_in_place


def reduce_scatter_in_place(world: int) -> Schedule:
    """Chunk ``c`` sets out from rank ``c + 1`` and arrives, complete, on rank ``c``."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry((rank - 1) % world, rank, ("data", (rank - step - 2) % world), reduce=True)]

    rounds = arriving(world, world - 1, arrivals, period=1)
    return Schedule("ring reduce_scatter in place", world, rounds, world)


def all_gather_in_place(world: int) -> Schedule:
    """Chunk ``c`` sets out from rank ``c``; every rank keeps a copy and passes it on."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry((rank - 1) % world, rank, ("data", (rank - step - 1) % world))]

    rounds = arriving(world, world - 1, arrivals, period=1)
    return Schedule("ring all_gather in place", world, rounds, world)


def all_reduce(world: int) -> Schedule:
    """Once round to reduce, once round to hand out."""
    return then(reduce_scatter_in_place(world), all_gather_in_place(world), name="ring all_reduce")


def reduce(world: int, root: int = 0) -> Schedule:
    """Once round to reduce, then every rank hands its finished chunk to the root."""
    return then(reduce_scatter_in_place(world), gather_in_place(world, root), name="ring reduce")


def all_gather(world: int) -> Schedule:
    """In the first step every rank also puts its own block in its place."""

    def arrivals(step: int, rank: int) -> list[Move]:
        source, block = (rank - 1) % world, (rank - step - 1) % world
        own = [Move(rank, rank, ("in", 0), ("out", rank))] if step == 0 else []
        read: Slot = ("in", 0) if step == 0 else ("out", block)
        return own + ([Move(source, rank, read, ("out", block))] if world > 1 else [])

    return Schedule("ring all_gather", world, arriving(world, max(1, world - 1), arrivals, period=1), world)


def reduce_scatter(world: int) -> Schedule:
    """As in place, but inputs stay whole: the partial sum travels through two scratch slots in turn."""
    if world == 1:
        return Schedule("ring reduce_scatter", 1, ((Move(0, 0, ("in", 0), ("out", 0)),),))

    def arrivals(step: int, rank: int) -> list[Move]:
        chunk = (rank - step - 2) % world
        read: Slot = ("tmp", (step - 1) % 2) if step else ("in", chunk)
        write: Slot = ("out", 0) if step == world - 2 else ("tmp", step % 2)
        return [Move((rank - 1) % world, rank, read, write), Move(rank, rank, ("in", chunk), write, reduce=True)]

    return Schedule("ring reduce_scatter", world, arriving(world, world - 1, arrivals, period=1), world)
