"""The kernel's side of the rank server: start it, have it start ranks, end it.

What is said to ranks is in `conversation`; who decides is `torchdist_ref.notebook.pool`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchdist_ref.errors import ArgumentError, DistError, explain
from torchdist_ref.notebook.marks import MarkedOutput
from torchdist_ref.notebook.wire import Message, receive, send

METHODS = ("fork", "spawn")
_PATIENCE = 5.0


@dataclass(slots=True)
class Channel:
    """The kernel's ends of what connects it with one rank.

    Attributes:
        rank: Which one.
        pid: Its process id, 0 until the server has told.
        messages: The socket for requests and answers.
        output: What it prints.
    """

    rank: int
    pid: int
    messages: socket.socket
    output: MarkedOutput

    def close(self) -> None:
        """Drop both ends, upon which an idle rank goes."""
        self.messages.close()
        self.output.close()


class RankServer:
    """A running rank server. It is a session leader of its own, so an interrupt of the kernel does not reach it.

    Args:
        method: ``"fork"`` loads torch once, in the server, and then starts ranks by forking; ``"spawn"`` starts a
            fresh Python for each rank, which takes longer and is needed where a fork will not do.

    Raises:
        ArgumentError: If there is no such method.
        DistError: If the server did not come up; the message has its words.
    """

    def __init__(self, method: str = "fork") -> None:
        if method not in METHODS:
            raise ArgumentError(explain("RankServer", "method", "'fork' or 'spawn'", method))
        self.method = method
        self._words = tempfile.TemporaryFile()
        self.control, theirs = socket.socketpair()
        with theirs:
            self._process = self._start(theirs.fileno())
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can start ranks."""
        return self._process.poll() is None

    def start_rank(self, rank: int, environment: Mapping[str, str]) -> Channel:
        """Have a rank started.

        Args:
            rank: Which one.
            environment: Its whole environment.

        Returns:
            The connection to it.
        """
        ours, theirs = socket.socketpair()
        output, their_output = os.pipe()
        os.set_blocking(output, False)
        channel = Channel(rank, 0, ours, MarkedOutput(output))
        try:
            send(self.control, ("start", rank, dict(environment)), [theirs.fileno(), their_output])
            channel.pid = self._await(f"could not start rank {rank}", "started")[2]
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
            os.close(their_output)
        return channel

    def signal(self, rank: int, signum: int) -> None:
        """Signal a rank and what it started; one that has ended is left alone."""
        with contextlib.suppress(ConnectionError):
            send(self.control, ("signal", rank, int(signum)))

    def stop_ranks(self, channels: Sequence[Channel]) -> None:
        """Kill ranks, whatever they are doing, and see them gone."""
        left = {channel.rank for channel in channels}
        for channel in channels:
            self.signal(channel.rank, signal.SIGKILL)
        with contextlib.suppress(EOFError):
            while left and select.select([self.control], [], [], _PATIENCE)[0]:
                kind, rank, _ = receive(self.control)
                left -= {rank} if kind == "ended" else set()

    def close(self) -> None:
        """End it, and with it every rank that it started."""
        self.control.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.close()

    def _start(self, descriptor: int) -> subprocess.Popen[bytes]:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from torchdist_ref.notebook.server import main\n"
            f"main({descriptor}, {self.method!r}, {os.getpid()})"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code],
            # Thread pools read this when they are loaded: a pool in each rank would fight over the cores.
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=self._words,
            stderr=self._words,
            pass_fds=[descriptor],
            start_new_session=True,
        )

    def _await_ready(self) -> None:
        message = self._await("did not start", "ready", "failed")
        if message[0] == "failed":
            raise DistError(f"the rank server could not load what ranks need:\n{message[1]}")

    def _await(self, trouble: str, *kinds: str) -> Message:
        try:
            while (message := receive(self.control))[0] not in kinds:
                continue
            return message
        except EOFError:
            self._words.seek(0)
            words = self._words.read().decode(errors="replace").strip()
            raise DistError(f"the rank server {trouble}: it has ended{': ' + words if words else ''}") from None
