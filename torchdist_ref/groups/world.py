"""The current world: which groups this rank has. Init, destroy, new_group.

There is one world per process, as in torch: user code calls from plain threads, from completion callbacks
and from autograd's threads, and all mean the same one. Only where ranks are threads (`testing`, notebooks)
does a context variable override it. This and the table of backends are the package's only module state.

Don't add collectives here, nor anything that a backend needs to know.
"""

from __future__ import annotations

import atexit
import contextvars
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torchdist_ref.errors import ArgumentError, NotInitializedError, explain, find_rank_with
from torchdist_ref.groups.destroyed import Destroyed
from torchdist_ref.groups.group import GroupMember, ProcessGroup
from torchdist_ref.stores import Store

default_pg_timeout = DEFAULT_TIMEOUT = timedelta(minutes=30)


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
