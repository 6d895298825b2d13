"""Circle: what the ranks of a benchmark share apart from the engines under test.

A start line, so that a call is timed from the moment when all ranks are there: each rank counts up a word of its own
in shared memory and spins on the others'. It carries no data, so nothing depends on the order in which a processor
makes writes visible. Figures go through pipes, which block, and which the kernel orders.

Made before the ranks are forked. Don't add anything that an engine could be measured with: this is the neutral ground.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import TypeVar

T = TypeVar("T")
_LINE = 64
_WORD = 8
_EASE = 0.002
_PATIENT, _CROWDED = 20_000, 50


class Circle:
    """Neutral ground for `world` ranks.

    Args:
        world: How many ranks will stand in it.

    >>> circle = Circle(1)
    >>> circle.line_up(0), circle.exchange(0, "alone"), circle.close()
    (None, ['alone'], None)
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._memory = mmap.mmap(-1, max(1, world) * _LINE)
        self._words = memoryview(self._memory).cast("q")
        self._places = [rank * _LINE // _WORD for rank in range(world)]
        self._turn = 0
        self._spins = _PATIENT if world <= len(os.sched_getaffinity(0)) else _CROWDED
        self._ends = [Pipe() for _ in range(world - 1)]

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
        """Let go of the memory and the pipes."""
        ends: list[Connection] = [end for pair in self._ends for end in pair]
        for end in ends:
            end.close()
        self._words.release()
        self._memory.close()
