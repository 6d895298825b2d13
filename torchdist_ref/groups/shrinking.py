"""shrink_group: the ranks that are left go on without those that are gone.

A group whose member died can carry out nothing any more; but its ranks that live still have the store, and make a group
of themselves there. Nobody asks the excluded ranks anything. The old group ends on those who shrink it, and if it was
the group of all ranks, the new one takes its place, ranks are counted anew, and all other groups end too.

The group is as good as the store: where the excluded rank held it, as rank 0 does without a launcher, nothing is left
to meet through. Under a launcher the store outlives every rank.
"""

from __future__ import annotations

from typing import Any

from torchdist_ref.backends.base import Membership, create
from torchdist_ref.debug.checked import as_asked
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, BackendArgumentError, explain
from torchdist_ref.groups.destroyed import refuse_destroyed
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.splitting import agree_on_parts, await_part, place_of_part
from torchdist_ref.groups.world import World, current, default_group, resolve

SHRINK_DEFAULT, SHRINK_ABORT = 0, 1
_NAME = "shrink_group"


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
        raise ArgumentError(explain(_NAME, "group", "a group that this rank is in", group, rank=rank))
    refuse_destroyed(parent, _NAME)
    stay = _staying(parent, ranks_to_exclude, shrink_flags)
    if shrink_flags == SHRINK_ABORT:
        parent.backend.abort(f"shrink_group: group {parent.name!r} goes on without ranks {ranks_to_exclude}")
    number = parent.store.add(f"shrink/rounds/{parent.rank()}", 1)
    agree_on_parts(_NAME, parent, number, [stay])
    store = place_of_part(_NAME, parent, number, 0)
    await_part(_NAME, parent, store, stay, parent.timeout)
    return _in_place_of(parent, stay, store, pg_options)


def _staying(group: ProcessGroup, exclude: Any, flags: Any) -> list[int]:
    """The group ranks that stay."""
    if not isinstance(exclude, list) or not all(isinstance(rank, int) for rank in exclude):
        raise ArgumentTypeError(explain(_NAME, "ranks_to_exclude", "a list of whole numbers", exclude))
    if flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ArgumentError(explain(_NAME, "shrink_flags", f"{SHRINK_DEFAULT} or {SHRINK_ABORT}", flags))
    stay = [rank for rank in range(group.size()) if rank not in exclude]
    if not exclude or not stay or len(stay) + len(exclude) != group.size():
        expected = f"at least one group rank from 0 to {group.size() - 1}, none twice, and not all of them"
        raise ArgumentError(explain(_NAME, "ranks_to_exclude", expected, exclude))
    if group.rank() not in stay:
        hint = "A rank that is excluded takes no part: let its process end."
        raise BackendArgumentError(explain(_NAME, "ranks_to_exclude", "other ranks than this one", exclude, hint=hint))
    return stay


def _in_place_of(parent: ProcessGroup, stay: list[int], store: Any, options: Any) -> ProcessGroup:
    world, everybody = current(), parent is current().default
    members = tuple(range(len(stay))) if everybody else tuple(parent.members[rank] for rank in stay)
    for group in reversed(list(world.groups)) if everybody else [parent]:
        world.remove(group)
    rank, name = stay.index(parent.rank()), f"{parent.name}, shrunk"
    membership = Membership(store, rank, members, name, parent.timeout, options)
    backend = as_asked(create(parent.backend.name, membership), membership)
    made = ProcessGroup(members, rank, backend, name, parent.timeout, store)
    return _known(world, made, everybody)


def _known(world: World, group: ProcessGroup, everybody: bool) -> ProcessGroup:
    world.groups.append(group)
    if everybody:
        world.default = group
    return group
