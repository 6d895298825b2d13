"""Results of `benchmark hooks`: figures of one hook on one task, backend and link, and their table.

All hooks of one task, backend and link take turns in the same rounds, so a ratio compares turns of the same number, and
is their median. The first turn does not count: DDP rebuilds its buckets, and PowerSGD begins.

Do not add here: measuring, or pictures (`hooks_pictures`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from statistics import median
from typing import Any

from torchdist_ref.benchmark.hooks_tasks import summed
from torchdist_ref.benchmark.hooks_watch import BenchmarkLink, Span
from torchdist_ref.benchmark.report import columns, show_millis, show_number

DIGITS = 5
LEGEND = """\
bytes: bytes that a rank sends in a step; x less: than without compression.
error: of the gradients, relative to their exact average.
x none: a step's time by the first hook's, so that less than 1 is faster.
loss: the mean over the ranks at the end.
!: bytes are not those of the hook's formula.
(modeled): computed from bytes, not measured."""


@dataclass(frozen=True)
class HookResult:
    """Figures of one hook on one task, backend and link.

    Attributes:
        task: Name of the task.
        backend: Name of the backend.
        link: Name of the link between the ranks.
        hook: Name of the hook.
        world: Number of ranks.
        parameters: Number of the model's parameters.
        expected_bytes: Bytes that a rank should send in a step, by the hook's formula.
        sent_bytes: Bytes of the hook's calls in a step.
        wire_bytes: Bytes that the host sent over its cable in a step, headers included; None without a cable.
        error: Relative error of the gradients, of each step in which it was measured.
        seconds: Time of each step, from the last rank's begin to the last rank's end.
        losses: Loss of each step, the mean over the ranks.
        turn: Number of steps of a turn. The first turn doesn't count.
        modeled: Whether the times were computed from those of the fast link.
        spans: Timeline of one step on rank 0.
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
    modeled: bool = False
    spans: Sequence[Span] = ()

    def turns(self) -> list[float]:
        """Return the mean time of a step of each turn that counts: steps of a hook may differ."""
        ends = range(2 * self.turn, len(self.seconds) + 1, self.turn)
        return [sum(self.seconds[end - self.turn : end]) / self.turn for end in ends]

    @property
    def step(self) -> float:
        """Time of a step: the median over the turns."""
        return median(self.turns())

    def ratio(self, other: HookResult) -> float:
        """Return how many times longer a step takes than with another hook.

        >>> one = HookResult("text", "ref", "fast", "noop", 2, 8, 0, 0, None, [0.5], [9, 1, 2, 9], [3.0] * 4, turn=1)
        >>> one.ratio(replace(one, seconds=[1, 1, 1, 1]))
        2.0
        """
        return float(median(x / y for x, y in zip(self.turns(), other.turns(), strict=True)))

    @property
    def mean_error(self) -> float:
        """Mean relative error of the gradients."""
        return sum(self.error) / len(self.error)

    @property
    def clock(self) -> list[float]:
        """Seconds since the beginning, at the end of each step."""
        return list(accumulate(self.seconds))

    def on(self, link: BenchmarkLink) -> HookResult:
        """Return the result modeled on a slower link, if communication and computation do not overlap.

        >>> from torchdist_ref.benchmark.hooks_watch import parse_link
        >>> fast = HookResult("text", "ref", "fast", "none", 2, 8, 1e6, 1e6, None, [0.0], [9, 0.02], [4.0, 3.0], 1)
        >>> fast.on(parse_link("100mbit")).step
        0.1
        """
        seconds = [one + link.seconds(self.sent_bytes) for one in self.seconds]
        return replace(self, link=link.name, seconds=seconds, modeled=True, spans=())

    def as_json(self) -> dict[str, Any]:
        """Return a flat entry, with the significant digits."""
        entry = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("error", "seconds", "losses"):
            entry[name] = [float(f"{value:.{DIGITS}g}") for value in entry[name]]
        entry["spans"] = [[row, what, round(begin, 6), round(end, 6)] for row, what, begin, end in self.spans]
        return entry


def from_json(entry: Mapping[str, Any]) -> HookResult:
    """Return a result from its entry in a report."""
    spans = [(str(row), str(what), float(begin), float(end)) for row, what, begin, end in entry["spans"]]
    return HookResult(**{**entry, "spans": spans})


def select(results: Sequence[HookResult], **wanted: str) -> list[HookResult]:
    """Return those with these attributes, in order: ``select(results, task="text", link="100mbit")``."""
    return [one for one in results if all(getattr(one, name) == value for name, value in wanted.items())]


def table(results: Sequence[HookResult], ratios: bool = True) -> str:
    """Return the table of one task on one backend.

    Args:
        results: Results of any number of hooks and links. The others are compared with the first hook.
        ratios: Whether to compare times. Without, the table is narrower.

    Returns:
        Lines of text; all times are medians over the turns, in milliseconds.
    """
    first = results[0]
    links = list(dict.fromkeys(result.link for result in results))
    hooks = list(dict.fromkeys(result.hook for result in results))
    head = f"{first.task}: {first.parameters:,} parameters, {first.world} ranks on {first.backend}"
    titles = ["hook", "bytes", "x less", "error"]
    for link in links:
        modeled = " (modeled)" if select(results, link=link)[0].modeled else ""
        titles += [f"{link}{modeled} ms", *([f"x {hooks[0]}"] if ratios else [])]
    lines = [_line(select(results, hook=hook), results, links, ratios) for hook in hooks]
    return f"{head}\n{columns([*titles, 'loss'], lines)}"


def _line(mine: Sequence[HookResult], results: Sequence[HookResult], links: Sequence[str], ratios: bool) -> list[str]:
    some = mine[0]
    right = some.sent_bytes == some.expected_bytes
    whole = 4 * some.parameters * summed(some.world)
    cells = [some.hook, f"{some.sent_bytes:,.0f}{'' if right else '!'}"]
    cells += [show_number(whole / some.sent_bytes) if some.sent_bytes else "-", f"{some.mean_error:.2g}"]
    for link in links:
        here = select(mine, link=link)
        cells += _times(here[0], select(results, link=link)[0])[: 1 + ratios] if here else ["-"] * (1 + ratios)
    return [*cells, f"{some.losses[-1]:.3f}"]


def _times(one: HookResult, first: HookResult) -> list[str]:
    return [show_millis(one.step), show_number(one.ratio(first))]
