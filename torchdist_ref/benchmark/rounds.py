"""Rounds of a benchmark, as a rank runs them: its context, the turns of the contestants, and their samples.

All contestants are alive at once. In each round every one has a turn, the first being another each time. So what slows
down the machine slows down all, and a ratio is the median of the ratios within rounds. In a comparison of checkouts
the ranks of each checkout are a side: all sides run the same program, and one turn at a time (`RankContext.in_turn`).

Ranks of an older library run this file too: use the library's public API alone. Do not add here: what is measured.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from time import process_time
from typing import Any

import torchdist_ref
from torchdist_ref.benchmark.timing import LINE_BYTES, OtherProcesses, StartLine, calls_for, rotated, without_collector

# The library that is measured: this checkout's, or another.
library: Any = torchdist_ref
Turn = Callable[[], Sequence[float]]
REPORT, CONNECTED, SIDE, EVERYONE = "report", "connected", "side", "everyone"


@dataclass(frozen=True)
class Result:
    """Samples of one cell of a benchmark: one operation at one size, one model with one hook, and so on.

    All contestants have samples of the same rounds, and a round is disturbed or not for all of them. Where at least
    half of the rounds are undisturbed only those count; else all do, and the result is marked as noisy.

    Attributes:
        cell: Names of the cell's parts, and their values.
        samples: By contestant, seconds of a call, one value a round.
        disturbed: For each round, whether other processes used the processors; empty if that was not observed.
        more: Other facts about the cell.
    """

    cell: Mapping[str, Any]
    samples: Mapping[str, Sequence[float]]
    disturbed: Sequence[bool] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def noisy(self) -> bool:
        """Whether most rounds were disturbed."""
        return 2 * sum(self.disturbed) > len(self.disturbed)

    def counted(self, values: Sequence[float]) -> list[float]:
        """Return the values of the rounds that count."""
        if self.noisy or not self.disturbed:
            return list(values)
        return [value for value, bad in zip(values, self.disturbed, strict=True) if not bad]

    def median(self, name: str) -> float:
        """Return the median of a contestant's samples."""
        return float(median(self.counted(self.samples[name])))

    def ratios(self, of: str, to: str) -> list[float]:
        """Return one contestant's samples over another's of the same rounds."""
        return self.counted([x / y for x, y in zip(self.samples[of], self.samples[to], strict=True)])

    def ratio(self, of: str, to: str) -> float:
        """Return how many times longer one contestant takes than another: the median over rounds.

        >>> Result({"op": "barrier"}, {"a": [2, 8, 3], "b": [1, 2, 3]}).ratio("a", "b")
        2.0
        """
        return float(median(self.ratios(of, to)))

    def entry(self) -> dict[str, Any]:
        """Return a flat entry of a report."""
        samples = {name: list(values) for name, values in self.samples.items()}
        return {**self.cell, **self.more, "samples": samples, "disturbed": list(self.disturbed)}


@dataclass(frozen=True)
class RankContext:
    """One rank of a benchmark.

    Attributes:
        rank: This rank.
        world: Number of ranks on this side.
        folder: Folder for stores; it is removed when the ranks have ended.
        memory: Shared memory for the program, page-aligned.
        start_line: Barrier of all ranks of this side.
        side: Number of this side, which runs this library's or another checkout's ranks.
        sides: Number of sides.
        host: Host of `torchdist_ref.testing.namespaces` that this rank runs on, if any.
    """

    rank: int
    world: int
    folder: str
    memory: memoryview
    start_line: StartLine
    side: int
    sides: int
    host: Any
    _reading: Connection
    _writing: Connection

    def wait(self) -> None:
        """Wait at the start line."""
        self.start_line.wait()

    def exchange(self, value: Any, everyone: bool = False) -> list[Any]:
        """Return every rank's value, of this side or of all sides, in rank order. It blocks without spinning."""
        self._writing.send((EVERYONE if everyone else SIDE, value))
        received: list[Any] = self._reading.recv()
        return received

    def report(self, event: object, from_any_rank: bool = False) -> None:
        """Send the parent something; without `from_any_rank` only rank 0 does."""
        if self.rank == 0 or from_any_rank:
            self._writing.send((REPORT, event))

    def in_turn(self, number: int, turn: Turn) -> Sequence[float]:
        """Run this side's turn while the other sides wait; the number decides on their order."""
        if self.sides == 1:
            return turn()
        samples: Sequence[float] = []
        self.exchange(None, everyone=True)
        for side in rotated([*range(self.sides)], number):
            if side == self.side:
                samples = turn()
            self.exchange(None, everyone=True)
        return samples

    def calls(self, first: Turn, seconds: float) -> int:
        """Return how many calls fill so many seconds, from the times of first ones; the same on all ranks."""
        everyone = self.exchange(self.in_turn(0, first), everyone=True)
        return calls_for([min(map(min, everyone))], seconds)


@dataclass(frozen=True)
class ParentAddress:
    """Descriptors of the parent process that its ranks open through ``/proc``: shared memory, and two pipes for each.

    Attributes:
        pid: The parent.
        folder: Folder of the run.
        world: Number of ranks of a side.
        sides: Number of sides.
        extra: Bytes of `RankContext.memory`.
        memory: Shared memory of all sides, one after the other.
        pipes: By number of the rank on all sides: the end that it reads, and the end that it writes.
    """

    pid: int
    folder: str
    world: int
    sides: int
    extra: int
    memory: int
    pipes: Sequence[tuple[int, int]]

    def connect(self, rank: int, side: int = 0, host: Any = None) -> RankContext:
        """Return the context of a rank in its process."""
        fd = self._open(self.memory, os.O_RDWR)
        size = segment_bytes(self.world, self.extra)
        whole = memoryview(mmap.mmap(fd, self.sides * size))[side * size : (side + 1) * size]
        os.close(fd)
        lines = segment_bytes(self.world, 0)
        reads, writes = self.pipes[side * self.world + rank]
        reading = Connection(self._open(reads, os.O_RDONLY), writable=False)
        writing = Connection(self._open(writes, os.O_WRONLY), readable=False)
        writing.send((CONNECTED, None))
        folder = os.path.join(self.folder, str(side))
        line, memory = StartLine(whole[:lines], rank, range(self.world)), whole[lines : lines + self.extra]
        return RankContext(rank, self.world, folder, memory, line, side, self.sides, host, reading, writing)

    def _open(self, fd: int, mode: int) -> int:
        return os.open(f"/proc/{self.pid}/fd/{fd}", mode | os.O_CLOEXEC)


def segment_bytes(world: int, extra: int) -> int:
    """Return the size of a side's shared memory: a cache line a rank, and the program's bytes, each up to whole pages.

    >>> segment_bytes(2, 100), segment_bytes(100, 0)
    (8192, 8192)
    """
    return sum(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for nbytes in (world * LINE_BYTES, extra))


def take_turns(
    context: RankContext, contestants: Mapping[str, Turn], rounds: int, after_round: Callable[[int], None] | None = None
) -> tuple[dict[str, list[float]], list[bool]]:
    """Let contestants take turns, without Python's garbage collector.

    Args:
        context: This rank.
        contestants: By name, a function that runs a turn and returns its samples. Called on all ranks alike.
        rounds: Number of rounds.
        after_round: Called with the number of each completed round.

    Returns:
        The samples by contestant, and for each round whether other processes disturbed it.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    disturbed, others = [], OtherProcesses()
    for number in range(rounds):
        others.mark()
        used = process_time()
        for name in rotated([*contestants], number):
            with without_collector():
                samples[name] += context.in_turn(number, contestants[name])
        disturbed.append(others.disturbed(sum(context.exchange(process_time() - used))))
        if after_round:
            after_round(number)
    return samples, disturbed
