"""Placeholder backends of groups that cannot be used: destroyed ones, a parent's in its child, and those without any.

Do not add ways to restore a group: create a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from torchdist_ref.backends.base import Backend
from torchdist_ref.calls import Call
from torchdist_ref.errors import ArgumentError, DestroyedGroupError, explain, on_rank
from torchdist_ref.recorder import Recorder
from torchdist_ref.work import Work


class DestroyedBackend(Backend):
    """Placeholder backend of a destroyed group: every call raises, and the flight recorder stays readable."""

    def __init__(self, backend: Backend, group: str) -> None:
        self.name, self.recorder, self._group = backend.name, backend.recorder, group

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for any use of the group.

        Raises:
            DestroyedGroupError: Always.
        """
        raise DestroyedGroupError(
            f"{operation}: group {self._group!r} was destroyed{on_rank()}. Create a new one with new_group."
        )

    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """See `Backend.submit`."""
        self.refuse(call.op)

    def implementation(self, device_type: str | None) -> Any:
        """See `Backend.implementation`."""
        self.refuse("get_backend_impl")

    def set_timeout(self, seconds: float) -> None:
        """See `Backend.set_timeout`."""
        self.refuse("set_timeout")

    def close(self) -> None:
        """See `Backend.close`."""

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""


class InheritedBackend(DestroyedBackend):
    """Placeholder backend of a group in a forked child: the group is its parent's, whose links it must not use."""

    def __init__(self, backend: Backend, group: str) -> None:
        super().__init__(backend, group)
        # Kept: its finalizers would release what the parent uses.
        self._backend_of_parent = backend

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for any use of the group.

        Raises:
            DestroyedGroupError: Always.
        """
        raise DestroyedGroupError(
            f"{operation}: group {self._group!r} belongs to the process that forked this one. A forked process has no "
            "groups: call collectives in its parent, or init_process_group here."
        )


class MissingBackend(DestroyedBackend):
    """Placeholder backend of a group that its constructor made, and that has none."""

    def __init__(self) -> None:
        self.name, self.recorder = "none", Recorder()

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for any use of the group.

        Raises:
            ArgumentError: Always.
        """
        got = "one that its constructor made, which has no backend"
        raise ArgumentError(explain(operation, "group", "a group made by new_group, or None", got))
