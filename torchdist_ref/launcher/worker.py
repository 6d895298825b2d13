"""Rank as its supervisor sees it: a child process, and one line relay for each of its two output pipes.

`processes.die_with_parent` ends it with the launcher.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, TextIO

from torchdist_ref import processes

# Windows has neither, and this package can be imported there.
with contextlib.suppress(ImportError):
    import fcntl
    import termios

# Longer unfinished lines are cut, so that output without line ends cannot fill the memory.
_MAX_LINE_BYTES = 1 << 16


class Worker:
    """Running rank.

    It leads a process group, so that a signal reaches the processes it started, and Ctrl-C reaches it only once,
    through the launcher. It stays in the launcher's session: Linux may distribute processor time by session (sched(7),
    autogroup), and ranks that wait for one another should share one.

    Rank 0 reads the launcher's standard input, as under mpiexec; the other ranks read nothing.

    Args:
        rank: Rank.
        command: Command line.
        environment: Whole environment.
        prefix: Start of each line of output.

    Attributes:
        rank: Rank.
        process: Its process.
        relays: Relay of each open pipe, by descriptor.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], prefix: bytes = b"") -> None:
        self.rank = rank
        self.process = processes.spawn(
            command,
            setup=_release_terminal,
            env=environment,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        streams = (sys.stdout, sys.stderr)
        self.relays = {
            pipe.fileno(): LineRelay(binary_sink(stream), prefix)
            for pipe, stream in zip(self.process.pipes, streams, strict=True)
        }


def _release_terminal() -> None:
    # A terminal stops processes outside its foreground group that read from it, but only processes that it controls.
    with contextlib.suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDWR)
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
        os.close(terminal)


class Sink(Protocol):
    """Destination of a relay."""

    def write(self, data: bytes, /) -> object:
        """Write bytes."""

    def flush(self) -> None:
        """Flush the destination."""


class _TextSink:
    """Sink over a stream that accepts only text, such as a notebook's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes, /) -> object:
        return self._stream.write(data.decode(errors="replace"))

    def flush(self) -> None:
        self._stream.flush()


def binary_sink(stream: TextIO) -> Sink:
    """Return a sink that writes bytes to a stream, without decoding them if the stream has a binary buffer."""
    binary: Sink = getattr(stream, "buffer", None) or _TextSink(stream)
    return binary


class LineRelay:
    r"""Relay that forwards the output of one pipe in whole lines.

    A carriage return also ends a line, so that a progress bar is visible while it grows.

    Args:
        sink: Destination.
        prefix: Start of each line.

    Example:
        >>> import io
        >>> sink = io.BytesIO()
        >>> relay = LineRelay(sink, b"[rank 1] ")
        >>> relay.feed(b"loss 0.5\n" + b"loss 0")
        >>> sink.getvalue()
        b'[rank 1] loss 0.5\n'
        >>> relay.feed(b".25")
        >>> relay.finish()
        >>> sink.getvalue()
        b'[rank 1] loss 0.5\n[rank 1] loss 0.25\n'
    """

    def __init__(self, sink: Sink, prefix: bytes = b"") -> None:
        self._sink = sink
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Accept bytes, forward the lines that they complete and keep the rest."""
        data = self._rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > _MAX_LINE_BYTES:
            data, end = data + b"\n", len(data) + 1
        self._rest = data[end:]
        self._write(data[:end])

    def finish(self) -> None:
        """Complete and forward an unfinished last line."""
        if self._rest:
            self.feed(b"\n")

    def _write(self, lines: bytes) -> None:
        if lines:
            self._sink.write(b"".join(self._prefix + line for line in lines.splitlines(keepends=True)))
            self._sink.flush()
