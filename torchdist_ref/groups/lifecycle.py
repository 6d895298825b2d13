"""Creation and destruction of groups: init_process_group, new_group, destroy_process_group.

The members of a new group meet under a key prefix of the store that no other group uses. Every rank computes the prefix
without communication. Groups that all ranks create are numbered; the first rank to arrive publishes the member list, so
that ranks which disagree get an error. Groups created by their members alone are numbered per member list, because the
other ranks never learn of them.

Do not add rendezvous methods (`rendezvous`) or backends (`backends`) here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any

from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.registry import create, decline, default_name, names_by_device
from torchdist_ref.debug.checked import apply_debug_level
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendArgumentError,
    MismatchError,
    NotInitializedError,
    UsageError,
    explain,
    on_rank,
)
from torchdist_ref.groups.world import (
    GroupMember,
    ProcessGroup,
    World,
    current,
    default_group,
    resolve,
    whole_number,
)
from torchdist_ref.rendezvous import rendezvous
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.stores.prefix import WatchedStore
from torchdist_ref.timeouts import GROUP_TIMEOUT

log = logging.getLogger("torchdist_ref.groups")


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
    _ranks: list[int] | None = None,
) -> None:
    """Meet all ranks and make the default group. Every rank calls this once; it returns when all are there.

    Give either `store`, with `rank` and `world_size`, or `init_method` (by default ``env://``: the
    environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as launchers set them).

    Args:
        backend: ``"ref"``, ``"gloo"``, ``"nccl"``, ``"mpi"`` or a name that was registered here or with torch; or one
            for each kind of device, as in ``"cpu:gloo,cuda:nccl"``. None: ``TORCHDIST_REF_BACKEND``, else ``"ref"``
            where all ranks share a host and ``"gloo"`` where they don't, and ``"nccl"`` besides, for CUDA tensors,
            where this rank has a CUDA device.
        init_method: A URL that says how to meet: ``env://``, ``tcp://host:port``, ``file:///path``.
        timeout: How long any wait takes at most. Default: 30 minutes.
        world_size: How many ranks there are.
        rank: Which one this is, from 0.
        store: A store that all ranks share, in place of `init_method`.
        group_name: A name for error messages. Default: ``"world"``.
        pg_options: For ``nccl`` a ``torch.distributed.ProcessGroupNCCL.Options``, for backends of others what they
            take; ``ref``, ``gloo`` and ``mpi`` have none.
        device_id: For ``nccl`` the device of this rank: ranks connect at once then. Others need none.
        _ranks: Accepted for torch's sake, which names the group after them and uses them for nothing else.

    Raises:
        ArgumentError: Initialised twice, a backend that is no name, or a wrong time-out.
        UsageError: An unknown backend, or arguments that contradict each other or lack one.
        UnsupportedError: The backend needs what is not installed here, or a device; with how to get it.
        RendezvousError: The URL, the environment, the rank or the world size is wrong.
        DistNetworkError: The meeting point cannot be reached.
        RankStalledError: A rank did not come in time.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.get_rank(), dist.get_world_size(), dist.get_backend()
        (0, 1, 'ref')
        >>> dist.destroy_process_group()
    """
    world = current()
    if world.default is not None:
        raise ArgumentError(f"init_process_group: trying to initialize the default process group twice!{on_rank()}")
    seconds = seconds_of(timeout, "init_process_group")
    _check_backend(backend, "init_process_group")
    owned = store is None
    if store is None:
        store, rank, world_size = _meet(init_method, rank, world_size, seconds)
    elif init_method is not None:
        raise UsageError("init_process_group: give either 'store' or 'init_method', not both.")
    elif not hasattr(store, "compare_set"):
        raise ArgumentTypeError(explain("init_process_group", "store", "a store", store))
    _check_place(rank, world_size)
    world.store, world.owns_store = store, owned
    try:
        everybody = tuple(range(world_size))
        place, name, for_backend = next_place(world), group_name or "world", (pg_options, device_id)
        world.default = _make(world, place, backend, name, everybody, rank, seconds, for_backend)
    except BaseException:
        world.close()
        raise


def _check_backend(backend: str | None, operation: str) -> None:
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(explain(operation, "backend", "a name", backend))
    if backend is not None:
        names_by_device(backend, operation)


def seconds_of(timeout: timedelta | None, operation: str) -> float:
    """The time-out that a caller gave, in seconds, or the default."""
    timeout = GROUP_TIMEOUT if timeout is None else timeout
    if not isinstance(timeout, timedelta):
        raise ArgumentTypeError(
            f"{operation}: Expected timeout argument to be of type datetime.timedelta, got {timeout!r}{on_rank()}."
        )
    if timeout <= timedelta(0):
        raise BackendArgumentError(explain(operation, "timeout", "more than zero", timeout))
    return timeout.total_seconds()


def _meet(init_method: str | None, rank: int, world_size: int, seconds: float) -> tuple[Store, int, int]:
    iterator = rendezvous(init_method or "env://", rank, world_size, timeout=timedelta(seconds=min(seconds, 300.0)))
    return next(iter(iterator))


def _check_place(rank: int, world_size: int) -> None:
    if world_size < 1:
        raise UsageError(explain("init_process_group", "world_size", "at least 1 when a store is given", world_size))
    if not 0 <= rank < world_size:
        # torch asserts that it is not negative, and its backends that it is not too large.
        kind = UsageError if rank < 0 else BackendArgumentError
        raise kind(explain("init_process_group", "rank", f"from 0 to {world_size - 1}", rank))


def _make(
    world: World,
    store: Store,
    backend: str | None,
    name: str,
    members: tuple[int, ...],
    rank: int,
    seconds: float,
    for_backend: tuple[Any, Any],
    meeting: Store | None = None,
) -> ProcessGroup:
    chosen = backend or _choose(store, rank, len(members))
    membership = Membership(meeting or store, rank, members, name, seconds, *for_backend)
    made = apply_debug_level(create(chosen, membership), membership)
    group = ProcessGroup(members, rank, made, name, seconds, store)
    world.groups.append(group)
    return group


def _choose(store: Store, rank: int, size: int) -> str:
    chosen = os.environ.get("TORCHDIST_REF_BACKEND") or default_name(store, rank, size)
    if rank == 0:
        log.info("no backend named: using %r", chosen)
    return chosen


def is_initialized() -> bool:
    """Whether the default group exists."""
    return current().default is not None


def destroy_process_group(group: ProcessGroup | int | None = None) -> None:
    """Leave a group, or all of them, and give back their memory, threads and descriptors.

    Calls that other ranks still make on the group raise there. Tensors that lie in a group's memory live on.

    Args:
        group: The group to leave. None, or the default group: all groups, and the store if this library made it.

    Raises:
        NotInitializedError: There is no group.
    """
    world = current()
    if world.default is None:
        raise NotInitializedError(
            "destroy_process_group: there is no group to destroy; init_process_group comes first."
        )
    found = resolve(group)
    if found is world.default:
        world.close()
    elif found is not None:
        if found not in world.groups:
            raise ArgumentError(f"destroy_process_group: group {found.name!r} was destroyed before{on_rank()}.")
        world.remove(found)


def new_group(
    ranks: Iterable[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup | int | None:
    """Make a group of some ranks. Every rank of the default group calls this, members or not, in the same order.

    Only the members wait for each other.

    Args:
        ranks: Global ranks of the members, in any order. None: all.
        timeout: How long any wait takes at most. Default: 30 minutes.
        backend: Default: the default group's.
        pg_options: As for `init_process_group`.
        use_local_synchronization: Whether only the members call this, each list of members in the same order.
        group_desc: A name for error messages.
        device_id: As for `init_process_group`.
        sort_ranks: Whether the group counts its members in ascending order, or as `ranks` lists them.

    Returns:
        On members the group; on the others ``GroupMember.NON_GROUP_MEMBER``, or as in torch None if
        `use_local_synchronization`: don't pass that on as a group, since it means all ranks there.

    Raises:
        ArgumentError: Ranks given twice or out of range.
        ArgumentTypeError: No list of at least one rank.
        MismatchError: Ranks called this with different members.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import fill, run
        >>> def program(rank):
        ...     evens = dist.new_group([0, 2])
        ...     return dist.get_rank(evens)
        >>> run(program, 3)
        [0, -1, 1]
    """
    world, default = current(), default_group()
    members = _members(ranks, default, sort_ranks)
    seconds = seconds_of(timeout, "new_group")
    _check_backend(backend, "new_group")
    me = default.members[default.rank()]
    if use_local_synchronization and me not in members:
        return None
    place = place_of_members(world, members) if use_local_synchronization else agreed_place(world, default, members)
    if me not in members:
        return GroupMember.NON_GROUP_MEMBER
    chosen, name = backend or default.backend.name, group_desc or place.prefix.replace("/", " ")
    waiting = watched(place, default, [default.members.index(m) for m in members if m != me], "new_group")
    return _make(world, place, chosen, name, members, members.index(me), seconds, (pg_options, device_id), waiting)


def _members(ranks: Iterable[int] | None, default: ProcessGroup, in_order: bool) -> tuple[int, ...]:
    if ranks is None:
        return default.members
    given = _numbers(ranks)
    for rank in given:
        if rank not in default.members:
            expected = f"global ranks from 0 to {default.size() - 1}"
            raise ArgumentError(explain("new_group", "ranks", expected, given, rank=default.rank()))
    if len(set(given)) != len(given):
        raise ArgumentError(f"new_group: ranks list must not contain duplicate entries, got {given}{on_rank()}.")
    return tuple(sorted(given) if in_order else given)


def _numbers(ranks: Any) -> list[int]:
    given = [whole_number(rank) for rank in ranks] if isinstance(ranks, Iterable) else []
    numbers = [number for number in given if number is not None]
    if not numbers or len(numbers) < len(given):
        raise ArgumentTypeError(explain("new_group", "ranks", "a list of at least one global rank", ranks))
    return numbers


Members = tuple[int, ...]


def next_place(world: World) -> PrefixStore:
    """Where the next group of the count meets."""
    assert world.store is not None
    place = PrefixStore(f"group/{world.made}", world.store)
    world.made += 1
    return place


def agreed_place(world: World, default: ProcessGroup, members: Members) -> PrefixStore:
    """Where a group meets that all ranks make, members or not.

    Raises:
        MismatchError: Another rank gave other members for it.
    """
    assert world.store is not None
    mine = ",".join(map(str, members))
    said = world.store.compare_set(f"members/{world.made}", "", mine).decode()
    place = next_place(world)
    if said != mine:
        raise _disagreement(place, default.members[default.rank()], mine, said)
    return place


def _disagreement(place: PrefixStore, me: int, mine: str, said: str) -> MismatchError:
    """Tell those who wait for this rank, and give the error for this one."""
    reason = (
        f"new_group: rank {me} gives members [{mine}], another rank gave [{said}]. "
        f"All ranks must make the same groups in the same order."
    )
    theirs = [int(member) for member in said.split(",")]
    if me in theirs:
        decline(place, theirs.index(me), reason)
    return MismatchError(reason)


def watched(place: PrefixStore, parent: ProcessGroup, ranks: Sequence[int], operation: str) -> WatchedStore:
    """The same place, to wait there for these ranks of an older group: not in vain, if that knows that they died."""
    return WatchedStore(place.prefix, place.underlying_store, lambda: parent.backend.failure(ranks, operation))


def place_of_members(world: World, members: Members) -> PrefixStore:
    """Where a group meets that only its members make."""
    assert world.store is not None
    # A list of thousands of ranks would be too long for a key.
    these = sha256(",".join(map(str, members)).encode()).hexdigest()[:16]
    place = PrefixStore(f"members_only/{these}/{world.by_members[members]}", world.store)
    world.by_members[members] += 1
    return place
