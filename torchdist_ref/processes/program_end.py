"""End of the program: its groups leave while threads still run, and members read the exception that ended it.

Once the interpreter finalizes, a thread of a backend that wakes up ends in the middle of C++ code, which aborts the
process. And the other ranks would learn of an exception only when the process is gone, without its text. So the owner
of groups that live until then registers here. Do not add reactions to failures of other ranks.
"""

from __future__ import annotations

import atexit
from contextlib import suppress
from functools import cache
from typing import Protocol

from torchdist_ref.processes.failure_record import on_uncaught
from torchdist_ref.processes.living_objects import LivingObjects


class GroupOwner(Protocol):
    """Object with groups to leave."""

    def abort_with(self, error: BaseException) -> None:
        """Abort the groups because of an exception that ends this rank's program."""

    def exit(self) -> None:
        """Leave the groups because the program ends. Members in a call learn which rank has left them."""


_owners: LivingObjects[GroupOwner] = LivingObjects()


def leave_at_end(owner: GroupOwner) -> None:
    """Call `abort_with` of a living object if an exception ends the program, and `exit` at the program's end."""
    _abort_on_uncaught_exception()
    _owners.add(owner)


@cache
def _abort_on_uncaught_exception() -> None:
    on_uncaught(_abort_all)


def _abort_all(error: BaseException) -> None:
    for owner in _owners.all():
        with suppress(Exception):
            owner.abort_with(error)


def _exit_all() -> None:
    for owner in _owners.all():
        with suppress(Exception):
            owner.exit()


atexit.register(_exit_all)
