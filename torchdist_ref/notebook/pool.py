"""Ranks that stay: give them a cell, get their output in rank order, give them the next.

This is all of the notebook's ranks but the magic words, so it works without IPython, in a plain script or a test.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.launcher.environment import rank_environment
from torchdist_ref.notebook.connection import Channel, RankServer
from torchdist_ref.notebook.conversation import Conversation
from torchdist_ref.notebook.report import PoolError, Report, names
from torchdist_ref.notebook.turns import Item, Turns
from torchdist_ref.processes import describe_exit as how_it_ended
from torchdist_ref.stores import TCPStore

_ADDRESS = "127.0.0.1"
_FIGURES = "module://torchdist_ref.notebook.figures"
_GRACE = 10.0


def _ignore(rank: int, item: Item) -> None:
    """Show nothing."""


class RankPool:
    """Persistent ranks, each a process with variables of its own, that find in their environment what ranks need.

    The variables are those of `torchdist_ref.launch`, so a cell calls ``dist.init_process_group("ref")`` itself. The
    ranks' store is served by this process. Close the pool, or use it in a ``with`` block; ending this process in
    whatever way ends the ranks too.

    Args:
        world_size: How many ranks, at least 1.
        server: The rank server to start them with, which stays; None starts one, which goes with the pool.

    Raises:
        ArgumentError: If the number of ranks is no such thing.
        DistError: If they could not be started.

    Example:
        >>> from torchdist_ref.notebook import RankPool
        >>> with RankPool(2) as pool:
        ...     pool.run("import os; rank = int(os.environ['RANK'])")
        ...     pool.run("print('hello'); rank * 10", show=print)
        ...     pool.pull("rank + 1", rank=1)
        0 hello
        0 {'text/plain': '0'}
        1 hello
        1 {'text/plain': '10'}
        2
    """

    def __init__(self, world_size: int, server: RankServer | None = None) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ArgumentError(explain("RankPool", "world_size", "a number of ranks, at least 1", world_size))
        self.world_size = world_size
        self._own_server = server is None
        self._server = server or RankServer()
        self._channels: list[Channel] = []
        self._cells = itertools.count(1)
        self._trouble = ""
        self._gone: set[int] = set()
        self._store: TCPStore | None = None
        atexit.register(self.close)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, in rank order."""
        return [channel.pid for channel in self._channels]

    def run(
        self,
        source: str,
        *,
        show: Callable[[int, Item], None] = _ignore,
        timeout: float | None = None,
        grace: float = _GRACE,
    ) -> None:
        """Run a cell on every rank and wait until all are through.

        Args:
            source: The cell's text.
            show: Called with a rank and a line of its output, or a value that it shows as a MIME bundle; all of
                rank 0's first, then rank 1's, and so on. The first rank that is not done is heard live.
            timeout: Seconds after which the ranks that are not through are interrupted and named; None waits on.
            grace: Seconds that the others have once a rank has failed, before they are interrupted.

        Raises:
            CellError: If a rank raised, died or did not answer. The variables of the others live on.
            CellInterrupted: If the user interrupted, after the ranks were interrupted too.
            PoolError: If a rank died, or had to be given up, earlier.
        """
        name = f"<spmd cell {next(self._cells)}>"
        self._ask(self._channels, ("run", source, name), show, timeout, grace).raise_if_bad()

    def pull(self, name: str, rank: int = 0) -> Any:
        """Fetch a value from a rank.

        Args:
            name: The name of a variable there, or any expression.
            rank: The rank to ask.

        Returns:
            A copy, pickled there and unpickled here.

        Raises:
            ArgumentError: If there is no such rank.
            CellError: If the rank cannot evaluate or pickle it.
        """
        if rank not in range(self.world_size):
            raise ArgumentError(explain("pull", "rank", f"a rank from 0 to {self.world_size - 1}", rank))
        report = self._ask([self._channels[rank]], ("get", name), _ignore, None, _GRACE)
        report.raise_if_bad()
        return pickle.loads(report.values[rank] or b"")

    def push(self, name: str, value: Any) -> None:
        """Set a variable on every rank.

        Args:
            name: What it is called there.
            value: Anything that can be pickled.

        Raises:
            ArgumentError: If the name is no name.
            CellError: If a rank cannot unpickle it, since it lacks the class for instance.
        """
        if not name.isidentifier():
            raise ArgumentError(explain("push", "name", "a variable's name", name))
        self._ask(self._channels, ("put", name, pickle.dumps(value)), _ignore, None, _GRACE).raise_if_bad()

    def close(self) -> None:
        """End the ranks, and the server if it came with the pool. Closing twice is fine."""
        atexit.unregister(self.close)
        channels, self._channels = self._channels, []
        self._trouble = "the ranks have been stopped"
        self._server.stop_ranks([channel for channel in channels if channel.rank not in self._gone])
        for channel in channels:
            channel.close()
        if self._store is not None:
            self._store.close()
        if self._own_server:
            self._server.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._store = TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            self._channels.append(self._server.start_rank(rank, self._environment(rank, self._store.port)))

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        defaults = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        # The kernel's own matplotlib backend draws into the kernel.
        return defaults | rank_environment(rank, self.world_size, _ADDRESS, port) | {"MPLBACKEND": _FIGURES}

    def _ask(
        self,
        channels: Sequence[Channel],
        request: tuple[Any, ...],
        show: Callable[[int, Item], None],
        timeout: float | None,
        grace: float,
    ) -> Report:
        if self._trouble:
            raise PoolError(f"{self._trouble}: start them anew (%spmd_stop, then %%spmd -n {self.world_size})")
        turns = Turns([channel.rank for channel in channels], show)
        report = Conversation(self._server, channels, turns, timeout, grace).hold(request)
        if report.silent:
            self._trouble = f"{names(report.silent)} did not answer an earlier request"
        self._gone |= report.died.keys()
        for rank, status in report.died.items():
            self._trouble = f"rank {rank} {how_it_ended(status)}"
        return report
