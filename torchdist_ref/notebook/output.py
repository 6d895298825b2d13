"""Output of ranks: read from a pipe up to the marker of the next message, and shown in rank order.

Output has its own pipe, so that text from C code and subprocesses is included. Do not add formatting of lines here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

# Written to the output before each message, which takes another way: it orders the message among the output.
MARKER = b"\0[torchdist_ref message]\0"

# Line of text without its end, or MIME bundle.
Item = str | dict[str, Any]


class OutputReader:
    """Reader of one rank's output, from marker to marker.

    Args:
        descriptor: Read end of the pipe, non-blocking.

    Attributes:
        descriptor: Read end of the pipe.
        at_marker: Whether the next message has to be handled before the output after it.

    Example:
        >>> end, start = os.pipe()
        >>> os.set_blocking(end, False)
        >>> output = OutputReader(end)
        >>> os.write(start, b"before" + MARKER + b"after")
        36
        >>> output.fill(), output.take(), output.at_marker, output.take()
        (True, b'before', True, b'')
        >>> output.pass_marker()
        >>> output.take(), output.at_marker
        (b'after', False)
        >>> os.close(start), output.fill(), output.close()
        (None, False, None)
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.at_marker = False
        self._data = b""

    def fill(self) -> bool:
        """Read available bytes; return False at the end of the output."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return True
        self._data += data
        return bool(data)

    def take(self) -> bytes:
        """Return the bytes before the next marker, without any part of it."""
        if self.at_marker:
            return b""
        text, marker, rest = self._data.partition(MARKER)
        self.at_marker = bool(marker)
        if not marker:
            keep = _marker_start(text)
            text, rest = text[: len(text) - keep], text[len(text) - keep :]
        self._data = rest
        return text

    def take_all(self) -> bytes:
        """Return all remaining output of a rank that sends no more messages."""
        before = -1
        while len(self._data) > before:
            before = len(self._data)
            self.fill()
        data, self._data, self.at_marker = self._data.replace(MARKER, b""), b"", False
        return data

    def pass_marker(self) -> None:
        """Continue after the marker, once its message has been handled."""
        self.at_marker = False

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.descriptor)


def _marker_start(text: bytes) -> int:
    """Return the number of bytes at the end of the text that may be the start of a marker."""
    longest = min(len(MARKER) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(MARKER[:count])), 0)


class RankOrder:
    r"""Buffer that reorders the output of concurrent ranks by rank.

    The first rank that has not finished is shown live; the output of later ranks waits.

    Args:
        ranks: Participating ranks, in the order of display.
        show: Function that receives a rank and one line or bundle of its output.

    Attributes:
        error: First exception of `show` or of a guarded function; after it, neither is called. None without one.

    Example:
        >>> order = RankOrder([0, 1], lambda rank, item: print(rank, item))
        >>> order.text(1, b"one\n")
        >>> order.text(0, b"zero\nnull")
        0 zero
        >>> order.finish(0)
        0 null
        1 one
    """

    def __init__(self, ranks: Iterable[int], show: Callable[[int, Item], None]) -> None:
        self._waiting: dict[int, list[Item]] = {rank: [] for rank in ranks}
        self._unfinished_lines = dict.fromkeys(self._waiting, b"")
        self._last_lines = dict.fromkeys(self._waiting, "")
        self._finished: set[int] = set()
        self._show = show
        self.error: Exception | None = None

    def text(self, rank: int, data: bytes) -> None:
        """Add a piece of a rank's text."""
        *lines, self._unfinished_lines[rank] = (self._unfinished_lines[rank] + data).split(b"\n")
        for line in lines:
            text = _final_state(line)
            self._last_lines[rank] = text or self._last_lines[rank]
            self._add(rank, text)

    def last_line(self, rank: int) -> str:
        r"""Return the last line of a rank that is not empty, whether it has ended and is shown or not.

        >>> order = RankOrder([0, 1], print)
        >>> order.text(1, b"epoch 1\n 10 %\r 20 %")
        >>> order.last_line(1)
        ' 20 %'
        """
        return _final_state(self._unfinished_lines[rank]) or self._last_lines[rank]

    def bundle(self, rank: int, bundle: dict[str, Any]) -> None:
        """Add a displayed value of a rank, after ending an unfinished line."""
        self._end_line(rank)
        self._add(rank, bundle)

    def finish(self, rank: int) -> None:
        """Mark the output of a rank as complete, and show that of the next rank."""
        self._end_line(rank)
        self._finished.add(rank)
        while self._waiting and (first := next(iter(self._waiting))) in self._finished:
            del self._waiting[first]
            following = next(iter(self._waiting), None)
            if following is not None:
                self._flush(following)

    def _end_line(self, rank: int) -> None:
        if self._unfinished_lines[rank]:
            self.text(rank, b"\n")

    def _add(self, rank: int, item: Item) -> None:
        self._waiting[rank].append(item)
        if rank == next(iter(self._waiting)):
            self._flush(rank)

    def _flush(self, rank: int) -> None:
        items, self._waiting[rank] = self._waiting[rank], []
        for item in items:
            self.guarded(partial(self._show, rank, item))

    def guarded(self, show: Callable[[], None]) -> None:
        """Call a function that shows something, unless one has raised: the ranks go on, and the request raises that."""
        try:
            if self.error is None:
                show()
        except Exception as error:
            self.error = error


def _final_state(line: bytes) -> str:
    # A progress bar returns to the start of the line and overwrites it: only its last state remains on a screen.
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
