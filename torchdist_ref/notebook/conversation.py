"""One request to some ranks, from the asking to the last answer.

One loop hears six kinds of events: output, an answer, the end of a rank, the user's interrupt, a deadline, the end of
the server. Interrupts are taken between events, never inside one: half a message read would be the last one understood.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torchdist_ref.notebook.cell import Failure
from torchdist_ref.notebook.connection import Channel, RankServer
from torchdist_ref.notebook.report import Report
from torchdist_ref.notebook.turns import Turns
from torchdist_ref.notebook.wire import Message, receive, send
from torchdist_ref.processes import signal_socket as caught_signals

# How long an interrupted rank may take to come back: C code that waits does not hear the interrupt at once.
_PATIENCE = 5.0
_AGAIN = 0.5
_NEVER = float("inf")
# Who interrupts again after so long means it; before, it may be a nervous finger.
_IMPATIENCE = 1.0


class Conversation:
    """Asks ranks something and listens until each has answered, died, or let the time pass.

    Args:
        server: The server that started the ranks.
        channels: The ranks to ask.
        turns: Takes what they print and show.
        timeout: Seconds that they have; None is for ever.
        grace: Seconds that the others have once one of them has failed.
    """

    def __init__(
        self, server: RankServer, channels: Sequence[Channel], turns: Turns, timeout: float | None, grace: float
    ) -> None:
        self._server = server
        self._channels = {channel.rank: channel for channel in channels}
        self._turns = turns
        self._timeout = timeout
        self._grace = grace
        self._waiting = set(self._channels)
        self._begun: set[int] = set()
        self._signals_under_way = 0
        self._deadline = _NEVER if timeout is None else time.monotonic() + timeout
        self._again_at = _NEVER
        self._report = Report(waited=timeout or 0.0)
        self._interrupted_at = 0.0
        self._selector = selectors.DefaultSelector()

    def hold(self, request: Message) -> Report:
        """Ask, and wait for what comes of it.

        Args:
            request: What to send to each rank.

        Returns:
            How each of them answered.
        """
        with self._selector, _interrupts() as interrupts:
            for channel in self._channels.values():
                self._hear(channel.messages, functools.partial(self._on_message, channel))
                self._hear(channel.output.descriptor, functools.partial(self._on_output, channel))
                self._pass_on(channel)
            self._hear(self._server.control, self._on_server)
            if interrupts is not None:
                self._hear(interrupts, functools.partial(self._on_interrupt, interrupts))
            for channel in self._channels.values():
                # A rank that is gone is reported by the server.
                with contextlib.suppress(ConnectionError):
                    send(channel.messages, request)
            self._listen()
        return self._report

    def _hear(self, source: socket.socket | int, do: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, do)

    def _listen(self) -> None:
        # A signal that is late would hit the next cell.
        while self._waiting or self._signals_under_way:
            for key, _ in self._selector.select(self._seconds_left()):
                # An earlier event of this round may have been a rank's last.
                if key.fileobj in self._selector.get_map():
                    key.data()
            now = time.monotonic()
            if now >= self._again_at:
                self._again_at = _NEVER
                self._signal(self._waiting & self._begun)
            if now >= self._deadline and self._waiting:
                self._on_deadline()

    def _seconds_left(self) -> float | None:
        next_time = min(self._deadline, self._again_at)
        return None if next_time == _NEVER else max(0.0, next_time - time.monotonic())

    def _on_output(self, channel: Channel) -> None:
        if not channel.output.fill():
            self._selector.unregister(channel.output.descriptor)
        self._pass_on(channel)

    def _pass_on(self, channel: Channel) -> None:
        self._turns.text(channel.rank, channel.output.take())

    def _on_message(self, channel: Channel) -> None:
        try:
            kind, *content = receive(channel.messages)
        except EOFError:
            # Dead, or dying: how, the server knows.
            self._selector.unregister(channel.messages)
            return
        # The mark was written before the message was sent, so it is there to be read.
        while not channel.output.at_mark and channel.output.fill():
            self._pass_on(channel)
        channel.output.pass_mark()
        if kind == "done":
            self._on_answer(channel, *content)
            return
        if kind == "display":
            self._turns.bundle(channel.rank, *content)
        else:
            self._on_begun(channel.rank)
        self._pass_on(channel)

    def _on_begun(self, rank: int) -> None:
        self._begun.add(rank)
        if self._interrupted_at:
            self._signal({rank})

    def _on_answer(self, channel: Channel, failure: object, value: bytes | None) -> None:
        if isinstance(failure, Failure):
            self._report.failures[channel.rank] = failure
            self._hurry(channel.rank)
        else:
            self._report.values[channel.rank] = value
        self._finish(channel)

    def _on_server(self) -> None:
        try:
            message = receive(self._server.control)
        except EOFError:
            # Ranks do not outlive their server: see `die_with_parent`.
            self._selector.unregister(self._server.control)
            self._signals_under_way = 0
            for rank in list(self._waiting):
                self._on_end(rank, -signal.SIGKILL)
            return
        if message[0] == "ended":
            self._on_end(message[1], message[2])
        elif message[0] == "signalled":
            self._signals_under_way -= 1

    def _on_end(self, rank: int, status: int) -> None:
        self._report.died[rank] = status
        if rank in self._waiting:
            self._turns.text(rank, self._channels[rank].output.take_all())
            self._hurry(rank)
            self._finish(self._channels[rank])

    def _finish(self, channel: Channel) -> None:
        self._waiting.discard(channel.rank)
        for source in (channel.messages, channel.output.descriptor):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        self._turns.done(channel.rank)

    def _hurry(self, rank: int) -> None:
        """The others may be waiting for a rank that failed, and would wait long."""
        deadline = time.monotonic() + self._grace
        if not self._report.late and not self._report.interrupted and deadline < self._deadline:
            self._deadline, self._report.after, self._report.waited = deadline, rank, self._grace

    def _on_interrupt(self, interrupts: socket.socket) -> None:
        interrupts.recv(64)
        if self._report.interrupted and time.monotonic() > self._interrupted_at + _IMPATIENCE:
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
        self._interrupted_at = time.monotonic()
        self._deadline = self._interrupted_at + _PATIENCE
        # A signal may come between a rank's last look for signals and its falling asleep: then only the next wakes it.
        self._again_at = self._interrupted_at + _AGAIN
        # A rank that has not begun yet would not hear it: it is signalled as soon as it has.
        self._signal(self._waiting & self._begun)

    def _signal(self, ranks: set[int]) -> None:
        for rank in ranks:
            self._signals_under_way += 1
            self._server.signal(rank, signal.SIGINT)

    def _give_up(self) -> None:
        self._report.silent = set(self._waiting)
        for rank in list(self._waiting):
            self._finish(self._channels[rank])


@contextlib.contextmanager
def _interrupts() -> Iterator[socket.socket | None]:
    """Catch the user's interrupt. Only the main thread of a process gets one."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    with caught_signals([signal.SIGINT]) as signals:
        yield signals
