"""Pool of persistent ranks: runs one cell after another on all of them and shows the output in rank order.

It needs no IPython, so it also works in scripts and tests. Do not add magics here: they belong to `magic`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchdist_ref.elastic.attempt import Assignment
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.launcher.environment import rank_environment
from torchdist_ref.notebook.display import BACKEND
from torchdist_ref.notebook.output import Item, RankOrder
from torchdist_ref.notebook.rank import CELL
from torchdist_ref.notebook.report import PoolError, Report
from torchdist_ref.notebook.request import Progress, RankRequest
from torchdist_ref.notebook.server import RankConnection, RankServer
from torchdist_ref.processes.control import describe_exit, name_ranks
from torchdist_ref.stores import TCPStore
from torchdist_ref.stores.addresses import loopback_address

if TYPE_CHECKING:
    from torchdist_ref.timeouts import Clock

# Time that the other ranks have after one has failed.
_GRACE_SECONDS = 10.0


def _ignore(rank: int, item: Item) -> None:
    """Discard the output."""


class RankPool:
    """Pool of persistent ranks, each a process with its own variables.

    Their environment is that of `torchdist_ref.launch`, so a cell calls ``dist.init_process_group("ref")``. This
    process serves the ranks' store. Close the pool, or use it in a ``with`` block. However this process ends, the ranks
    end too.

    Args:
        world_size: Number of ranks, at least 1.
        server: Running rank server to start them with. Default None: a new one, which `close` ends.
        clock: Clock of time-outs and reports. Default None: the monotonic clock.

    Attributes:
        world_size: Number of ranks.

    Raises:
        ArgumentError: The number of ranks is wrong.
        DistError: The ranks could not be started.

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

    def __init__(self, world_size: int, server: RankServer | None = None, clock: Clock | None = None) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ArgumentError(explain("RankPool", "world_size", "a number of ranks, at least 1", world_size))
        self.world_size = world_size
        self._clock = clock
        self._own_server = server is None
        self._server = server or RankServer()
        self._connections: list[RankConnection] = []
        self._cells = itertools.count(1)
        self._unusable = ""
        self._store: TCPStore | None = None
        atexit.register(self.close)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        return [connection.pid for connection in self._connections]

    def run(
        self,
        source: str,
        *,
        show: Callable[[int, Item], None] = _ignore,
        timeout: float | None = None,
        grace: float = _GRACE_SECONDS,
        progress: Progress | None = None,
        interval: float = 1.0,
    ) -> None:
        """Run a cell on every rank and wait until all have finished.

        Args:
            source: Text of the cell.
            show: Function that receives a rank and a line of its output, or a displayed value as a MIME bundle. It
                receives all of rank 0's output first, then rank 1's, and so on; that of the first unfinished rank live.
            timeout: Time in seconds after which unfinished ranks are interrupted and named. Default None: no limit.
            grace: Time in seconds for the others after a rank has failed, before they are interrupted.
            progress: Function that receives what each rank is doing, as a dict of texts by rank: the line of the cell,
                the call in which the rank waits, and the last line of its output, such as the present state of a
                progress bar. After the last call with texts it receives an empty dict. Default None: no reports.
            interval: Time in seconds before the first report and between two reports.

        Raises:
            CellError: A rank raised, died or did not answer. The variables of the other ranks are kept.
            CellInterrupted: The user interrupted; the ranks were interrupted too.
            PoolError: A rank died, or was given up, during an earlier request.
        """
        message = ("run", source, f"{CELL}{next(self._cells)}>")
        self._request(self._connections, message, show, timeout, grace, progress, interval).raise_for_failures()

    def pull(self, name: str, rank: int = 0) -> Any:
        """Fetch a value from a rank.

        Args:
            name: Name of a variable of the rank, or any expression.
            rank: Rank.

        Returns:
            A copy, pickled by the rank and unpickled here.

        Raises:
            ArgumentError: There is no such rank.
            CellError: The rank cannot evaluate or pickle it.
        """
        if rank not in range(self.world_size):
            raise ArgumentError(explain("pull", "rank", f"a rank from 0 to {self.world_size - 1}", rank))
        report = self._request([self._connections[rank]], ("get", name), _ignore, None, _GRACE_SECONDS)
        report.raise_for_failures()
        return pickle.loads(report.values[rank] or b"")

    def push(self, name: str, value: Any) -> None:
        """Set a variable on every rank.

        Args:
            name: Name of the variable.
            value: Any object that can be pickled.

        Raises:
            ArgumentError: The name is not an identifier.
            CellError: A rank cannot unpickle it, for example because it lacks the class.
        """
        if not name.isidentifier():
            raise ArgumentError(explain("push", "name", "a variable's name", name))
        message = ("put", name, pickle.dumps(value))
        self._request(self._connections, message, _ignore, None, _GRACE_SECONDS).raise_for_failures()

    def close(self) -> None:
        """Stop the ranks, and the server if the pool started it. A second call has no effect."""
        atexit.unregister(self.close)
        connections, self._connections = self._connections, []
        self._unusable = "the ranks have been stopped"
        if connections:
            self._server.stop_ranks(connections)
        for connection in connections:
            connection.close()
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
        self._store = store = TCPStore(loopback_address(), 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            self._connections.append(self._server.start_rank(rank, self._environment(rank, store)))

    def _environment(self, rank: int, store: TCPStore) -> dict[str, str]:
        defaults = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        # The kernel's own MPLBACKEND displays figures in the kernel.
        assignment = Assignment(range(self.world_size), self.world_size, store.host, store.port)
        return defaults | rank_environment(assignment, rank) | {"MPLBACKEND": BACKEND}

    def _request(
        self,
        connections: Sequence[RankConnection],
        message: tuple[Any, ...],
        show: Callable[[int, Item], None],
        timeout: float | None,
        grace: float,
        progress: Progress | None = None,
        interval: float = 1.0,
    ) -> Report:
        if self._unusable:
            raise PoolError(f"{self._unusable}: restart them (%spmd_stop, then %%spmd -n {self.world_size})")
        order = RankOrder([connection.rank for connection in connections], show)
        try:
            times = (timeout, grace, progress, interval, self._clock)
            report = RankRequest(self._server, connections, order, *times).run(message)
        except BaseException:
            # Ranks may still have to answer, and the next request would receive that.
            self._unusable = "an earlier request was broken off"
            raise
        if report.silent:
            self._unusable = f"{name_ranks(report.silent)} did not answer an earlier request"
        # A rank that has not taken part may have died, too.
        ended = {
            each.rank: self._server.ended[each.pid] for each in self._connections if each.pid in self._server.ended
        }
        for rank, status in (ended | report.died).items():
            self._unusable = f"rank {rank} {describe_exit(status)}"
        if order.error is not None:
            raise order.error
        return report
