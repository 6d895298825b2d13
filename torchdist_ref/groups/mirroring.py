"""Registration of our groups with torch: one default group, known to both libraries.

From `init_process_group` on, torch's default group is ours. All of torch finds it in torch's tables and in its C++
registry of names: DistributedSampler, torch's DDP, FSDP2, DTensor, functional collectives, checkpoints. Each group of
ours has a counterpart, a process group of torch's that passes calls on; see `Mirrored`. Either library's
``destroy_process_group`` destroys the group in both.

torch keeps its tables per process. Ranks that are threads register nothing at init: `mirror` shows their groups to
hooks written for torch.

All use of torch's private tables is in this module. Do not add translation of calls: backends do that.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch.distributed
from torch._C import _distributed_c10d as names_in_torch
from torch.distributed import distributed_c10d as c10d

from torchdist_ref.backends import registry
from torchdist_ref.errors import ArgumentError, on_rank
from torchdist_ref.groups.world import ProcessGroup, World, current, default_group, is_thread_rank
from torchdist_ref.stores import PrefixStore

_lock = threading.Lock()
# Objects of torch's that a forked child inherits: destroying them would wait for threads that the child lacks.
_inherited: list[Any] = []


def _torch_tables() -> Any:
    return c10d._world  # noqa: SLF001 - torch registers groups in no public way


def require_no_group_of_torch() -> None:
    """Raise if torch has a default group of its own.

    Raises:
        ArgumentError: It has one.
    """
    if is_thread_rank() or not torch.distributed.is_initialized() or hasattr(_torch_tables().default_pg, "ours"):
        return
    raise ArgumentError(
        f"init_process_group: torch.distributed has a default group already, on backend "
        f"{torch.distributed.get_backend()!r}{on_rank()}. This library's default group is torch's, and a process has "
        f"one. If this program made the first one, leave out that call. If Lightning, accelerate or another library "
        f"made it, leave out this call and pass backend='ref' to its initialization."
    )


def share(world: World) -> None:
    """Make the default group of the process torch's default group; do nothing where ranks are threads.

    The groups that exist and those created later are registered too, until they are destroyed.
    """
    if is_thread_rank() or torch.distributed.is_initialized():
        return
    world.registration = Registration(world)


class Registration:
    """Groups of one world that torch knows.

    Args:
        world: The world; it has a default group, which becomes torch's.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._process = os.getpid()
        assert world.default is not None
        self._default = world.default
        self._store = registry.store_for_torch(PrefixStore("torch", self._default.store))
        self._mirrors: dict[ProcessGroup, Any] = {}
        for group in world.groups:
            self.add(group)
        c10d._update_default_pg(self._default.in_torch)  # noqa: SLF001 - as above

    def add(self, group: ProcessGroup) -> None:
        """Register a group."""
        tables, mirror = _torch_tables(), group.in_torch
        name = _unique_name(group.name)
        mirror.setGroupName(name)
        mirror.on_shutdown = lambda: self._shut_down(group)
        self._mirrors[group] = mirror
        tables.pg_map[mirror] = group.backend.name, self._store
        tables.pg_names[mirror] = name
        tables.pg_group_ranks[mirror] = _group_ranks(group)
        tables.pg_backend_config[mirror] = _backend_config(group.backend.name)
        tag = f"ptd:{name}"
        tables.pg_to_tag[mirror] = tag
        for key in ("", tag):
            tables.tags_to_pg.setdefault(key, []).append(mirror)
        names_in_torch._register_process_group(name, mirror)  # type: ignore[arg-type]  # noqa: SLF001 - as above

    def remove(self, group: ProcessGroup) -> None:
        """Withdraw a group, and with the default group everything."""
        if group is self._default:
            self.withdraw()
        else:
            self._forget(group)

    def _forget(self, group: ProcessGroup) -> None:
        """Remove a group from torch's tables; do nothing if torch has forgotten it."""
        mirror = self._mirrors.pop(group, None)
        if mirror is None:
            return
        tables = _torch_tables()
        for table in (tables.pg_map, tables.pg_names, tables.pg_group_ranks, tables.pg_backend_config):
            table.pop(mirror, None)
        tables.pg_coalesce_state.pop(mirror, None)
        for key in ("", tables.pg_to_tag.pop(mirror, "")):
            if mirror in tables.tags_to_pg.get(key, ()):
                tables.tags_to_pg[key].remove(mirror)
        names_in_torch._unregister_process_group(mirror.getGroupName())  # noqa: SLF001 - as above

    def withdraw(self) -> None:
        """Withdraw all groups, and destroy those that torch made beside them."""
        self._world.registration = None
        if not self._mirrors:
            return
        if _torch_tables().default_pg is not self._default.in_torch:
            # The program has put another group in its place, which stays.
            for group in list(self._mirrors):
                self._forget(group)
            return
        if os.getpid() != self._process:
            tables = _torch_tables()
            _inherited.extend([self, *tables.pg_map, *tables.pg_map.values()])
            # Without names torch shuts down nothing; it clears its tables.
            tables.pg_names.clear()
        self._mirrors.clear()
        torch.distributed.destroy_process_group()

    def _shut_down(self, group: ProcessGroup) -> None:
        """Destroy a group that torch is destroying; torch clears its own tables afterwards."""
        if self._mirrors.pop(group, None) is None:
            return
        if group is self._default:
            self._mirrors.clear()
            self._world.close()
        else:
            self._world.destroy(group)


def _unique_name(name: str) -> str:
    taken = set(_torch_tables().pg_names.values())
    names = [name, *(f"{name} ({number})" for number in range(2, len(taken) + 3))]
    return next(each for each in names if each not in taken)


def _backend_config(backend: str) -> str:
    """Return a backend's name in torch's notation of one backend per device type."""
    return ",".join(f"{device}:{name}" for device, name in registry.by_device_type(backend).items())


def _group_ranks(group: ProcessGroup) -> dict[int, int]:
    return {member: index for index, member in enumerate(group.members)}


def mirror() -> None:
    """Let torch's functions accept the groups of ranks that are threads; do nothing if torch has a default group.

    `destroy_process_group` undoes it. The ranks share one mirror: each call uses the default group of the calling
    thread's world.
    """
    world = current()
    if not is_thread_rank():
        return
    with _lock:
        tables = _torch_tables()
        if not torch.distributed.is_initialized():
            _register(registry.mirrored(default_group), default_group())
        registered = tables.default_pg
        # A group that torch made itself, or that a process shares, keeps no such list.
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
    mirrored.shown_in = []
    tables.pg_map[mirrored] = group.backend.name, None
    tables.pg_names[mirrored] = group.name
    tables.pg_group_ranks[mirrored] = _group_ranks(group)
    tables.pg_backend_config[mirrored] = _backend_config(group.backend.name)
    c10d._update_default_pg(mirrored)  # noqa: SLF001 - as above


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
