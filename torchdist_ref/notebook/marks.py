"""Marks in a rank's output that say: here a message was sent.

Output and messages come by different ways, so neither tells where it stands among the other. A rank therefore writes
a mark into its output before each message; the kernel reads up to the mark, takes the message, and reads on.
"""

from __future__ import annotations

import os

MARK = b"\0[torchdist_ref message]\0"


class MarkedOutput:
    """Reads one rank's output, from mark to mark.

    Args:
        descriptor: The pipe's end to read from; it must not block.

    Example:
        >>> end, start = os.pipe()
        >>> os.set_blocking(end, False)
        >>> output = MarkedOutput(end)
        >>> os.write(start, b"before" + MARK + b"after")
        36
        >>> output.fill(), output.take(), output.at_mark, output.take()
        (True, b'before', True, b'')
        >>> output.pass_mark()
        >>> output.take(), output.at_mark
        (b'after', False)
        >>> os.close(start), output.fill(), output.close()
        (None, False, None)
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.at_mark = False
        self._data = b""

    def fill(self) -> bool:
        """Read what is there; False if nothing will come any more."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return True
        self._data += data
        return bool(data)

    def take(self) -> bytes:
        """Give what lies before the next mark, and no part of the mark."""
        if self.at_mark:
            return b""
        text, mark, rest = self._data.partition(MARK)
        self.at_mark = bool(mark)
        if not mark:
            keep = _begun(text)
            text, rest = text[: len(text) - keep], text[len(text) - keep :]
        self._data = rest
        return text

    def take_all(self) -> bytes:
        """Give all that was ever written and not yet given: for a rank that sends no more messages."""
        before = -1
        while len(self._data) > before:
            before = len(self._data)
            self.fill()
        data, self._data, self.at_mark = self._data.replace(MARK, b""), b"", False
        return data

    def pass_mark(self) -> None:
        """Go on behind the mark, once its message has come."""
        self.at_mark = False

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.descriptor)


def _begun(text: bytes) -> int:
    """How many of the last bytes may be the beginning of a mark."""
    longest = min(len(MARK) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(MARK[:count])), 0)
