"""Process groups and the current world: the groups that this rank belongs to, and the default one.

A `ProcessGroup` holds its members, a backend, and the translation between global ranks (``src=3``) and group ranks
(``group_src=1``). Backends only know group ranks; public functions translate once.

There is one `World` per process, as in torch: plain threads, completion callbacks and autograd's threads all use it.
A context variable overrides it only where ranks are threads (`testing`, notebooks). This and the table of backends
are the package's only module state.

Do not add communication here, nor anything that a backend needs to know.
"""

from __future__ import annotations

import atexit
import contextvars
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed
from torch import Tensor

from torchdist_ref.backends.base import Backend
from torchdist_ref.backends.registry import mirrored
from torchdist_ref.calls import Call
from torchdist_ref.errors import ArgumentError, GroupAbortedError, NotInitializedError, explain, find_rank_with, on_rank
from torchdist_ref.stores import Store
from torchdist_ref.timeouts import GROUP_TIMEOUT
from torchdist_ref.trace import Recorder
from torchdist_ref.work import Work


def whole_number(value: Any) -> int | None:
    """The number that a value means which may stand for one, as NumPy's and a tensor of one number may; None if not."""
    try:
        return operator.index(value)
    except TypeError:
        return None


class ProcessGroup:
    """A handle on the ranks that communicate. Made by `init_process_group` and `new_group` only.

    Attributes:
        members: The global rank of every member, in group order.
        backend: The backend.
        name: The group's name, the same on all members.
        timeout: Seconds that a wait in this group takes at most.
        store: Keys of this group only.
    """

    def __init__(
        self, members: Sequence[int], rank: int, backend: Backend, name: str, timeout: float, store: Store
    ) -> None:
        self.members = tuple(members)
        self.backend = backend
        self.name = name
        self.timeout = timeout
        self.store = store
        self._rank = rank
        self._position = {member: position for position, member in enumerate(self.members)}

    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.members)

    @property
    def recorder(self) -> Recorder:
        """The last calls of this rank on this group."""
        return self.backend.recorder

    def position(self, rank: int, operation: str, argument: str) -> int:
        """The group rank of a global rank.

        Raises:
            ArgumentError: That rank is not in the group.
        """
        found = self._position.get(rank)
        if found is None and (number := whole_number(rank)) is not None:
            found = self._position.get(number)
        if found is None:
            expected = f"a global rank in the group, one of {list(self.members)}"
            raise ArgumentError(explain(operation, argument, expected, rank, rank=self.members[self._rank]))
        return found

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """torch's functions may be given this group, and then call its methods under torch's names."""
            if name.startswith("__") or not hasattr(torch.distributed.ProcessGroup, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(mirrored(lambda: self), name)

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r} on {self.backend.name}: rank {self._rank} of {self.size()}>"


class HasWorld(type):
    """Gives a class the attribute `WORLD`, whose value changes with init and destroy."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        # The world knows groups, so it can't be imported where groups are defined.

        return current().default


class GroupMember(metaclass=HasWorld):
    """Names for two handles that users pass and compare.

    Attributes:
        WORLD: The group of all ranks; None before `init_process_group`.
        NON_GROUP_MEMBER: What `new_group` returns on ranks that are not in the new group.
    """

    NON_GROUP_MEMBER = -100


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


default_pg_timeout = GROUP_TIMEOUT


class World:
    """What one rank knows about its groups.

    Attributes:
        default: The group of all ranks, once initialised.
        store: What the ranks met through.
        groups: All groups that this rank is in, oldest first.
        made: How many groups were ever made by all ranks; the same on all of them, which names new ones.
        by_members: How many groups were made by their members alone, by list of members.
        owns_store: Whether this library made the store, and so closes it.
        at_close: What is done before the groups end.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Be as new."""
        self.default: ProcessGroup | None = None
        self.store: Store | None = None
        self.groups: list[ProcessGroup] = []
        self.made = 0
        self.by_members: Counter[tuple[int, ...]] = Counter()
        self.owns_store = False
        self.at_close: list[Callable[[], None]] = []

    def remove(self, group: ProcessGroup) -> None:
        """Leave one group."""
        self.groups.remove(group)
        backend, group.backend = group.backend, Destroyed(group.backend, group.name)
        backend.close()

    def say_goodbye(self) -> None:
        """Do what was asked to be done before the groups end."""
        for act in self.at_close:
            act()
        self.at_close.clear()

    def close(self) -> None:
        """Leave all groups, the newest first, and the store if it is ours."""
        self.say_goodbye()
        for group in reversed(list(self.groups)):
            self.remove(group)
        store, owned = self.store, self.owns_store
        self.forget()
        close = getattr(store, "close", None)
        if owned and close is not None:
            close()


_of_process = World()


_of_context: contextvars.ContextVar[World | None] = contextvars.ContextVar("torchdist_ref_world", default=None)


def current() -> World:
    """The world that calls without a group mean."""
    return _of_context.get() or _of_process


@contextmanager
def thread_rank() -> Iterator[World]:
    """Give the current context a world of its own, for ranks that are threads.

    >>> with thread_rank() as world:
    ...     current() is world
    True
    """
    world = World()
    token = _of_context.set(world)
    try:
        yield world
    finally:
        world.close()
        _of_context.reset(token)


def abort(reason: str) -> None:
    """Leave all groups of the current world at once: members that wait for this rank get an error.

    Args:
        reason: What they are told.
    """
    for group in current().groups:
        group.backend.abort(reason)


def default_group() -> ProcessGroup:
    """The group of all ranks.

    Raises:
        NotInitializedError: There is none.
    """
    group = current().default
    if group is None:
        raise NotInitializedError(
            "Default process group has not been initialized, please make sure to call init_process_group. "
            "(No group exists in this process.)"
        )
    return group


def resolve(group: ProcessGroup | int | None, operation: str = "process group") -> ProcessGroup | None:
    """The group that an argument means; None if this rank is not in it."""
    if group is None:
        return (_of_context.get() or _of_process).default or default_group()
    if isinstance(group, ProcessGroup):
        return group
    if group != GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(explain(operation, "group", "a group made by new_group, or None", group))
    return None


def _rank() -> int | None:
    group = current().default
    return None if group is None else group.rank()


def _after_fork() -> None:
    # The child has no backend threads and must not use its parent's links.
    _of_process.say_goodbye()
    _of_process.forget()


find_rank_with(_rank)


os.register_at_fork(after_in_child=_after_fork)


atexit.register(lambda: _of_process.close())


class group(metaclass=HasWorld):
    """The older place of `WORLD`.

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
