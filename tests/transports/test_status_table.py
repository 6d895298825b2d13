"""Rows of the status table."""

from __future__ import annotations

import pytest

from torchdist_ref.transports.status_table import JOINED, PRESENT, ROW_BYTES, Announcement, StatusRow


@pytest.fixture
def row() -> StatusRow:
    row = StatusRow(memoryview(bytearray(3 * ROW_BYTES)), ROW_BYTES)
    row.join(1234)
    return row


def test_a_new_row_has_no_call(row: StatusRow) -> None:
    assert (row.pid, row.status, row.announced) == (1234, PRESENT, JOINED)
    assert row.describe() == "has made no call on this group yet"


def test_the_last_two_calls_have_their_texts_and_older_ones_do_not(row: StatusRow) -> None:
    calls = [Announcement(10 * number * number, f"call {number}".encode()) for number in range(3)]
    for number, call in enumerate(calls):
        row.announce(number, call, (number, 7 * number))
    assert [row.text(number) for number in range(3)] == ["an earlier call", "call 1", "call 2"]
    assert [list(header) for header in row.headers] == [[2, 40, 2, 14], [1, 10, 1, 7]]
    row.completed = 2
    assert row.describe() == "completed call 2, call 2, and has made no other"


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
