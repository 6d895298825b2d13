"""Ring: every rank receives only from the rank before it; all links are busy all the time.

A chunk that travels once around the ring visits every rank: if contributions are collected on the way it is a
reduce-scatter, if copies are left it is an all-gather. One after the other they are the all-reduce that moves the
fewest bytes. A ring needs no power of two and suits long messages; its price is ``n - 1`` steps.

The ranks are combined in the order in which a chunk visits them, which is another one for each chunk. So the bits of a
sum depend on its index in the tensor (from 3 ranks on), and reductions run on a ring only where it is asked for by
name; all others have the bits of the `reduction_tree`.

all_reduce: steps ``2 (n - 1)``, bytes ``2 (n - 1)/n m``, reduced ``(n - 1)/n m``; the halves cost half.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

**Scatter, then all-gather** (`scatter_all_gather_broadcast`): a long broadcast in which no rank sends the whole tensor
more than twice. The root sends a different chunk to every rank, down a binomial tree, and the chunks then travel round
the ring. Steps ``ceil(log2 n) + n - 1``, bytes ``2 (n - 1)/n m``.
Source: Barnett, Gupta, Payne, Shuler, van de Geijn, Watts, "Interprocessor collective communication library", 1994.

Do not add here: segmentation (`compose.segmented`) or anything with a second neighbor.
"""

from __future__ import annotations

from torchdist_ref.schedules.compose import only, rooted, then
from torchdist_ref.schedules.direct import gather_in_place
from torchdist_ref.schedules.schedule import Arrivals, Move, Rounds, Schedule, Slot, arriving, carry, to_targets
from torchdist_ref.schedules.tree import scatter_in_place


def _around(world: int, count: int, arrivals: Arrivals) -> Rounds:
    """Return rounds in which a rank receives only from the rank before it, and from itself."""
    leaving = to_targets(arrivals, lambda step, rank: (rank, (rank + 1) % world))
    return arriving(world, count, arrivals, leaving, period=1)


def reduce_scatter_in_place(world: int) -> Schedule:
    """Reduce chunk ``c`` around the ring, from rank ``c + 1`` to rank ``c``, where it is complete.

    A chunk that starts on rank ``c + 1`` arrives on rank ``c + 2`` in step 0; so rank ``r`` receives chunk
    ``r - 2`` in step 0, and chunk ``r - step - 2`` in general.
    """

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry((rank - 1) % world, rank, ("data", (rank - step - 2) % world), reduce=True)]

    rounds = _around(world, world - 1, arrivals)
    return Schedule("ring reduce_scatter in place", world, rounds, world)


def all_gather_in_place(world: int) -> Schedule:
    """Copy chunk ``c`` around the ring, from rank ``c``: every rank keeps a copy and passes it on."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry((rank - 1) % world, rank, ("data", (rank - step - 1) % world))]

    rounds = _around(world, world - 1, arrivals)
    return Schedule("ring all_gather in place", world, rounds, world)


def all_reduce(world: int) -> Schedule:
    """Reduce once around the ring, then copy once around the ring."""
    return then(reduce_scatter_in_place(world), all_gather_in_place(world), name="ring all_reduce")


def reduce(world: int, root: int = 0) -> Schedule:
    """Reduce once around the ring, then copy every rank's finished chunk to the root."""
    return then(reduce_scatter_in_place(world), gather_in_place(world, root), name="ring reduce")


def all_gather(world: int) -> Schedule:
    """Copy blocks around the ring; in the first step every rank also copies its own block to its output."""

    def arrivals(step: int, rank: int) -> list[Move]:
        source, block = (rank - 1) % world, (rank - step - 1) % world
        own = [Move(rank, rank, ("in", 0), ("out", rank))] if step == 0 else []
        read: Slot = ("in", 0) if step == 0 else ("out", block)
        return own + ([Move(source, rank, read, ("out", block))] if world > 1 else [])

    return Schedule("ring all_gather", world, _around(world, max(1, world - 1), arrivals), world)


def reduce_scatter(world: int) -> Schedule:
    """Reduce as in place, but keep the inputs: the partial sum alternates between two scratch slots."""
    if world == 1:
        return Schedule("ring reduce_scatter", 1, ((Move(0, 0, ("in", 0), ("out", 0)),),))

    def arrivals(step: int, rank: int) -> list[Move]:
        chunk = (rank - step - 2) % world
        read: Slot = ("tmp", (step - 1) % 2) if step else ("in", chunk)
        write: Slot = ("out", 0) if step == world - 2 else ("tmp", step % 2)
        return [Move((rank - 1) % world, rank, read, write), Move(rank, rank, ("in", chunk), write, reduce=True)]

    return Schedule("ring reduce_scatter", world, _around(world, world - 1, arrivals), world)


def scatter_all_gather_broadcast(world: int, root: int = 0) -> Schedule:
    """Scatter down a tree, then all-gather around the ring, without the arrows to the root, which has all chunks."""
    spread = only(all_gather_in_place(world), lambda m: m.dst != 0)
    return rooted(then(scatter_in_place(world), spread, name="scatter_all_gather broadcast"), root)
