"""Segment: its layout, and the rows of its status table."""

from __future__ import annotations

from itertools import pairwise

import pytest

from torchdist_ref.transports.segment import (
    CACHE_LINE,
    EAGER_BYTES,
    JOINED,
    MESSAGE_HEADER_BYTES,
    PRESENT,
    ROW_BYTES,
    SEGMENT_HEADER_BYTES,
    SEMAPHORE_KINDS,
    Announcement,
    SegmentLayout,
    StatusRow,
)


def test_the_parts_of_a_segment_do_not_overlap() -> None:
    layout = SegmentLayout(3, window=8192, cells=4)
    parts = [(0, SEGMENT_HEADER_BYTES)]
    parts += [(layout.status_row(r), ROW_BYTES) for r in range(3)]
    pairs = [(a, b) for a in range(3) for b in range(3)]
    parts += [(layout.semaphore(kind, a, b), CACHE_LINE) for kind in SEMAPHORE_KINDS for a, b in pairs]
    parts += [(layout.eager_buffer(r, cell), EAGER_BYTES) for r in range(3) for cell in range(4)]
    parts += [(layout.ring(r, offset), 8192) for r in range(3) for offset in range(0, 4 * 8192, 8192)]
    parts += [(layout.message_header(a, b), MESSAGE_HEADER_BYTES) for a, b in pairs]
    parts += [(layout.mailbox_ring(a, b), layout.mailbox_ring_bytes) for a, b in pairs]
    parts.sort()
    for (begin, size), (following, _) in pairwise(parts):
        assert begin + size <= following
    assert parts[-1][0] + parts[-1][1] <= layout.nbytes


@pytest.fixture
def row() -> StatusRow:
    row = StatusRow(memoryview(bytearray(3 * ROW_BYTES)), ROW_BYTES)
    row.join(1234)
    return row


def test_a_new_row_has_no_call(row: StatusRow) -> None:
    assert (row.pid, row.status, row.announced) == (1234, PRESENT, JOINED)
    assert row.describe() == "has made no collective on this group yet"


def test_the_last_two_calls_have_their_texts_and_older_ones_do_not(row: StatusRow) -> None:
    calls = [Announcement(10 * number * number, f"call {number}".encode()) for number in range(3)]
    for number, call in enumerate(calls):
        row.announce(number, call, (number, 7 * number))
    assert [row.text(number) for number in range(3)] == ["an earlier call", "call 1", "call 2"]
    assert [list(header) for header in row.headers] == [[2, 40, 2, 14], [1, 10, 1, 7]]
    row.completed = 2
    assert row.describe() == "completed call 2, call 2, and has made no other"


def test_a_reason_that_cannot_be_encoded_is_published(row: StatusRow) -> None:
    row.abort("no \udce9.pt")
    assert row.reason == r"no \udce9.pt"


def test_the_first_reason_of_an_abort_is_kept_and_shortened_to_the_row(row: StatusRow) -> None:
    row.abort("é" * ROW_BYTES)
    row.abort("later")
    assert set(row.reason.rstrip("\ufffd")) == {"é"} and 400 < len(row.reason) < ROW_BYTES // 2
    assert row.aborted_at > 0


def test_an_entry_of_a_stopped_waiter_expires(row: StatusRow) -> None:
    row.set_waiting_for(2)
    assert row.waiting_for(None) == 2 and row.waiting_for(60.0) == 2 and row.waiting_for(0.0) is None
    row.clear_waiting_for()
    assert row.waiting_for(None) is None
