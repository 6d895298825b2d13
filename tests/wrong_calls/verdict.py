"""Verdict on the outcome of a wrong call: the exception, its message and its time, against the row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tests.wrong_calls.execution import TIMEOUT, Attempt
from tests.wrong_calls.table import Kind, Row

# Ids of errors whose messages do not tell them from those of another entry.
AS_GOOD = {
    "orders-of-threads-differ": {"calls-differ"},
    "object-list-type": {"object-list-length"},
    "ranks-of-a-new-group": {"size-of-subgroups"},
}
WITHOUT_ID = {"warning"}


def faults(kind: Kind, row: Row, outcomes: Sequence[Attempt]) -> list[str]:
    """Return what is wrong with the outcomes of one row; nothing if they are as the table states."""
    return list(_faults(kind, row, outcomes))


def representative(kind: Kind, outcomes: Sequence[Attempt]) -> Attempt | None:
    """Return the outcome of the first rank that raised an error of the kind."""
    accepted = {kind.error, *kind.others}
    return next((found for found in outcomes if accepted & set(found.kinds)), None)


def _faults(kind: Kind, row: Row, outcomes: Sequence[Attempt]) -> Iterator[str]:
    accepted = {kind.error, *kind.others}
    for rank, found in enumerate(outcomes):
        # A wrong call is refused at once. One that waits in vain for the other rank ends at the time-out.
        if found.seconds >= TIMEOUT.total_seconds():
            yield f"rank {rank} waited for the time-out: {found.seconds:.1f} s"
        if not found.kinds and not kind.partly:
            yield f"rank {rank} raised nothing"
        if found.kinds and not accepted & set(found.kinds):
            yield f"rank {rank} raised {found.kinds[0]}: {found.message}"
        ids = {kind.id, *AS_GOOD.get(kind.id, ())}
        if found.kinds and kind.error not in WITHOUT_ID and found.see not in {f"See: {each}" for each in ids}:
            yield f"rank {rank}'s {found.kinds[0]} ends with {found.see!r}: {found.message}"
    shown = representative(kind, outcomes)
    if shown is None:
        yield f"no rank raised {kind.error}"
        return
    for phrase in row.phrases:
        if not re.search(phrase, shown.message, re.S):
            yield f"the message lacks {phrase!r}: {shown.message}"
