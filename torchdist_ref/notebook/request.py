"""Request to some ranks: sent to all, and awaited until each has answered, died or been given up.

One loop handles seven kinds of events: output, a message, the end of a rank, the user's interrupt, a deadline, the time
to report progress, the end of the server. Interrupts are handled between events only: one inside a message would
corrupt the stream.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from math import inf
from multiprocessing.connection import Connection
from typing import Any

from torchdist_ref.notebook.output import RankOrder
from torchdist_ref.notebook.rank import POSITION_SIGNAL, CellFailure
from torchdist_ref.notebook.report import Report
from torchdist_ref.notebook.server import RankConnection, RankServer
from torchdist_ref.processes.control import signal_socket
from torchdist_ref.timeouts import CLOCK, Clock

# Time that an interrupted rank has to answer: C code that waits does not notice the interrupt at once.
ANSWER_SECONDS = 5.0
# An interrupt may come between a rank's last check for signals and its wait in C code: a second one ends the wait.
_REPEAT_SECONDS = 0.5
# A second interrupt by the user gives the ranks up, unless it follows the first one immediately.
_DOUBLE_PRESS_SECONDS = 1.0


Progress = Callable[[dict[int, str]], None]
"""Function that receives what each rank is doing, as texts by rank."""


def _ignore(activities: dict[int, str]) -> None:
    """Discard a report."""


class RankRequest:
    """Request to ranks in progress.

    Args:
        server: Server that started the ranks.
        connections: Connections to the ranks.
        order: Buffer that receives their output.
        timeout: Time for the ranks, in seconds; None for no limit.
        grace: Time for the others after one of them has failed, in seconds.
        progress: Function that receives what each rank is doing, at intervals, and an empty dict at the end; or None.
        interval: Seconds between two calls of `progress`.
        clock: Clock of all times above. Default None: the monotonic clock.
    """

    def __init__(
        self,
        server: RankServer,
        connections: Sequence[RankConnection],
        order: RankOrder,
        timeout: float | None,
        grace: float,
        progress: Progress | None = None,
        interval: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self._server = server
        self._clock = clock or CLOCK
        self._connections = {connection.rank: connection for connection in connections}
        self._order = order
        self._grace = grace
        self._waiting = set(self._connections)
        self._begun: set[int] = set()
        self._deadline = inf if timeout is None else self._clock.now() + timeout
        self._repeat_at = inf
        self._progress, self._interval = progress or _ignore, interval
        self._progress_at = inf if progress is None else self._clock.now() + interval
        self._positions: dict[int, str] = {}
        self._report = Report(waited=timeout or 0.0)
        self._interrupted_at = 0.0
        self._selector = selectors.DefaultSelector()

    def run(self, message: tuple[Any, ...]) -> Report:
        """Send a message to each rank and wait for the results.

        Args:
            message: Message, see `torchdist_ref.notebook.rank`.

        Returns:
            The results of all ranks.
        """
        with self._selector, _interrupts() as interrupts:
            for connection in self._connections.values():
                self._register(connection.messages, functools.partial(self._on_message, connection))
                self._register(connection.output.descriptor, functools.partial(self._on_output, connection))
                self._forward(connection)
            self._register(self._server.connection, self._on_server)
            if interrupts is not None:
                self._register(interrupts, functools.partial(self._on_interrupt, interrupts))
            for connection in self._connections.values():
                # The server reports the death of a rank.
                with contextlib.suppress(ConnectionError):
                    connection.messages.send(message)
            for connection in self._connections.values():
                if connection.pid in self._server.ended:
                    self._on_end(connection.rank, self._server.ended[connection.pid])
            while self._waiting:
                self._step()
        if self._positions:
            self._order.guarded(lambda: self._progress({}))
        return self._report

    def _register(self, source: Connection | socket.socket | int, callback: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _step(self) -> None:
        next_time = min(self._deadline, self._repeat_at, self._progress_at)
        for key, _ in self._selector.select(None if next_time == inf else max(0.0, next_time - self._clock.now())):
            # An earlier event of the same round may have completed this rank.
            if key.fd in self._selector.get_map():
                key.data()
        now = self._clock.now()
        if now >= self._repeat_at:
            self._repeat_at = inf
            self._signal(self._waiting & self._begun)
        if now >= self._progress_at and self._waiting:
            self._report_progress()
        if now >= self._deadline and self._waiting:
            self._on_deadline()

    def _report_progress(self) -> None:
        """Report what each rank did last, and ask those that run for their position, which the next report has."""
        self._progress_at = self._clock.now() + self._interval
        for rank in self._connections:
            self._positions.setdefault(rank, "running")
            if rank in self._waiting & self._begun:
                self._connections[rank].ask(POSITION_SIGNAL)
        self._order.guarded(lambda: self._progress({rank: self._activity(rank) for rank in self._connections}))

    def _activity(self, rank: int) -> str:
        ended = "failed" if rank in self._report.failures or rank in self._report.died else "done"
        activity = self._positions[rank] if rank in self._waiting else ended
        return f"{activity}: {last}" if (last := self._order.last_line(rank)) else activity

    def _on_output(self, connection: RankConnection) -> None:
        if not connection.output.fill():
            self._selector.unregister(connection.output.descriptor)
        self._forward(connection)

    def _forward(self, connection: RankConnection) -> None:
        self._order.text(connection.rank, connection.output.take())

    def _on_message(self, connection: RankConnection) -> None:
        try:
            data = connection.messages.recv_bytes()
        except (EOFError, OSError):
            # The rank has died; the server reports how.
            self._selector.unregister(connection.messages)
            return
        try:
            kind, *content = pickle.loads(data)
        except Exception as error:
            # An object in a MIME bundle, of a class that only the rank has.
            kind, content = "display", [{"text/plain": f"(a displayed value cannot be unpickled: {error})"}]
        if kind == "position":
            # It has no marker: it does not belong to a place of the output.
            self._positions[connection.rank] = content[0]
            return
        # The marker was written before the message was sent, so it can be read now.
        while not connection.output.at_marker and connection.output.fill():
            self._forward(connection)
        connection.output.pass_marker()
        if kind == "done":
            self._on_done(connection, *content)
            return
        if kind == "display":
            self._order.bundle(connection.rank, *content)
        else:
            self._on_begun(connection.rank)
        self._forward(connection)

    def _on_begun(self, rank: int) -> None:
        self._begun.add(rank)
        if self._interrupted_at:
            self._signal({rank})

    def _on_done(self, connection: RankConnection, failure: object, value: bytes | None) -> None:
        if isinstance(failure, CellFailure):
            self._report.failures[connection.rank] = failure
            self._shorten_deadline(connection.rank)
        else:
            self._report.values[connection.rank] = value
        self._complete(connection)

    def _on_server(self) -> None:
        try:
            kind, pid, status = self._server.connection.recv()
        except (EOFError, OSError):
            # The kernel kills ranks whose server has ended: see `processes.control.die_with_parent`.
            self._selector.unregister(self._server.connection)
            for rank in list(self._waiting):
                self._on_end(rank, -signal.SIGKILL)
            return
        assert kind == "ended"
        self._server.ended[pid] = status
        for rank, connection in self._connections.items():
            if connection.pid == pid:
                self._on_end(rank, status)

    def _on_end(self, rank: int, status: int) -> None:
        self._report.died[rank] = status
        if rank in self._waiting:
            self._order.text(rank, self._connections[rank].output.take_all())
            self._shorten_deadline(rank)
            self._complete(self._connections[rank])

    def _complete(self, connection: RankConnection) -> None:
        self._waiting.discard(connection.rank)
        for source in (connection.messages, connection.output.descriptor):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        self._order.finish(connection.rank)

    def _shorten_deadline(self, failed: int) -> None:
        """Limit the time of the other ranks, which may be waiting for one that failed."""
        deadline = self._clock.now() + self._grace
        if not self._report.late and not self._report.interrupted and deadline < self._deadline:
            self._deadline, self._report.after, self._report.waited = deadline, failed, self._grace

    def _on_interrupt(self, interrupts: socket.socket) -> None:
        # The socket receives the number of each signal that this process handles in Python.
        if signal.SIGINT not in interrupts.recv(64):
            return
        if self._report.interrupted and self._clock.now() > self._interrupted_at + _DOUBLE_PRESS_SECONDS:
            self._give_up()
        self._report.interrupted = True
        self._interrupt()

    def _on_deadline(self) -> None:
        if self._report.late or self._report.interrupted:
            self._give_up()
        else:
            self._report.late = set(self._waiting)
            self._interrupt()

    def _interrupt(self) -> None:
        self._interrupted_at = self._clock.now()
        self._deadline = self._interrupted_at + ANSWER_SECONDS
        self._repeat_at = self._interrupted_at + _REPEAT_SECONDS
        # Ranks that have not begun would ignore the signal: they receive it when they have.
        self._signal(self._waiting & self._begun)

    def _signal(self, ranks: set[int]) -> None:
        for rank in ranks:
            self._connections[rank].signal(signal.SIGINT)

    def _give_up(self) -> None:
        self._report.silent = set(self._waiting)
        for rank in list(self._waiting):
            self._complete(self._connections[rank])


@contextlib.contextmanager
def _interrupts() -> Iterator[socket.socket | None]:
    """Receive the user's interrupts through a socket; None outside the main thread, which alone receives them."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    with signal_socket([signal.SIGINT]) as signals:
        yield signals
