"""Messages: the moves of a round with the same two ends, taken together.

Moves are per slot, so that algorithms stay simple; on a wire all that one rank tells another in one round
goes as one message. The simulator, the cost counter and the pictures all look at a round in this way.

Do not add here: times (`simulate`) or sums over rounds (`cost`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from torchdist_ref.schedules.schedule import Move, Slot, slot_name


@dataclass(slots=True)
class Message:
    """All moves of one round from ``src`` to ``dst``, in listed order."""

    src: int
    dst: int
    moves: list[Move] = field(default_factory=list)

    @property
    def reduced(self) -> int:
        """How many of the slots are reduced into what is there."""
        return sum(move.reduce for move in self.moves)

    @property
    def label(self) -> str:
        """What is carried, for people: ``data[0-3] +`` for four neighbouring slots that are reduced."""
        if len(self.moves) == 1:  # by far the most frequent case, and simulations of many ranks need it fast
            only = self.moves[0]
            return slot_name(only.read) + (" +" if only.reduce else "")
        plain = ", ".join(slot_ranges(m.read for m in self.moves if not m.reduce))
        reduced = ", ".join(slot_ranges(m.read for m in self.moves if m.reduce))
        return ", ".join(part for part in (plain, reduced and f"{reduced} +") if part)


def messages(moves: Iterable[Move]) -> list[Message]:
    """The messages of a round, in the order in which their first moves are listed.

    >>> from torchdist_ref.schedules import build
    >>> [m.label for m in messages(build("all_reduce", "halving_doubling", 4).rounds[0])]
    ['data[0-1] +', 'data[0-1] +', 'data[2-3] +', 'data[2-3] +']
    """
    found: dict[tuple[int, int], Message] = {}
    for move in moves:
        ends = (move.src, move.dst)
        if ends not in found:
            found[ends] = Message(*ends)
        found[ends].moves.append(move)
    return list(found.values())


def slot_ranges(slots: Iterable[Slot]) -> Iterator[str]:
    """Slots for people, neighbours taken together.

    >>> list(slot_ranges([("in", 2), ("data", 1), ("data", 0), ("data", 4)]))
    ['data[0-1]', 'data[4]', 'in[2]']
    """
    ordered = enumerate(sorted(set(slots)))
    for (buffer, _), run in groupby(ordered, key=lambda item: (item[1][0], item[1][1] - item[0])):
        indices = [index for _, (_, index) in run]
        yield f"{buffer}[{indices[0]}]" if len(indices) == 1 else f"{buffer}[{indices[0]}-{indices[-1]}]"
