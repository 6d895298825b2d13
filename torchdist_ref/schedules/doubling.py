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
from torchdist_ref.schedules.schedule import Move, Schedule, arriving, carry


def core_size(world: int) -> int:
    """The largest power of two that is not above ``world``.

    >>> core_size(7), core_size(8)
    (4, 8)
    """
    return 1 << (world.bit_length() - 1)


def blocks(chunk: int, core: int, world: int) -> list[int]:
    """The blocks for which core rank ``chunk`` answers: its own, and that of the rank folded into it."""
    return [chunk, chunk + core] if chunk + core < world else [chunk]


def fold(world: int, chunks: int) -> Schedule:
    """Rank ``core + i`` gives its tensor to rank ``i``, which reduces it into its own."""
    core = core_size(world)
    pairs = [(core + i, i) for i in range(world - core)]
    moves = tuple(carry(src, dst, ("data", c), reduce=True) for src, dst in pairs for c in range(chunks))
    return Schedule("fold", world, (moves,) if moves else (), chunks)


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
        return [Move(r, rank, ("in", 0), ("out", r)) for r in ([rank] if rank >= core else blocks(rank, core, world))]

    def swap(step: int, rank: int) -> list[Move]:
        distance = 1 << step
        first = (rank ^ distance) // distance * distance
        known = [b for chunk in range(first, first + distance) for b in blocks(chunk, core, world)]
        return [carry(rank ^ distance, rank, ("out", b)) for b in known]

    period = 1 if core == world else 0
    placed = Schedule("place", world, arriving(world, 1, place, period), world)
    swaps = Schedule("swap", world, arriving(core, core.bit_length() - 1, swap, period), world)
    unfold = tuple(carry(r - core, r, ("out", b)) for r in range(core, world) for b in range(world) if b != r)
    last = Schedule("unfold", world, (unfold,) if unfold else (), world)
    return then(placed, swaps, last, name="recursive_doubling all_gather")
