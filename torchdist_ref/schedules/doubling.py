"""Recursive doubling: in step ``t`` swap all you have with the rank whose number differs in bit ``t``.

After each step the groups that know the same have doubled. Partners need a power of two: `folded` lets the
ranks beyond the largest power of two hand their part to a partner before, and hear the result after.

all_reduce: steps ``lg n`` (two more when folding), bytes ``lg n m``, reduced ``lg n m``.
all_gather: steps ``lg n``, bytes ``(n - 1)/n m``. With both partners of a swap reducing the same two
operands, all ranks end with the same expression up to the order of two operands, hence the same bits.
Source: Thakur, Rabenseifner, Gropp 2005; folding: Rabenseifner, Träff 2004.

Do not add here: swaps of halves (`halving`).
"""

from __future__ import annotations

from torchdist_ref.schedules.compose import on_ranks, reversed_, then
from torchdist_ref.schedules.direct import DATA
from torchdist_ref.schedules.schedule import Move, Run, Schedule, arriving, carry, carry_run


def core_size(world: int) -> int:
    """The largest power of two that is not above ``world``.

    >>> core_size(7), core_size(8)
    (4, 8)
    """
    return 1 << (world.bit_length() - 1)


def blocks(chunks: range, core: int, world: int) -> list[range]:
    """The blocks for which the core ranks ``chunks`` answer: their own, and those of the ranks folded into them."""
    folded_in = range(chunks.start + core, min(chunks.stop + core, world))
    return [chunks, folded_in] if folded_in else [chunks]


def fold(world: int, chunks: int) -> Schedule:
    """Rank ``core + i`` gives its tensor to rank ``i``, which reduces it into its own."""
    core = core_size(world)

    def arrivals(step: int, rank: int) -> list[Run]:
        return [carry_run(core + rank, rank, "data", range(chunks), reduce=True)] if core + rank < world else []

    return Schedule("fold", world, arriving(world, int(core < world), arrivals), chunks)


def folded(core: Schedule, world: int) -> Schedule:
    """An all-reduce for a power of two, made to serve any world."""
    if core.world == world:
        return core
    before = fold(world, core.chunks)
    return then(before, on_ranks(core, range(core.world), world), reversed_(before), name=core.name)


def all_reduce(world: int) -> Schedule:
    """Swap everything, reduce, and swap with somebody twice as far."""
    core = core_size(world)

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry(rank ^ 1 << step, rank, DATA, reduce=True)]

    rounds = arriving(core, core.bit_length() - 1, arrivals, period=1)
    return folded(Schedule("recursive_doubling all_reduce", core, rounds), world)


def all_gather(world: int) -> Schedule:
    """Swap all the blocks gathered so far. Folded ranks hand in one block and hear all the others."""
    core = core_size(world)

    def place(step: int, rank: int) -> list[Move]:
        owners = (rank, rank + core) if rank + core < world else (rank,)
        return [Move(r, rank, ("in", 0), ("out", r)) for r in owners]

    def swap(step: int, rank: int) -> list[Run]:
        distance = 1 << step
        first = (rank ^ distance) // distance * distance
        known = blocks(range(first, first + distance), core, world)
        return [carry_run(rank ^ distance, rank, "out", run) for run in known]

    def unfold(step: int, rank: int) -> list[Run]:
        others = (range(rank), range(rank + 1, world)) if rank >= core else ()
        return [carry_run(rank - core, rank, "out", run) for run in others if run]

    period = 1 if core == world else 0
    placed = Schedule("place", world, arriving(world, 1, place, period), world)
    swaps = Schedule("swap", world, arriving(core, core.bit_length() - 1, swap, period), world)
    last = Schedule("unfold", world, arriving(world, int(core < world), unfold), world)
    return then(placed, swaps, last, name="recursive_doubling all_gather")
