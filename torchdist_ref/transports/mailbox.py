"""Mailbox: how one message goes from one rank to one other.

There is a mailbox for each ordered pair of ranks. The sender writes an envelope (tag, fingerprint, bytes)
and the first window of the data, and offers it. The receiver looks at the envelope, and takes the message
or refuses it; either way it replies, so that a send that returned was received, and a mismatch is an error
on both sides. Long messages continue in windows: through two halves in turn, or where the two ranks don't see the same
memory, down a `Lane` from tensor to tensor.

Matching by tag is above (`backends.point_to_point`); a mailbox only knows the message at its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchdist_ref.errors import MismatchError
from torchdist_ref.transports.base import Link, Range
from torchdist_ref.transports.board import Record
from torchdist_ref.transports.layout import ENVELOPE

_TAG, _FINGERPRINT, _NBYTES, _VERDICT = range(4)
_TEXT, _REPLY, _FIELD = 64, 512, 384
TAKEN, REFUSED = 0, 1

# Bytes of a window that goes down a lane: two of them fit in what kernels buffer, so that no sender waits in vain.
LANE_WINDOW = 512 * 1024

# Views of a mailbox that are kept: loops repeat a few sizes.
_KEPT = 64


class Envelope(NamedTuple):
    """What a receiver sees before it takes a message; the text is for errors."""

    tag: int
    fingerprint: int
    nbytes: int


class Mailbox:
    """The mailbox from `source` to `target`, as seen by one of the two."""

    def __init__(self, link: Link, source: int, target: int) -> None:
        self.link, self.source, self.target = link, source, target
        self.peer = target if link.rank == source else source
        memory, layout = link.memory, link.layout
        self._begin = begin = layout.envelope(source, target)
        # A mailbox belongs to its sender; the receiver has the same bytes, or a copy that is kept up.
        self._buffer = memory.buffer_of(source)
        self._bytes = memory.bytes_of(source)[begin : begin + ENVELOPE]
        self._words = self._bytes[:64].cast("q")
        self._halves = [layout.mailbox(source, target, half) for half in (0, 1)]
        self._shown: Record | None = None
        self._tag, self._doing = -1, ""
        self._views: dict[tuple[int, torch.dtype, int], Tensor] = {}
        self.offer = memory.token(layout, "offer", source, target)
        self._reply = memory.token(layout, "reply", target, source)
        self._more = memory.token(layout, "more", source, target)
        self._room = memory.token(layout, "room", target, source)
        self._lane = memory.lane(self.peer)

    def send(self, tag: int, record: Record, tensor: Tensor, timeout: float | None = None) -> None:
        """Deliver a contiguous tensor; back when the receiver has it.

        Raises:
            MismatchError: The receiver expected something else, and has not taken it.
        """
        row = tensor.view(-1)
        pieces = self._pieces(row)
        self._words[_TAG], self._words[_FINGERPRINT] = tag, record.fingerprint
        self._words[_NBYTES] = row.numel() * row.itemsize
        if self._shown is not record or self._tag != tag:
            self._shown, self._tag = record, tag
            self._doing = f"send(dst={self.target}, tag={tag}): {record.text.decode()}"
            self._put(_TEXT, record.text)
        doing = self._doing
        self._view(0, row.dtype, pieces[0].numel()).copy_(pieces[0])
        self._give("offer", [(self._begin, ENVELOPE), self._range(0, pieces[0])])
        self._give("bell")
        self.link.wait(self._reply, self.peer, doing, timeout, alone=True)
        if self._words[_VERDICT] == REFUSED:
            raise MismatchError(
                f"{self.link.here(doing)}: {self.link.who([self.peer])} expects something else: {self._get(_REPLY)}. "
                f"Nothing was written."
            )
        self._send_rest(pieces, doing, timeout)

    def _send_rest(self, pieces: tuple[Tensor, ...], doing: str, timeout: float | None) -> None:
        for number, piece in enumerate(pieces[1:], 1):
            if number > 1:
                self.link.wait(self._room, self.peer, doing, timeout, alone=True)
            if self._lane is not None:
                self._lane.send("more", _bytes_of(piece))
                continue
            self._view(number & 1, piece.dtype, piece.numel()).copy_(piece)
            self._give("more", [self._range(number & 1, piece)])
        # Of a long message, the receiver frees every window; the last two have not been waited for yet.
        for _ in pieces[:2] if len(pieces) > 1 else ():
            self.link.wait(self._room, self.peer, doing, timeout, alone=True)

    def look(self) -> Envelope:
        """The envelope at the head; only after the offer's token was taken."""
        return Envelope(self._words[_TAG], self._words[_FINGERPRINT], self._words[_NBYTES])

    def text(self) -> str:
        """What the sender says that the message at the head is."""
        return self._get(_TEXT)

    def refuse(self, text: str) -> None:
        """Tell the sender that its message does not fit what is expected here."""
        self._put(_REPLY, text.encode())
        self._words[_VERDICT] = REFUSED
        self._give("reply", [(self._begin, ENVELOPE)])

    def take(self, tensor: Tensor, doing: str, timeout: float | None = None) -> None:
        """Receive the message at the head into a contiguous tensor of its size."""
        row = tensor.view(-1)
        pieces = self._pieces(row)
        self._words[_VERDICT] = TAKEN
        if len(pieces) > 1:
            if self._lane is not None:
                self._lane.expect([_bytes_of(piece) for piece in pieces[1:]])
            self._give("reply", [(self._begin, 64)])
        pieces[0].copy_(self._view(0, row.dtype, pieces[0].numel()))
        if len(pieces) > 1:
            self._give("room")
        for number, piece in enumerate(pieces[1:], 1):
            self.link.wait(self._more, self.peer, doing, timeout, alone=True)
            if self._lane is None:
                piece.copy_(self._view(number & 1, piece.dtype, piece.numel()))
            self._give("room")
        if len(pieces) == 1:
            self._give("reply", [(self._begin, 64)])

    def _give(self, kind: str, ranges: Sequence[Range] = ()) -> None:
        self.link.giver(kind, self.peer, ranges, owner=self.source)()

    def _range(self, half: int, piece: Tensor) -> Range:
        return self._halves[half], piece.numel() * piece.itemsize

    def _pieces(self, row: Tensor) -> tuple[Tensor, ...]:
        window = self.link.layout.box // row.itemsize
        if row.numel() <= window:
            return (row,)
        return (row[:window], *row[window:].split(LANE_WINDOW // row.itemsize)) if self._lane else row.split(window)

    def _view(self, half: int, dtype: torch.dtype, count: int) -> Tensor:
        view = self._views.get((half, dtype, count))
        if view is None:
            if len(self._views) >= _KEPT:
                self._views.clear()
            view = self._views[half, dtype, count] = self._new_view(half, dtype, count)
        return view

    def _new_view(self, half: int, dtype: torch.dtype, count: int) -> Tensor:
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=self._halves[half])

    def _put(self, at: int, text: bytes) -> None:
        text = text[: _FIELD - 2]
        self._bytes[at : at + 2 + len(text)] = len(text).to_bytes(2, "little") + text

    def _get(self, at: int) -> str:
        length = min(int.from_bytes(self._bytes[at : at + 2], "little"), _FIELD - 2)
        return bytes(self._bytes[at + 2 : at + 2 + length]).decode(errors="replace")


def _bytes_of(row: Tensor) -> memoryview:
    """The memory of a contiguous row."""
    return row.detach().view(torch.uint8).numpy().data
