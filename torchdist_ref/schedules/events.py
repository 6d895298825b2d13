"""Event and Trace: what a clock saw while a schedule ran, for tables, totals and pictures.

The simulator writes these; anything else that knows who did what from when to when can write them too, and
gets `timeline.timeline` to draw them. (`torchdist_ref.trace` records whole calls of a real group; here one
event is one message or one reduction inside a call.)

Do not add here: how times come about (`simulate`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that one rank was busy with.

    Args:
        rank: who.
        kind: ``"send"``, ``"recv"``, ``"reduce"`` or ``"copy"``.
        start: seconds from the beginning.
        end: seconds from the beginning.
        peer: the other rank of a message; the rank itself for local work.
        nbytes: bytes moved or reduced.
        label: what, such as ``"data[3]"``.
    """

    rank: int
    kind: str
    start: float
    end: float
    peer: int
    nbytes: float
    label: str


@dataclass(frozen=True)
class Trace(Sequence[Event]):
    """Events of a run, and the time that the run took.

    Args:
        title: what ran.
        world: number of ranks.
        events: in the order in which they were found.
        total: seconds until the last rank was done.
        note: what a reader must know, such as that one rank stands for all (default: nothing).

    ``len``, indexing and iteration are those of the events. In a notebook the value draws itself.
    """

    title: str
    world: int
    events: list[Event]
    total: float
    note: str = ""

    def __len__(self) -> int:
        return len(self.events)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        return self.events[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def _repr_svg_(self) -> str:
        # Imported here because timeline draws traces and imports this module.
        from torchdist_ref.schedules.timeline import timeline

        return timeline(self)
