"""Tables of torch's in which our groups are: one default group, known to both libraries.

From `init_process_group` on, torch's default group is ours. All of torch finds it in torch's tables and in its C++
registry of names: DistributedSampler, torch's DDP, FSDP2, DTensor, functional collectives, checkpoints. A group of ours
is of torch's type, so the same object serves both libraries. Either library's ``destroy_process_group`` destroys it in
both.

torch keeps its tables per process. If ranks are threads, `TablesByRank` takes their place, and each rank finds its
own groups. torch's compiler keeps compiled code per process, so compiled programs that ask for a group raise there.

All use of torch's tables of groups is in this module; `torch_private` names them. Do not add translation of calls:
backends do that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d as c10d

from torchdist_ref.backends import registry
from torchdist_ref.backends.base import InheritedBackend, Membership, never_release
from torchdist_ref.backends.ref_in_torch.objects import limit_objects
from torchdist_ref.backends.ref_in_torch.process_group import CallsFromTorch
from torchdist_ref.errors import ArgumentError, DestroyedGroupError, UnsupportedError, explain, on_rank
from torchdist_ref.groups.world import ProcessGroup, World, current, is_thread_rank
from torchdist_ref.recorder import Recorder
from torchdist_ref.stores import PrefixStore
from torchdist_ref.torch_internals import torch_private

_lock = threading.Lock()
_tables_now: Callable[[], Any] = torch_private.TABLES.reader()
_register_name: Callable[[str, Any], None] = torch_private.REGISTER_NAME.bind()
_unregister_name: Callable[[str], None] = torch_private.UNREGISTER_NAME.bind()
_set_default_group: Callable[[Any], None] = torch_private.SET_DEFAULT_GROUP.bind()


def _is_torchs_own(group: Any) -> bool:
    """Return whether torch made a group itself."""
    return group is not None and not isinstance(group, ProcessGroup)


def require_no_group_of_torch() -> None:
    """Raise if torch has a default group of its own.

    Raises:
        ArgumentError: It has one.
    """
    if is_thread_rank() or not _is_torchs_own(_tables_now().default_pg):
        return
    raise ArgumentError(
        f"init_process_group: torch.distributed has a default group already, on backend "
        f"{torch.distributed.get_backend()!r}{on_rank()}. This library's default group is torch's, and a process has "
        f"one. If this program made the first one, leave out that call. If Lightning, accelerate or another library "
        f"made it, leave out this call and pass backend='ref' to its initialization."
    )


def _explain_second_initialization() -> None:
    """Have torch's `init_process_group` note, in its error, whose default group exists; torch offers no hook for that.

    The function stays until the process ends: programs may have imported it meanwhile.
    """
    original: Any = c10d.init_process_group
    if hasattr(original, "notes_our_group"):
        return

    @wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            group = _tables_now().default_pg
            if isinstance(group, ProcessGroup):
                error.add_note(
                    f"torchdist_ref.init_process_group has made the default group{on_rank()}, on backend "
                    f"{group.backend.name!r}, and torch.distributed uses it too. Leave out this call; for a further "
                    f"group, call torch.distributed.new_group."
                )
            raise

    init_process_group.notes_our_group = True  # type: ignore[attr-defined]
    c10d.init_process_group = torch.distributed.init_process_group = init_process_group


@cache
def adapt_torch() -> None:
    """Put our functions in place of three of torch's, at the first default group; they stay until the process ends."""
    limit_objects()
    registry.share_servers()
    _explain_second_initialization()


def share(world: World) -> None:
    """Make the default group of the calling rank torch's default group; do nothing if torch has one.

    The groups that exist and those created later are registered too, until they are destroyed.
    """
    if is_thread_rank():
        if not TablesByRank.install(world):
            return
    elif torch.distributed.is_initialized():
        return
    adapt_torch()
    world.in_torch = GroupsInTorch(world)


_TorchTables: Any = torch_private.TABLES_CLASS.get()


class RankTables(_TorchTables):  # type: ignore[misc]
    """torch's tables for one rank that is a thread."""

    # They replace torch's properties, which read variables of its module.
    default_pg: Any = None
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    pg_coalesce_state: Any = None
    comms: Any = None
    group_count = 0

    def __init__(self) -> None:
        # A newer torch has tables that are not listed here.
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.tags_to_pg, self.pg_to_tag, self.pg_coalesce_state, self.comms = {}, {}, {}, []


class TablesByRank:
    """Object in place of torch's tables while ranks are threads: its attributes are those of the calling rank's tables.

    Meanwhile torch's C++ registry of names is per thread.

    Args:
        of_process: torch's own tables, for other threads.

    Attributes:
        ranks: Number of ranks that have tables of their own.
    """

    ranks = 0

    def __init__(self, of_process: Any) -> None:
        vars(self)["of_process"] = of_process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_caller(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of_caller(), name, value)

    def _of_caller(self) -> Any:
        tables = current().torch_tables
        if tables is None:
            return self.of_process
        if torch_private.COMPILE_CONTEXT.get().try_get() is not None:
            raise UnsupportedError(
                f"torch.compile: ranks that are threads share compiled code, in which torch writes one rank's groups"
                f"{on_rank()}. Start the ranks as processes, or call torch's functions outside the compiled function."
            )
        return tables

    @classmethod
    def install(cls, world: World) -> bool:
        """Give the rank of a world tables of its own; return False if torch has a default group of its own."""
        if world.torch_tables is not None:
            return True
        with _lock:
            tables = _tables_now()
            if not isinstance(tables, cls):
                if _is_torchs_own(tables.default_pg):
                    return False
                torch_private.TABLES.set(cls(tables))
                torch_private.NAMES_PER_THREAD.get()(True)
            cls.ranks += 1
        world.torch_tables = RankTables()
        return True

    @classmethod
    def uninstall(cls, world: World) -> None:
        """Take the tables from the rank of a world; with the last rank's, torch's own return."""
        if world.torch_tables is None:
            return
        world.torch_tables = None
        with _lock:
            cls.ranks -= 1
            if not cls.ranks:
                torch_private.TABLES.set(_tables_now().of_process)
                torch_private.NAMES_PER_THREAD.get()(False)
                # torch's DDP keeps the module whose forward runs per process: threads may leave one of theirs behind,
                # and torch.compile would then divide any later module by the buckets of that one.
                torch_private.ACTIVE_DDP.set(None)


class GroupsInTorch:
    """Groups of one world, as torch's tables have them.

    Args:
        world: The world; it has a default group, which becomes torch's.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # Keep this rank's tables: `TablesByRank` may be installed in torch's module, or removed, at any time.
        self._tables = world.torch_tables or _tables_now()
        assert world.default is not None
        self._default = world.default
        self._store = registry.store_for_torch(PrefixStore("torch", self._default.store))
        self._groups: set[ProcessGroup] = set()
        # Groups that torch made, and ours on the same backends.
        self._counterparts: dict[Any, ProcessGroup] = {}
        self._making = threading.RLock()
        for group in world.groups:
            self.add(group)
        _set_default_group(self._default)

    def inherit(self) -> None:
        """Become a forked child's copy of this object."""
        global _lock
        # Another thread of the parent may have held the locks when it forked.
        _lock, self._making = threading.Lock(), threading.RLock()
        tables = self._tables
        never_release([*tables.pg_map, *tables.pg_map.values()])

    def add(self, group: ProcessGroup) -> None:
        """Register a group."""
        tables = self._tables
        name = _unique_name(group.group_desc, tables)
        group.rename(name)
        group.on_shutdown = lambda: self._shut_down(group)
        self._groups.add(group)
        tables.pg_map[group] = group.backend.name, self._store
        tables.pg_names[group] = name
        tables.pg_group_ranks[group] = {member: index for index, member in enumerate(group.members)}
        tables.pg_backend_config[group] = group.choice.config if group.choice else ""
        tag = f"ptd:{name}"
        tables.pg_to_tag[group] = tag
        for key in ("", tag):
            tables.tags_to_pg.setdefault(key, []).append(group)
        _register_name(name, group)

    def remove(self, group: ProcessGroup) -> None:
        """Withdraw a group, and with the default group everything."""
        if group is self._default:
            self.withdraw()
        elif group in self._groups:
            # A group that is not in `_groups` is being destroyed by torch, which clears its tables itself.
            self.forget(group)

    def forget(self, group: ProcessGroup) -> bool:
        """Remove a group from torch's tables; return whether torch knew it."""
        self._release(group)
        tables = self._tables
        if group not in tables.pg_map:
            return False
        for table in (tables.pg_map, tables.pg_names, tables.pg_group_ranks, tables.pg_backend_config):
            table.pop(group, None)
        tables.pg_coalesce_state.pop(group, None)
        for key in ("", tables.pg_to_tag.pop(group, "")):
            if group in tables.tags_to_pg.get(key, ()):
                tables.tags_to_pg[key].remove(group)
        _unregister_name(group.group_name)
        return True

    def counterpart(self, group: Any) -> ProcessGroup:
        """Return a group of ours with the members and the backend of a group that torch made.

        Raises:
            DestroyedGroupError: torch does not know the group, since it was destroyed or belongs to an earlier job.
            ArgumentError: torch does not know the group, and it has no name.
        """
        known = self._tables.pg_map
        # Another thread may remove one at the same time.
        for each in [each for each in tuple(self._counterparts) if each not in known]:
            if (unknown := self._counterparts.pop(each, None)) is not None:
                unknown.destroy_backend()
        if group not in known:
            try:
                name = group.group_name
            except RuntimeError:
                got = "one that its constructor made, which has no name"
                raise ArgumentError(explain("process group", "group", "a group made by new_group", got)) from None
            raise DestroyedGroupError(
                f"process group {name!r} of torch.distributed was destroyed, or belongs to an earlier "
                f"default group{on_rank()}. Create a new one with new_group."
            )
        with self._making:
            if group not in self._counterparts:
                self._counterparts[group] = self.make_counterpart(group)
            return self._counterparts[group]

    def make_counterpart(self, group: Any) -> ProcessGroup:
        """Return a group of ours for a group that torch has made."""
        tables = self._tables
        members = tuple(sorted(tables.pg_group_ranks[group], key=tables.pg_group_ranks[group].get))
        store = PrefixStore(f"torch/{group.group_name}/ours", self._default.store)
        facts = group.rank(), members, group.group_desc or group.group_name, self._default.timeout
        if isinstance(group, CallsFromTorch):
            backend = group.backend
        elif self._world.inherited:
            backend = InheritedBackend(tables.pg_map[group][0], Recorder(), facts[2], self._default.rank())
        else:
            backend = registry.create(tables.pg_map[group][0], Membership(store, *facts, existing=group))
        rank, _, name, timeout = facts
        made = ProcessGroup.on(backend, members, rank, name, timeout, store)
        made.rename(group.group_name)
        made.original = group
        return made

    def destroy_in_torch(self, group: ProcessGroup) -> bool:
        """Let torch destroy the group that it made; return False unless `group` is the counterpart of one."""
        if group.original not in self._counterparts:
            return False
        torch.distributed.destroy_process_group(group.original)
        self._counterparts.pop(group.original).destroy_backend()
        return True

    def _release(self, group: ProcessGroup) -> None:
        self._groups.discard(group)
        group.on_shutdown = None

    def withdraw(self) -> None:
        """Withdraw all groups, and destroy those that torch made beside them."""
        self._world.in_torch = None
        if not self._groups:
            return
        if self._tables.default_pg is not self._default:
            # The program has put another group in its place, which stays.
            for group in list(self._groups):
                self.forget(group)
        else:
            self._destroy_all_in_torch()
        TablesByRank.uninstall(self._world)

    def _destroy_all_in_torch(self) -> None:
        if self._world.inherited:
            # torch shuts down only groups that have names. Without, it just clears its tables.
            self._tables.pg_names.clear()
        for group in list(self._groups):
            self._release(group)
        torch.distributed.destroy_process_group()
        for ours in tuple(self._counterparts.values()):
            ours.destroy_backend()
        self._counterparts.clear()

    def _shut_down(self, group: ProcessGroup) -> None:
        """Destroy a group that torch is destroying; torch clears its own tables afterward."""
        if group is self._default:
            for each in list(self._groups):
                self._release(each)
            self._world.close()
            # torch clears the rank's tables after this, so they stay until the rank ends.
            self._world.on_close.append(lambda: TablesByRank.uninstall(self._world))
        else:
            self._release(group)
            self._world.destroy(group)


def _unique_name(name: str, tables: Any) -> str:
    taken = set(tables.pg_names.values())
    names = [name, *(f"{name} ({number})" for number in range(2, len(taken) + 3))]
    return next(each for each in names if each not in taken)
