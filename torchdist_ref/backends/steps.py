"""Steps: what a rank does with what it reads in a round, each made into one function when the plan is made.

A step takes the list of this rank's slots as tensors and changes one of them. A source is a view of somebody's
stage, which is known for good, or the position of a slot of this rank, which is another tensor in every call.
All choices are made here, once, so that the executor only calls. Don't add waits: steps know of no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, float32

from torchdist_ref.backends import reductions
from torchdist_ref.backends.reductions import Reduction

Source = Tensor | int
Bound = Sequence[Tensor]
Step = Callable[[Bound], Any]


def copy(at: int, source: Source) -> Step:
    """Slot `at` becomes the source."""
    if isinstance(source, int):
        return lambda bound: bound[at].copy_(bound[source])
    return lambda bound: bound[at].copy_(source)


def reduce(at: int, source: Source, reduction: Reduction) -> Step:
    """The source is reduced into slot `at`."""
    into = reduction.into
    if isinstance(source, int):
        return lambda bound: into(bound[at], bound[source])
    return lambda bound: into(bound[at], source)


def combine(at: int, first: Source, second: Source, reduction: Reduction) -> Step:
    """Slot `at` becomes the reduction of two sources: a copy and a reduction in one pass over memory."""
    together = reduction.combine
    if isinstance(first, int) or isinstance(second, int):
        return lambda bound: together(_of(first, bound), _of(second, bound), out=bound[at])
    return lambda bound: together(first, second, out=bound[at])


def widened(at: int, sources: Sequence[Source], reduction: Reduction) -> Step:
    """Slot `at` becomes the reduction of half-precision sources, made in float32 and rounded once."""

    def step(bound: Bound) -> None:
        total = _of(sources[0], bound).to(float32)
        for source in sources[1:]:
            reduction.into(total, _of(source, bound).to(float32))
        bound[at].copy_(total)

    return step


def divide(at: int, by: int) -> Step:
    """Slot `at` is divided: what makes a sum an average."""
    return lambda bound: reductions.divide(bound[at], by)


def _of(source: Source, bound: Bound) -> Tensor:
    return bound[source] if isinstance(source, int) else source
