"""Several groups at once: by size, by a list of members, by splitting one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from torchdist_ref.errors import ArgumentError, explain, on_rank
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.lifecycle import new_group
from torchdist_ref.groups.queries import get_process_group_ranks, get_rank

Handle = ProcessGroup | int | None
Subgroups = tuple[Handle, list[Handle]]


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | int | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Subgroups:
    """Cut a group into groups of equal size: the first `group_size` ranks, the next, and so on.

    Every rank of the default group calls this.

    Args:
        group_size: Ranks in each new group. Default: the number of CUDA devices of this host.
        group: The group to cut. Default: all ranks.
        timeout: As for `new_group`.
        backend: As for `new_group`.
        pg_options: As for `new_group`.
        group_desc: As for `new_group`.

    Returns:
        The group that this rank is in, and a list of all new groups, with ``GroupMember.NON_GROUP_MEMBER`` in place of
        those that it is not in.

    Raises:
        ArgumentError: A size that is not positive, or that does not divide the number of ranks; or none is given and
            there is no CUDA device.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     mine, every = dist.new_subgroups(2)
        ...     return dist.get_process_group_ranks(mine), len(every)
        >>> run(program, 4)
        [([0, 1], 2), ([0, 1], 2), ([2, 3], 2), ([2, 3], 2)]
    """
    ranks = get_process_group_ranks(group)
    size = _size(group_size, len(ranks))
    lists = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    return new_subgroups_by_enumeration(lists, timeout, backend, pg_options, group_desc)


def _size(given: int | None, world: int) -> int:
    if given is None and not torch.cuda.is_available():
        raise ArgumentError(
            "new_subgroups: the default of argument 'group_size' is the number of CUDA devices, and "
            "there is none here; give 'group_size'."
        )
    size = torch.cuda.device_count() if given is None else given
    if not isinstance(size, int) or not 0 < size <= world:
        raise ArgumentError(explain("new_subgroups", "group_size", f"a number from 1 to {world}", size))
    if world % size:
        raise ArgumentError(explain("new_subgroups", "group_size", f"a divisor of the {world} ranks", size))
    return size


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Subgroups:
    """Make groups that share no rank. Every rank of the default group calls this, with the same lists.

    Args:
        ranks_per_subgroup_list: For each new group, the global ranks of its members.
        timeout: As for `new_group`.
        backend: As for `new_group`.
        pg_options: As for `new_group`.
        group_desc: As for `new_group`.

    Returns:
        The group that this rank is in, None if it is in none; and a list of all new groups, with
        ``GroupMember.NON_GROUP_MEMBER`` in place of those that it is not in.

    Raises:
        ArgumentError: No list, a rank in two of them, or out of range. No group has been made.
        MismatchError: Ranks called this with different lists.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     mine, every = dist.new_subgroups_by_enumeration([[0, 2], [3]])
        ...     return mine and dist.get_process_group_ranks(mine)
        >>> run(program, 4)
        [[0, 2], None, [0, 2], [3]]
    """
    _check_apart(ranks_per_subgroup_list)
    groups = [new_group(ranks, timeout, backend, pg_options, False, group_desc) for ranks in ranks_per_subgroup_list]
    me = get_rank()
    mine = next((made for made, ranks in zip(groups, ranks_per_subgroup_list, strict=True) if me in ranks), None)
    return mine, groups


def _check_apart(lists: Any) -> None:
    if not lists:
        expected = "a list of at least one list of ranks"
        raise ArgumentError(explain("new_subgroups_by_enumeration", "ranks_per_subgroup_list", expected, lists))
    seen: dict[int, Sequence[int]] = {}
    for ranks in lists:
        for rank in ranks:
            if rank in seen and seen[rank] is not ranks:
                words = f"Rank {rank} has appeared in both subgroup {list(seen[rank])} and {list(ranks)}"
                raise ArgumentError(f"new_subgroups_by_enumeration: {words}; they must share no rank{on_rank()}.")
            seen[rank] = ranks
