"""One repetition: some calls on every rank, each from the start line, and when each rank began and ended.

A call's time is from the moment when the last rank began to the moment when the last rank was done. Ranks only take
down times; what they mean is computed once, by rank 0, from everybody's. A bound, whose ranks don't wait for one
another, has no common end: it is what each rank has to do, shared out among the processors (`shared_out`).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time

from torchdist_ref.benchmark.operations import Action

Times = list[tuple[float, float]]
Clock = Callable[[], float]
# Others' processor time is counted in ticks of a hundredth of a second.
_TICK = 0.01
_TOLERATED = 0.15


def apart(call: Action, calls: int, line_up: Callable[[], None], clock: Clock = perf_counter) -> Times:
    """Make so many calls, each from the start line: (begin, end) of each, by default on a clock that all share."""
    times = []
    for _ in range(calls):
        line_up()
        begin = clock()
        call()
        times.append((begin, clock()))
    return times


def in_a_row(call: Action, calls: int, line_up: Callable[[], None], clock: Clock = perf_counter) -> Times:
    """Make so many calls back to back after one start line: (begin, end) of all together."""
    line_up()
    begin = clock()
    for _ in range(calls):
        call()
    return [(begin, clock())]


def durations(by_rank: Sequence[Times], parts: int = 1) -> list[float]:
    """Seconds of each call, from every rank's times; each took `parts` times as long.

    >>> durations([[(1.0, 4.0)], [(2.0, 3.5)]])
    [2.0]
    """
    return [
        (max(end for _, end in call) - max(begin for begin, _ in call)) / parts for call in zip(*by_rank, strict=True)
    ]


def own_clock(world: int) -> Clock:
    """What tells how long a rank has worked, however long it waited for a processor.

    A rank with a processor to itself does not wait, and any clock tells; the one of processor time takes a call of
    the kernel to read, as long as copying 10 KiB.
    """
    return perf_counter if world <= len(os.sched_getaffinity(0)) else thread_time


def shared_out(by_rank: Sequence[Times], parts: int = 1, processors: int | None = None) -> list[float]:
    """Seconds below which processors cannot do each call's work, from how long every rank worked on it.

    No rank's work can be split, and all of it has to be done by somebody: at best it ends with the longest rank's, or
    when the sum is shared out evenly, whichever is later. By default among those that this process may run on.

    >>> four = [[(0.0, 2.0)], [(0.0, 2.0)], [(0.0, 2.0)], [(0.0, 3.0)]]
    >>> shared_out(four, processors=2), shared_out(four, processors=4)
    ([4.5], [3.0])
    """
    many = processors or len(os.sched_getaffinity(0))
    worked = ([end - begin for begin, end in call] for call in zip(*by_rank, strict=True))
    return [max(max(seconds), sum(seconds) / many) / parts for seconds in worked]


def calls_for(first: Sequence[float], seconds: float, most: int = 1000) -> int:
    """How many calls fill a repetition of so many seconds.

    >>> calls_for([0.02, 0.01, 0.03], 0.05), calls_for([1.0], 0.05), calls_for([1e-6], 0.05)
    (2, 1, 1000)
    """
    return max(1, min(most, int(seconds / max(median(first), 1e-7))))


class Strangers:
    """How much of the processors others use while we measure: their busy time, less what our ranks used.

    Seen on the processors that this process may run on. Where /proc/stat does not exist nothing is ever disturbed.
    """

    def __init__(self, cpus: set[int] | None = None) -> None:
        self._cpus = os.sched_getaffinity(0) if cpus is None else cpus
        self.mark()

    def mark(self) -> None:
        """Begin anew."""
        self._busy, self._wall = self._read(), perf_counter()

    def disturbed(self, own: float) -> bool:
        """Whether others took more than a seventh of a processor since the mark; our ranks used `own` seconds."""
        wall = perf_counter() - self._wall
        return self._read() - self._busy - own > _TOLERATED * wall + 2 * _TICK

    def _read(self) -> float:
        try:
            return busy(Path("/proc/stat").read_text(), self._cpus, os.sysconf("SC_CLK_TCK"))
        except OSError:
            return 0.0


def busy(stat: str, cpus: set[int], ticks: int) -> float:
    """Seconds for which some processors were not idle, from the text of /proc/stat.

    >>> busy("cpu 9 9 9 9 9 9 9 9\\ncpu0 100 0 50 700 7 1 2 3\\ncpu1 5 5 5 5 5 5 5 5", {0}, 100)
    1.56
    """
    lines = (line.split() for line in stat.splitlines() if line.startswith("cpu") and line[3:4].isdigit())
    # user nice system idle iowait irq softirq steal
    used = [sum(map(int, (*f[1:4], *f[6:9]))) for f in lines if int(f[0][3:]) in cpus]
    return sum(used) / ticks


def own_time() -> float:
    """Processor seconds of this process, all its threads."""
    return process_time()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep Python's garbage collector out of what is timed."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
