"""Messages: the moves of a round with the same two ends, taken together.

Moves are per slot, so that algorithms stay simple; on a wire all that one rank tells another in one round
goes as one message. The simulator, the cost counter and the pictures all look at a round in this way.

Do not add here: times (`simulate`) or sums over rounds (`cost`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torchdist_ref.schedules.schedule import Move, Run, Slot


@dataclass(slots=True)
class Message:
    """All moves of one round from ``src`` to ``dst``, in listed order, some of them as runs."""

    src: int
    dst: int
    runs: list[Run] = field(default_factory=list)

    @property
    def moves(self) -> list[Move]:
        """The moves, one by one."""
        return [move for run in self.runs for move in run]

    @property
    def slots(self) -> int:
        """How many slots are carried."""
        return sum(run.length for run in self.runs)

    @property
    def reduced(self) -> int:
        """How many of the slots are reduced into what is there."""
        return sum(run.length for run in self.runs if run.first.reduce)

    @property
    def label(self) -> str:
        """What is carried, for people: ``data[0-3] +`` for four neighbouring slots that are reduced."""
        plain = ", ".join(slot_ranges((run.first.read, run.length) for run in self.runs if not run.first.reduce))
        reduced = ", ".join(slot_ranges((run.first.read, run.length) for run in self.runs if run.first.reduce))
        return ", ".join(part for part in (plain, reduced and f"{reduced} +") if part)


def messages(moves: Iterable[Move | Run]) -> list[Message]:
    """The messages of a round, in the order in which their first moves are listed.

    >>> from torchdist_ref.schedules import build
    >>> [m.label for m in messages(build("all_reduce", "halving_doubling", 4).rounds[0])]
    ['data[0-1] +', 'data[0-1] +', 'data[2-3] +', 'data[2-3] +']
    """
    found: dict[tuple[int, int], Message] = {}
    for item in moves:
        run = Run(item, 1) if isinstance(item, Move) else item
        ends = (run.first.src, run.first.dst)
        if ends not in found:
            found[ends] = Message(*ends)
        found[ends].runs.append(run)
    return list(found.values())


def slot_ranges(runs: Iterable[tuple[Slot, int]]) -> Iterator[str]:
    """Slots for people, neighbours taken together; each run is its first slot and how many there are.

    >>> list(slot_ranges([(("in", 2), 1), (("data", 1), 4), (("data", 0), 1), (("data", 6), 1)]))
    ['data[0-4]', 'data[6]', 'in[2]']
    """
    joined: list[tuple[str, int, int]] = []
    for (buffer, first), count in sorted(runs):
        before = joined[-1] if joined else ("", 0, 0)
        if before[0] == buffer and first <= before[2]:
            joined[-1] = (buffer, before[1], max(first + count, before[2]))
        else:
            joined.append((buffer, first, first + count))
    return (f"{buffer}[{a}]" if b == a + 1 else f"{buffer}[{a}-{b - 1}]" for buffer, a, b in joined)
