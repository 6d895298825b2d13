"""The order in which a culprit is chosen: for each wait, what was known, who was needed, and who is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchdist_ref.membership.blame import Wait, blame
from torchdist_ref.membership.events import (
    ABORTED,
    DIED,
    EXITED,
    KILLED,
    LEFT,
    LOST,
    MISMATCH,
    PROGRAM_ENDED,
    STALLED,
    Aborted,
    Died,
    Ending,
    Failure,
    Left,
    MemberEvent,
    Published,
)

SIGKILL, EXIT = Ending(KILLED, 71, "node3", 9), Ending(EXITED, 17, "node5", 3)
LOST_RANK = Ending(LOST, 29, "node7")
COLLECTIVE, MESSAGE, ELSEWHERE, PART, MEETING, FAILED_CALL = Wait

OF_5 = Failure(ABORTED, (5,), error="KeyError", call="barrier()", text="'my bug'")
LEFT_5 = Failure(LEFT, (5,), last="completed call 3, barrier()")
ENDED_5 = Failure(PROGRAM_ENDED, (5,), (EXIT,))
DIED_5 = Failure(DIED, (5,), (SIGKILL,))

# Events, ranks needed, kinds of wait, kind of the failure, ranks named.
Row = tuple[list[MemberEvent], list[int], tuple[Wait, ...], str, tuple[int, ...]]
ROWS: dict[str, Row] = {
    "nobody failed": ([], [2, 5], tuple(Wait), "", ()),
    # A collective of a group: Link.failure.
    "a death": ([Died(5, SIGKILL)], [5, 11], (COLLECTIVE, MESSAGE, ELSEWHERE, MEETING, FAILED_CALL), DIED, (5,)),
    "two deaths": ([Died(11), Died(5, SIGKILL)], [5, 11], (COLLECTIVE, ELSEWHERE, MEETING), DIED, (11, 5)),
    "the death of a rank that has done its part": ([Died(5)], [11], (COLLECTIVE, MESSAGE, ELSEWHERE, MEETING), "", ()),
    "a death that the server of the store saw": (
        [Published(5, DIED, ending=LOST_RANK)],
        [11],
        (MEETING,),
        DIED,
        (5,),
    ),
    "an abort": ([Aborted(5, "KeyError", "x", at=7)], [5, 11], (COLLECTIVE, MESSAGE, FAILED_CALL), ABORTED, (5,)),
    "the first of two aborts": (
        [Aborted(5, at=70), Aborted(11, at=30)],
        [5, 11],
        (COLLECTIVE, MESSAGE),
        ABORTED,
        (11,),
    ),
    "an abort of a rank that then ended": (
        [Died(5, SIGKILL), Aborted(5, "KeyError", at=7)],
        [5],
        (COLLECTIVE, MESSAGE),
        ABORTED,
        (5,),
    ),
    "an abort of a rank that then closed the group and ended": (
        [Died(5, SIGKILL), Aborted(5, "KeyError", at=7), Left(5)],
        [5],
        (COLLECTIVE, MESSAGE, ELSEWHERE, PART),
        ABORTED,
        (5,),
    ),
    "the death of a rank that aborted an earlier call": (
        [Died(5, SIGKILL), Aborted(5, "KeyError", at=7)],
        [5],
        (ELSEWHERE,),
        DIED,
        (5,),
    ),
    "a leave of a rank that then ended": (
        [Died(5, SIGKILL), Left(5)],
        [5],
        (COLLECTIVE, MESSAGE, ELSEWHERE, FAILED_CALL),
        LEFT,
        (5,),
    ),
    "a death before an abort": (
        [Aborted(5, at=7), Died(11, SIGKILL), Left(2)],
        [2, 5, 11],
        (COLLECTIVE, MESSAGE, ELSEWHERE),
        DIED,
        (11,),
    ),
    "an abort before a leave": (
        [Left(2, program_ended=True), Aborted(5, at=7)],
        [2, 5],
        (COLLECTIVE, MESSAGE, FAILED_CALL),
        ABORTED,
        (5,),
    ),
    "a leave": ([Left(5), Left(11)], [5, 11], (COLLECTIVE, MESSAGE, PART, MEETING, FAILED_CALL), LEFT, (5, 11)),
    "a leave that is announced only, in a collective": ([Left(5, is_closed=False)], [5], (COLLECTIVE,), LEFT, (5,)),
    "a leave that is announced only, of a sender": ([Left(5, is_closed=False)], [5], (MESSAGE, PART), "", ()),
    "the end of a program before a leave": (
        [Left(2, after="x"), Left(5, program_ended=True), Left(11)],
        [2, 5, 11],
        (COLLECTIVE, MESSAGE, PART),
        PROGRAM_ENDED,
        (5,),
    ),
    "a leave after a failure before one without": (
        [Left(2), Left(11, after="RankDiedError: x"), Left(5, after="RankDiedError: x")],
        [2, 5, 11],
        (COLLECTIVE, MESSAGE, PART, FAILED_CALL),
        LEFT,
        (11, 5),
    ),
    # Failures that a rank passes on: Link.abort and _abort_of.
    "an abort that another rank passes on": ([Aborted(11, cause=OF_5, at=9)], [11], (COLLECTIVE,), ABORTED, (5,)),
    "the end of a program that another rank passes on": (
        [Aborted(11, cause=ENDED_5, at=9)],
        [11],
        (COLLECTIVE, MESSAGE),
        PROGRAM_ENDED,
        (5,),
    ),
    "a leave that another rank passes on": ([Aborted(11, cause=LEFT_5, at=9)], [11], (COLLECTIVE,), LEFT, (5,)),
    # Waits on other channels, such as the store: Link.failure_elsewhere, GroupEvents.known.
    "an abort of a living rank, elsewhere": ([Aborted(5, at=7)], [5], (ELSEWHERE, PART), "", ()),
    "a leave of a living rank, elsewhere": ([Left(5)], [5], (ELSEWHERE,), "", ()),
    "an abort of a rank that closed the group": ([Aborted(5, at=7), Left(5)], [5], (PART,), ABORTED, (5,)),
    "a death, where only leaves are expected": ([Died(5)], [5], (PART,), DIED, (5,)),
    "a failure that a needed rank published": (
        [Published(5, text="no data")],
        [5, 11],
        (ELSEWHERE, MEETING, FAILED_CALL),
        ABORTED,
        (5,),
    ),
    "a failure published by a rank that has done its part": (
        [Published(5, text="no data")],
        [11],
        (ELSEWHERE, PART, FAILED_CALL),
        "",
        (),
    ),
    "calls ended to make another group": ([Published(5, continues=True)], [5], (ELSEWHERE, PART), "", ()),
    "calls ended for another group, for a call": (
        [Published(5, continues=True)],
        [5],
        (FAILED_CALL,),
        ABORTED,
        (5,),
    ),
    # Meetings: MemberWatch.failure and read_failure.
    "a published failure before the death of its reader": (
        [Died(11, SIGKILL), Published(5, error="OSError", text="full")],
        [11],
        (MEETING,),
        ABORTED,
        (5,),
    ),
    "a failure of all ranks": ([Published(5, MISMATCH, text="they differ")], [11], (MEETING,), MISMATCH, ()),
    "a published death": ([Published(11, DIED, text="x", cause=DIED_5)], [11], (MEETING,), DIED, (5,)),
    "a published time-out": ([Published(11, STALLED, text="x")], [11], (MEETING,), STALLED, ()),
}
CASES = [(name, wait) for name, row in ROWS.items() for wait in row[2]]


@pytest.mark.parametrize(("name", "wait"), CASES)
def test_the_culprit_is(name: str, wait: Wait) -> None:
    events, needed, _, kind, ranks = ROWS[name]
    for order in (events, events[::-1]):
        found = blame(order, needed, wait)
        assert (found.kind if found else "", set(found.ranks) if found else set()) == (kind, set(ranks))


def test_all_that_is_known_of_the_culprit_is_in_the_failure() -> None:
    found = blame([Died(11), Died(5, SIGKILL), Died(2, EXIT)], [2, 5, 11], COLLECTIVE)
    assert found == Failure(DIED, (11, 5, 2), (SIGKILL, EXIT))
    aborted = Aborted(5, "KeyError", "'my bug'", "barrier()", at=7)
    assert blame([aborted], [5], COLLECTIVE) == OF_5
    assert blame([replace(aborted, rank=11, cause=OF_5)], [11], COLLECTIVE) == OF_5
    ended = [Left(5, program_ended=True, last="completed call 3", ending=EXIT), Left(11, program_ended=True)]
    assert blame(ended, [5, 11], COLLECTIVE) == Failure(PROGRAM_ENDED, (5, 11), (EXIT,), last="completed call 3")
    left = blame([Left(2), Left(11, last="is in call 4", after="RankDiedError: x")], [2, 11], COLLECTIVE)
    assert left == Failure(LEFT, (11,), last="is in call 4", after="RankDiedError: x")
    others = [Left(11, after="RankDiedError: x"), Left(5, after="KeyError: y"), Left(2, after="RankDiedError: x")]
    assert blame(others, [2, 5, 11], MESSAGE) == Failure(LEFT, (11, 2), after="RankDiedError: x")
    published = blame([Published(11, DIED, "", "rank 5 died", cause=DIED_5)], [], MEETING)
    assert published == replace(DIED_5, text="rank 5 died", publisher=11)
