"""The board: what each rank last announced, finished and gave up on, readable by all at any time.

Every word has one writer, its own rank, and is eight bytes and aligned. A rank reads another's
announcement only after it took that rank's token, which orders the two (see `tokens`). Status words
are read without a token, in slow waits: a stale value there costs one more slice, never a wrong answer.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import NamedTuple

from torchdist_ref.transports.layout import (
    BEAT,
    BOARD_LINE,
    DONE,
    GAVE_UP_AT,
    HEADS,
    PID,
    REASON,
    REASON_BYTES,
    STATUS,
    TEXT_BYTES,
    TEXTS,
    WAITS,
    Layout,
)

ABSENT, PRESENT, LEFT, GAVE_UP = range(4)
# Calls count from 0. Meeting is what comes before the first: a rank that has met has finished number -1.
MEETING, MET = -2, -1


# The bits of a fingerprint that say whether a rank lends its tensors, and how: in registered memory, or on a device.
LENT, REGISTERED, ON_DEVICE = 3, 1, 2


class Record(NamedTuple):
    """What a rank announces at the start of a call: the fingerprint that is compared, the text that is shown."""

    fingerprint: int
    text: bytes


class Line:
    """The board line of one rank: two announcements, by the parity of the call's number, and its status."""

    def __init__(self, memory: memoryview, layout: Layout, rank: int) -> None:
        begin = layout.board(rank)
        self.words = memory[begin : begin + BOARD_LINE].cast("q")
        self._bytes = memory[begin : begin + BOARD_LINE]
        self.heads = tuple(self.words[at : at + 4] for at in (HEADS // 8, HEADS // 8 + 8))
        # What of an announcement ranks compare: all but the sequence number.
        self.said = tuple(head[1:] for head in self.heads)
        # Where the tensors of a call lie that are lent, in bytes that mean something to `registered` only.
        self.lent = tuple(self._bytes[at + 32 : at + 64] for at in (HEADS, HEADS + 64))
        self._texts = tuple(self._bytes[at : at + TEXT_BYTES] for at in (TEXTS, TEXTS + TEXT_BYTES))
        self._shown: list[Record | None] = [None, None]

    def announce(self, sequence: int, record: Record, number: tuple[int, int] = (0, 0)) -> None:
        """Say which call comes next. The text is written only where it changed: most loops repeat two calls.

        Args:
            sequence: How many calls were announced before.
            record: What the call is.
            number: Which call it is (see `numbers`); ranks may come to calls in different orders.
        """
        parity = sequence & 1
        head = self.heads[parity]
        head[0] = sequence
        head[1] = record.fingerprint
        head[2], head[3] = number
        if self._shown[parity] is not record:
            self._shown[parity] = record
            _put(self._texts[parity], record.text)

    def lend(self, parity: int, mark: int, place: bytes) -> None:
        """Say of the call just announced that this rank lends its tensors, in which way, and where they lie."""
        self.heads[parity][1] |= mark
        self.lent[parity][:] = place

    def text(self, sequence: int) -> str:
        """The text of call number `sequence`, if it is one of the last two."""
        parity = sequence & 1
        return _take(self._texts[parity]) if self.heads[parity][0] == sequence else "an earlier call"

    @property
    def announced(self) -> int:
        """The number of the call that this rank announced last, -1 before the first."""
        return max(head[0] for head in self.heads)

    @property
    def status(self) -> int:
        """ABSENT, PRESENT, LEFT or GAVE_UP."""
        return self.words[STATUS // 8]

    @status.setter
    def status(self, value: int) -> None:
        self.words[STATUS // 8] = value

    @property
    def pid(self) -> int:
        """The process of this rank."""
        return self.words[PID // 8]

    def arrive(self, pid: int) -> None:
        """This rank is here; nothing announced, nothing finished."""
        for head in self.heads:
            head[0] = MET
        self.words[DONE // 8] = MEETING
        self.words[PID // 8] = pid
        self.status = PRESENT

    @property
    def done(self) -> int:
        """The number of the last finished call; MET or MEETING before the first."""
        return self.words[DONE // 8]

    @done.setter
    def done(self, sequence: int) -> None:
        self.words[DONE // 8] = sequence

    def give_up(self, reason: str) -> None:
        """Tell everybody that this rank has left the group's calls for good, and why. The first reason stays."""
        if self.status == PRESENT:
            _put(self._bytes[REASON : REASON + REASON_BYTES], reason.encode()[: REASON_BYTES - 2])
            self.words[GAVE_UP_AT // 8] = monotonic_ns()
            self.status = GAVE_UP

    @property
    def gave_up_at(self) -> int:
        """When this rank gave up, in nanoseconds of a clock that all ranks of a host share."""
        return self.words[GAVE_UP_AT // 8]

    @property
    def reason(self) -> str:
        """Why this rank gave up."""
        return _take(self._bytes[REASON : REASON + REASON_BYTES])

    def wait_for(self, peer: int) -> None:
        """Say, and say again while it lasts, that this rank waits for that one."""
        self.words[WAITS // 8], self.words[BEAT // 8] = peer + 1, monotonic_ns()

    def waits_no_more(self) -> None:
        """The wait is over."""
        self.words[WAITS // 8] = 0

    def waits_for(self, within: float | None) -> int | None:
        """The rank that this one waits for, said within so many seconds of a clock that both share; or None.

        Whoever is stopped in the middle of a wait says nothing any more, and does not wait: it is waited for.
        """
        peer, beat = self.words[WAITS // 8] - 1, self.words[BEAT // 8]
        return peer if peer >= 0 and (within is None or monotonic_ns() - beat < within * 1e9) else None

    def doing(self) -> str:
        """What this rank was last seen at, in words."""
        if self.announced < 0:
            return "has made no call on this group yet"
        call = f"call {self.announced}, {self.text(self.announced)}"
        return f"finished {call}, and has made no other" if self.done >= self.announced else f"is in {call}"


def _put(field: memoryview, text: bytes) -> None:
    text = text[: len(field) - 2]
    field[:2] = len(text).to_bytes(2, "little")
    field[2 : 2 + len(text)] = text


def _take(field: memoryview) -> str:
    length = min(int.from_bytes(field[:2], "little"), len(field) - 2)
    return bytes(field[2 : 2 + length]).decode(errors="replace")
