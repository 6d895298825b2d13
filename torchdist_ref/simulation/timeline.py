"""Timeline of a simulation: what happened on which rank at which virtual time.

Two runs with the same `Timeline.digest` had the same interleaving, the same messages and the same times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple


class Happening(NamedTuple):
    """One entry of a timeline.

    Attributes:
        time: Virtual time in seconds.
        rank: Rank on which it happened.
        kind: ``"sent"`` (facts: receiver, bytes, time of arrival), ``"runs"``, ``"returned"``, ``"raised"`` (type of
            the error), ``"killed"``, ``"stopped"``, ``"continues"``, ``"cut off"``, ``"connected again"``.
        facts: Further facts.
    """

    time: float
    rank: int
    kind: str
    facts: tuple[Any, ...] = ()


class Timeline(Sequence[Happening]):
    """Entries of a run in the order in which they happened.

    Args:
        happenings: The entries.

    >>> from torchdist_ref.simulation import Happening, Timeline
    >>> timeline = Timeline([Happening(0.0, 0, "sent", (1, 400, 3e-05)), Happening(3e-05, 1, "returned")])
    >>> timeline.sent_bytes(0), timeline.digest()[:12]
    (400, 'c84a0b2962f9')
    """

    def __init__(self, happenings: Sequence[Happening] = ()) -> None:
        self._happenings = list(happenings)

    def add(self, time: float, rank: int, kind: str, *facts: Any) -> None:
        """Add an entry."""
        self._happenings.append(Happening(time, rank, kind, facts))

    def __len__(self) -> int:
        return len(self._happenings)

    def __getitem__(self, index: Any) -> Any:
        return self._happenings[index]

    def __iter__(self) -> Iterator[Happening]:
        return iter(self._happenings)

    def digest(self) -> str:
        """Return a text that two timelines share if and only if they have the same entries."""
        rows = ([each.time.hex(), each.rank, each.kind, *map(str, each.facts)] for each in self)
        return sha256("\n".join(map(json.dumps, rows)).encode()).hexdigest()

    def sent_bytes(self, rank: int) -> int:
        """Return the number of bytes that a rank has sent."""
        return sum(each.facts[1] for each in self if each.rank == rank and each.kind == "sent")

    def chrome_trace(self) -> str:
        """Return the timeline in the format of Chrome's tracing and of Perfetto: JSON, times in microseconds."""
        events: list[dict[str, Any]] = []
        for each in self:
            at = {"pid": each.rank, "tid": 0, "ts": each.time * 1e6}
            if each.kind == "sent":
                target, nbytes, arrival = each.facts
                duration = (arrival - each.time) * 1e6
                name = f"{nbytes} B to rank {target}"
                events.append({"ph": "X", "name": name, "dur": duration, "args": {"bytes": nbytes}, **at})
            else:
                events.append({"ph": "i", "name": each.kind, "s": "p", "args": {"facts": list(each.facts)}, **at})
        named = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in sorted({each.rank for each in self})
        ]
        return json.dumps({"traceEvents": [*named, *events]})
