"""Outcome of a simulated run: its values and times, or the error that says why it ended without them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torchdist_ref.ranks.outcomes import RankError
from torchdist_ref.schedules.simulate import Trace, TraceEvent
from torchdist_ref.simulation.faults import Fault
from torchdist_ref.simulation.timeline import Timeline


class DeadlockError(RankError):
    """No rank could continue, and no event was pending: the message lists which rank waits for which, and where."""


class BlockedOutsideError(RankError):
    """A rank waits for something that is not simulated, such as a socket."""


@dataclass(frozen=True)
class SimulatedRun:
    """Outcome of a run in which no rank failed.

    Attributes:
        values: Result of the program on each rank; None for a rank that the plan has killed.
        times: Virtual time at which each rank returned, in seconds.
        timeline: What happened when.
        order: Digest of the order in which the ranks ran.
        seed: Seed of the run.
        decisions: Decisions that differed from the plain order; `run` repeats them.
        operations: Number of operations of each rank that others could notice, as `Kill` counts them.
        faults: Faults that occurred. A fault at an operation that its rank did not reach is not among them.
        switches: Number of times that another thread of the run continued.
        computed: Virtual seconds of each computation in the order of the run; empty if computation took no time.
            ``run(..., compute=result.computed)`` with the same arguments repeats the run exactly.
    """

    values: list[Any]
    times: list[float]
    timeline: Timeline
    order: str = field(repr=False)
    seed: int
    decisions: dict[int, int] = field(repr=False)
    operations: list[int]
    faults: tuple[Fault, ...] = ()
    switches: int = 0
    computed: tuple[float, ...] = field(default=(), repr=False)

    @cached_property
    def digest(self) -> str:
        """Text that two runs share if and only if they had the same order of events and the same times."""
        return f"{self.timeline.digest()[:32]}{self.order[:32]}"

    @property
    def seconds(self) -> float:
        """Virtual time at which the last rank returned."""
        return max(self.times)

    @property
    def trace(self) -> Trace:
        """The messages with data as a value that draws itself, as the trace of a simulated schedule does."""
        events: list[TraceEvent] = []
        for each in self.timeline:
            if each.kind == "sent":
                peer, nbytes, arrival = each.facts
                label = f"{nbytes} B"
                events.append(TraceEvent(each.rank, "send", each.time, arrival, peer, nbytes, label))
                events.append(TraceEvent(peer, "recv", each.time, arrival, each.rank, nbytes, label))
        return Trace("simulated run", len(self.times), events, self.seconds)

    def _repr_svg_(self) -> str:
        return self.trace._repr_svg_()  # noqa: SLF001 (the name that notebooks call)

    def __str__(self) -> str:
        lines = [f"{'rank':>5} {'virtual time':>14} {'bytes sent':>12} {'operations':>11}"]
        for rank, (time, operations) in enumerate(zip(self.times, self.operations, strict=True)):
            lines.append(f"{rank:>5} {time * 1e3:>11.3f} ms {self.timeline.sent_bytes(rank):>12,} {operations:>11,}")
        return "\n".join(lines)
