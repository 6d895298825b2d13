"""Who am I, how many are we, on what: questions that cost no communication."""

from __future__ import annotations

from torchdist_ref.errors import ArgumentError, explain, on_rank
from torchdist_ref.groups.destroyed import refuse_destroyed
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.world import resolve


def get_rank(group: ProcessGroup | int | None = None) -> int:
    """This rank's number in a group, from 0; -1 where this rank is not in it.

    Args:
        group: Default: the group of all ranks.

    Raises:
        ArgumentError: The group was destroyed.
        NotInitializedError: There is no group yet.
    """
    found = resolve(group)
    if found is None:
        return -1
    refuse_destroyed(found, "get_rank")
    return found.rank()


def get_world_size(group: ProcessGroup | int | None = None) -> int:
    """How many ranks a group has; -1 where this rank is not in it.

    Args:
        group: Default: the group of all ranks.

    Raises:
        NotInitializedError: There is no group yet.
    """
    found = resolve(group)
    return -1 if found is None else found.size()


def get_backend(group: ProcessGroup | int | None = None) -> str:
    """The name of a group's backend.

    Args:
        group: Default: the group of all ranks.

    Raises:
        ArgumentError: This rank is not in the group, or the group was destroyed.
        NotInitializedError: There is no group yet.
    """
    return _member(group, "get_backend").backend.name


def get_process_group_ranks(group: ProcessGroup | int | None) -> list[int]:
    """The global ranks of a group's members, in group order.

    Raises:
        ArgumentError: This rank is not in the group, or the group was destroyed.
    """
    return list(_member(group, "get_process_group_ranks").members)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """The global rank of a group's member.

    Raises:
        ArgumentError: The group has no such rank, this rank is not in it, or it was destroyed.
    """
    found = _member(group, "get_global_rank")
    if not 0 <= group_rank < found.size():
        raise ArgumentError(f"get_global_rank: Group rank {group_rank} is not part of group {found.name!r}{on_rank()}.")
    return found.members[group_rank]


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """A global rank's number in a group.

    Raises:
        ArgumentError: That rank or this one is not in the group, or the group was destroyed.
    """
    found = _member(group, "get_group_rank")
    if global_rank not in found.members:
        words = f"Global rank {global_rank} is not part of group {found.name!r}"
        raise ArgumentError(f"get_group_rank: {words}{on_rank()}.")
    return found.members.index(global_rank)


def _member(group: ProcessGroup | int | None, operation: str) -> ProcessGroup:
    found = resolve(group)
    if found is None:
        raise ArgumentError(explain(operation, "group", "a group that this rank is in", group))
    refuse_destroyed(found, operation)
    return found
