"""A rank of a notebook: waits for a cell, runs it, says how it went, waits for the next.

Its variables stay from cell to cell in a module called ``__main__``, as in a notebook's kernel. It ends when the kernel
closes the socket or is gone. An interrupt reaches a running cell as KeyboardInterrupt, and an idle rank not at all.
"""

from __future__ import annotations

import builtins
import os
import pickle
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torchdist_ref.notebook.cell import Failure, failure, run_cell
from torchdist_ref.notebook.marks import MARK
from torchdist_ref.notebook.rich import bundle_of
from torchdist_ref.notebook.wire import Message, receive, send

# Seconds within which two signals are one interrupt.
_ONE_INTERRUPT = 2.0
FIGURES = "torchdist_ref.notebook.figures"


def live(channel: int, output: int, environment: Mapping[str, str]) -> NoReturn:
    """Be a rank until the kernel goes away.

    Args:
        channel: The descriptor of the socket to the kernel.
        output: The descriptor of the pipe that takes all output.
        environment: The whole environment.
    """
    os.environ.clear()
    os.environ.update(environment)
    _redirect(output)
    rank = Rank(socket.socket(fileno=channel))
    signal.signal(signal.SIGINT, rank.on_interrupt)
    try:
        while True:
            rank.answer(receive(rank.channel))
    except (EOFError, ConnectionError):
        os._exit(0)


def _redirect(output: int) -> None:
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


class Rank:
    """The state of a rank between two messages."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self._running = False
        self._interrupted_at = 0.0
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self._namespace = main.__dict__
        # Where a notebook has it: a name of its own would be among the user's variables.
        builtins.display = self.display  # type: ignore[attr-defined]

    def on_interrupt(self, signum: int, frame: object) -> None:
        """Break off the running cell."""
        now = time.monotonic()
        # The kernel sends it twice, in case that the first came just before the cell began to wait.
        if self._running and now > self._interrupted_at + _ONE_INTERRUPT:
            self._interrupted_at = now
            raise KeyboardInterrupt

    def answer(self, message: Message) -> None:
        """Do what a message asks, and say that it is done."""
        kind, *arguments = message
        doing: dict[str, Callable[..., Any]] = {"run": self._run, "get": self._get, "put": self._put}
        trouble, value = self._attempt(doing[kind], arguments)
        self._say(("done", trouble, value))

    def _attempt(self, do: Callable[..., Any], arguments: list[Any]) -> tuple[Failure | None, bytes | None]:
        try:
            self._interrupted_at = 0.0
            self._running = True
            # From now on an interrupt is heard.
            self._say(("begun",))
            value = do(*arguments)
            self._running = False
            return None, value
        except BaseException as error:
            # SystemExit too: the rank belongs to the notebook and not to the cell.
            self._running = False
            return failure(error), None

    def _run(self, source: str, name: str) -> None:
        run_cell(source, name, self._namespace, self._show)
        figures = sys.modules.get(FIGURES)
        if figures is not None:
            figures.show()

    def _show(self, value: Any) -> None:
        self._namespace["_"] = value
        self.display(value)

    def display(self, *values: Any) -> None:
        """Show values as the notebook shows the value of a cell."""
        for value in values:
            self._say(("display", bundle_of(value)))

    def _say(self, message: Message) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            _write_all(1, MARK)
            send(self.channel, message)
        finally:
            # Half a message, or a mark without one, would put out of step all that follows.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def _get(self, name: str) -> bytes:
        return pickle.dumps(eval(name, self._namespace))

    def _put(self, name: str, value: bytes) -> None:
        self._namespace[name] = pickle.loads(value)
