"""Several groups at once: new_subgroups, new_subgroups_by_enumeration, split_group, shrink_group.

new_subgroups calls new_group on every rank of the default group. split_group and shrink_group involve only members of
the parent group, which meet in the parent's part of the store.

A group with a dead member cannot run any call. Its surviving ranks still have the store, where shrink_group creates a
group of them. That works only while the store lives: without a launcher rank 0 holds it, under a launcher it outlives
every rank.

Do not add functions that communicate through a backend here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.registry import create
from torchdist_ref.debug.checked import apply_debug_level
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendArgumentError,
    MismatchError,
    RankStalledError,
    StoreTimeoutError,
    explain,
    on_rank,
)
from torchdist_ref.groups.lifecycle import new_group, seconds_of, watched
from torchdist_ref.groups.queries import get_process_group_ranks, get_rank
from torchdist_ref.groups.world import ProcessGroup, World, current, default_group, refuse_destroyed, resolve
from torchdist_ref.stores import PrefixStore

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


Lists = list[list[int]]


def split_group(
    parent_pg: ProcessGroup | int | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Cut a group into groups that share no rank. The members of the group call this, and nobody else.

    Args:
        parent_pg: The group to cut. Default: all ranks.
        split_ranks: For each new group its members, as ranks in the group to cut; the new group counts them
            ascending. All members give the same lists. A rank may be in none of them.
        timeout: How long any wait takes at most. Default: 30 minutes.
        pg_options: Accepted for torch's sake.
        group_desc: A name for error messages.
        backend: Default: that of the group to cut.

    Returns:
        The new group that this rank is in; None if it is in none.

    Raises:
        ArgumentError: No lists, ranks out of range or given twice, or this rank is not in the group.
        MismatchError: Ranks called this with different lists.
        RankStalledError: A member did not come in time.

    torch does this on NCCL only; here it works on every backend.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     mine = dist.split_group(split_ranks=[[0, 3], [1, 2]])
        ...     return dist.get_process_group_ranks(mine)
        >>> run(program, 4)
        [[0, 3], [1, 2], [1, 2], [0, 3]]
    """
    parent = resolve(parent_pg)
    if parent is None:
        rank = default_group().rank()
        raise ArgumentError(explain("split_group", "parent_pg", "a group that this rank is in", parent_pg, rank=rank))
    refuse_destroyed(parent, "split_group")
    lists, seconds = _checked(split_ranks, parent), seconds_of(timeout, "split_group")
    number = parent.store.add(f"split/rounds/{parent.rank()}", 1)
    agree_on_parts("split_group", parent, number, lists)
    index = next((index for index, ranks in enumerate(lists) if parent.rank() in ranks), None)
    if index is None:
        return None
    others = [rank for rank in lists[index] if rank != parent.rank()]
    store = place_of_part("split_group", parent, number, index)
    await_part("split_group", parent, watched(store, parent, others, "split_group"), lists[index], seconds)
    name = group_desc or f"{parent.name}, split {number}, part {index}"
    return _join(parent, store, lists[index], backend or parent.backend.name, name, seconds)


def _checked(split_ranks: Any, parent: ProcessGroup) -> Lists:
    if not split_ranks:
        raise ArgumentError(explain("split_group", "split_ranks", "a list of at least one list of ranks", split_ranks))
    every = [rank for ranks in split_ranks for rank in ranks]
    for rank in every:
        if not isinstance(rank, int) or not 0 <= rank < parent.size():
            expected = f"lists of group ranks from 0 to {parent.size() - 1}"
            raise ArgumentError(explain("split_group", "split_ranks", expected, split_ranks))
    if len(set(every)) != len(every) or not all(split_ranks):
        expected = "lists with at least one rank each and no rank twice"
        raise ArgumentError(explain("split_group", "split_ranks", expected, split_ranks))
    return [sorted(ranks) for ranks in split_ranks]


def place_of_part(operation: str, parent: ProcessGroup, number: int, index: int) -> PrefixStore:
    """Where the members of one part of a group meet, the n-th time that the group is cut."""
    return PrefixStore(f"{operation}/{number}/{index}", parent.store)


def agree_on_parts(operation: str, parent: ProcessGroup, number: int, lists: Lists) -> None:
    """The first rank to come writes down the lists; whoever comes with others is told, and so are those who wait.

    Raises:
        MismatchError: This rank's lists are others than the first one's.
    """
    said: Lists = json.loads(parent.store.compare_set(f"{operation}/{number}/lists", "", json.dumps(lists)))
    if said == lists:
        return
    me = parent.rank()
    reason = f"{operation}: rank {parent.members[me]} gives {lists}, another rank gave {said}. All must give the same."
    for index, ranks in enumerate(said):
        if me in ranks:
            place_of_part(operation, parent, number, index).set(f"came/{me}", reason)
    raise MismatchError(reason)


def await_part(operation: str, parent: ProcessGroup, store: PrefixStore, ranks: list[int], seconds: float) -> None:
    """Wait for the members of a part, before any of them counts on the others.

    Raises:
        RankStalledError: One of them did not come in time.
        MismatchError: One of them came with other lists.
    """
    store.set(f"came/{parent.rank()}", "")
    try:
        store.wait([f"came/{rank}" for rank in ranks], timedelta(seconds=seconds))
    except StoreTimeoutError:
        absent = [parent.members[rank] for rank in ranks if not store.check([f"came/{rank}"])]
        raise RankStalledError(
            f"{operation}: of group {parent.name!r}, ranks {absent} did not come in {seconds:g} s "
            f"(on rank {parent.members[parent.rank()]}). See what they do."
        ) from None
    for answer in store.multi_get([f"came/{rank}" for rank in ranks]):
        if answer:
            raise MismatchError(answer.decode())


def _join(
    parent: ProcessGroup, store: PrefixStore, ranks: list[int], backend: str, name: str, seconds: float
) -> ProcessGroup:
    members, rank = tuple(parent.members[r] for r in ranks), ranks.index(parent.rank())
    membership = Membership(store, rank, members, name, seconds)
    made = apply_debug_level(create(backend, membership), membership)
    group = ProcessGroup(members, rank, made, name, seconds, store)
    current().groups.append(group)
    return group


SHRINK_DEFAULT, SHRINK_ABORT = 0, 1


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | int | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Make a group of the ranks that stay, in place of the group that they are in. Only those that stay call this.

    Args:
        ranks_to_exclude: Ranks in the group to shrink, dead or alive; at least one, and not all.
        group: The group to shrink; it ends. Default: the group of all ranks, and the new one is that from then on, with
            ranks counted anew from 0; all other groups end with it.
        shrink_flags: 1 to give up the group's calls under way first, so that ranks that wait in them get an error and
            come; 0 where none are. ``ref`` tells all ranks of a death at once; on ``gloo``, some hear of it only at
            the time-out.
        pg_options: As for `init_process_group`.

    Returns:
        The new group, in which the ranks that stay have their old order, on the same backend, with the same time-out.

    Raises:
        ArgumentTypeError: Not a list of whole numbers.
        ArgumentError: None, all, or ranks that are not in the group, or one twice; flags that mean nothing; a group of
            one rank, or one that this rank is not in.
        BackendArgumentError: This rank is among the excluded.
        MismatchError: Ranks that stay gave different lists.
        RankStalledError: A rank that is to stay did not come within the group's time-out.
        DistNetworkError: The store is gone, with the rank that held it.

    torch does this on NCCL only, whose ``ncclCommShrink`` it is named after; here it works on every backend.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     if rank == 1:
        ...         return "gone"
        ...     dist.shrink_group([1])
        ...     tensor = torch.tensor([rank])
        ...     dist.all_reduce(tensor)
        ...     return dist.get_rank(), dist.get_world_size(), tensor.item()
        >>> run(program, 3)
        [(0, 2, 2), 'gone', (1, 2, 2)]
    """
    parent = resolve(group)
    if parent is None:
        rank = default_group().rank()
        raise ArgumentError(explain("shrink_group", "group", "a group that this rank is in", group, rank=rank))
    refuse_destroyed(parent, "shrink_group")
    stay = _staying(parent, ranks_to_exclude, shrink_flags)
    if shrink_flags == SHRINK_ABORT:
        parent.backend.abort(f"shrink_group: group {parent.name!r} goes on without ranks {ranks_to_exclude}")
    number = parent.store.add(f"shrink/rounds/{parent.rank()}", 1)
    agree_on_parts("shrink_group", parent, number, [stay])
    store = place_of_part("shrink_group", parent, number, 0)
    await_part("shrink_group", parent, store, stay, parent.timeout)
    return _in_place_of(parent, stay, store, pg_options)


def _staying(group: ProcessGroup, exclude: Any, flags: Any) -> list[int]:
    """The group ranks that stay."""
    if not isinstance(exclude, list) or not all(isinstance(rank, int) for rank in exclude):
        raise ArgumentTypeError(explain("shrink_group", "ranks_to_exclude", "a list of whole numbers", exclude))
    if flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ArgumentError(explain("shrink_group", "shrink_flags", f"{SHRINK_DEFAULT} or {SHRINK_ABORT}", flags))
    stay = [rank for rank in range(group.size()) if rank not in exclude]
    if not exclude or not stay or len(stay) + len(exclude) != group.size():
        expected = f"at least one group rank from 0 to {group.size() - 1}, none twice, and not all of them"
        raise ArgumentError(explain("shrink_group", "ranks_to_exclude", expected, exclude))
    if group.rank() not in stay:
        hint = "A rank that is excluded takes no part: let its process end."
        raise BackendArgumentError(
            explain("shrink_group", "ranks_to_exclude", "other ranks than this one", exclude, hint=hint)
        )
    return stay


def _in_place_of(parent: ProcessGroup, stay: list[int], store: Any, options: Any) -> ProcessGroup:
    world, everybody = current(), parent is current().default
    members = tuple(range(len(stay))) if everybody else tuple(parent.members[rank] for rank in stay)
    for group in reversed(list(world.groups)) if everybody else [parent]:
        world.remove(group)
    rank, name = stay.index(parent.rank()), f"{parent.name}, shrunk"
    membership = Membership(store, rank, members, name, parent.timeout, options)
    backend = apply_debug_level(create(parent.backend.name, membership), membership)
    made = ProcessGroup(members, rank, backend, name, parent.timeout, store)
    return _known(world, made, everybody)


def _known(world: World, group: ProcessGroup, everybody: bool) -> ProcessGroup:
    world.groups.append(group)
    if everybody:
        world.default = group
    return group
