"""Turns: where a round lays out what others read, and who reads what was laid out before.

All ranks count alike the rounds, and what they take of the ring, so nobody has to say where anything lies. What a round
lays out may lie where the round so many turns before did (`SegmentLayout.cells`): its readers have to have freed that.
Don't add what a round does: that is the plan's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torchdist_ref.backends.ref.plan import Code, Peer, Plan
from torchdist_ref.transports.link import Link


class Turns:
    """A link's rounds.

    Attributes:
        number: Of the next round.
        head: Where its place on the ring is looked for.
        turns: So many rounds after each other lie apart.
        readers: Who reads what was laid out in which round, by token. Tokens don't say what they are for; they come in
            the order of the rounds.
    """

    def __init__(self, link: Link) -> None:
        self._link, self.turns = link, link.layout.cells
        self.number = self.head = 0
        self.readers: deque[tuple[int, tuple[Peer, ...]]] = deque()

    def place(self, plan: Plan) -> int:
        """The place on every ring for the next window's first round: the same on all ranks."""
        place = self._link.layout.next_offset(self.head, plan.room)
        self.head = place + plan.room * len(plan.rounds)
        return place

    def make_room(self, number: int, doing: str) -> None:
        """Wait until nobody reads what was laid out as many rounds ago as there are turns, or before that."""
        while self.readers and self.readers[0][0] <= number - self.turns:
            self.take(self.readers.popleft()[1], doing)

    def read_by(self, readers: tuple[Peer, ...]) -> None:
        """What the round under way lays out is read by these peers."""
        self.readers.append((self.number, readers))

    def take(self, tokens: tuple[Peer, ...], doing: str) -> None:
        """Take a token from each of these peers."""
        for token, peer in tokens:
            if not token.acquire(False):
                self._link.acquire(token, peer, doing)


class Places(dict[int, Code]):
    """A plan's code for one window, by place: what `Plan.code` finds, found sooner."""

    def __init__(self, code: Callable[[int], Code]) -> None:
        self._code = code

    def __missing__(self, place: int) -> Code:
        found = self[place] = self._code(place)
        return found
