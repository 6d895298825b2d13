"""What a schedule costs, counted: steps, bytes, reductions. No clock and no network; those are in `simulate`.

Bytes are in units of the operation's whole buffer: the tensor in all_reduce, reduce and broadcast, all blocks
together in the others. Local moves cost no bytes.

Do not add here: closed forms. They are in the catalogue as text, and the tests compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from torchdist_ref.schedules.messages import messages
from torchdist_ref.schedules.schedule import Move, Schedule, sampled


@dataclass(frozen=True, slots=True)
class Cost:
    """What a schedule costs, in units of the whole buffer.

    Args:
        steps: rounds in which anything goes from one rank to another.
        messages: how many messages all ranks send.
        sent: the most that one rank sends.
        received: the most that one rank receives.
        reduced: the most that one rank reduces.
        total: what all ranks together send.
    """

    steps: int
    messages: int
    sent: Fraction
    received: Fraction
    reduced: Fraction
    total: Fraction


class _Tally:
    """Slots sent, received and reduced by each rank, summed over the rounds seen so far."""

    def __init__(self) -> None:
        self.steps = self.messages = 0
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.reduced: Counter[int] = Counter()

    def add(self, moves: Iterable[Move]) -> None:
        parts = messages(moves)
        travelling = [part for part in parts if part.src != part.dst]
        self.steps += bool(travelling)
        self.messages += len(travelling)
        for part in travelling:
            self.sent[part.src] += len(part.moves)
            self.received[part.dst] += len(part.moves)
        for part in parts:
            self.reduced[part.dst] += part.reduced


def cost(schedule: Schedule) -> Cost:
    """Count what a schedule costs.

    Args:
        schedule: of any size. In rounds in which all ranks do the same, rank 0 is counted for all.

    Returns:
        The cost, exact.

    >>> from torchdist_ref.schedules import build
    >>> found = cost(build("all_reduce", "ring", 4))
    >>> found.steps, str(found.sent), str(found.reduced)
    (6, '3/2', '3/4')
    """
    own, alike = _Tally(), _Tally()
    for step in range(len(schedule.rounds)):
        sample = sampled(schedule.rounds, step)
        if sample is None:
            own.add(schedule.rounds[step])
        else:
            alike.add(sample)
    return _cost(schedule, own, alike)


def _cost(schedule: Schedule, own: _Tally, alike: _Tally) -> Cost:
    """A sample shows one side of one rank: by symmetry the other side has as much, and so has every rank."""
    moved, reduced, share = alike.sent.total(), alike.reduced.total(), schedule.share
    return Cost(
        steps=own.steps + alike.steps,
        messages=own.messages + alike.messages * schedule.world,
        sent=share * (max(own.sent.values(), default=0) + moved),
        received=share * (max(own.received.values(), default=0) + moved),
        reduced=share * (max(own.reduced.values(), default=0) + reduced),
        total=share * (own.sent.total() + moved * schedule.world),
    )
