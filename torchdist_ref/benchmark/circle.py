"""Circle: what the ranks of a benchmark share apart from the backends under test.

A start line, so that a call is timed from the moment when all ranks are there: each rank counts up a word of its own
in shared memory and spins on the others'. It carries no data, so nothing depends on the order in which a processor
makes writes visible. Figures go through pipes, which block, and which the kernel orders.

Made before the ranks are forked. Don't add anything that a backend could be measured with: this is the neutral ground.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from time import monotonic, sleep
from typing import Any, TypeVar

T = TypeVar("T")
Exchange = Callable[[Any], list[Any]]
_LINE = 64
_WORD = 8
_EASE = 0.002
_PATIENT, _CROWDED = 20_000, 50


class Circle:
    """Neutral ground for `world` ranks, and some memory that they share.

    Args:
        world: How many ranks will stand in it.
        extra: Bytes of `memory` to make.
        found: For ranks that are not forked (see `mpi_crew`): their memory, and what exchanges values.

    Attributes:
        memory: What all ranks see and use as they like, page-aligned.

    >>> circle = Circle(1)
    >>> circle.line_up(0), circle.exchange(0, "alone"), circle.close()
    (None, ['alone'], None)
    """

    def __init__(self, world: int, extra: int = 0, found: tuple[mmap.mmap, Exchange] | None = None) -> None:
        self.world = world
        whole = memoryview(found[0] if found else mmap.mmap(-1, segment(world, extra)))
        self._exchange = found[1] if found else None
        self._ends = [] if found else [Pipe() for _ in range(world - 1)]
        self._words, self.memory = whole[: segment(world, 0)].cast("q"), whole[segment(world, 0) :]
        self._places = [rank * _LINE // _WORD for rank in range(world)]
        self._turn = 0
        self._spins = _PATIENT if world <= len(os.sched_getaffinity(0)) else _CROWDED

    def line_up(self, rank: int) -> None:
        """Come back when all ranks have called this as often as this one: on a core each, within a microsecond."""
        self._turn += 1
        words, turn, spins = self._words, self._turn, self._spins
        words[self._places[rank]] = turn
        for place in self._places:
            while words[place] < turn:
                spins -= 1
                if spins < 0:
                    os.sched_yield()

    def linger(self, rank: int, ranks: Sequence[int], seconds: float) -> bool:
        """Wait at ease until these ranks do too, so long at most; whether they came. For use when others are gone."""
        self._turn += 1
        self._words[self._places[rank]] = self._turn
        end = monotonic() + seconds
        while any(self._words[self._places[other]] < self._turn for other in ranks):
            if monotonic() > end:
                return False
            sleep(_EASE)
        return True

    def exchange(self, rank: int, value: T) -> list[T]:
        """Give every rank every rank's value, in rank order. Blocks, so it leaves the processors alone."""
        if self._exchange:
            return self._exchange(value)
        if rank:
            end = self._ends[rank - 1][1]
            end.send(value)
            given: list[T] = end.recv()
            return given
        values = [value, *(here.recv() for here, _ in self._ends)]
        for here, _ in self._ends:
            here.send(values)
        return values

    def close(self) -> None:
        """Let go of the pipes. The memory goes with the last tensor that lies in it."""
        for end in (end for pair in self._ends for end in pair):
            end.close()
        self._words.release()
        self.memory.release()


def segment(world: int, extra: int) -> int:
    """Bytes of a circle's memory: a cache line for each rank, up to a whole page, and what is asked for besides.

    >>> segment(2, 100)
    4196
    """
    return -(-world * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE + extra
