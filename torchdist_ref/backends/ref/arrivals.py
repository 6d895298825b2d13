"""Arrivals: the steps that bring into one slot what arrives for it in a round, copied or reduced, in listed order.

Sums of halves are made in float32 and rounded once, and an average is divided before that: the sum of two numbers may
be too large for what their average is small enough for. Where slots lie, and in which round, belongs to `plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from torchdist_ref.backends.reductions import WIDENED, Reduction
from torchdist_ref.backends.ref import steps
from torchdist_ref.backends.ref.steps import Operand, Step
from torchdist_ref.schedules.schedule import Move


class Arrivals(NamedTuple):
    """What one call does with what arrives.

    Attributes:
        dtype: Of all its tensors.
        reduction: How to reduce; None where nothing is.
        short: Whether its slots are cut out of one tensor, and so short that a copy is quicker than the cut.
    """

    dtype: torch.dtype
    reduction: Reduction | None
    short: bool

    def steps(
        self, into: Operand, count: int, moves: Sequence[Move], sources: Sequence[Operand], divide: int
    ) -> Iterable[Step]:
        """What to do with one slot.

        Args:
            into: The slot.
            count: Its elements.
            moves: What arrives, in order.
            sources: Where each of them comes from.
            divide: By what to divide where anything is reduced; 0 for not at all.
        """
        # What comes before the last copy is overwritten by it.
        last = max((i for i, m in enumerate(moves) if not m.reduce), default=-1)
        moves, sources = moves[max(0, last) :], sources[max(0, last) :]
        size, reduces = self.dtype.itemsize, sum(m.reduce for m in moves)
        if self.reduction is None or not reduces:
            yield from (steps.copy(into, source, count * size, size) for source in sources)
        elif (reduces > 1 or divide) and self.dtype in WIDENED:
            start = [] if last >= 0 else [into]
            yield steps.widened(into, [*start, *sources], count, self.reduction, divide)
        else:
            yield from self._reduced(self.reduction, into, count, sources, afresh=last >= 0)
            if divide:
                yield steps.divide(into, count, divide)

    def _reduced(
        self, reduction: Reduction, into: Operand, count: int, sources: Sequence[Operand], afresh: bool
    ) -> Iterable[Step]:
        """Sources reduced into what is there, or if they begin `afresh`, without that."""
        size, rest = self.dtype.itemsize, sources
        if afresh and self.short:
            yield steps.copy(into, sources[0], count * size, size)
            rest = sources[1:]
        elif afresh:
            yield steps.combine(into, sources[0], sources[1], count, reduction)
            rest = sources[2:]
        yield from (steps.reduce(into, source, count, reduction) for source in rest)
