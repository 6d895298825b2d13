"""Crew: forked ranks that tell the parent what they find while they run.

The ranks come from `torchdist_ref.testing.run`, which sees to it that none outlives the benchmark, Ctrl-C included.
Rank 0 reports: whatever it puts on the line the parent hears at once. Ranks that ``mpiexec`` has to start are in
`mpi_crew`; the program does not know the difference.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from torchdist_ref.benchmark.circle import Circle
from torchdist_ref.testing import run

T = TypeVar("T")
_DAY = 86_400.0


@dataclass(frozen=True)
class Place:
    """Where one rank of a benchmark stands.

    Attributes:
        rank: Which rank.
        world: How many there are.
        circle: The neutral ground.
        folder: A folder for stores; it goes when the ranks are done.
    """

    rank: int
    world: int
    circle: Circle
    folder: str
    _line: Connection | None

    def line_up(self) -> None:
        """Wait at the start line."""
        self.circle.line_up(self.rank)

    def exchange(self, value: T) -> list[T]:
        """Everybody's values, in rank order."""
        return self.circle.exchange(self.rank, value)

    def report(self, event: object, whoever: bool = False) -> None:
        """Tell the parent something. Only rank 0 is heard, unless a rank says that it wants to be, whoever it is."""
        if self._line is not None and (self.rank == 0 or whoever):
            self._line.send(event)


def go(
    program: Callable[[Place], T], world: int, hear: Callable[[Any], None], timeout: float = _DAY, extra: int = 0
) -> list[T]:
    """Run a program on forked ranks.

    Args:
        program: What each rank does.
        world: How many ranks.
        hear: Called here with each thing that rank 0 reports, in order, on another thread.
        timeout: Seconds until the ranks are stopped.
        extra: Bytes of memory to share, as `Place.circle.memory`.

    Returns:
        What each rank's program returned.

    Raises:
        RankError: A rank failed.
    """
    circle = Circle(world, extra)
    with listening(hear) as line, tempfile.TemporaryDirectory(prefix="torchdist_ref-") as folder:
        try:
            return run(
                lambda rank: program(Place(rank, world, circle, folder, line)),
                world,
                ranks="processes",
                init=False,
                timeout=timeout,
            )
        finally:
            circle.close()


@contextmanager
def listening(hear: Callable[[Any], None]) -> Iterator[Connection]:
    """A line to this process: whatever is sent on it is heard, until the block ends."""
    ear, line = Pipe(duplex=False)
    listener = threading.Thread(target=_listen, args=(ear, hear), name="benchmark listener")
    listener.start()
    try:
        yield line
    finally:
        line.send(None)
        listener.join()
        line.close()
        ear.close()


def _listen(ear: Connection, hear: Callable[[Any], None]) -> None:
    while (event := ear.recv()) is not None:
        try:
            hear(event)
        except Exception:
            # A full terminal or a closed pipe must not stop the ranks, which would wait for ever to report.
            logging.getLogger("torchdist_ref.benchmark").exception("could not show %r", event)
