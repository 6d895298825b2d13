"""Blame among workers: the order in which launchers and agents choose the worker that failed first.

When one worker fails, others fail within milliseconds because of it, and may even end before it: neither the order of
their ends nor that of the reports of several hosts says who was first. The order is this:

1. A worker that has failed *by itself* counts before those that name another rank as their cause (`follows`).
2. A worker that a *signal* has killed counts before those that have exited: it could record nothing, and the errors
   that the others have recorded may follow from its death.
3. The *earliest record* of a failure counts, and any record before none.

Among equals, the first to be noticed. Do not add the choice among the ranks of a group here: `membership.blame` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Evidence(NamedTuple):
    """Facts about the failure of one worker, in the order in which they count.

    Attributes:
        follows: Whether the worker has named a failure of another rank as its cause.
        exited: Whether it exited, or still runs; False if a signal killed it.
        time: Time of its record, in seconds since 1970; infinite without a record.
    """

    follows: bool
    exited: bool
    time: float = inf


def blame(failures: Iterable[T], evidence: Callable[[T], Evidence]) -> T:
    """Return the failure that made the others happen.

    Args:
        failures: One failure or more, in the order in which they were noticed.
        evidence: Function that returns the facts about a failure.

    >>> blame([Evidence(False, True, 7.5), Evidence(True, False), Evidence(False, True, 7.25)], lambda each: each)
    Evidence(follows=False, exited=True, time=7.25)
    """
    return min(failures, key=evidence)
