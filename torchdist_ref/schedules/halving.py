"""Halving and doubling (Rabenseifner): swap halves, then quarters, ...; then the same way back.

In step ``t`` partners differ in the ``t``-th highest bit; each keeps the half of the chunks whose numbers agree
with its own there, and gives the other half away. That is a reduce-scatter in ``lg n`` steps; run backwards it
is an all-gather. Together: the bytes of a ring in the steps of a tree. Other worlds fold (`doubling.folded`).

all_reduce: steps ``2 lg n``, bytes ``2 (n - 1)/n m``, reduced ``(n - 1)/n m``; reduce: the same; reduce_scatter: half.
Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.

Do not add here: swaps of whole tensors (`doubling`).
"""

from __future__ import annotations

from torchdist_ref.schedules import direct
from torchdist_ref.schedules.compose import on_ranks, only, reversed_, then
from torchdist_ref.schedules.doubling import blocks, core_size, fold, folded
from torchdist_ref.schedules.schedule import Move, Run, Schedule, arriving, carry_run


def kept(core: int, step: int, rank: int) -> tuple[int, range]:
    """Partner of ``rank`` in a halving step, and the chunks that ``rank`` keeps after it."""
    distance = core >> (step + 1)
    first = rank // distance * distance
    return rank ^ distance, range(first, first + distance)


def reduce_scatter_in_place(core: int) -> Schedule:
    """For a power of two: chunk ``c`` of everybody's ``data`` is reduced on rank ``c``."""

    def arrivals(step: int, rank: int) -> list[Run]:
        partner, chunks = kept(core, step, rank)
        return [carry_run(partner, rank, "data", chunks, reduce=True)]

    rounds = arriving(core, core.bit_length() - 1, arrivals, period=1)
    return Schedule("halving reduce_scatter in place", core, rounds, core)


def all_reduce(world: int) -> Schedule:
    """Halve, then double: the second part is the first one backwards."""
    halve = reduce_scatter_in_place(core_size(world))
    return folded(then(halve, reversed_(halve), name="halving_doubling all_reduce"), world)


def gather_in_place(core: int, root: int) -> Schedule:
    """Of the way back only those arrows that lead to the root.

    At distance ``d`` a rank's chunks are still on their way to the root only if it agrees with the root in the
    bits below ``2 d``.
    """
    steps = core.bit_length() - 1

    def arrivals(step: int, rank: int) -> list[Run]:
        partner = rank ^ 1 << step
        _, chunks = kept(core, steps - 1 - step, partner)
        leads = (rank ^ root) % (2 << step) == 0
        return [carry_run(partner, rank, "data", chunks)] if leads else []

    return Schedule("doubling gather in place", core, arriving(core, steps, arrivals), core)


def reduce(world: int, root: int = 0) -> Schedule:
    """Halve, then gather. A root outside the core hears from the rank that it was folded into."""
    core = core_size(world)
    inner = then(reduce_scatter_in_place(core), gather_in_place(core, root % core))
    before = fold(world, core)
    after = only(reversed_(before), lambda m: m.dst == root)
    parts = [before, on_ranks(inner, range(core), world), *([after] if root >= core else [])]
    return then(*parts, name="halving_doubling reduce")


def reduce_scatter(world: int) -> Schedule:
    """Between blocks, for any world: sums are built in scratch slots, so that inputs stay whole."""
    if world == 1:
        return direct.reduce_scatter(1)
    core = core_size(world)
    extra, swaps = world - core, core.bit_length() - 1

    def start(rank: int, source: int, indices: range) -> Run:
        """Scratch slots begin as a copy of this rank's own blocks, to which another rank's blocks may be added."""
        return carry_run(source, rank, "in", indices, reduce=source != rank, into="tmp")

    def swap(step: int, rank: int) -> list[Run]:
        partner, chunks = kept(core, step, rank)
        mine = blocks(chunks, core, world)
        copies = [start(rank, rank, run) for run in mine] if step == 0 and rank >= extra else []
        buffer = "in" if step == 0 and partner >= extra else "tmp"
        return copies + [carry_run(partner, rank, buffer, run, reduce=True, into="tmp") for run in mine]

    def arrivals(step: int, rank: int) -> list[Run] | list[Move]:
        step -= extra > 0
        if step < 0:
            return [start(rank, source, range(world)) for source in (rank, core + rank)] if rank < extra else []
        if step == swaps:
            return [Move(rank % core, rank, ("tmp", rank), ("out", 0))]
        return swap(step, rank) if rank < core else []

    rounds = arriving(world, (extra > 0) + swaps + 1, arrivals, period=0 if extra else 1)
    return Schedule("recursive_halving reduce_scatter", world, rounds, world)
