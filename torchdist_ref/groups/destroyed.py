"""What takes the place of a group's backend when the group is destroyed, so that every use of it says so.

Don't add ways to bring a group back: make a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from torchdist_ref.backends.base import Backend
from torchdist_ref.calls import Call
from torchdist_ref.errors import ArgumentError, GroupAbortedError, on_rank
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.work import Work


class DestroyedGroupError(GroupAbortedError, ArgumentError):
    """The group that was given is gone. Those who made a call before it went get the same by the first name.

    torch raises a ValueError here, or uses the group as if nothing had happened.
    """

    definite = True


class Destroyed(Backend):
    """No backend; the calls that the group made can still be looked at."""

    def __init__(self, backend: Backend, group: str) -> None:
        self.name, self.recorder, self._group = backend.name, backend.recorder, group

    def refuse(self, operation: str) -> NoReturn:
        """Say that the group is gone.

        Raises:
            DestroyedGroupError: Always.
        """
        raise DestroyedGroupError(
            f"{operation}: group {self._group!r} was destroyed{on_rank()}. Make a new one with new_group."
        )

    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """See `Backend.submit`."""
        self.refuse(call.op)

    def close(self) -> None:
        """See `Backend.close`."""

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""


def refuse_destroyed(group: ProcessGroup, operation: str) -> None:
    """For functions that ask nothing of a backend: raise if the group is gone.

    Raises:
        DestroyedGroupError: It was destroyed.
    """
    if isinstance(group.backend, Destroyed):
        group.backend.refuse(operation)
