"""How far it is: a bar that moves on a terminal, a line for each heading elsewhere. On standard error, always."""

from __future__ import annotations

import sys
from typing import TextIO

_WIDTH = 30
_CLEAR = "\r\x1b[K"


class Progress:
    """A bar of so many steps.

    Args:
        steps: How many times `advance` will be called.
        stream: Where it is drawn; standard error unless given.

    >>> import io
    >>> bar = Progress(2, io.StringIO())
    >>> bar.heading("all_reduce"); bar.advance("4 B"); bar.advance("1 KiB"); bar.clear()
    >>> print(bar.stream.getvalue(), end="")
    all_reduce ...
    """

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self.steps, self.stream = max(1, steps), stream or sys.stderr
        self._done, self._heading, self._moves = 0, "", self.stream.isatty()

    def heading(self, text: str) -> None:
        """Begin with a part of the work."""
        if text == self._heading:
            return
        self._heading = text
        if self._moves:
            self._draw("")
        else:
            self._write(f"{text} ...\n")

    def advance(self, text: str = "") -> None:
        """One step is done."""
        self._done += 1
        if self._moves:
            self._draw(text)

    def clear(self) -> None:
        """Take the bar away, so that something can be printed in its place."""
        if self._moves:
            self._write(_CLEAR)

    def _draw(self, text: str) -> None:
        share = min(1.0, self._done / self.steps)
        bar = ("#" * round(share * _WIDTH)).ljust(_WIDTH, ".")
        self._write(f"{_CLEAR}[{bar}] {share:4.0%} {self._heading} {text}")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
