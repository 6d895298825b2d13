"""Shown: what peers read of a rank in a round, and how they come to see it.

Peers of the same host read it on the rank's stage, where it is laid out. Ranks of other hosts have a copy of that stage
which only they see: nothing is laid out for them, but sent there from where it lies, the tensors of the call.

Don't add ways to send: they are the transport's (`transports.memory.Lane`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torchdist_ref.backends import steps
from torchdist_ref.backends.steps import Step
from torchdist_ref.schedules.schedule import Move, Slot
from torchdist_ref.transports.base import Link

if TYPE_CHECKING:
    from torchdist_ref.backends.plan import Plan


def staged(moves: Sequence[Move]) -> dict[int, tuple[Slot, ...]]:
    """By rank, what has a place on its stage: what a peer reads, and what it reads and overwrites itself."""
    written = {(m.dst, m.write) for m in moves}
    found: dict[int, dict[Slot, None]] = {}
    for move in moves:
        if move.src != move.dst or (move.src, move.read) in written:
            found.setdefault(move.src, {})[move.read] = None
    return {rank: tuple(slots) for rank, slots in found.items()}


def laid_out(moves: Sequence[Move], link: Link) -> frozenset[Slot]:
    """What of it this rank lays out: not what only ranks of other hosts read."""
    mine = [m for m in moves if m.src == link.rank]
    overwritten = {m.write for m in moves if m.dst == link.rank}
    return frozenset(m.read for m in mine if (m.read in overwritten if m.dst == link.rank else m.dst not in link.lanes))


def sends(plan: Plan, number: int, begin: int, place: int) -> Iterator[tuple[int, Step]]:
    """The ranks of other hosts that read something in this round of this window, and what sends it to them."""
    rank, size = plan.link.rank, plan.dtype.itemsize
    for peer, lane in plan.link.lanes.items():
        slots = plan.read_by(peer, number, begin)
        if slots:
            give = lane.giver("full", plan.shown(peer, number, begin, place), len(slots))
            sources = [(plan.own(slot, begin), plan.length(rank, slot, begin) * size) for slot in slots]
            yield peer, steps.send(give, sources, size)
