"""What was measured, and what it says: medians, ratios, bandwidths. Values only; nothing here runs or prints.

All contestants of one (operation, size) have one sample a round, and a round is disturbed or not for all of them. A
ratio compares samples of the same round. Where at least half of the rounds were quiet only those count; else all do,
and the figure is marked as noisy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from torchdist_ref.benchmark.operations import OPERATIONS

# Bounds stand among the contestants: what staging costs at least, and what reading peers' tensors does.
LIMIT, DIRECT = "limit", "direct"
BOUNDS = (LIMIT, DIRECT)


@dataclass(frozen=True)
class Row:
    """One operation at one size on one number of ranks, on all contestants.

    Attributes:
        op: The operation.
        size: Bytes of the whole buffer, as it was.
        world: Ranks.
        samples: By contestant, the seconds of a call in each round (the median of that round's calls).
        calls: By contestant, how many calls a round has.
        disturbed: For each round, whether other processes used the processors.
        missing: By contestant that cannot do this, why.
    """

    op: str
    size: int
    world: int
    samples: Mapping[str, Sequence[float]]
    calls: Mapping[str, int]
    disturbed: Sequence[bool]
    missing: Mapping[str, str]

    @property
    def noisy(self) -> bool:
        """Whether most rounds were disturbed."""
        return 2 * sum(self.disturbed) > len(self.disturbed)

    def _counted(self, values: Sequence[float]) -> list[float]:
        return [v for v, bad in zip(values, self.disturbed, strict=True) if self.noisy or not bad]

    def seconds(self, name: str) -> float:
        """The median time of a call."""
        return median(self._counted(self.samples[name]))

    def ratio(self, of: str, to: str) -> float:
        """How many times longer one contestant takes than another: the median over rounds.

        >>> Row("barrier", 0, 2, {"a": [2, 8, 3], "b": [1, 2, 3]}, {}, [False] * 3, {}).ratio("a", "b")
        2.0
        """
        return float(median(self._ratios(of, to)))

    def _ratios(self, of: str, to: str) -> list[float]:
        return self._counted([x / y for x, y in zip(self.samples[of], self.samples[to], strict=True)])

    def algorithm_bandwidth(self, name: str) -> float:
        """Bytes of the whole buffer a second."""
        return self.size / self.seconds(name)

    def bus_bandwidth(self, name: str) -> float:
        """Algorithm bandwidth times nccl-tests' factor."""
        return self.algorithm_bandwidth(name) * OPERATIONS[self.op].factor(self.world)

    def as_json(self) -> list[dict[str, Any]]:
        """One flat entry for each contestant."""
        return [self._entry(name) for name in self.samples]

    def _entry(self, name: str) -> dict[str, Any]:
        others = [other for other in self.samples if other != name]
        return {
            "op": self.op,
            "size_bytes": self.size,
            "world": self.world,
            "backend": name,
            "seconds": self.seconds(name),
            "algorithm_bytes_per_second": self.algorithm_bandwidth(name),
            "bus_bytes_per_second": self.bus_bandwidth(name),
            "quartiles_seconds": quartiles(self._counted(self.samples[name])),
            "times_longer_than": {other: self.ratio(name, other) for other in others},
            "quartiles_times_longer_than": {other: quartiles(self._ratios(name, other)) for other in others},
            "calls_per_sample": self.calls[name],
            "samples_seconds": list(self.samples[name]),
            "disturbed": list(self.disturbed),
            "noisy": self.noisy,
        }


def quartiles(values: Sequence[float]) -> list[float]:
    """Between which two values the middle half lies.

    >>> quartiles([1, 2, 3, 4, 5]), quartiles([7.0])
    ([2.0, 4.0], [7.0, 7.0])
    """
    return quantiles(values, n=4, method="inclusive")[::2] if len(values) > 1 else [values[0], values[0]]
