"""Process groups and the current world: the groups that this rank belongs to, and the default one.

A `ProcessGroup` holds its members, a backend, and the translation between global ranks (``src=3``) and group ranks
(``group_src=1``). Backends only know group ranks; public functions translate once.

There is one `World` per process, as in torch: plain threads, completion callbacks and autograd's threads all use it.
A context variable overrides it only where ranks are threads (`testing`, notebooks). This and the table of backends
are the package's only module state.

A forked child has a copy of its parent's world (`World.inherit`): questions have the same answers, and nothing that the
child does reaches the other ranks. Do not add communication here, nor anything that a backend needs to know.
"""

from __future__ import annotations

import contextvars
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch.distributed

from torchdist_ref.backends.base import (
    Backend,
    DestroyedBackend,
    InheritedBackend,
    Membership,
    MissingBackend,
    UnusableBackend,
    close_all,
    inherit_store,
)
from torchdist_ref.backends.detail_level import OFF, apply_debug_level, current_level
from torchdist_ref.backends.ref_in_torch.process_group import CallsFromTorch, with_backends
from torchdist_ref.backends.registry import BackendChoice, by_device_type, is_of_torch, of_process_group
from torchdist_ref.debug.flight_recorder import observe_process
from torchdist_ref.debug.monitored import run_monitored_barrier
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    NotInitializedError,
    explain,
    find_rank_with,
    message_of,
    text_of,
)
from torchdist_ref.processes.program_end import leave_at_end
from torchdist_ref.recorder import RecordedGroup, StoreCall, StoreCalls, include
from torchdist_ref.stores import HashStore, Store, TCPStore
from torchdist_ref.stores.sealed import innermost
from torchdist_ref.timeouts import GROUP_TIMEOUT, MAX_TIMEOUT

if TYPE_CHECKING:
    from torchdist_ref.stores.prefix import KeyRange

default_pg_timeout = GROUP_TIMEOUT
_OF_METHODS = "_torchdist_ref_group"
_LINGER_SECONDS = 0.05
_LINGER_AFTER_FAILURE_SECONDS = 0.2
"""Time for ranks that meet to read why this one left: they look at intervals of `CHECK_SECONDS`, or later if busy."""


def as_integer(value: Any) -> int | None:
    """Convert an integer-like value (NumPy scalar, one-element tensor) to int, or return None."""
    try:
        return operator.index(value)
    except TypeError:
        return None


class ProcessGroup(CallsFromTorch):
    """Handle on a set of ranks that communicate: `init_process_group`, `new_group` and the like return one.

    A backend in Python may be a subclass, as it may be of torch's class: its constructor calls
    ``super().__init__(rank, size)``, it has the methods of the operations that it supports, and
    `Backend.register_backend` gets a function that returns it. A program may also make one of its class and pass it as
    the group of a call or of DDP: its methods make the calls, and return a Work of torch's class, or of ours.

    It is a ``torch.distributed.ProcessGroup``: torch's modules take it as their group, and its methods with torch's
    names (`allreduce`, `broadcast`, …) are the ones that torch's C++ calls.

    Attributes:
        members: Global rank of every member, in group order.
        backend: The backend; a `DestroyedBackend` after `destroy_process_group`.
        group_desc: The group's name, the same on all members.
        group_name: The same, or with a number where this process has another group of that name.
        timeout: Default time-out of a call on this group, in seconds.
        store: Store with a key prefix that only this group uses.
        choice: The backend that the group was made with, for groups that are made without naming one; or None.
        keys: The keys that the group's members and other callers of its creation release, or None.
        original: The group of torch's whose members and backend this group has, where torch made it; else None.
        on_shutdown: Function that destroys the group, called when torch destroys it; None while torch does not know it.

    Elsewhere:
        ``MPI_Comm`` in MPI, ``ncclComm_t`` in NCCL; an axis of ``jax.sharding.Mesh`` in JAX.
    """

    timeout: float
    store: Store
    choice: BackendChoice | None = None
    keys: KeyRange | None = None
    original: Any = None
    on_shutdown: Callable[[], None] | None = None

    def __init__(self, rank: int, size: int) -> None:
        try:
            super().__init__(rank, size)  # type: ignore[call-arg]
        except TypeError:
            raise ArgumentTypeError(explain("ProcessGroup", "rank, size", "two integers", (rank, size))) from None
        self._rank = rank
        self.members = tuple(range(size))
        self._group_ranks = {member: member for member in self.members}

    @classmethod
    def on(
        cls, backend: Backend, members: Sequence[int], rank: int, name: str, timeout: float, store: Store
    ) -> ProcessGroup:
        """Return the handle of a group on a backend of this library."""
        group = cls(rank, len(members))
        group._name = group._description = name
        group.members, group.backend, group.timeout, group.store = tuple(members), backend, timeout, store
        group._group_ranks = {member: index for index, member in enumerate(group.members)}
        if backend.group is None:
            backend.group = ref(group)
        with_backends.add(group)
        return group

    def observe(self, membership: Membership) -> None:
        """Have the flight recorder show the group's calls, and do what the debug level asks for."""
        facts = self.group_desc, self.backend.name, self.members, self._rank, self.timeout
        include(self.backend.recorder, RecordedGroup(*facts, getattr(self.store, "prefix", "")))
        if current_level() != OFF:
            self.backend = apply_debug_level(self.backend, membership)

    def rename(self, name: str) -> None:
        """Set `group_name`, by which torch finds the group."""
        self._name = name

    def rank(self) -> int:
        """Return this rank's group rank."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.members)

    def shutdown(self) -> None:
        """Destroy the group, as torch destroys it."""
        if self.on_shutdown is not None:
            self.on_shutdown()

    def abort(self) -> None:
        """Abort the group's calls, and destroy the group."""
        self.backend.abort("torch.distributed aborted the group")
        self.shutdown()

    def destroy_backend(self) -> Backend:
        """Put a `DestroyedBackend` in place of the backend, and return the backend, which the caller closes."""
        backend = self.backend
        self.backend = DestroyedBackend(backend.name, backend.recorder, self.group_desc)
        return backend

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of the calls that begin from now on: `torchdist_ref.set_timeout` on this group."""
        super().set_timeout(timeout)
        self.timeout = min(timeout, MAX_TIMEOUT).total_seconds()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank of the group has called this: `torchdist_ref.monitored_barrier` on this group.

        Args:
            timeout: Longest wait for the other ranks. Default: the group's time-out.
            wait_all_ranks: Accepted for compatibility with torch.
        """
        refuse_unusable(self, "monitored_barrier")
        with current().recorded("monitored_barrier", "", self.members, self):
            run_monitored_barrier(
                self.store,
                self._rank,
                self.members,
                timeout or timedelta(seconds=self.timeout),
                self.group_desc,
                self.backend.failure,
            )

    def _backend_names(self) -> Mapping[str, str]:
        """Return the name of the backend for each device type."""
        return by_device_type(self.backend.name)

    def group_rank(self, rank: int, operation: str, argument: str) -> int:
        """Translate a global rank into a group rank.

        Raises:
            ArgumentError: The rank is not in the group.
        """
        # A float such as 1.0 equals an int, and the table would accept it.
        if type(rank) is int and rank in self._group_ranks:
            return self._group_ranks[rank]
        number = as_integer(rank)
        found = None if number is None else self._group_ranks.get(number)
        if found is None:
            kind = "a global rank" if number is not None else "an int, a global rank"
            expected = f"{kind} in the group, one of {list(self.members)}"
            error = ArgumentError if number is not None else RankTypeError
            raise error(explain(operation, argument, expected, rank, rank=self.members[self._rank]))
        return found

    def __repr__(self) -> str:
        backend = type(self).__name__ if isinstance(self.backend, MissingBackend) else self.backend.name
        return f"<ProcessGroup {self.group_desc!r} on {backend}: rank {self._rank} of {self.size()}>"


class RankTypeError(ArgumentError, ArgumentTypeError):
    """A rank that is not an integer. torch raises a TypeError in the default group, and a ValueError in others."""


@contextmanager
def aborted_on_failure(backend: Backend, operation: str) -> Iterator[None]:
    """Abort a group whose other members have created it, if this rank fails in the block."""
    try:
        yield
    except BaseException as error:
        backend.abort(f"{type(error).__name__} in {operation}: {text_of(error)}")
        raise


def refuse_destroyed(group: ProcessGroup, operation: str) -> None:
    """Raise if the group was destroyed; for queries, which a forked child can answer.

    Raises:
        DestroyedGroupError: It was destroyed.
    """
    if not isinstance(group.backend, InheritedBackend):
        refuse_unusable(group, operation)


def refuse_unusable(group: ProcessGroup, operation: str) -> None:
    """Raise if the group cannot communicate; for functions that reach other ranks by other means than its backend.

    Raises:
        DestroyedGroupError: It was destroyed, or belongs to the process that forked this one.
    """
    if isinstance(group.backend, UnusableBackend):
        group.backend.refuse(operation)


def refuse_made_alone(group: ProcessGroup, operation: str) -> None:
    """Raise ArgumentError if the constructor of the class made the group, which so has no backend."""
    if isinstance(group.backend, MissingBackend):
        group.backend.refuse(operation)


class World:
    """All groups that one rank belongs to, and the store that they meet through.

    Attributes:
        inherited: Whether the groups are those of the process that forked this one.
        default: The default group (all ranks), or None before initialization.
        store: The store given to or created by `init_process_group`.
        groups: All groups that this rank is in, oldest first.
        created: Number of groups that all ranks created; equal on all ranks, and part of a new group's key prefix.
        member_only: Number of groups that only their members created, by member list.
        leave_store: Function that releases all keys of this world, if its store may outlive it; or None.
        created_store: The store below, if this library created it and so closes it; else None.
        on_close: Functions to call before the groups close.
        in_torch: The groups as torch knows them (`torch_tables.GroupsInTorch`); None while it knows none.
        store_calls: Calls of this rank that meet others in the store, for the flight recorder.
        failure: First failure that ended a group of this rank; empty again once the survivors have a new group.
        torch_tables: torch's tables for this rank where ranks are threads, or None.
    """

    def __init__(self) -> None:
        self.torch_tables: Any = None
        self.reset()

    def reset(self) -> None:
        """Return to the state before initialization, without closing anything."""
        self.inherited = False
        self.default: ProcessGroup | None = None
        self.store: Store | None = None
        self.groups: list[ProcessGroup] = []
        self.created = 0
        self.member_only: Counter[tuple[int, ...]] = Counter()
        self.created_store: Any = None
        self.leave_store: Callable[[], None] | None = None
        self.on_close: list[Callable[[], None]] = []
        self.in_torch: Any = None
        self.store_calls = StoreCalls()
        self.failure = ""

    def inherit(self) -> None:
        """Become a forked child's copy of this world: its groups exist, and nothing here reaches the other ranks."""
        if self.default is None:
            # Another thread of the parent was initializing when the parent forked.
            self.reset()
            return
        self.inherited, self.created_store, self.leave_store = True, None, None
        self.on_close, self.store_calls = [], StoreCalls()
        for group in self.groups:
            group.keys = None
            inherit_store(group.store, group.backend)
        if self.in_torch is not None:
            self.in_torch.inherit()

    def observe(self) -> None:
        """Configure logging, and answer requests for dumps until this rank leaves the world."""
        self.on_close.append(observe_process())

    def recorded(
        self,
        operation: str,
        arguments: str,
        awaited: Sequence[int],
        group: ProcessGroup,
        members: Sequence[int] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context in which a call that meets other ranks in the store is in the flight recorder.

        Args:
            operation: Name of the operation.
            arguments: The arguments that all ranks must agree on, as text.
            awaited: Global ranks that this rank waits for.
            group: Group whose members make the call.
            members: Global ranks that make the call, if not all members do.
        """
        made_by, me = group.members if members is None else members, group.members[group.rank()]
        name = f"{operation} of {group.group_desc!r}" + ("" if members is None else f" by ranks {[*members]}")
        call = StoreCall(operation, arguments, tuple(awaited))
        return self.store_calls.recorded(call, name, made_by, made_by.index(me), group.timeout)

    def add(self, group: ProcessGroup) -> ProcessGroup:
        """Add a new group, register it with torch if the default group is, and return it."""
        with aborted_on_failure(group.backend, "the creation of the group"):
            self.groups.append(group)
            if self.in_torch is not None:
                self.in_torch.add(group)
        return group

    def destroy(self, group: ProcessGroup) -> None:
        """Close one group's backend, put a `DestroyedBackend` in its place, and release the group's keys."""
        self._leave([group])
        if group.keys is not None:
            group.keys.release()

    def _leave(self, groups: Sequence[ProcessGroup]) -> None:
        """Close the backends of some groups. Members that miss this rank there read which failure it has met."""
        broken = next(filter(None, (group.backend.broken for group in self.groups)), None)
        if broken is not None and not self.failure:
            # Keep the text only: the error has a traceback, which would keep tensors alive.
            self.failure = message_of(broken)
        backends = [self._remove(group) for group in groups]
        if self.failure:
            for backend in backends:
                backend.explain_leave(self.failure)
        close_all(backends)

    def _remove(self, group: ProcessGroup) -> Backend:
        if self.in_torch is not None:
            self.in_torch.remove(group)
        self.groups.remove(group)
        return group.destroy_backend()

    def use_store(self, store: Store, leave: Callable[[], None] | None, created: bool) -> None:
        """Use a store from now on: see the attributes; `created` is whether this library created it."""
        self.store, self.leave_store, self.created_store = store, leave, innermost(store) if created else None

    def replace_store(self, store: Store) -> None:
        """Use another store from now on, which this library has created, and close the old one if it was such."""
        old = self.created_store
        self.use_store(store, None, True)
        if old is not None:
            old.close()

    def run_on_close(self) -> None:
        """Withdraw the groups from torch, and call the functions in `on_close`, each once."""
        if self.in_torch is not None:
            self.in_torch.withdraw()
        for function in self.on_close:
            function()
        self.on_close.clear()

    def abort_with(self, error: BaseException) -> None:
        """See `GroupOwner.abort_with`."""
        for group in reversed(self.groups):
            with suppress(Exception):
                group.backend.abort(f"its program ended with {message_of(error)}")

    def exit(self) -> None:
        """See `GroupOwner.exit`."""
        for group in self.groups:
            with suppress(Exception):
                group.backend.announce_exit()
        self.close(_LINGER_SECONDS if self.groups else 0.0)

    def close_after_failure(self) -> None:
        """Close after an initialization has failed."""
        self.close(_LINGER_AFTER_FAILURE_SECONDS)

    def close(self, linger: float = 0.0) -> None:
        """Destroy all groups, newest first, and close the store if this library created it.

        Args:
            linger: Seconds for which a store that this rank serves may wait for the others. They still read there why
                an initialization has failed, or that the program ends with groups.
        """
        self.run_on_close()
        self._leave(self.groups[::-1])
        if self.leave_store is not None:
            self.leave_store()
        store = self.created_store
        self.reset()
        if linger and isinstance(store, TCPStore):
            store.close(linger)
        elif (close := getattr(store, "close", None)) is not None:
            close()


_of_process = World()
_of_context: contextvars.ContextVar[World | None] = contextvars.ContextVar("torchdist_ref_world", default=None)


def current() -> World:
    """Return the world that calls without a group use."""
    return _of_context.get() or _of_process


def is_thread_rank() -> bool:
    """Return whether the caller is one of several ranks that are threads of this process."""
    return _of_context.get() is not None


@contextmanager
def thread_rank() -> Iterator[World]:
    """Give the current context a world of its own, for ranks that are threads.

    >>> with thread_rank() as world:
    ...     current() is world
    True
    """
    world = World()
    with _within(world):
        try:
            yield world
        finally:
            world.close()


@contextmanager
def _within(world: World) -> Iterator[None]:
    reset = _of_context.set(world)
    try:
        yield
    finally:
        _of_context.reset(reset)


def same_rank() -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes a context in which any thread belongs to the caller's rank.

    Autograd has a thread for each accelerator, which it shares among all ranks that are threads: functions of a program
    that it calls there would find no default group.
    """
    world = _of_context.get()
    return nullcontext if world is None else partial(_within, world)


def abort(reason: str) -> None:
    """Abort all groups of the current world: members that wait for this rank get an error.

    Args:
        reason: Text for the other ranks' error messages.
    """
    for group in current().groups:
        group.backend.abort(reason)


@cache
def leave_at_end_of_program() -> None:
    """Destroy the groups when the program ends, from now on. Their other members quote the exception that ends it."""
    leave_at_end(_of_process)


def default_group(operation: str = "") -> ProcessGroup:
    """Return the group of all ranks.

    Args:
        operation: Call that needs it, for the error.

    Raises:
        NotInitializedError: There is none.
    """
    group = current().default
    if group is None:
        raise NotInitializedError(
            "Default process group has not been initialized, please make sure to call init_process_group. "
            f"({_absence(operation)})"
        )
    return group


def _absence(operation: str) -> str:
    """Return which call needs a default group, and what this process has instead of one of this library."""
    need = f"{operation} needs it. " if operation else ""
    if not torch.distributed.is_initialized():
        return f"{need}No group exists in this process."
    return (
        f"{need}torch.distributed has a default group of its own, on backend {torch.distributed.get_backend()!r}: "
        f"initialize with torchdist_ref, or use torch's functions. Lightning and accelerate take backend='ref'."
    )


def resolve(
    group: ProcessGroup | int | None, operation: str = "process group", argument: str = "group"
) -> ProcessGroup | None:
    """Return the group that an argument refers to, or None if this rank is not in it."""
    if group is None:
        return (_of_context.get() or _of_process).default or default_group(operation)
    if type(group) is ProcessGroup:
        return group
    if isinstance(group, ProcessGroup):
        return _of_methods(group) if _has_own_methods(group) else group
    if isinstance(group, torch.distributed.ProcessGroup):
        return _counterpart(group, operation, argument)
    if type(group) is not int or group != GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(explain(operation, argument, "a group made by new_group, or None", group))
    return None


def resolve_member(group: Any, operation: str, argument: str = "group") -> ProcessGroup:
    """Return the group that an argument refers to.

    Raises:
        ArgumentError: This rank is not in the group.
        DestroyedGroupError: The group was destroyed.
    """
    found = resolve(group, operation, argument)
    if found is None:
        hint = "Invalid process group specified: this rank is not in it."
        raise ArgumentError(explain(operation, argument, "a group that this rank is in", group, hint=hint))
    refuse_destroyed(found, operation)
    return found


def _counterpart(group: Any, operation: str, argument: str) -> ProcessGroup:
    """Return our group for one that torch made beside our default group, or for one whose class is a program's own."""
    if _has_own_methods(group):
        return _of_methods(group)
    in_torch = current().in_torch
    if in_torch is None:
        expected = "a group of this library, whose default group comes from its own init_process_group"
        raise ArgumentError(explain(operation, argument, expected, f"{type(group).__name__} of torch.distributed"))
    found: ProcessGroup = in_torch.counterpart(group)
    return found


def _has_own_methods(group: Any) -> bool:
    """Return whether a program made a group of a class of its own, whose methods make the calls.

    Such a group has no backend: its constructor is that of torch's class, or of ours. torch does not list it.
    """
    if isinstance(group, CallsFromTorch):
        return type(group) is not ProcessGroup and type(group.backend) is MissingBackend
    return type(group) is not torch.distributed.ProcessGroup and not is_of_torch(group)


def _of_methods(group: Any) -> ProcessGroup:
    """Return our group whose calls are the methods of a group of a program's own class.

    The group keeps it, so both are freed together. A group that has changed its size gets a new one.
    """
    found: ProcessGroup | None = vars(group).get(_OF_METHODS)
    if found is None or found.size() != group.size():
        name, seconds, store = type(group).__name__, GROUP_TIMEOUT.total_seconds(), HashStore()
        membership = Membership(store, group.rank(), tuple(range(group.size())), name, seconds)
        backend = of_process_group(name, membership, group)
        found = ProcessGroup.on(backend, membership.members, membership.rank, name, seconds, store)
        vars(group)[_OF_METHODS] = found
    return found


class HasWorld(type):
    """Metaclass that adds the class attribute `WORLD`, whose value follows init and destroy."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, or None before `init_process_group`."""
        return current().default


class GroupMember(metaclass=HasWorld):
    """Constants that users pass as a group or compare a group with.

    Attributes:
        WORLD: The group of all ranks; None before `init_process_group`.
        NON_GROUP_MEMBER: Return value of `new_group` on ranks outside the new group.
    """

    NON_GROUP_MEMBER = -100


class group(metaclass=HasWorld):
    """Older namespace of `WORLD`; see `GroupMember`.

    Attributes:
        WORLD: The group of all ranks; None before `init_process_group`.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> dist.group.WORLD is None
        True
        >>> run(lambda rank: dist.get_process_group_ranks(dist.group.WORLD), 2)
        [[0, 1], [0, 1]]
    """


def _global_rank() -> int | None:
    default = current().default
    return None if default is None else default.rank()


def _after_fork() -> None:
    for world in {_of_process, current()}:
        world.inherit()


find_rank_with(_global_rank)
os.register_at_fork(after_in_child=_after_fork)
