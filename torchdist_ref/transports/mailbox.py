"""Mailbox: how one message goes from one rank to one other.

There is a mailbox for each ordered pair of ranks. The sender writes an envelope (tag, fingerprint, bytes) and the
first piece of the data, and offers it; a longer message follows in pieces, as many as the box has room for, so that
both sides work at once. The box is a ring: a message begins where the one before ended, if it has room there. The
receiver looks at the envelope, and takes the message or refuses it; either way it replies, so that a send that returned
was received, and a mismatch is an error on both sides. Where the two ranks don't see the same memory, what follows goes
down a `Lane`, from tensor to tensor, once the receiver has agreed.

Matching by tag is above (`backends.ref.point_to_point`); a mailbox only knows the message at its head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.errors import MismatchError
from torchdist_ref.transports.base import Link
from torchdist_ref.transports.board import Record
from torchdist_ref.transports.layout import CACHE_LINE, ENVELOPE
from torchdist_ref.transports.memory import Lane, Range, Token
from torchdist_ref.transports.moving import mover

_TAG, _FINGERPRINT, _NBYTES, _VERDICT = range(4)
_WORDS, _TEXT, _REPLY, _FIELD = 64, 64, 512, 384
TAKEN, REFUSED = 0, 1

# Bytes of a window that goes down a lane: two of them fit in what kernels buffer, so that no sender waits in vain.
LANE_WINDOW = 512 * 1024

# Routes that are kept: loops repeat a few sizes.
_KEPT = 64
# A message is cut in four, so that the receiver starts early, but not in pieces so small that hand-overs cost more
# than they hide, nor in such that leave the cache before they are read.
_PARTS, _LEAST, _MOST = 4, 64 * 1024, 256 * 1024
# Messages that are no longer stay where they are: so little is written as fast wherever it lies.
_SHORT = 4 * 1024


class Piece(NamedTuple):
    """A part of a message: where it lies behind the message's place in the box, and in the tensor; how it is given."""

    offset: int
    first: int
    nbytes: int
    give: Callable[[], Any]


class Route(NamedTuple):
    """How messages of one size travel.

    Attributes:
        pieces: In order; piece `i` uses the place of piece `i - room`.
        room: How many of them have a place of their own.
        taken: Bytes that the message takes of the ring.
        move: What moves a piece.
    """

    pieces: tuple[Piece, ...]
    room: int
    taken: int
    move: Callable[[int, int, int], None]


class Mailbox:
    """The mailbox from `source` to `target`, as seen by one of the two."""

    def __init__(self, link: Link, source: int, target: int) -> None:
        self.link, self.source, self.target = link, source, target
        self.peer = target if link.rank == source else source
        memory, layout = link.memory, link.layout
        self._begin = begin = layout.envelope(source, target)
        # A mailbox belongs to its sender; the receiver has the same bytes, or a copy that is kept up.
        self._bytes = memory.bytes_of(source)[begin : begin + ENVELOPE]
        self._words = self._bytes[:_WORDS].cast("q")
        self._place, self._nbytes, self._next = layout.mailbox(source, target), layout.box, 0
        self._box = torch.frombuffer(
            memory.buffer_of(source), dtype=torch.uint8, count=self._nbytes, offset=self._place
        )
        self._address = self._box.data_ptr()
        self._shown: Record | None = None
        self._tag, self._doing = -1, ""
        self._routes: dict[int, Route] = {}
        self.offer = memory.token(layout, "offer", source, target)
        self._reply = memory.token(layout, "reply", target, source)
        self._more = memory.token(layout, "more", source, target)
        self._room = memory.token(layout, "room", target, source)
        self._lane = memory.lane(self.peer)
        words = [(begin, _WORDS)]
        self._ring = self._giver("bell")
        self._answer, self._free = self._giver("reply", words), self._giver("room", words)

    def send(self, tag: int, record: Record, tensor: Tensor, timeout: float | None = None) -> None:
        """Deliver a contiguous tensor; back when the receiver has it.

        Raises:
            MismatchError: The receiver expected something else, and has not taken it.
        """
        words, nbytes, address = self._words, tensor.nbytes, tensor.data_ptr()
        route = self._routes.get(nbytes) or self._new_route(nbytes)
        begin = self._begin_of(route)
        words[_TAG], words[_FINGERPRINT], words[_NBYTES], words[_VERDICT] = tag, record.fingerprint, nbytes, TAKEN
        if self._shown is not record or self._tag != tag:
            self._show(record, tag)
        _, _, size, give = route.pieces[0]
        route.move(begin, address, size)
        give()
        self._ring()
        if size < nbytes and self._lane is None:
            self._send_rest(route, begin, address, timeout)
        if not self._reply.acquire(False):
            self._wait(self._reply, self._doing, timeout)
        if words[_VERDICT] == REFUSED:
            raise MismatchError(
                f"{self.link.here(self._doing)}: {self.link.who([self.peer])} expects something else: "
                f"{self._get(_REPLY)}. Nothing was written."
            )
        if size < nbytes and self._lane is not None:
            self._send_down(self._lane, _windows(tensor, size), timeout)

    def _show(self, record: Record, tag: int) -> None:
        self._shown, self._tag = record, tag
        self._doing = f"send(dst={self.target}, tag={tag}): {record.text.decode()}"
        self._put(_TEXT, record.text)

    def _begin_of(self, route: Route) -> int:
        """Where the next message lies; both sides count alike."""
        begin = self._next if self._next + route.taken <= self._nbytes else 0
        self._next = begin + (route.taken if route.taken > _SHORT else 0)
        return self._address + begin

    def _send_rest(self, route: Route, begin: int, address: int, timeout: float | None) -> None:
        for number, (offset, first, nbytes, give) in enumerate(route.pieces[1:], 1):
            if number >= route.room:
                self._wait(self._room, self._doing, timeout)
                if self._words[_VERDICT] == REFUSED:
                    return
            route.move(begin + offset, address + first, nbytes)
            give()

    def _send_down(self, lane: Lane, windows: list[memoryview], timeout: float | None) -> None:
        for number, window in enumerate(windows):
            if number > 1:
                self._wait(self._room, self._doing, timeout)
            lane.send("more", window)
        for _ in windows[:2]:
            self._wait(self._room, self._doing, timeout)

    def look(self) -> tuple[int, int, int]:
        """Tag, fingerprint and bytes of the message at the head; only after the offer's token was taken."""
        words = self._words
        return words[_TAG], words[_FINGERPRINT], words[_NBYTES]

    def text(self) -> str:
        """What the sender says that the message at the head is."""
        return self._get(_TEXT)

    def refuse(self, text: str) -> None:
        """Tell the sender that its message does not fit what is expected here."""
        nbytes = self._words[_NBYTES]
        route = self._routes.get(nbytes) or self._new_route(nbytes)
        self._begin_of(route)
        self._put(_REPLY, text.encode())
        self._words[_VERDICT] = REFUSED
        if len(route.pieces) > route.room:
            self._free()
        # The pieces that have room come in any case.
        for _ in route.pieces[1 : route.room]:
            self._wait(self._more, text, None)
        self._giver("reply", [(self._begin, ENVELOPE)])()

    def take(self, tensor: Tensor, doing: str, timeout: float | None = None) -> None:
        """Receive the message at the head into a contiguous tensor of its size."""
        nbytes = self._words[_NBYTES]
        route, address = self._routes.get(nbytes) or self._new_route(nbytes), tensor.data_ptr()
        begin, size = self._begin_of(route), route.pieces[0].nbytes
        route.move(address, begin, size)
        if size < nbytes and self._lane is None:
            self._take_rest(route, begin, address, doing, timeout)
        windows = [] if self._lane is None or size == nbytes else _windows(tensor, size)
        if self._lane is not None and windows:
            self._lane.expect(windows)
        self._answer()
        for _ in windows:
            self._wait(self._more, doing, timeout)
            self._free()

    def _take_rest(self, route: Route, begin: int, address: int, doing: str, timeout: float | None) -> None:
        waited_for = len(route.pieces) - route.room
        for number, (offset, first, nbytes, _) in enumerate(route.pieces[1:]):
            if number < waited_for:
                self._free()
            if not self._more.acquire(False):
                self._wait(self._more, doing, timeout)
            route.move(address + first, begin + offset, nbytes)

    def _wait(self, token: Token, doing: str, timeout: float | None) -> None:
        self.link.wait(token, self.peer, doing, timeout, alone=True)

    def _giver(self, kind: str, ranges: list[Range] | None = None) -> Callable[[], Any]:
        return self.link.giver(kind, self.peer, ranges or [], owner=self.source)

    def _new_route(self, nbytes: int) -> Route:
        if len(self._routes) >= _KEPT:
            self._routes.clear()
        size = min(_MOST if self._lane else max(nbytes // _PARTS, _LEAST), _MOST, self._nbytes // 2)
        room, end = self._nbytes // size, min(nbytes, size) if self._lane else nbytes
        pieces = [self._piece(at, min(size, nbytes - at), at // size % room * size) for at in range(0, end, size)]
        # What goes down a lane is announced with its place, which is always the same.
        taken = 0 if self._lane else min(-(-nbytes // CACHE_LINE) * CACHE_LINE, self._nbytes)
        route = self._routes[nbytes] = Route(tuple(pieces) or (self._piece(0, 0, 0),), room, taken, mover(size))
        return route

    def _piece(self, first: int, nbytes: int, offset: int) -> Piece:
        shown = [(self._place + offset, nbytes)]
        give = self._giver("more", shown) if first else self._giver("offer", [(self._begin, ENVELOPE), *shown])
        return Piece(offset, first, nbytes, give)

    def _put(self, at: int, text: bytes) -> None:
        text = text[: _FIELD - 2]
        self._bytes[at : at + 2 + len(text)] = len(text).to_bytes(2, "little") + text

    def _get(self, at: int) -> str:
        length = min(int.from_bytes(self._bytes[at : at + 2], "little"), _FIELD - 2)
        return bytes(self._bytes[at + 2 : at + 2 + length]).decode(errors="replace")


def _windows(tensor: Tensor, first: int) -> list[memoryview]:
    """The memory of a contiguous tensor from this byte on, in windows of a lane."""
    data = tensor.detach().view(-1).view(torch.uint8).numpy().data[first:]
    return [data[at : at + LANE_WINDOW] for at in range(0, len(data), LANE_WINDOW)]
