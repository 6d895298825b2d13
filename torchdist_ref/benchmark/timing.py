"""Start line and clocks: repetitions on every rank, each from a common start, and the time that they took.

A call's time is from the moment when the last rank began to the moment when the last rank completed. Ranks only record
times; rank 0 computes durations from those of all ranks. A bound, whose ranks do not wait for one another, has no
common end: its time is the work of each rank, divided among the processors (`shared_out`).

Ranks of an older library run this file too. Import nothing but the standard library here.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep, thread_time
from typing import Any, TypeVar

T = TypeVar("T")
Action = Callable[[], Any]
Times = list[tuple[float, float]]
Clock = Callable[[], float]
# Bytes from one rank's word to the next: a cache line.
LINE_BYTES = 64
WORD_BYTES = 8
# Loops before a waiting rank yields its processor, with a processor for each rank and with fewer.
LONG_SPINS, CROWDED_SPINS = 20_000, 50
POLL_SECONDS = 0.002
# /proc/stat counts in ticks of a hundredth of a second.
TICK_SECONDS = 0.01
# Share of a processor that other processes may use in an undisturbed round.
TOLERATED_SHARE = 0.15
MAX_CALLS = 1000


class StartLine:
    """Barrier of a benchmark's ranks, independent of all backends: one word a rank in shared memory.

    Each rank increments its own word and spins on the others'. No data depends on it, so the order in which a processor
    makes writes visible is irrelevant.

    Args:
        memory: Shared memory, zero at first: a cache line for each rank.
        rank: This rank.
        ranks: Ranks that take part.

    >>> line = StartLine(memoryview(bytearray(64)), 0, range(1))
    >>> line.wait(), line.poll([0], 0.1)
    (None, True)
    """

    def __init__(self, memory: memoryview, rank: int, ranks: range) -> None:
        self._words = memory.cast("q")
        self._step = LINE_BYTES // WORD_BYTES
        self._own, self._all = rank * self._step, [each * self._step for each in ranks]
        self._count = 0
        self._spins = LONG_SPINS if len(ranks) <= len(os.sched_getaffinity(0)) else CROWDED_SPINS

    def wait(self) -> None:
        """Return when all ranks have called this as often as this one; on a core each, within a microsecond."""
        self._count += 1
        words, count, spins = self._words, self._count, self._spins
        words[self._own] = count
        for index in self._all:
            while words[index] < count:
                spins -= 1
                if spins < 0:
                    os.sched_yield()

    def poll(self, ranks: Sequence[int], seconds: float) -> bool:
        """Wait for these ranks, with sleeps and a time limit; return whether they came. For ranks of which some die."""
        self._count += 1
        self._words[self._own] = self._count
        end = monotonic() + seconds
        while any(self._words[rank * self._step] < self._count for rank in ranks):
            if monotonic() > end:
                return False
            sleep(POLL_SECONDS)
        return True


def calls_apart(call: Action, calls: int, wait: Action, clock: Clock = perf_counter) -> Times:
    """Make calls, each from the start line; return (begin, end) of each, by default on a clock that all ranks share."""
    times = []
    for _ in range(calls):
        wait()
        begin = clock()
        call()
        times.append((begin, clock()))
    return times


def calls_in_a_row(call: Action, calls: int, wait: Action, clock: Clock = perf_counter) -> Times:
    """Make calls back to back after one start line; return (begin, end) of all together."""
    wait()
    begin = clock()
    for _ in range(calls):
        call()
    return [(begin, clock())]


def durations(by_rank: Sequence[Times], parts: int = 1) -> list[float]:
    """Return the seconds of each call, from every rank's times, divided by ``parts``.

    >>> durations([[(1.0, 4.0)], [(2.0, 3.5)]])
    [2.0]
    """
    return [
        (max(end for _, end in call) - max(begin for begin, _ in call)) / parts for call in zip(*by_rank, strict=True)
    ]


def own_clock(world: int) -> Clock:
    """Return a clock of the time that a rank works, without its waits for a processor.

    A rank with a processor to itself does not wait, and any clock serves; the one of processor time takes a system
    call, as long as copying 10 KiB.
    """
    return perf_counter if world <= len(os.sched_getaffinity(0)) else thread_time


def shared_out(by_rank: Sequence[Times], parts: int = 1, processors: int | None = None) -> list[float]:
    """Return the least seconds in which processors can do each call's work, from the time that every rank worked.

    A rank's work cannot be split. At best a call ends with the longest rank's work, or when the sum is divided evenly,
    whichever is later. By default among the processors that this process may run on.

    >>> four = [[(0.0, 2.0)], [(0.0, 2.0)], [(0.0, 2.0)], [(0.0, 3.0)]]
    >>> shared_out(four, processors=2), shared_out(four, processors=4)
    ([4.5], [3.0])
    """
    many = processors or len(os.sched_getaffinity(0))
    worked = ([end - begin for begin, end in call] for call in zip(*by_rank, strict=True))
    return [max(max(seconds), sum(seconds) / many) / parts for seconds in worked]


def calls_for(first: Sequence[float], seconds: float) -> int:
    """Return how many calls fill a repetition of so many seconds.

    >>> calls_for([0.02, 0.01, 0.03], 0.05), calls_for([1.0], 0.05), calls_for([1e-6], 0.05)
    (2, 1, 1000)
    """
    return max(1, min(MAX_CALLS, int(seconds / max(median(first), 1e-7))))


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """Return names in order, beginning with another one in each turn.

    >>> rotated("abc", 4)
    ['b', 'c', 'a']
    """
    first = turn % max(1, len(names))
    return [*names[first:], *names[:first]]


class OtherProcesses:
    """Processor time of other processes during a measurement: busy time, less that of our ranks.

    Only processors that this process may run on count. Without /proc/stat nothing is ever disturbed.
    """

    def __init__(self, cpus: set[int] | None = None) -> None:
        self._cpus = os.sched_getaffinity(0) if cpus is None else cpus
        self.mark()

    def mark(self) -> None:
        """Begin a new interval."""
        self._busy, self._wall = self._read(), perf_counter()

    def disturbed(self, own: float) -> bool:
        """Return whether others used more than the tolerated share since the mark; our ranks used `own` seconds."""
        wall = perf_counter() - self._wall
        return self._read() - self._busy - own > TOLERATED_SHARE * wall + 2 * TICK_SECONDS

    def _read(self) -> float:
        try:
            return busy(Path("/proc/stat").read_text(), self._cpus, os.sysconf("SC_CLK_TCK"))
        except OSError:
            return 0.0


def busy(stat: str, cpus: set[int], ticks: int) -> float:
    r"""Return the seconds for which some processors were not idle, from the text of /proc/stat.

    >>> busy("cpu 9 9 9 9 9 9 9 9\ncpu0 100 0 50 700 7 1 2 3\ncpu1 5 5 5 5 5 5 5 5", {0}, 100)
    1.56
    """
    lines = (line.split() for line in stat.splitlines() if line.startswith("cpu") and line[3:4].isdigit())
    # user nice system idle iowait irq softirq steal
    used = [sum(map(int, (*f[1:4], *f[6:9]))) for f in lines if int(f[0][3:]) in cpus]
    return sum(used) / ticks


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python's garbage collector out of what is timed."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
