"""Ranks speak at the same time; a reader wants rank 0's words first, then rank 1's.

Bytes come in as they come, lines go out in rank order: the first rank that is not done is heard live, the others when
their turn comes. What a line is printed on is no concern of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

# A line of text without its end, or a MIME bundle.
Item = str | dict[str, Any]


class Turns:
    """Puts the output of ranks in order.

    Args:
        ranks: Those that take part, in the order in which they shall be heard.
        show: Called with a rank and one line or bundle of it, in order.

    Example:
        >>> turns = Turns([0, 1], lambda rank, item: print(rank, item))
        >>> turns.text(1, b"one\\n")
        >>> turns.text(0, b"zero\\nnull")
        0 zero
        >>> turns.done(0)
        0 null
        1 one
    """

    def __init__(self, ranks: Iterable[int], show: Callable[[int, Item], None]) -> None:
        self._waiting: dict[int, list[Item]] = {rank: [] for rank in ranks}
        self._rests = dict.fromkeys(self._waiting, b"")
        self._done: set[int] = set()
        self._show = show

    def text(self, rank: int, data: bytes) -> None:
        """Take a piece of what a rank printed."""
        *lines, self._rests[rank] = (self._rests[rank] + data).split(b"\n")
        for line in lines:
            self._item(rank, _as_on_screen(line))

    def bundle(self, rank: int, bundle: dict[str, Any]) -> None:
        """Take a rich value; a line that was begun ends before it."""
        self._end_line(rank)
        self._item(rank, bundle)

    def done(self, rank: int) -> None:
        """Nothing more comes from this rank: the next may speak."""
        self._end_line(rank)
        self._done.add(rank)
        while self._waiting and (first := next(iter(self._waiting))) in self._done:
            del self._waiting[first]
            following = next(iter(self._waiting), None)
            if following is not None:
                self._say(following)

    def _end_line(self, rank: int) -> None:
        if self._rests[rank]:
            self.text(rank, b"\n")

    def _item(self, rank: int, item: Item) -> None:
        self._waiting[rank].append(item)
        if rank == next(iter(self._waiting)):
            self._say(rank)

    def _say(self, rank: int) -> None:
        items, self._waiting[rank] = self._waiting[rank], []
        for item in items:
            self._show(rank, item)


def _as_on_screen(line: bytes) -> str:
    # A progress bar goes back to the start of the line and writes over itself: what stays is the last state.
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
