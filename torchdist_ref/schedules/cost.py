"""Cost of a schedule, counted: steps, bytes, reductions. Clock and network are in `simulate`.

Bytes are in units of the operation's whole buffer: the tensor in all_reduce, reduce and broadcast, all blocks
together in the others. Local moves cost no bytes.

Do not add here: closed forms. They are in the catalogue as text, and the tests compare.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from torchdist_ref.schedules.schedule import Runs, Schedule, messages, pattern_of, runs_of


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a schedule, in units of the whole buffer.

    Args:
        steps: rounds with a message from one rank to another.
        messages: number of messages of all ranks.
        sent: maximum over the ranks of what one sends.
        received: maximum over the ranks of what one receives.
        reduced: maximum over the ranks of what one reduces.
        total: sum over the ranks of what each sends.
    """

    steps: int
    messages: int
    sent: Fraction
    received: Fraction
    reduced: Fraction
    total: Fraction


class _Tally:
    """Slots sent, received and reduced, summed over rounds in which rank ``r`` does the same as ``r % period``."""

    def __init__(self, period: int) -> None:
        self.period = period
        self.steps = self.messages = 0
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.reduced: Counter[int] = Counter()

    def add(self, moves: Runs) -> None:
        parts = messages(moves)
        between = [part for part in parts if part.src != part.dst]
        self.steps += bool(between)
        self.messages += len(between)
        for part in between:
            self.sent[part.src % self.period] += part.slots
            self.received[part.dst % self.period] += part.slots
        for part in parts:
            self.reduced[part.dst % self.period] += part.reduced


def cost(schedule: Schedule) -> Cost:
    """Count the cost of a schedule.

    Args:
        schedule: of any size. In rounds that repeat themselves from rank to rank, a few ranks are counted for all.

    Returns:
        The cost, exact.

    >>> from torchdist_ref.schedules import build, cost
    >>> found = cost(build("all_reduce", "ring", 4))
    >>> found.steps, str(found.sent), str(found.reduced)
    (6, '3/2', '3/4')
    """
    tallies: dict[int, _Tally] = {}
    for step in range(len(schedule.rounds)):
        pattern = pattern_of(schedule.rounds, step)
        period = pattern.period if pattern else schedule.world
        tally = tallies.setdefault(period, _Tally(period))
        tally.add(pattern.runs(period) if pattern else runs_of(schedule.rounds, step))
    return _cost(schedule, list(tallies.values()))


def _cost(schedule: Schedule, tallies: list[_Tally]) -> Cost:
    world, share = schedule.world, schedule.share

    def most(counters: list[tuple[int, Counter[int]]]) -> Fraction:
        return share * max(sum(counter[rank % period] for period, counter in counters) for rank in range(world))

    return Cost(
        steps=sum(t.steps for t in tallies),
        messages=sum(t.messages * world // t.period for t in tallies),
        sent=most([(t.period, t.sent) for t in tallies]),
        received=most([(t.period, t.received) for t in tallies]),
        reduced=most([(t.period, t.reduced) for t in tallies]),
        total=share * sum(t.sent.total() * world // t.period for t in tallies),
    )
