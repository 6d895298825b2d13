"""Placeholder backends of groups that cannot communicate: destroyed, inherited by a forked child, or without a backend.

A forked child answers questions about its parent's groups, as on torch: workers of data loaders read a rank's share.
It cannot communicate: it has no threads of the backend, and its call would be taken for the parent's. Do not add ways
to restore a group: create a new one.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from torchdist_ref.backends.base import Backend
from torchdist_ref.calls import Call
from torchdist_ref.errors import ArgumentError, DestroyedGroupError, explain, on_rank
from torchdist_ref.recorder import Recorder
from torchdist_ref.stores import Store
from torchdist_ref.stores.sealed import sealed_below
from torchdist_ref.work import Work


class UnusableBackend(Backend):
    """Backend on which every call raises.

    Args:
        name: Name of the backend in whose place this is.
        recorder: Its last calls, which stay readable.
        group: Name of the group.
    """

    def __init__(self, name: str, recorder: Recorder, group: str) -> None:
        self.name, self.recorder, self._group = name, recorder, group

    @abstractmethod
    def refuse(self, operation: str) -> NoReturn:
        """Raise the error of an operation."""

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


class DestroyedBackend(UnusableBackend):
    """Placeholder backend of a destroyed group, which answers no question either."""

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for any use of the group.

        Raises:
            DestroyedGroupError: Always.
        """
        raise DestroyedGroupError(
            f"{operation}: group {self._group!r} was destroyed{on_rank()}. Create a new one with new_group."
        )


class InheritedBackend(UnusableBackend):
    """Placeholder backend of a parent's group in a forked child: the group answers questions as in the parent.

    Args:
        name: See `UnusableBackend`.
        recorder: See `UnusableBackend`.
        group: See `UnusableBackend`.
        rank: Global rank of the parent.
    """

    def __init__(self, name: str, recorder: Recorder, group: str, rank: int) -> None:
        super().__init__(name, recorder, group)
        self._rank = rank

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for communication in the group.

        Raises:
            DestroyedGroupError: Always.
        """
        raise self.error(operation)

    def error(self, operation: str) -> DestroyedGroupError:
        """Return the error for an operation of the group, or of its store."""
        return DestroyedGroupError(
            f"{operation}: this process was forked from rank {self._rank}, so it can ask group {self._group!r} for "
            f"ranks and sizes but cannot communicate in it: call {operation} in the parent, or start this process by "
            f"spawn and call init_process_group in it."
        )


class InheritedStore(Store):
    """Placeholder store of a parent's group in a forked child: every operation raises.

    Args:
        backend: Backend of the group.
    """

    def __init__(self, backend: InheritedBackend) -> None:
        self._backend = backend

    def _unsupported(self, operation: str) -> DestroyedGroupError:
        return self._backend.error(f"store.{operation}")


def inherit_store(store: Store, backend: Backend) -> None:
    """Have the store of a parent's group raise in a forked child, and with it other groups' parts of the same store."""
    sealed, _ = sealed_below(store)
    if (
        isinstance(backend, InheritedBackend)
        and sealed is not None
        and not isinstance(sealed.underlying_store, InheritedStore)
    ):
        never_release([sealed.underlying_store])
        sealed.replace(InheritedStore(backend))


class MissingBackend(UnusableBackend):
    """Placeholder backend of a group that its constructor made, and that has none."""

    def __init__(self) -> None:
        super().__init__("none", Recorder(), "")

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for any use of the group.

        Raises:
            ArgumentError: Always.
        """
        got = "one that its constructor made, which has no backend"
        raise ArgumentError(explain(operation, "group", "a group made by new_group, or None", got))


def never_release(things: Sequence[Any]) -> None:
    """Keep a parent's objects in a forked child until its end, also while Python finalizes.

    Finalizers would release what the parent uses. Those in C++ would wait for threads that a child does not have.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
