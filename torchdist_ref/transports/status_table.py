"""Status table: one row per rank with its last two calls, the last one completed, and why it aborted.

The table is part of a group's segment (see `segment_layout`). A rank writes only its own row, in aligned words of eight
bytes. Announcements are read after acquiring a semaphore that their writer posted, which orders the two accesses. All
other fields are read without synchronization, between two polls of a slow wait: a stale value costs one more poll.

Do not add waits here: a row is plain memory.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import NamedTuple

ABSENT, PRESENT, LEFT, ABORTED = range(4)
"""Values of `StatusRow.status`."""

JOINING, JOINED = -2, -1
"""Values of `StatusRow.completed` before the first call, which is number 0."""

ZERO_COPY_BITS, REGISTERED_MEMORY, DEVICE_MEMORY = 3, 1, 2
"""Mask of the fingerprint bits for a zero-copy call, and their values: the kind of memory that its tensors are in."""

# Indices of the fields, in words.
_STATUS, COMPLETED, _PID, _ABORTED_AT, _WAITING_FOR, _WAITING_SINCE = range(6)
# Offsets in bytes. An announcement is a header of 32 bytes and a memory handle of 32 bytes; a row holds two of each.
_ANNOUNCEMENTS, _HEADER_BYTES, _ANNOUNCEMENT_STRIDE = 64, 32, 64
_TEXTS, _TEXT_BYTES = 192, 256
_REASON = _TEXTS + 2 * _TEXT_BYTES

ROW_BYTES = 2048
ANNOUNCEMENT_BYTES = _REASON
"""Size of the part of a row that changes in every call: everything before the reason of an abort."""


class Announcement(NamedTuple):
    """Announcement of a call: a fingerprint for comparison and a text for messages."""

    fingerprint: int
    text: bytes


class StatusRow:
    """Row of one rank: two announcements, by the parity of the call's sequence number, and the rank's status.

    Args:
        memory: The segment, or this process's copy of it.
        begin: Offset of the row in bytes.

    Attributes:
        fields: The row as words of eight bytes; `COMPLETED` is the index that executors write directly.
        announcements: Headers of the two announcements: sequence number, fingerprint, and the call's number (two
            words).
        compared: The part of each header that ranks compare: everything but the sequence number.
        handles: Memory handles of the two calls, 32 bytes each, valid where `announce_zero_copy` wrote them.
    """

    def __init__(self, memory: memoryview, begin: int) -> None:
        self._bytes = memory[begin : begin + ROW_BYTES]
        self.fields = self._bytes.cast("q")
        starts = (_ANNOUNCEMENTS, _ANNOUNCEMENTS + _ANNOUNCEMENT_STRIDE)
        self.headers = tuple(self.fields[at // 8 : (at + _HEADER_BYTES) // 8] for at in starts)
        self.compared = tuple(header[1:] for header in self.headers)
        self.handles = tuple(self._bytes[at + _HEADER_BYTES : at + _ANNOUNCEMENT_STRIDE] for at in starts)
        self._texts = tuple(self._bytes[at : at + _TEXT_BYTES] for at in (_TEXTS, _TEXTS + _TEXT_BYTES))
        self._written: list[Announcement | None] = [None, None]

    def announce(self, sequence: int, record: Announcement, number: tuple[int, int] = (0, 0)) -> None:
        """Write the announcement of the next call.

        The text is written only if it differs from the previous one of this parity: most loops repeat two calls.

        Args:
            sequence: Number of calls announced before.
            record: Fingerprint and text of the call.
            number: Identity of the call (see `calls`). Ranks may reach calls in different orders.
        """
        parity = sequence & 1
        header = self.headers[parity]
        header[0] = sequence
        header[1] = record.fingerprint
        header[2], header[3] = number
        if self._written[parity] is not record:
            self._written[parity] = record
            _put_text(self._texts[parity], record.text)

    def announce_zero_copy(self, parity: int, kind: int, handle: bytes) -> None:
        """Add to the announcement of this parity that peers may access this rank's tensors directly.

        Args:
            parity: Parity of the call just announced.
            kind: `REGISTERED_MEMORY` or `DEVICE_MEMORY`.
            handle: Location of the tensors, 32 bytes.
        """
        self.headers[parity][1] |= kind
        self.handles[parity][:] = handle

    def text(self, sequence: int) -> str:
        """Return the text of the call with this sequence number, if it is one of the last two."""
        parity = sequence & 1
        return _get_text(self._texts[parity]) if self.headers[parity][0] == sequence else "an earlier call"

    @property
    def announced(self) -> int:
        """Sequence number of the last announced call; -1 before the first."""
        return max(header[0] for header in self.headers)

    @property
    def status(self) -> int:
        """`ABSENT`, `PRESENT`, `LEFT` or `ABORTED`."""
        return self.fields[_STATUS]

    @status.setter
    def status(self, value: int) -> None:
        self.fields[_STATUS] = value

    @property
    def pid(self) -> int:
        """Process id of the rank."""
        return self.fields[_PID]

    def join(self, pid: int) -> None:
        """Mark the rank as present, with no call announced or completed."""
        for header in self.headers:
            header[0] = JOINED
        self.fields[COMPLETED] = JOINING
        self.fields[_PID] = pid
        self.status = PRESENT

    @property
    def completed(self) -> int:
        """Sequence number of the last completed call; `JOINING` or `JOINED` before the first."""
        return self.fields[COMPLETED]

    @completed.setter
    def completed(self, sequence: int) -> None:
        self.fields[COMPLETED] = sequence

    def abort(self, reason: str) -> None:
        """Mark the rank as aborted, with the reason. Later aborts do not overwrite the first reason."""
        if self.status == PRESENT:
            _put_text(self._bytes[_REASON:], reason.encode())
            self.fields[_ABORTED_AT] = monotonic_ns()
            self.status = ABORTED

    @property
    def aborted_at(self) -> int:
        """Time of the abort in nanoseconds, by the monotonic clock that the ranks of a host share."""
        return self.fields[_ABORTED_AT]

    @property
    def reason(self) -> str:
        """Reason of the abort."""
        return _get_text(self._bytes[_REASON:])

    def set_waiting_for(self, peer: int) -> None:
        """Record that this rank waits for `peer`. Call again while the wait lasts: the entry expires."""
        self.fields[_WAITING_FOR], self.fields[_WAITING_SINCE] = peer + 1, monotonic_ns()

    def clear_waiting_for(self) -> None:
        """Record that this rank no longer waits."""
        self.fields[_WAITING_FOR] = 0

    def waiting_for(self, max_age: float | None) -> int | None:
        """Return the rank that this one waits for, or None.

        Args:
            max_age: Age in seconds from which an entry counts as expired: a process stopped in a wait no longer renews
                it. None where the two ranks share no clock.
        """
        peer, since = self.fields[_WAITING_FOR] - 1, self.fields[_WAITING_SINCE]
        return peer if peer >= 0 and (max_age is None or monotonic_ns() - since < max_age * 1e9) else None

    def describe(self) -> str:
        """Describe the last known call of the rank, for messages."""
        if self.announced < 0:
            return "has made no call on this group yet"
        call = f"call {self.announced}, {self.text(self.announced)}"
        return f"completed {call}, and has made no other" if self.completed >= self.announced else f"is in {call}"


def _put_text(field: memoryview, text: bytes) -> None:
    """Write a text and its length into a field, shortened if it does not fit."""
    text = text[: len(field) - 2]
    field[:2] = len(text).to_bytes(2, "little")
    field[2 : 2 + len(text)] = text


def _get_text(field: memoryview) -> str:
    length = min(int.from_bytes(field[:2], "little"), len(field) - 2)
    return bytes(field[2 : 2 + length]).decode(errors="replace")
