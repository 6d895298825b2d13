"""What the hook laboratory found out about one hook, and what it says. Values only; nothing here runs or prints.

All hooks of one task, backend and link have taken their turns in the same rounds, so a ratio compares turns of the same
number, and is their median. The first turn is not counted: DDP lays its buckets out anew, and PowerSGD begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from statistics import median
from typing import Any

from torchdist_ref.benchmark.hooks_links import Link
from torchdist_ref.benchmark.hooks_watch import Span

_DIGITS = 5


@dataclass(frozen=True)
class Result:
    """One hook on one task, backend and link.

    Attributes:
        task: What was learned.
        backend: The backend.
        link: Between the ranks.
        hook: Which hook.
        world: Ranks.
        parameters: Of the model.
        expected_bytes: What a rank should send in a step, by the hook's formula.
        sent_bytes: What the hook asked the backend to send in a step.
        wire_bytes: What left the host by its cable in a step, headers included; None where there is no cable.
        error: Relative error of the gradients, of each step in which it was looked at.
        seconds: Of each step, from the last rank's begin to the last rank's end.
        losses: Of each step, the mean over the ranks.
        turn: How many steps a turn has. The first turn doesn't count.
        modelled: Whether the times were computed from those of the fast link.
        spans: Of one step on rank 0.
    """

    task: str
    backend: str
    link: str
    hook: str
    world: int
    parameters: int
    expected_bytes: float
    sent_bytes: float
    wire_bytes: float | None
    error: Sequence[float]
    seconds: Sequence[float]
    losses: Sequence[float]
    turn: int
    modelled: bool = False
    spans: Sequence[Span] = ()

    def _turns(self) -> list[float]:
        """Of each turn that counts, the mean time of a step: not every step of a hook need be like the others."""
        ends = range(2 * self.turn, len(self.seconds) + 1, self.turn)
        return [sum(self.seconds[end - self.turn : end]) / self.turn for end in ends]

    @property
    def step(self) -> float:
        """The time of a step: the median over the turns."""
        return median(self._turns())

    def ratio(self, other: Result) -> float:
        """How many times longer a step takes than with another hook.

        >>> one = Result("text", "ref", "fast", "noop", 2, 8, 0, 0, None, [0.5], [9, 1, 2, 9], [3.0] * 4, turn=1)
        >>> one.ratio(replace(one, seconds=[1, 1, 1, 1]))
        2.0
        """
        return float(median(x / y for x, y in zip(self._turns(), other._turns(), strict=True)))

    @property
    def mean_error(self) -> float:
        """The relative error of the gradients, on average over the steps at which it was looked at."""
        return sum(self.error) / len(self.error)

    @property
    def clock(self) -> list[float]:
        """Seconds since the beginning, at the end of each step."""
        return list(accumulate(self.seconds))

    def on(self, link: Link) -> Result:
        """The same as it would be on a slower link, if no byte travelled while something is computed.

        >>> from torchdist_ref.benchmark.hooks_links import parse
        >>> fast = Result("text", "ref", "fast", "none", 2, 8, 1e6, 1e6, None, [0.0], [9, 0.02], [4.0, 3.0], 1)
        >>> fast.on(parse("100mbit")).step
        0.1
        """
        seconds = [one + link.seconds(self.sent_bytes) for one in self.seconds]
        return replace(self, link=link.name, seconds=seconds, modelled=True, spans=())

    def as_json(self) -> dict[str, Any]:
        """A flat entry, with as many digits as mean something."""
        entry = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("error", "seconds", "losses"):
            entry[name] = [float(f"{value:.{_DIGITS}g}") for value in entry[name]]
        entry["spans"] = [[row, what, round(begin, 6), round(end, 6)] for row, what, begin, end in self.spans]
        return entry


def from_json(entry: Mapping[str, Any]) -> Result:
    """A result from its entry in a report."""
    spans = [(str(row), str(what), float(begin), float(end)) for row, what, begin, end in entry["spans"]]
    return Result(**{**entry, "spans": spans})


def select(results: Sequence[Result], **wanted: str) -> list[Result]:
    """Those with these attributes, in order: ``select(results, task="text", link="100mbit")``."""
    return [one for one in results if all(getattr(one, name) == value for name, value in wanted.items())]
