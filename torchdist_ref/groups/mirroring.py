"""Registration of our groups with torch, so that hooks written for torch run on our backends unchanged.

Such a hook calls ``torch.distributed.all_reduce(tensor, group=state)``. With ``group=None`` torch looks up its default
group: `mirror` registers a mirror of ours there, if torch has none of its own. With a group of ours, torch calls the
group's methods by torch's names; ``ProcessGroup.__getattr__`` provides them. Mirrors leave torch's tables when our
group is destroyed. Do not add translation of calls: backends do that.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d as theirs

from torchdist_ref.backends import registry
from torchdist_ref.groups.world import ProcessGroup, World, current, default_group

_lock = threading.Lock()


def mirror() -> None:
    """Let torch's functions work on the groups of the current world; nothing where torch has a default group itself.

    Undone by `destroy_process_group`. Where ranks are threads, they share the one mirror: each call goes to the
    default group of the thread's own world.
    """
    world, group = current(), default_group()
    with _lock:
        if not torch.distributed.is_initialized():
            _hang(registry.mirrored(default_group), group)
        shown = theirs._get_default_group()
        # A group that torch made itself keeps no such list.
        if not hasattr(shown, "shown_in"):
            return
        for one in world.groups:
            theirs._world.pg_map[one] = one.backend.name, None  # type: ignore[index, assignment]
            theirs._world.pg_group_ranks[one] = _ranks(one)  # type: ignore[index]
        if world not in shown.shown_in:
            shown.shown_in.append(world)
            world.at_close.append(lambda: _take_down(shown, world))


def _hang(mirrored: Any, group: ProcessGroup) -> None:
    theirs._world.pg_map[mirrored] = group.backend.name, None  # type: ignore[assignment]
    theirs._world.pg_names[mirrored] = group.name  # type: ignore[assignment]
    theirs._world.pg_group_ranks[mirrored] = _ranks(group)
    theirs._world.pg_backend_config[mirrored] = f"cpu:{group.backend.name}"
    theirs._update_default_pg(mirrored)


def _ranks(group: ProcessGroup) -> dict[int, int]:
    return {member: position for position, member in enumerate(group.members)}


def _take_down(mirrored: Any, world: World) -> None:
    """Forget a world's groups, and with the last world the mirror."""
    with _lock:
        mirrored.shown_in.remove(world)
        gone = [*world.groups, *([] if mirrored.shown_in else [mirrored])]
        for table in (theirs._world.pg_map, theirs._world.pg_group_ranks, theirs._world.pg_names):
            for one in gone:
                table.pop(one, None)
        theirs._world.pg_backend_config.pop(mirrored, None)
        if not mirrored.shown_in and theirs._world.default_pg is mirrored:
            theirs._update_default_pg(None)
