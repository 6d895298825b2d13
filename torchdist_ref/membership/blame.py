"""Blame: the one order in which a culprit is chosen among the ranks that have failed or left.

When one rank fails, others fail within milliseconds because of it, and may even end before it. So a wait that finds
several ranks gone has to find out who was first. The order is this:

1. *A failure that a rank has published in the store* counts before anything else. Ranks that have read it raise it and
   end, so dead processes beside it are consequences.
2. *A process that has ended* is next, if the rank has not said why. A rank that aborted, or closed its end of the
   group, may have ended since: its own words count, not its end.
3. *An abort* is next; of several, the first in time. A rank that aborted only because of another one's abort or leave
   passes that failure on, and the other one is named.
4. *A leave* comes last. A rank whose program ended without destroying the group is named before those that destroyed
   it, and a rank that left after a failure before those that left without: they may have left because of it.

The ranks that count depend on the wait (see `Wait`), since a rank that has done its part may go. `blame` is pure: it
reads no clock, no store and no process. Do not add sentences (`words`) or ways to learn of an ending here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

from torchdist_ref.membership.events import (
    ABORTED,
    DIED,
    LEFT,
    PROGRAM_ENDED,
    Aborted,
    Died,
    Failure,
    Left,
    MemberEvent,
    Published,
)


class Wait(Enum):
    """Kind of wait that asks for a culprit.

    Attributes:
        COLLECTIVE: A collective of the group. A rank that has announced its leave takes no part any more.
        MESSAGE: A message. A rank that has announced its leave may still send until it has closed its end.
        ELSEWHERE: A wait by other means than the group's calls, in which the ranks needed may be living members that
            have left or aborted the group. Only an ended process, or a failure published for good, ends it.
        PART: The same, for ranks known to have yet to do their part: those that have closed the group will not.
        MEETING: A meeting in which all succeed or all fail: the failure of any rank counts, needed or not.
        FAILED_CALL: A call that has failed already, with an error that names no rank.
    """

    COLLECTIVE, MESSAGE, ELSEWHERE, PART, MEETING, FAILED_CALL = range(6)


def blame(events: Iterable[MemberEvent], needed: Collection[int], wait: Wait) -> Failure | None:
    """Return the failure that a wait has to report, or None if it has to go on.

    Args:
        events: Everything known of the members.
        needed: Global ranks that have yet to do their part.
        wait: Kind of the wait.

    >>> blame([Left(3), Aborted(1, "ValueError", "no data", at=2), Died(2)], [1, 2, 3], Wait.COLLECTIVE).ranks
    (2,)
    >>> blame([Left(3), Aborted(1, "ValueError", "no data", at=2), Died(2)], [1, 3], Wait.COLLECTIVE).ranks
    (1,)
    """
    known = [*events]
    for event in known:
        if isinstance(event, Published) and _counts(event, needed, wait):
            return _of_published(event)
    died = {event.rank: event for event in known if isinstance(event, Died) and event.rank in needed}
    aborts = [event for event in known if isinstance(event, Aborted) and event.rank in needed]
    leaves = [event for event in known if isinstance(event, Left) and event.rank in needed]
    closed = {event.rank for event in leaves if event.is_closed}
    if wait in (Wait.ELSEWHERE, Wait.PART):
        # A rank that aborted the group in an earlier call may meet others of it again. Its abort explains its absence
        # only if it has closed its end too.
        aborts = [event for event in aborts if event.rank in closed]
    explained = closed | {event.rank for event in aborts}
    if dead := [event for rank, event in died.items() if rank not in explained]:
        return _of_deaths(dead)
    if wait is Wait.ELSEWHERE:
        aborts = [event for event in aborts if event.rank in died]
        leaves = [event for event in leaves if event.rank in died]
    if aborts:
        return _of_abort(min(aborts, key=lambda event: event.at))
    return _of_leaves([event for event in leaves if event.is_closed or wait is Wait.COLLECTIVE])


def _counts(event: Published, needed: Collection[int], wait: Wait) -> bool:
    """Return whether a published failure ends a wait."""
    if wait is Wait.MEETING:
        return True
    # A rank that ends its calls to make another group is awaited in the meeting for that one.
    return event.rank in needed and not (event.continues and wait in (Wait.ELSEWHERE, Wait.PART))


def _of_published(event: Published) -> Failure:
    cause = event.cause
    endings = (event.ending,) if event.ending else cause.endings if cause else ()
    # In a meeting, a rank may publish the death of another one that it knows no rank of.
    own = (event.rank,) if event.ending or event.kind in (ABORTED, PROGRAM_ENDED) else ()
    return Failure(
        event.kind,
        cause.ranks if cause else own,
        endings,
        event.error,
        text=event.text,
        publisher=event.rank,
        continues=event.continues,
    )


def _of_deaths(dead: Collection[Died]) -> Failure:
    endings = tuple(event.ending for event in dead if event.ending)
    return Failure(DIED, tuple(event.rank for event in dead), endings)


def _of_abort(event: Aborted) -> Failure:
    if event.cause is not None:
        return event.cause
    return Failure(
        ABORTED, (event.rank,), error=event.error, call=event.call, text=event.text, continues=event.continues
    )


def _of_leaves(leaves: Collection[Left]) -> Failure | None:
    if not leaves:
        return None
    ended = [event for event in leaves if event.program_ended]
    chosen = ended or [event for event in leaves if event.after] or [*leaves]
    first = chosen[0]
    # The program of a rank ends before its process, whose exit code may be known by now.
    endings = tuple(event.ending for event in ended if event.ending)
    ranks = tuple(event.rank for event in chosen if ended or event.after == first.after)
    return Failure(PROGRAM_ENDED if ended else LEFT, ranks, endings, last=first.last, after=first.after)
