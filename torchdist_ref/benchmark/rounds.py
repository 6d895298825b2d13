"""Rounds of a benchmark, as a rank runs them: start line and clocks, the turns of the contestants, and their samples.

All contestants are alive at once. In each round every one has a turn, the first being another each time. So what slows
down the machine slows down all, and a ratio is the median of the ratios within rounds. In a comparison of checkouts
the ranks of each checkout are a side: all sides run the same program, and one turn at a time (`RankContext.in_turn`).

A call's time is from the moment when the last rank began to the moment when the last rank completed. Ranks only record
times; rank 0 computes durations from those of all ranks. A bound, whose ranks do not wait for one another, has no
common end: its time is the work of each rank, divided among the processors (`shared_out`).

Ranks of an older library run this file too: use the library's public API alone. Do not add here: what is measured.
"""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, process_time, sleep, thread_time
from typing import Any, TypeVar

import torchdist_ref

# The library that is measured: this checkout's, or another.
library: Any = torchdist_ref
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
Turn = Callable[[], Sequence[float]]
# Name of the hub's socket in the folder of the run.
HUB = "hub"


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
    (None, None)
    """

    def __init__(self, memory: memoryview, rank: int, ranks: range) -> None:
        self._words = memory.cast("q")[:: LINE_BYTES // WORD_BYTES]
        self._rank, self._ranks, self._count = rank, ranks, 0
        self._spins = LONG_SPINS if len(ranks) <= len(os.sched_getaffinity(0)) else CROWDED_SPINS

    def wait(self) -> None:
        """Return when all ranks have called this as often as this one; on a core each, within a microsecond."""
        self._count += 1
        words, count, spins = self._words, self._count, self._spins
        words[self._rank] = count
        for rank in self._ranks:
            while words[rank] < count:
                spins -= 1
                if spins < 0:
                    os.sched_yield()

    def poll(self, ranks: Sequence[int], seconds: float) -> None:
        """Wait for these ranks, with sleeps and a time limit, since some may have died."""
        self._count += 1
        self._words[self._rank] = self._count
        end = monotonic() + seconds
        while any(self._words[rank] < self._count for rank in ranks) and monotonic() < end:
            sleep(POLL_SECONDS)


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


def busy(stat: str, cpus: set[int], ticks: int) -> float:
    r"""Return the seconds for which some processors were not idle, from the text of /proc/stat.

    >>> busy("cpu 9 9 9 9 9 9 9 9\ncpu0 100 0 50 700 7 1 2 3\ncpu1 5 5 5 5 5 5 5 5", {0}, 100)
    1.56
    """
    lines = (line.split() for line in stat.splitlines() if line.startswith("cpu") and line[3:4].isdigit())
    # user nice system idle iowait irq softirq steal
    used = [sum(map(int, (*f[1:4], *f[6:9]))) for f in lines if int(f[0][3:]) in cpus]
    return sum(used) / ticks


def busy_now() -> float:
    """Return `busy` of the processors that this process may run on."""
    return busy(Path("/proc/stat").read_text(), os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK"))


def disturbed_by_others(used: float, own: float, wall: float) -> bool:
    """Return whether other processes had more than the tolerated share of the processor time that was used.

    >>> disturbed_by_others(2.0, own=1.9, wall=1.0), disturbed_by_others(2.0, own=1.0, wall=1.0)
    (False, True)
    """
    return used - own > TOLERATED_SHARE * wall + 2 * TICK_SECONDS


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
        return {**self.cell, **self.more, "samples": dict(self.samples), "disturbed": self.disturbed}


@dataclass(frozen=True)
class ParentAddress:
    """Address of the parent process for its ranks.

    Attributes:
        folder: Folder of the run, with the hub's socket.
        world: Number of ranks of a side.
        sides: Number of sides.
        hosts: Hosts of `torchdist_ref.testing.namespaces`, whose descriptors the ranks have inherited: the first part
            of the ranks of each side is on the first host. Default: this machine.
    """

    folder: str
    world: int
    sides: int
    hosts: Sequence[Any] = ()


class RankContext:
    """One rank of a benchmark, connected to the parent. It moves this process to the rank's host, if there are hosts.

    Args:
        address: Address of the parent.
        rank: This rank.
        side: Number of this side, which runs this library's or another checkout's ranks.

    Attributes:
        rank, side: As given.
        host: Host of `torchdist_ref.testing.namespaces` that this rank runs on, or None.
        world: Number of ranks on this side.
        sides: Number of sides.
        folder: Folder for stores; it is removed when the ranks have ended.
        start_line: Barrier of all ranks of this side.
    """

    def __init__(self, address: ParentAddress, rank: int, side: int = 0) -> None:
        self.rank, self.side = rank, side
        self.world, self.sides = address.world, address.sides
        self.host = address.hosts[rank * len(address.hosts) // self.world] if address.hosts else None
        if self.host:
            self.host.enter()
            # Gloo and `ref` read this one.
            os.environ["GLOO_SOCKET_IFNAME"] = self.host.interface
        self.folder = os.path.join(address.folder, str(side))
        self._hub = Client(os.path.join(address.folder, HUB))
        self._hub.send(side * self.world + rank)
        self.start_line = StartLine(self.shared_memory(self.world * LINE_BYTES), rank, range(self.world))

    def shared_memory(self, nbytes: int) -> memoryview:
        """Return new memory that all ranks of this side share, page-aligned and zero at first."""
        # Not the library's memfd_create: an older checkout that is measured has none.
        with tempfile.TemporaryFile(dir="/dev/shm") as mine:
            os.posix_fallocate(mine.fileno(), 0, nbytes)
            with open(self.exchange(f"/proc/{os.getpid()}/fd/{mine.fileno()}")[0], "r+b") as file:
                memory = mmap.mmap(file.fileno(), nbytes)
            self.exchange(None)
        return memoryview(memory)

    def wait(self) -> None:
        """Wait at the start line."""
        self.start_line.wait()

    def exchange(self, value: Any, everyone: bool = False) -> list[Any]:
        """Return every rank's value, of this side or of all sides, in rank order. It blocks without spinning."""
        first = 0 if everyone else self.side * self.world
        self._hub.send((range(first, first + self.world * (self.sides if everyone else 1)), value))
        received: list[Any] = self._hub.recv()
        return received

    def report(self, event: object, from_any_rank: bool = False) -> None:
        """Send the parent something; without `from_any_rank` only rank 0 does."""
        if self.rank == 0 or from_any_rank:
            self._hub.send((None, event))

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

    def timed(self, call: Action, calls: int, loop: bool = False, bound: bool = False) -> list[float]:
        """Return the seconds of each of some calls of all ranks; of a call, if they are made in a `loop`, back to back.

        Of a `bound`, whose ranks do not wait for one another, it is the least time of their work.
        """
        clock, figure = (own_clock(self.world), shared_out) if bound else (perf_counter, durations)
        times = (calls_in_a_row if loop else calls_apart)(call, calls, self.wait, clock)
        return figure(self.exchange(times), calls if loop else 1)

    def calls(self, first: Turn, seconds: float) -> int:
        """Return how many calls fill so many seconds, from the times of first ones; the same on all ranks."""
        everyone = self.exchange(self.in_turn(0, first), everyone=True)
        return calls_for([min(map(min, everyone))], seconds)

    def compare(self, cell: Mapping[str, Any], contestants: Mapping[str, Turn], rounds: int, **more: Any) -> None:
        """Let contestants take turns, and report the result of the cell, with other facts about it."""
        self.report(Result(cell, *take_turns(self, contestants, rounds), more))


def take_turns(
    context: RankContext, contestants: Mapping[str, Turn], rounds: int
) -> tuple[dict[str, list[float]], list[bool]]:
    """Let contestants take turns, without Python's garbage collector. Rank 0 reports (rounds done, rounds).

    Args:
        context: This rank.
        contestants: By name, a function that runs a turn and returns its samples. Called on all ranks alike.
        rounds: Number of rounds.

    Returns:
        The samples by contestant, and for each round whether other processes disturbed it.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    disturbed = []
    for number in range(rounds):
        busy_before, wall, used = busy_now(), perf_counter(), process_time()
        for name in rotated([*contestants], number):
            gc.disable()
            samples[name] += context.in_turn(number, contestants[name])
            gc.enable()
        own = sum(context.exchange(process_time() - used))
        disturbed.append(disturbed_by_others(busy_now() - busy_before, own, perf_counter() - wall))
        context.report((number + 1, rounds))
    return samples, disturbed
