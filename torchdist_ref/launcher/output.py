"""Many ranks write, one terminal shows: whole lines, in order of arrival, never two ranks in one line.

Each rank has two pipes, for its standard output and its standard error; each pipe has a `Relay`. What a line means
is no concern of this file.
"""

from __future__ import annotations

from typing import Protocol, TextIO

_LONGEST = 1 << 16


class Sink(Protocol):
    """Where lines go."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> None: ...


class _Text:
    """A sink on a stream that takes text only, such as a notebook's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes, /) -> object:
        return self._stream.write(data.decode(errors="replace"))

    def flush(self) -> None:
        self._stream.flush()


def sink_of(stream: TextIO) -> Sink:
    """Where the bytes for a stream go: around it, if it lets them, so that nothing is decoded in between."""
    binary: Sink = getattr(stream, "buffer", None) or _Text(stream)
    return binary


class Relay:
    """Passes on what comes out of one pipe, line by line.

    A carriage return ends a line too, or a progress bar would be seen only when it is full.

    Args:
        sink: Where the lines go.
        prefix: What each line begins with.

    Example:
        >>> import io
        >>> sink = io.BytesIO()
        >>> relay = Relay(sink, b"[rank 1] ")
        >>> relay.feed(b"loss 0.5" + b"\\n" + b"loss 0")
        >>> sink.getvalue()
        b'[rank 1] loss 0.5\\n'
        >>> relay.feed(b".25")
        >>> relay.finish()
        >>> sink.getvalue()
        b'[rank 1] loss 0.5\\n[rank 1] loss 0.25\\n'
    """

    def __init__(self, sink: Sink, prefix: bytes = b"") -> None:
        self._sink = sink
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take what was read, pass on the lines that it completes, and keep the rest."""
        data = self._rest + data
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - cut > _LONGEST:
            data, cut = data + b"\n", len(data) + 1
        self._rest = data[cut:]
        self._write(data[:cut])

    def finish(self) -> None:
        """Pass on a last line that was never ended, and end it."""
        if self._rest:
            self.feed(b"\n")

    def _write(self, lines: bytes) -> None:
        if lines:
            self._sink.write(b"".join(self._prefix + line for line in lines.splitlines(keepends=True)))
            self._sink.flush()
