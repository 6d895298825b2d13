"""split_group: a group cut in groups by its own members, without the other ranks of the job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torchdist_ref.backends.base import Membership, create
from torchdist_ref.debug.checked import as_asked
from torchdist_ref.errors import ArgumentError, MismatchError, RankStalledError, StoreTimeoutError, explain
from torchdist_ref.groups.destroyed import refuse_destroyed
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.lifecycle import seconds_of
from torchdist_ref.groups.places import watched
from torchdist_ref.groups.world import current, default_group, resolve
from torchdist_ref.stores import PrefixStore

Lists = list[list[int]]
_NAME = "split_group"


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
    refuse_destroyed(parent, _NAME)
    lists, seconds = _checked(split_ranks, parent), seconds_of(timeout, "split_group")
    number = parent.store.add(f"split/rounds/{parent.rank()}", 1)
    agree_on_parts(_NAME, parent, number, lists)
    index = next((index for index, ranks in enumerate(lists) if parent.rank() in ranks), None)
    if index is None:
        return None
    others = [rank for rank in lists[index] if rank != parent.rank()]
    store = place_of_part(_NAME, parent, number, index)
    await_part(_NAME, parent, watched(store, parent, others, _NAME), lists[index], seconds)
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
    made = as_asked(create(backend, membership), membership)
    group = ProcessGroup(members, rank, made, name, seconds, store)
    current().groups.append(group)
    return group
