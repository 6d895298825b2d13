"""Backend interface: a backend takes a call and tensors, and returns a Work.

The differences between `ref`, `gloo`, `nccl` and `mpi` are below `submit`. The shared parts (ranks, argument errors,
default groups) are above it. `BackendWrapper` is the base of backends that record, compare or delay another's calls.
`UnusableBackend` is that of placeholders in groups that cannot communicate: destroyed, inherited by a forked child, or
without a backend. Names of backends are in `registry`, tests of operands in `operands`.

A forked child answers questions about its parent's groups, as on torch: workers of data loaders read a rank's share.
It cannot communicate: it has no threads of the backend, and its call would be taken for the parent's.

Do not add a method per operation here, nor ways to restore a group: create a new one.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NoReturn, TypeGuard
from weakref import ref

import torch
from torch import Tensor

from torchdist_ref.calls import Call
from torchdist_ref.errors import ArgumentError, DestroyedGroupError, explain, message_of, on_rank
from torchdist_ref.membership.blame import Wait
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.recorder import Recorder
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.stores.sealed import sealed_below
from torchdist_ref.timeouts import found_soon
from torchdist_ref.work import Work

CLOSE_SECONDS, _CLOSE_POLL_SECONDS = 5.0, 0.001
"""Longest wait for the calls of groups that are destroyed, for all groups together, and interval of its checks."""


class Backend(ABC):
    """A backend of one group on one rank.

    Attributes:
        name: The name that `get_backend` returns.
        recorder: The last calls of this group on this rank.
        group: Reference to the group, or None: modes of torch's dispatcher see it as an argument of calls.
    """

    name: str
    recorder: Recorder
    group: ref[Any] | None = None

    @property
    def shares_memory(self) -> bool:
        """Whether ranks read each other's CPU tensors without a network: several ranks, on one host."""
        return False

    @abstractmethod
    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """Start a call.

        Args:
            call: The operation, with group ranks.
            inputs: Tensors that are read, as many as the call's contract says: a list, or `RowBlocks`.
            outputs: Tensors that are written. For in-place calls the same tensors as `inputs`.
            wait: Return only when the call is complete: the caller needs no Work, only its error.

        Returns:
            The call's Work, with the outputs as `flat_operands`; a completed one if `wait`.

        Raises:
            DistBackendError: With `wait`, the error of the call.
        """

    def submit_repeated(
        self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool
    ) -> Work | None:
        """Start a call of lists if its operands need no check, as one of their kinds and addresses has passed it.

        Checks of lists take as long as the rest of a small call, so public functions ask this first.

        Returns:
            As `submit`; None if the operands may be invalid. Nothing was started then.
        """
        return None

    def empty(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a new CPU tensor, in registered memory if this backend has such."""
        return torch.empty(size, dtype=dtype, device="cpu")

    @property
    def device_types(self) -> Sequence[str]:
        """Types of the devices whose tensors the backend takes."""
        return ("cpu",)

    def implementation(self, device_type: str | None) -> Any:
        """Return what `get_backend_impl` does: the object that runs the calls, by default this one.

        Args:
            device_type: Device type of the calls; None for all.
        """
        return self

    def set_timeout(self, seconds: float) -> None:
        """Set the time-out of the calls that begin from now on; by default warn that the backend cannot.

        Args:
            seconds: Upper limit of any wait, in seconds.
        """
        warnings.warn(
            f"set_timeout: backend {self.name!r} does not support changing its time-out, which stays what it was when "
            "the group was made. Pass timeout to init_process_group or new_group.",
            stacklevel=2,
        )

    def failure(self, ranks: Sequence[int], description: str, wait: Wait) -> BaseException | None:
        """Return the error for the first of some group ranks known to have failed, or None.

        Args:
            ranks: The ranks that the caller waits for by other means than this backend's calls.
            description: The operation that waits, for the error's message.
            wait: Kind of the wait. A rank that has left the group counts as well if it has yet to do its part
                (`Wait.PART`).
        """
        return None

    def failure_soon(self, ranks: Sequence[int], description: str) -> BaseException | None:
        """Return the error for ranks that have failed or left once one is known, or None after a moment."""
        return found_soon(lambda: self.failure(ranks, description, Wait.PART))

    def successor_store(self, store: Store, remaining: Sequence[int], timeout: float) -> PrefixStore | None:
        """Return a new, empty store in place of the group's, which has ended with the rank that served it.

        All members that remain call this.

        Args:
            store: The group's store.
            remaining: Group ranks of these members; the first serves the new store.
            timeout: Longest duration of a wait in seconds.

        Returns:
            The store; None if this backend has no way to find it.
        """
        return None

    def coalescing(self) -> AbstractContextManager[None]:
        """Return a context in which sends and receives may be held back, to be started as one group at its end.

        It does nothing, except for backends that start messages one after the other: there, two ranks that each send
        to the other before they receive would deadlock. The Works can be waited for after the context has ended.
        """
        return nullcontext()

    @property
    def broken(self) -> BaseException | None:
        """Error that ended the group on this rank; None while it is usable, or if the backend does not know."""
        return None

    def explain_leave(self, reason: str) -> None:  # noqa: B027 - a backend may have no way to publish it
        """Have the members that miss this rank read the failure after which it leaves. `leave` follows."""

    def announce_exit(self) -> None:  # noqa: B027 - simple backends announce it in `close`
        """Publish that this rank's program ends though the group exists. `close` follows."""

    def leave(self) -> bool:
        """Announce that this rank makes no new call, and return whether its calls have ended. `close` ends the others.

        Called until it returns True or a time-out has passed. Never blocks.
        """
        return True

    @abstractmethod
    def close(self) -> None:
        """Leave the group in an orderly way; calls that have not ended raise."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Leave the group at once; members that wait for this rank get an error with the reason."""

    def end_calls(self, reason: str) -> None:
        """End the group's calls as `abort` does, on a rank that then meets other members to make another group."""
        self.abort(reason)


@dataclass(frozen=True, slots=True)
class Membership:
    """A group as its backend on one rank sees it.

    Attributes:
        store: Store with a prefix of this group only, shared by its members.
        rank: This rank in the group.
        members: The global rank of every member, in group order.
        name: The group's name, the same on all members.
        timeout: Upper limit of any wait in this group, in seconds.
        options: The caller's `pg_options`, for backends that accept options.
        device: The caller's `device_id`, for backends that bind a device.
        existing: torch's process group whose backend to use, where torch made the group; else None.
        watch: Watch over the members until the backend is made; the waits of `store` obey it already.
        recorder: The last calls of the group on this rank, for the backend's attribute `recorder`.
    """

    store: Store
    rank: int
    members: tuple[int, ...]
    name: str
    timeout: float
    options: Any = None
    device: Any = None
    existing: Any = None
    watch: MemberWatch | None = None
    recorder: Recorder = field(default_factory=Recorder, compare=False)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.members)


def _forwarded(name: str) -> Any:
    """Return a method that calls the method of this name of the wrapped backend."""

    def method(self: BackendWrapper, *arguments: Any) -> Any:
        return getattr(self.wrapped, name)(*arguments)

    method.__doc__ = f"Call `Backend.{name}` of the wrapped backend."
    return method


class BackendWrapper(Backend):
    """Base of backends that act at each call of another backend, in `submit`, and forward everything else to it.

    Args:
        backend: The backend that runs the calls.
    """

    def __init__(self, backend: Backend) -> None:
        self.name, self.recorder, self.wrapped = backend.name, backend.recorder, backend

    @property
    def group(self) -> ref[Any] | None:
        """See `Backend.group`."""
        return self.wrapped.group

    @group.setter
    def group(self, group: ref[Any] | None) -> None:
        self.wrapped.group = group

    shares_memory = property(lambda self: self.wrapped.shares_memory)
    broken = property(lambda self: self.wrapped.broken)
    empty, failure, coalescing, close, abort = map(_forwarded, ("empty", "failure", "coalescing", "close", "abort"))
    successor_store, announce_exit, end_calls = map(_forwarded, ("successor_store", "announce_exit", "end_calls"))
    leave, explain_leave = map(_forwarded, ("leave", "explain_leave"))
    set_timeout, implementation = map(_forwarded, ("set_timeout", "implementation"))


# ---- the end of a group


def close_all(backends: Sequence[Backend]) -> None:
    """Close backends, after their calls have ended or 5 seconds have passed, whichever is first.

    While an exception is handled, as in the ``finally`` of a program that fails, the groups are aborted with it: its
    other members read it, and no call is waited for.
    """
    if is_failure(error := sys.exc_info()[1]):
        for backend in backends:
            with suppress(Exception):
                backend.abort(f"it destroyed the group because of {message_of(error)}")
    end = monotonic() + CLOSE_SECONDS
    try:
        # All of them, each time: the members of each group shall learn at once that this rank leaves.
        while not min([backend.leave() for backend in backends], default=True) and monotonic() < end:
            sleep(_CLOSE_POLL_SECONDS)
    finally:
        for backend in backends:
            backend.close()


def is_failure(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether a program that ends with an exception has failed; `SystemExit` without a code is a success."""
    if isinstance(error, SystemExit):
        return bool(error.code)
    return error is not None and not isinstance(error, GeneratorExit)


# ---- groups that cannot communicate


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
