"""Rounds as values: which round a rank enters, when it believes a failure, and what it reads from the store."""

from __future__ import annotations

from math import inf

import pytest

from torchdist_ref.errors import RendezvousError
from torchdist_ref.membership.rounds import CLOSED, OPEN, Attendance, Attendee, Round

OLD, NEW = Round("old", OPEN, 3, 711, "node a"), Round("new", OPEN, 3, 802, "node b")
FIRST_CHECK = 40.0


def seat(doubt_seconds: float = 0.3) -> Attendance:
    return Attendance(rank=2, size=3, nonce="own", doubt_seconds=doubt_seconds)


@pytest.mark.parametrize(
    ("may_have_ended", "failed_at_first", "doubt_seconds", "believed_from"),
    [
        # The round was there before this rank, and its rank 0 is not known to live: it may be an earlier attempt's.
        (True, True, 0.3, FIRST_CHECK + 0.3),
        # An agent ends the ranks of a failed attempt, so this rank waits for as long as it may.
        (True, True, inf, inf),
        # Its rank 0 lives.
        (False, True, inf, FIRST_CHECK),
        # The first check found nothing: the failure has come since, so it is this attempt's.
        (True, False, inf, FIRST_CHECK),
    ],
)
def test_when_a_failure_is_believed(
    may_have_ended: bool, failed_at_first: bool, doubt_seconds: float, believed_from: float
) -> None:
    rank_2 = seat(doubt_seconds)
    rank_2.found(OLD, may_have_ended)
    rank_2.enter(OLD)
    rank_2.believes(failed_at_first, FIRST_CHECK)
    assert [rank_2.believes(True, at) for at in (FIRST_CHECK, FIRST_CHECK + 0.29, FIRST_CHECK + 0.31, 1e9)] == [
        at >= believed_from for at in (FIRST_CHECK, FIRST_CHECK + 0.29, FIRST_CHECK + 0.31, 1e9)
    ]


def test_a_round_that_was_opened_during_the_wait_is_no_old_one() -> None:
    rank_2 = seat(inf)
    rank_2.found(OLD, may_have_ended=True)
    rank_2.enter(OLD)
    assert rank_2.is_replaced_by(NEW) and not rank_2.is_replaced_by(OLD)
    rank_2.leave()
    rank_2.enter(NEW)
    assert rank_2.believes(True, FIRST_CHECK)


def test_a_rank_enters_open_rounds_that_it_has_not_missed() -> None:
    rank_2 = seat()
    assert rank_2.accepts(OLD) and not rank_2.accepts(OLD._replace(state=CLOSED))
    rank_2.enter(OLD)
    rank_2.leave()
    assert not rank_2.accepts(OLD) and rank_2.accepts(NEW) and not rank_2.is_replaced_by(NEW)


@pytest.mark.parametrize(
    ("nonces", "met"),
    [
        (["a", "b", "own"], True),
        # Another process with this rank has met.
        (["a", "b", "other"], False),
        (["own", "a", "b"], False),
        # Rank 0 has a smaller world.
        (["a", "b"], False),
        ([], False),
    ],
)
def test_a_rank_has_met_those_whose_list_has_its_nonce_at_its_place(nonces: list[str], met: bool) -> None:
    rank_2 = seat()
    rank_2.enter(OLD)
    assert rank_2.listed(nonces) is met and rank_2.met is met


@pytest.mark.parametrize("host", ["node", "a|b", 'quote " and \\', "h\u00f6st"])
def test_what_ranks_publish_is_read_as_it_was(host: str) -> None:
    opened, announced = Round("4f", OPEN, 64, 7, host), Attendee(host, 4_194_304, 2**62, 64, "cpu:gloo|x", "5c")
    assert Round.parse(opened.encode()) == opened and Attendee.parse(announced.encode().encode()) == announced


@pytest.mark.parametrize(
    "value",
    [b"", b"4f|open|2|711|node", b"[]", b'{"nonce": 1}', b'["4f", "open", "2", 711, "node"]', b"\xff\xfe", b"[1"],
)
def test_what_another_program_wrote_is_refused_by_name(value: bytes) -> None:
    with pytest.raises(RendezvousError, match="where rank 0 announces a world"):
        Round.parse(value)
    with pytest.raises(RendezvousError, match="announces no rank"):
        Attendee.parse(value)
