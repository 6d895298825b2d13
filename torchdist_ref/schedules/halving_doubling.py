"""Recursive doubling and halving: exchanges with the rank whose number differs in one bit.

**Doubling**: in step ``t`` exchange all you have with the rank whose number differs in bit ``t``. After each step the
groups that have the same data double. Partners need a power of two: with `folded`, some ranks send their part to a
neighbor before, and receive the result after.
all_reduce: steps ``lg n`` (two more when folding), bytes ``lg n m``, reduced ``lg n m``.
all_gather: steps ``lg n``, bytes ``(n - 1)/n m``. Both partners of an exchange reduce the same two operands, so all
ranks end with the same expression up to the order of two operands: the one of the `reduction_tree`.
Source: Thakur, Rabenseifner, Gropp 2005; folding: Rabenseifner, Träff 2004.

**Halving, then doubling** (Rabenseifner): in step ``t`` partners differ in bit ``t``. Each keeps one half of the chunks
that it has, and sends the other half. That is a reduce-scatter in ``lg n`` steps; reversed it is an all-gather.
Together they move the bytes of a ring in the steps of a tree. The literature begins with the highest bit; the lowest
one combines neighbors first, as the `reduction_tree` does, and sends the most bytes to the nearest rank. all_reduce:
steps ``2 lg n``, bytes ``2 (n - 1)/n m``, reduced ``(n - 1)/n m``; reduce: the same; reduce_scatter: half. Source:
Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.

**Blocks**: halve within blocks of 16 neighbors only, double from block to block, and gather within the blocks. With
``k``, the smaller of ``n`` and 16: steps ``lg n + lg k``, bytes ``2 (k - 1)/k m + lg(n/k)/k m``. Each rank handles
``k`` chunks where halving all the way has ``n``, which for hundreds of ranks are many small copies.

Do not add here: exchanges for any world without folding (`bruck`).
"""

from __future__ import annotations

from torchdist_ref.schedules import direct
from torchdist_ref.schedules.compose import on_ranks, reversed_, then
from torchdist_ref.schedules.direct import DATA
from torchdist_ref.schedules.reduction_tree import core_ranks, core_size, fold
from torchdist_ref.schedules.schedule import Move, Run, Schedule, arriving, carry, carry_run, to_targets

BLOCK_RANKS = 16
"""Ranks of a block: a power of two."""


def across(step: int, rank: int) -> tuple[int]:
    """Return the rank whose number differs in bit ``step``."""
    return (rank ^ 1 << step,)


def blocks(chunks: range, core: int, world: int) -> list[range]:
    """Return the blocks of the core ranks ``chunks``: their own, and those of the ranks folded into them."""
    folded_in = range(chunks.start + core, min(chunks.stop + core, world))
    return [chunks, folded_in] if folded_in else [chunks]


def folded(core: Schedule, world: int) -> Schedule:
    """Extend an all-reduce for a power of two to any world."""
    if core.world == world:
        return core
    before = fold(world, core.chunks)
    return then(before, on_ranks(core, core_ranks(world), world), reversed_(before), name=core.name)


def doubling_all_reduce(world: int) -> Schedule:
    """Exchange whole tensors and reduce, with a partner twice as far in each step."""
    core = core_size(world)

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry(rank ^ 1 << step, rank, DATA, reduce=True)]

    rounds = arriving(core, core.bit_length() - 1, arrivals, to_targets(arrivals, across), period=1)
    return folded(Schedule("recursive_doubling all_reduce", core, rounds), world)


def doubling_all_gather(world: int) -> Schedule:
    """Exchange all the blocks gathered so far; folded ranks send one block and receive all the others."""
    core = core_size(world)

    def own(step: int, rank: int) -> list[Move]:
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
    copied = to_targets(own, lambda step, rank: (rank, rank % core))
    swapped = to_targets(swap, across)
    unfolded = to_targets(unfold, lambda step, rank: (rank + core,) if rank + core < world else ())
    copies = Schedule("own blocks", world, arriving(world, 1, own, copied, period), world)
    swaps = Schedule("swap", world, arriving(core, core.bit_length() - 1, swap, swapped, period), world)
    last = Schedule("unfold", world, arriving(world, int(core < world), unfold, unfolded), world)
    return then(copies, swaps, last, name="recursive_doubling all_gather")


def kept(core: int, step: int, rank: int) -> tuple[int, range]:
    """Return the partner of ``rank`` in a halving step, and the chunks that ``rank`` keeps after it.

    The lowest bit of a rank decides which half of the chunks it keeps, the next bit which quarter.
    """
    length, first = core, 0
    for bit in range(step + 1):
        length //= 2
        first += length * (rank >> bit & 1)
    return rank ^ 1 << step, range(first, first + length)


def reduce_scatter_in_place(core: int, size: int = 0) -> Schedule:
    """Reduce each chunk of every rank's ``data`` on one rank of each block, for a power of two.

    Args:
        core: number of ranks.
        size: ranks of a block, and number of chunks: a power of two (default 0: all ranks are one block).
    """
    size = size or core

    def arrivals(step: int, rank: int) -> list[Run]:
        partner, chunks = kept(size, step, rank)
        return [carry_run(partner, rank, "data", chunks, reduce=True)]

    rounds = arriving(core, size.bit_length() - 1, arrivals, to_targets(arrivals, across), period=1)
    return Schedule("halving reduce_scatter in place", core, rounds, size)


def all_reduce(world: int) -> Schedule:
    """Halve, then double: the second part is the first one reversed."""
    halve = reduce_scatter_in_place(core_size(world))
    return folded(then(halve, reversed_(halve), name="halving_doubling all_reduce"), world)


def blocks_all_reduce(world: int) -> Schedule:
    """Halve within blocks, double from block to block, gather within blocks."""
    core = core_size(world)
    size = min(core, BLOCK_RANKS)
    bits = size.bit_length() - 1
    halve = reduce_scatter_in_place(core, size)

    def arrivals(step: int, rank: int) -> list[Run]:
        return [carry_run(rank ^ size << step, rank, "data", kept(size, bits - 1, rank)[1], reduce=True)]

    leaving = to_targets(arrivals, lambda step, rank: across(step + bits, rank))
    between = Schedule("doubling", core, arriving(core, core.bit_length() - 1 - bits, arrivals, leaving, 1), size)
    return folded(then(halve, between, reversed_(halve), name="blocks all_reduce"), world)


def gather_in_place(core: int, root: int) -> Schedule:
    """Keep only those arrows of the reversed halving that lead to the root.

    Partners that differ in bit ``b`` exchange chunks after those that differ in higher bits. So a rank's chunks still
    have to travel to the root only if the rank agrees with the root in all bits above ``b``.
    """
    steps = core.bit_length() - 1

    def arrivals(step: int, rank: int) -> list[Run]:
        bit = steps - 1 - step
        partner, _ = kept(core, bit, rank)
        leads = (rank ^ root) >> bit == 0
        return [carry_run(partner, rank, "data", kept(core, bit, partner)[1])] if leads else []

    leaving = to_targets(arrivals, lambda step, rank: across(steps - 1 - step, rank))
    return Schedule("doubling gather in place", core, arriving(core, steps, arrivals, leaving), core)


def reduce(world: int, root: int = 0) -> Schedule:
    """Halve, then gather on the root."""
    core, ranks = core_size(world), core_ranks(world, root)
    inner = then(reduce_scatter_in_place(core), gather_in_place(core, ranks.index(root)))
    return then(fold(world, core, root), on_ranks(inner, ranks, world), name="halving_doubling reduce")


def reduce_scatter(world: int) -> Schedule:
    """Halve between blocks, for any world: sums are built in scratch slots, so that inputs are kept.

    Core rank ``i`` represents one rank or two (`reduction_tree.fold`), and keeps their blocks.
    """
    if world == 1:
        return direct.reduce_scatter(1)
    core, ranks = core_size(world), core_ranks(world)
    extra, swaps = world - core, core.bit_length() - 1
    index = {rank: i for i, rank in enumerate(ranks)}

    def start(rank: int, source: int, indices: range) -> Run:
        """Copy this rank's own blocks to scratch slots, or add another rank's blocks there."""
        return carry_run(source, rank, "in", indices, reduce=source != rank, into="tmp")

    def kept_blocks(step: int, rank: int) -> list[range]:
        owners = range(index[rank] & (2 << step) - 1, core, 2 << step)
        return [range(ranks[i], ranks[i] + 1 + (i < extra)) for i in owners]

    def swap(step: int, rank: int) -> list[Run]:
        partner, mine = ranks[index[rank] ^ 1 << step], kept_blocks(step, rank)
        copies = [start(rank, rank, run) for run in mine] if step == 0 and index[rank] >= extra else []
        buffer = "in" if step == 0 and index[partner] >= extra else "tmp"
        return copies + [carry_run(partner, rank, buffer, run, reduce=True, into="tmp") for run in mine]

    def arrivals(step: int, rank: int) -> list[Run] | list[Move]:
        step -= extra > 0
        if step < 0:
            return (
                [start(rank, source, range(world)) for source in (rank, rank + 1)]
                if index.get(rank, extra) < extra
                else []
            )
        if step == swaps:
            return [Move(rank if rank in index else rank - 1, rank, ("tmp", rank), ("out", 0))]
        return swap(step, rank) if rank in index else []

    def targets(step: int, rank: int) -> tuple[int, ...]:
        step -= extra > 0
        if step < 0:
            return rank, rank - 1
        if step == swaps:
            return rank, rank + 1
        return (rank, ranks[index[rank] ^ 1 << step]) if rank in index else ()

    leaving = to_targets(arrivals, lambda step, rank: (r for r in targets(step, rank) if 0 <= r < world))
    rounds = arriving(world, (extra > 0) + swaps + 1, arrivals, leaving, period=0 if extra else 1)
    return Schedule("recursive_halving reduce_scatter", world, rounds, world)
