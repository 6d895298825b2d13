"""Several groups at once: new_subgroups, new_subgroups_by_enumeration, split_group, shrink_group.

new_subgroups calls new_group on every rank of the default group. split_group and shrink_group involve only members of
the parent group, which meet in the parent's part of the store.

A group with a dead member cannot run any call. Its surviving ranks still have the store, where shrink_group creates a
group of them. Under a launcher the store outlives every rank. Without one, rank 0 serves it. When rank 0 has died, the
first remaining rank serves a new one, which the others find through the memory of the group (`transports.successor`).

Ranks meet on sealed values only. Counters of a store cannot be sealed, so each rank counts its calls itself.

Do not add functions that communicate through a backend here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torchdist_ref.backends.registry import BackendChoice
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendArgumentError,
    DistNetworkError,
    MismatchError,
    RankStalledError,
    StoreTimeoutError,
    explain,
    on_rank,
)
from torchdist_ref.groups.creation import (
    backend_of_new_group,
    check_description,
    make_group,
    new_group,
    store_failure_explained,
    watch_members,
)
from torchdist_ref.groups.queries import get_rank
from torchdist_ref.groups.torch_tables import share
from torchdist_ref.groups.world import (
    ProcessGroup,
    aborted_on_failure,
    as_integer,
    current,
    default_group,
    refuse_unusable,
    resolve_member,
)
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.membership.words import both_sides
from torchdist_ref.recorder import StoreCalls
from torchdist_ref.stores.base import limit_requests
from torchdist_ref.stores.prefix import KeyRange, PrefixStore
from torchdist_ref.timeouts import timeout_of

Handle = ProcessGroup | int | None
Subgroups = tuple[Handle, list[Handle]]
Parts = list[list[int]]
SHRINK_DEFAULT, SHRINK_ABORT = 0, 1
_rounds: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""Calls so far by default group, and by prefix of the keys of their parts."""


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | int | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Subgroups:
    """Divide a group into groups of equal size: the first `group_size` ranks, the next, and so on.

    Every rank of the default group calls this.

    Args:
        group_size: Number of ranks in each new group. Default: the number of CUDA devices of this host.
        group: The group to divide. Default: all ranks.
        timeout: As for `new_group`.
        backend: As for `new_group`.
        pg_options: As for `new_group`.
        group_desc: As for `new_group`.

    Returns:
        The group that this rank is in, and a list of all new groups, with ``GroupMember.NON_GROUP_MEMBER`` in place of
        those that it is not in.

    Raises:
        ArgumentError: A size that is not positive or does not divide the number of ranks; or no size without a CUDA
            device.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     own, groups = dist.new_subgroups(2)
        ...     return dist.get_process_group_ranks(own), len(groups)
        >>> run(program, 4)
        [([0, 1], 2), ([0, 1], 2), ([2, 3], 2), ([2, 3], 2)]

    Elsewhere:
        ``MPI_Comm_split`` in MPI, ``ncclCommSplit`` in NCCL, ``axis_index_groups`` of JAX's collectives.
    """
    parent = resolve_member(group, "new_subgroups")
    refuse_unusable(parent, "new_subgroups")
    ranks = parent.members
    size = _subgroup_size(group_size, len(ranks))
    lists = [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]
    return new_subgroups_by_enumeration(lists, timeout, backend, pg_options, group_desc)


def _subgroup_size(group_size: int | None, world: int) -> int:
    if group_size is None and not torch.accelerator.device_count():
        raise ArgumentError(
            "new_subgroups: the default of argument 'group_size' is the number of accelerators, and "
            "there is none here; pass 'group_size'."
        )
    size = torch.accelerator.device_count() if group_size is None else group_size
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
    """Create disjoint groups. Every rank of the default group calls this, with the same lists.

    Args:
        ranks_per_subgroup_list: Global ranks of the members of each new group.
        timeout: As for `new_group`.
        backend: As for `new_group`.
        pg_options: As for `new_group`.
        group_desc: As for `new_group`.

    Returns:
        The group that this rank is in, or None; and a list of all new groups. ``GroupMember.NON_GROUP_MEMBER`` stands
        for a group that this rank is not in.

    Raises:
        ArgumentError: No list, a rank in two of them, or out of range. No group was created.
        MismatchError: Ranks called this with different lists.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     own, groups = dist.new_subgroups_by_enumeration([[0, 2], [3]])
        ...     return own and dist.get_process_group_ranks(own)
        >>> run(program, 4)
        [[0, 2], None, [0, 2], [3]]

    Elsewhere:
        ``MPI_Comm_split`` in MPI, ``ncclCommSplit`` in NCCL, ``axis_index_groups`` of JAX's collectives.
    """
    lists = _lists_of_ranks("new_subgroups_by_enumeration", "ranks_per_subgroup_list", ranks_per_subgroup_list)
    _check_disjoint(lists)
    groups = [new_group(ranks, timeout, backend, pg_options, False, group_desc) for ranks in lists]
    me = get_rank()
    own = next((group for group, ranks in zip(groups, lists, strict=True) if me in ranks), None)
    return own, groups


def _lists_of_ranks(operation: str, argument: str, value: Any) -> Parts:
    """Return lists of ranks, which may be arrays and hold integers of any type, as lists of int.

    Raises:
        ArgumentError: Not one or more lists of integers.
    """
    lists = list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else []
    if not lists or not all(isinstance(ranks, Iterable) for ranks in lists):
        raise ArgumentError(explain(operation, argument, "a list of at least one list of ranks", value))
    found = [[as_integer(rank) for rank in ranks] for ranks in lists]
    integers = [[rank for rank in ranks if rank is not None] for ranks in found]
    if integers != found:
        raise ArgumentError(explain(operation, argument, "lists of ranks (int)", value))
    return integers


def _check_disjoint(lists: Parts) -> None:
    seen: dict[int, list[int]] = {}
    for ranks in lists:
        for rank in ranks:
            if rank in seen and seen[rank] is not ranks:
                text = f"Rank {rank} has appeared in both subgroup {list(seen[rank])} and {list(ranks)}"
                raise ArgumentError(f"new_subgroups_by_enumeration: {text}; they must share no rank{on_rank()}.")
            seen[rank] = ranks


def split_group(
    parent_pg: ProcessGroup | int | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Split a group into disjoint groups. All members of the group call this, and no other rank.

    Args:
        parent_pg: The group to split. Default: all ranks.
        split_ranks: Members of each new group, as ranks in the parent group; the new group orders them ascending. All
            members pass the same lists. A rank may be in none of them.
        timeout: Default time-out of every call on the new group. Default: the parent's.
        pg_options: Accepted for compatibility with torch.
        group_desc: Name for error messages. Default: the parent's name and a number.
        backend: Name of the backend. Default: the parent's.

    Returns:
        The new group that this rank is in, or None.

    Raises:
        ArgumentError: No lists, ranks out of range or duplicate ranks, or this rank is not in the group.
        MismatchError: Ranks called this with different lists.
        RankStalledError: A member did not call in time.

    torch supports this on NCCL only; here it works on every backend.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     own = dist.split_group(split_ranks=[[0, 3], [1, 2]])
        ...     return dist.get_process_group_ranks(own)
        >>> run(program, 4)
        [[0, 3], [1, 2], [1, 2], [0, 3]]

    Elsewhere:
        ``MPI_Comm_split`` in MPI, ``ncclCommSplit`` in NCCL, ``axis_index_groups`` of JAX's collectives.
    """
    parent = resolve_member(parent_pg, "split_group", "parent_pg")
    refuse_unusable(parent, "split_group")
    parts = _checked_parts(split_ranks, parent)
    seconds = timeout_of("split_group", timeout, timedelta(seconds=parent.timeout)).total_seconds()
    check_description("split_group", group_desc)
    chosen = backend_of_new_group("split_group", parent, backend, pg_options)
    awaited = [parent.members[rank] for ranks in parts if parent.rank() in ranks for rank in ranks]
    with (
        current().recorded("split_group", f"split_ranks={parts}", awaited, parent),
        limit_requests(seconds),
        store_failure_explained(parent, "split_group"),
    ):
        number, keys = _next_keys("split_group", parent, parent.size())
        index = next((index for index, ranks in enumerate(parts) if parent.rank() in ranks), None)
        if index is None:
            _agree_on_parts("split_group", parent, keys, parts)
            keys.release()
            return None
        ranks = parts[index]
        members = tuple(parent.members[rank] for rank in ranks)
        store = _part_store(keys, index)
        watch = watch_members(store, parent, members, "split_group")
        with watch.interruption_published():
            _agree_on_parts("split_group", parent, keys, parts)
            _await_part(parent, watch, ranks, seconds)
        name = group_desc or f"{parent.group_desc}, split {number}, part {index}"
        own = ranks.index(parent.rank())
        group = make_group(watch, store, chosen, name, members, own, seconds)
        group.keys = keys
    return current().add(group)


def _checked_parts(split_ranks: Any, parent: ProcessGroup) -> Parts:
    parts = _lists_of_ranks("split_group", "split_ranks", split_ranks)
    listed = [rank for ranks in parts for rank in ranks]
    for rank in listed:
        if not 0 <= rank < parent.size():
            expected = f"lists of group ranks (int) from 0 to {parent.size() - 1}"
            raise ArgumentError(explain("split_group", "split_ranks", expected, split_ranks))
    if len(set(listed)) != len(listed) or not all(parts):
        expected = "lists with at least one rank each and no rank twice"
        raise ArgumentError(explain("split_group", "split_ranks", expected, split_ranks))
    return [sorted(ranks) for ranks in parts]


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | int | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Replace a group by a new one without some of its ranks. Only the ranks that remain call this.

    Args:
        ranks_to_exclude: Ranks in the group to exclude, dead or alive; at least one, and not all.
        group: The group to shrink, which is destroyed. Default: all ranks. The new group is then the default group,
            with ranks renumbered from 0, and all other groups are destroyed too.
        shrink_flags: 1 to abort the group's pending calls first; 0 if none is pending. Ranks that wait in an aborted
            call get an error, and can then call this. ``ref`` notifies all ranks of a death at once; on ``gloo``, some
            learn of it only by their time-out. Default: 0.
        pg_options: As for `init_process_group`.

    Returns:
        The new group. It has the remaining ranks in their old order, the same backend and the same time-out.

    Raises:
        ArgumentTypeError: Not a list of integers.
        ArgumentError: No ranks, all ranks, ranks that are not in the group, or duplicates; unknown flags; or a group
            that this rank is not in.
        BackendArgumentError: This rank is excluded.
        MismatchError: The remaining ranks passed different lists.
        RankStalledError: A remaining rank did not call within the group's time-out.
        DistNetworkError: The store died with the rank that served it, on a backend other than ``ref``.

    torch supports this on NCCL only, after whose ``ncclCommShrink`` it is named; here it works on every backend.

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

    Elsewhere:
        ``MPIX_Comm_shrink`` of MPI's ULFM extension, ``ncclCommShrink`` in NCCL; none in JAX.
    """
    parent = resolve_member(group, "shrink_group")
    refuse_unusable(parent, "shrink_group")
    remaining = _remaining(parent, ranks_to_exclude, shrink_flags)
    chosen = backend_of_new_group("shrink_group", parent, None, pg_options)
    remain = [parent.members[rank] for rank in remaining]
    text = f"ranks_to_exclude={sorted(ranks_to_exclude)}"
    with current().recorded("shrink_group", text, remain, parent):
        return _shrink(parent, chosen, remaining, ranks_to_exclude, shrink_flags, pg_options)


def _shrink(
    parent: ProcessGroup,
    backend: BackendChoice,
    remaining: list[int],
    excluded: list[int],
    flags: int,
    pg_options: Any,
) -> ProcessGroup:
    """Replace a group by one of its remaining ranks; see `shrink_group`."""
    if flags == SHRINK_ABORT:
        parent.backend.end_calls(f"shrink_group: group {parent.group_desc!r} continues without ranks {excluded}")
    with limit_requests(parent.timeout):
        try:
            keys, watch = _meet_remaining(parent, remaining)
        except DistNetworkError as gone:
            _replace_store(parent, remaining, gone)
            keys, watch = _meet_remaining(parent, remaining)
    old_ranks = [parent.members[rank] for rank in remaining]
    world, own = current(), remaining.index(parent.rank())
    is_default = parent is world.default
    members = tuple(range(len(remaining)) if is_default else old_ranks)
    name = f"{parent.group_desc}, shrunk"
    # The old group is destroyed last, because its backend detects failures of the remaining ranks until then.
    with limit_requests(parent.timeout):
        shrunk = make_group(watch, _part_store(keys, 0), backend, name, members, own, parent.timeout, (pg_options,))
    with aborted_on_failure(shrunk.backend, "shrink_group"):
        shrunk.keys = keys
        if parent.keys is not None:
            parent.keys = parent.keys._replace(users=len(remaining))
        for old in reversed(list(world.groups)) if is_default else [parent]:
            world.destroy(old)
        world.add(shrunk)
        world.failure = ""
        if is_default:
            world.default = shrunk
            share(world)
            # The flight recorder identifies the awaited ranks by their old global ranks.
            world.store_calls = StoreCalls()
    return shrunk


def _meet_remaining(parent: ProcessGroup, remaining: list[int]) -> tuple[KeyRange, MemberWatch]:
    """Wait until all remaining ranks have arrived; return the keys of the new group, and a watch over its members."""
    _, keys = _next_keys("shrink_group", parent, len(remaining))
    members = [parent.members[rank] for rank in remaining]
    watch = watch_members(_part_store(keys, 0), parent, members, "shrink_group")
    with watch.interruption_published():
        _agree_on_parts("shrink_group", parent, keys, [remaining])
        _await_part(parent, watch, remaining, parent.timeout)
    return keys, watch


def _replace_store(parent: ProcessGroup, remaining: list[int], gone: DistNetworkError) -> None:
    """Have the first remaining rank serve a new store in place of the group's, whose server is gone.

    Raises:
        DistNetworkError: The group's backend has no way to find the new one.
    """
    world, is_default = current(), parent is current().default
    successor = parent.backend.successor_store(parent.store, remaining, parent.timeout)
    if successor is None:
        raise gone
    # Ranks number their calls of shrink_group in a store, and some may have called it more often than others before the
    # server ended. The new store is empty, so all begin again from zero.
    _rounds[default_group()].pop(_parts_prefix("shrink_group", parent), None)
    parent.store, parent.keys = successor, None
    if is_default:
        world.replace_store(successor.underlying_store)


def _remaining(group: ProcessGroup, excluded: Any, flags: Any) -> list[int]:
    """Return the group ranks that are not excluded, after a check of all arguments."""
    if not isinstance(excluded, list) or any(as_integer(rank) is None for rank in excluded):
        raise ArgumentTypeError(explain("shrink_group", "ranks_to_exclude", "a list of integers", excluded))
    if flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ArgumentError(explain("shrink_group", "shrink_flags", f"{SHRINK_DEFAULT} or {SHRINK_ABORT}", flags))
    remaining = [rank for rank in range(group.size()) if rank not in excluded]
    if not excluded or not remaining or len(remaining) + len(excluded) != group.size():
        expected = f"at least one group rank from 0 to {group.size() - 1}, none twice, and not all of them"
        raise ArgumentError(explain("shrink_group", "ranks_to_exclude", expected, excluded))
    if group.rank() not in remaining:
        expected, hint = "other ranks than this one", "An excluded rank does not call shrink_group: end its process."
        raise BackendArgumentError(explain("shrink_group", "ranks_to_exclude", expected, excluded, hint=hint))
    return remaining


def _next_keys(operation: str, parent: ProcessGroup, users: int) -> tuple[int, KeyRange]:
    """Return how often this rank has called an operation on a group, this time included, and the keys of the parts.

    They are not below the parent's: a part outlives its parent.
    """
    counts, prefix = _rounds.setdefault(default_group(), Counter()), _parts_prefix(operation, parent)
    counts[prefix] += 1
    assert isinstance(parent.store, PrefixStore)
    return counts[prefix], KeyRange(parent.store.underlying_store, f"{prefix}/{counts[prefix]}", users)


def _parts_prefix(operation: str, parent: ProcessGroup) -> str:
    assert isinstance(parent.store, PrefixStore)
    return f"{operation}/{parent.store.prefix.replace('/', '.')}"


def _part_store(keys: KeyRange, index: int) -> PrefixStore:
    """Return the store of one part."""
    return PrefixStore(f"{keys.prefix}/{index}", keys.store)


def _agree_on_parts(operation: str, parent: ProcessGroup, keys: KeyRange, parts: Parts) -> None:
    """Compare this rank's parts with those of the first rank, which publishes them.

    Raises:
        MismatchError: They differ. Ranks that wait for this one raise it too.
    """
    rank = parent.rank()
    own = parent.members[rank], parts
    first_rank, first = json.loads(keys.store.compare_set(f"{keys.prefix}/lists", "", json.dumps(own)))
    if first == parts:
        return
    sides = both_sides((own[0], f"{parts}"), (first_rank, f"{first}"))
    reason = f"{operation}: {sides}. All ranks must pass the same."
    for index, ranks in enumerate(first):
        if rank in ranks:
            store = _part_store(keys, index)
            MemberWatch(store, ranks.index(rank), ranks, operation).publish(MismatchError(reason))
    raise MismatchError(reason)


def _await_part(parent: ProcessGroup, watch: MemberWatch, ranks: list[int], seconds: float) -> None:
    """Wait until all members of a part have arrived, before any of them connects.

    Raises:
        RankDiedError: A member has died.
        RankStalledError: A member did not arrive in time.
        MismatchError: A member passed other parts.
        AuthenticationError: A process outside this job wrote that a member has arrived.
    """
    store, keys = watch.store, {rank: f"came/{rank}" for rank in ranks}
    try:
        store.wait_get(list(keys.values()), timedelta(seconds=seconds), {keys[parent.rank()]: ""})
    except StoreTimeoutError:
        absent = [parent.members[rank] for rank, key in keys.items() if store.get_if_present(key) is None]
        raise RankStalledError(
            f"{watch.operation}: of group {parent.group_desc!r}, ranks {absent} did not come in {seconds:g} s "
            f"(on rank {parent.members[parent.rank()]}). Check where they hang."
        ) from None
