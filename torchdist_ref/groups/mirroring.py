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
from torch.distributed import distributed_c10d as c10d

from torchdist_ref.backends import registry
from torchdist_ref.groups.world import ProcessGroup, World, current, default_group

_lock = threading.Lock()


def _torch_tables() -> Any:
    return c10d._world  # noqa: SLF001 - torch registers groups in no public way


def mirror() -> None:
    """Let torch's functions accept the groups of the current world; do nothing if torch has its own default group.

    `destroy_process_group` undoes it. Ranks that are threads share one mirror: each call uses the default group of
    the calling thread's world.
    """
    world, group = current(), default_group()
    with _lock:
        tables = _torch_tables()
        if not torch.distributed.is_initialized():
            _register(registry.mirrored(default_group), group)
        registered = tables.default_pg
        # A group that torch made itself keeps no such list.
        if not hasattr(registered, "shown_in"):
            return
        for own in world.groups:
            tables.pg_map[own] = own.backend.name, None
            tables.pg_group_ranks[own] = _group_ranks(own)
        if world not in registered.shown_in:
            registered.shown_in.append(world)
            world.on_close.append(lambda: _unregister(registered, world))


def _register(mirrored: Any, group: ProcessGroup) -> None:
    tables = _torch_tables()
    tables.pg_map[mirrored] = group.backend.name, None
    tables.pg_names[mirrored] = group.name
    tables.pg_group_ranks[mirrored] = _group_ranks(group)
    tables.pg_backend_config[mirrored] = f"cpu:{group.backend.name}"
    c10d._update_default_pg(mirrored)  # noqa: SLF001 - as above


def _group_ranks(group: ProcessGroup) -> dict[int, int]:
    return {member: index for index, member in enumerate(group.members)}


def _unregister(mirrored: Any, world: World) -> None:
    """Remove a world's groups from torch's tables, and with the last world the mirror."""
    with _lock:
        tables = _torch_tables()
        mirrored.shown_in.remove(world)
        removed = [*world.groups, *([] if mirrored.shown_in else [mirrored])]
        for table in (tables.pg_map, tables.pg_group_ranks, tables.pg_names):
            for group in removed:
                table.pop(group, None)
        tables.pg_backend_config.pop(mirrored, None)
        if not mirrored.shown_in and tables.default_pg is mirrored:
            c10d._update_default_pg(None)  # noqa: SLF001 - as above
