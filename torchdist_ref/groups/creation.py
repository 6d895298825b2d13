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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from hashlib import sha256
from typing import Any

from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.registry import BackendChoice, check_options, choice, default_name, names_by_device
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    AuthenticationError,
    DistNetworkError,
    MismatchError,
    NotInitializedError,
    UsageError,
    at_limit,
    explain,
    of_operation,
    on_rank,
)
from torchdist_ref.groups.torch_tables import require_no_group_of_torch, share
from torchdist_ref.groups.world import (
    GroupMember,
    ProcessGroup,
    World,
    aborted_on_failure,
    as_integer,
    current,
    default_group,
    leave_at_end_of_program,
    refuse_made_alone,
    refuse_unusable,
    resolve,
)
from torchdist_ref.membership.initialization import meet, meet_on
from torchdist_ref.membership.trust import KeyAgreement
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.membership.words import backend_mismatch, both_sides
from torchdist_ref.stores.base import Store, limit_requests
from torchdist_ref.stores.prefix import KeyRange, PrefixStore
from torchdist_ref.timeouts import timeout_of

_BACKEND_VARIABLE = "TORCHDIST_REF_BACKEND"
_DEFAULT_BACKEND = "(default)"
_MOST_RECORDED = 1 << 17
"""Largest world whose initialization is in the flight recorder, which lists its ranks."""
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
    enable_reconfigure: bool = False,
) -> None:
    """Create the default group. Every rank calls this once; it returns when all ranks have called it.

    Pass either `store`, with `rank` and `world_size`, or `init_method` (by default ``env://``: the
    environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as launchers set them).

    Args:
        backend: ``"ref"``, ``"gloo"``, ``"nccl"``, ``"mpi"`` or a name registered here or with torch; or one name per
            device type, as in ``"cpu:gloo,cuda:nccl"``. Default: the environment variable ``TORCHDIST_REF_BACKEND``.
            If it is not set: ``"ref"`` if all ranks share a host, else ``"gloo"``. A rank with a CUDA device uses
            ``"nccl"`` for CUDA tensors in both cases.
        init_method: Rendezvous URL: ``env://``, ``tcp://host:port`` or ``file:///path``. Default: ``env://``.
        timeout: Default time-out of every call on the group. Default: 30 minutes.
        world_size: Number of ranks.
        rank: This rank, from 0.
        store: A store that all ranks share, instead of `init_method`. Backend ``"fake"`` needs neither.
        group_name: Name for error messages. Default: ``"world"``.
        pg_options: For ``nccl`` a ``torch.distributed.ProcessGroupNCCL.Options``, for third-party backends their own;
            ``ref``, ``gloo`` and ``mpi`` have none.
        device_id: For ``nccl`` this rank's device: ranks then connect at once. Other backends need none.
        _ranks: Accepted for compatibility with torch, which uses them only for the group's name.
        enable_reconfigure: Accepted for compatibility with torch 2.15, whose experimental reconfiguration no backend
            here has; as in torch, such a backend ignores it.

    Raises:
        ArgumentError: Initialized twice, a backend that is not a str, or a time-out that is not positive.
        UsageError: An unknown backend, or arguments that are contradictory or incomplete.
        UnsupportedError: The backend needs software or a device that is missing; the text names it.
        RendezvousError: The URL, the environment, the rank or the world size is wrong.
        DistNetworkError: The rendezvous address cannot be reached.
        RankStalledError: A rank did not call in time.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.get_rank(), dist.get_world_size(), dist.get_backend()
        (0, 1, 'ref')
        >>> dist.destroy_process_group()

    Elsewhere:
        ``MPI_Init`` in MPI, ``ncclCommInitRank`` in NCCL, ``jax.distributed.initialize`` in JAX.
    """
    world = current()
    if world.default is not None:
        hint = ""
        if world.inherited:
            hint = (
                " This process was forked, and has inherited its parent's groups: call "
                "destroy_process_group first, which removes them here and does not affect the parent."
            )
        raise ArgumentError(
            f"init_process_group: trying to initialize the default process group twice!{on_rank()}{hint}"
        )
    require_no_group_of_torch()
    seconds = timeout_of("init_process_group", timeout).total_seconds()
    chosen = os.environ.get(_BACKEND_VARIABLE) if backend is None else backend
    check_backend("init_process_group", backend, chosen or "ref", pg_options, device_id)
    # A rank of `fake` runs without the other ranks, which may not exist.
    alone = backend is not None and set(names_by_device(backend).values()) == {"fake"}
    owned = store is None
    with limit_requests(seconds), _closed_on_failure(world), _recorded(world, rank, world_size, seconds):
        # Before any wait: a rank that hangs here has to answer requests for dumps.
        world.observe()
        if store is None:
            meeting = meet(init_method, rank, world_size, seconds, alone)
        elif init_method is not None:
            raise UsageError("init_process_group: give either 'store' or 'init_method', not both.")
        elif not hasattr(store, "compare_set"):
            raise ArgumentTypeError(explain("init_process_group", "store", "a store", store))
        else:
            meeting = meet_on(store, rank, world_size)
        seat = meeting.seat
        world.use_store(meeting.store, meeting.leave, owned)
        members, options = tuple(range(seat.size)), (pg_options, device_id)
        rank_and_size = (0, 1) if alone else (seat.rank, seat.size)
        keys = KeyAgreement(meeting.store, *rank_and_size, world.on_close, nonce=seat.nonce)
        wanted = choice(chosen) if chosen else None
        compared = _DEFAULT_BACKEND if wanted is None else wanted.on_cpu
        with meeting.watched(seconds, alone, keys.own, keys.awaited, compared, keys.connect) as watch:
            with watch.published():
                sealed = keys.complete(watch.store, seconds, meeting.values)
            world.store = sealed.over(meeting.store)
            name, own_store = group_name or "world", _next_store(world)
            world.default = make_group(
                watch, own_store, wanted, name, members, seat.rank, seconds, options, agreed=True
            )
        world.add(world.default)
        share(world)
        leave_at_end_of_program()


@contextmanager
def _closed_on_failure(world: World) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        world.close_after_failure()
        if (failure := at_limit("init_process_group", error)) is not None:
            raise failure from error
        raise


def _recorded(world: World, rank: Any, size: Any, seconds: float) -> AbstractContextManager[Any]:
    """Return a context that records the initialization in the flight recorder, if this rank knows its rank already."""
    known: list[Any] = [
        value if value != -1 else os.environ.get(name) for name, value in (("RANK", rank), ("WORLD_SIZE", size))
    ]
    try:
        number, count = map(int, known)
    except (TypeError, ValueError):
        return nullcontext()
    if not 0 <= number < count <= _MOST_RECORDED:
        return nullcontext()
    return world.store_calls.initialization(number, count, seconds)


def check_backend(operation: str, backend: Any, default: str, pg_options: Any, device_id: Any = None) -> None:
    """Raise unless a backend exists and accepts the options; `default` is used where `backend` is None."""
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(explain(operation, "backend", "a name", backend))
    check_options(default if backend is None else backend, pg_options, device_id, operation)


def make_group(
    watch: MemberWatch,
    store: PrefixStore,
    backend: BackendChoice | None,
    name: str,
    members: tuple[int, ...],
    rank: int,
    seconds: float,
    options: tuple[Any, ...] = (),
    agreed: bool = False,
) -> ProcessGroup:
    """Create a backend and a group that uses it. A failure on one member ends the wait of the others.

    Args:
        watch: Watch over the members.
        store: Store of the group.
        backend: The backend; None for the default.
        name: Name of the group.
        members: Global ranks of the members, in group order.
        rank: Group rank of this rank.
        seconds: Default time-out of a call.
        options: The caller's `pg_options` and `device_id`.
        agreed: Whether all members are known to have chosen the same backend.

    Returns:
        The group.
    """
    pg_options, device = (*options, None, None)[:2]
    with watch.published():
        watched = watch.over(store)
        chosen = backend or choice(_choose(watched, rank, len(members)))
        if not agreed:
            _agree_on_backend(watched, chosen.on_cpu, members[rank], watch.operation)
        membership = Membership(watched, rank, members, name, seconds, pg_options, device, watch=watch)
        made = chosen.make(membership)
        with aborted_on_failure(made, watch.operation):
            group = ProcessGroup.on(made, members, rank, name, seconds, store)
            group.choice = chosen
            group.observe(membership)
            return group


def _choose(store: Store, rank: int, size: int) -> str:
    chosen = os.environ.get(_BACKEND_VARIABLE) or default_name(store, rank, size)
    if rank == 0:
        log.info("no backend given: using %r", chosen)
    return chosen


def _agree_on_backend(store: Store, backend: str, rank: int, operation: str) -> None:
    """Compare this rank's backend for CPU tensors with that of the first rank, which publishes it.

    Raises:
        MismatchError: They differ.
    """
    first, _, other = store.compare_set("backend", "", f"{rank}|{backend}").decode().partition("|")
    if other != backend:
        raise backend_mismatch(operation, (rank, backend), (int(first), other))


def backend_of_new_group(
    operation: str, parent: ProcessGroup, backend: Any, pg_options: Any, device_id: Any = None
) -> BackendChoice:
    """Return the backend of a new group: the one that the program chose, or that of the parent group.

    Raises:
        ArgumentTypeError: `backend` is not a name, or the backend does not accept the options.
        UsageError: No backend has the name.
    """
    if parent.choice is not None and backend is None and pg_options is None and device_id is None:
        return parent.choice
    check_backend(operation, backend, parent.backend.name, pg_options, device_id)
    return choice(parent.backend.name if backend is None else backend)


def is_initialized() -> bool:
    """Return whether the default group exists.

    A forked child, such as a worker of a ``DataLoader``, has its parent's groups: it can query ranks, sizes
    and members, but cannot communicate.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> dist.is_initialized(), run(lambda rank: dist.is_initialized(), 2)
        (False, [True, True])

    Elsewhere:
        ``MPI_Initialized`` in MPI, ``jax.distributed.is_initialized`` in JAX; none in NCCL.
    """
    return current().default is not None


def destroy_process_group(group: ProcessGroup | int | None = None) -> None:
    """Destroy a group, or all groups, on this rank: release their memory, threads and file descriptors.

    In a forked child, such as a worker of a ``DataLoader``, this removes the inherited groups from the child only; the
    parent keeps its groups. The child can then call `init_process_group` for a group of its own.

    Later calls of other ranks on the group raise there. Tensors in a group's memory remain valid. Calls that this rank
    has started have 5 seconds in all to complete, but a receive whose message has not arrived fails at once. On
    ``ref``, members on other hosts have half a second more to read what this rank has sent. If this is called while an
    exception is handled, as in a ``finally`` block, the groups are aborted, and errors of the other ranks quote the
    exception.

    Args:
        group: The group to destroy. Default: all groups, and the store if this library created it; the default group
            as an argument means the same.

    Raises:
        NotInitializedError: There is no group.
        ArgumentError: The group was destroyed before, or this library did not make it.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.destroy_process_group()
        >>> dist.is_initialized()
        False

    Elsewhere:
        ``MPI_Finalize`` and ``MPI_Comm_free`` in MPI, ``ncclCommDestroy`` in NCCL, ``jax.distributed.shutdown``
        in JAX.
    """
    world = current()
    if world.default is None:
        raise NotInitializedError(
            "destroy_process_group: there is no group to destroy; init_process_group comes first."
        )
    found = resolve(group, "destroy_process_group")
    if found is world.default:
        with world.recorded("destroy_process_group", "", (), world.default):
            world.close()
    elif found is not None:
        if found not in world.groups:
            in_torch = world.in_torch
            # A group that the program has aborted is still in torch's tables.
            if in_torch is not None and (in_torch.destroy_in_torch(found) or in_torch.forget(found)):
                return
            refuse_made_alone(found, "destroy_process_group")
            raise ArgumentError(f"destroy_process_group: group {found.group_desc!r} was destroyed before{on_rank()}.")
        world.destroy(found)


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
    """Create a group of some ranks. Every rank of the default group calls this, members or not, in the same order.

    Only the members wait for each other.

    Args:
        ranks: Global ranks of the members, in any order. Default: all ranks.
        timeout: Default time-out of every call on the group. Default: the default group's.
        backend: Name of the backend. Default: the default group's.
        pg_options: As for `init_process_group`.
        use_local_synchronization: If True, only the members call this. If several groups have the same members, all
            members create them in the same order. Default: False.
        group_desc: Name for error messages. Default: a number.
        device_id: As for `init_process_group`.
        sort_ranks: Order the members by global rank; if False, as in `ranks`. Default: True.

    Returns:
        The group on members. On the others ``GroupMember.NON_GROUP_MEMBER``, or as in torch None if
        `use_local_synchronization`. Do not pass that None as a group: as an argument, None means all ranks.

    Raises:
        ArgumentError: Duplicate ranks, or ranks out of range.
        ArgumentTypeError: Not a list of at least one rank.
        MismatchError: Ranks called this with different members.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import fill, run
        >>> def program(rank):
        ...     evens = dist.new_group([0, 2])
        ...     return dist.get_rank(evens)
        >>> run(program, 3)
        [0, -1, 1]

    Elsewhere:
        ``MPI_Comm_create`` in MPI, or ``MPI_Comm_create_group`` with `use_local_synchronization`;
        ``ncclCommSplit`` in NCCL; ``axis_index_groups`` of JAX's collectives.
    """
    world, default = current(), default_group("new_group")
    refuse_unusable(default, "new_group")
    members = _members(ranks, default, sort_ranks)
    seconds = timeout_of("new_group", timeout, timedelta(seconds=default.timeout)).total_seconds()
    check_description("new_group", group_desc)
    chosen = backend_of_new_group("new_group", default, backend, pg_options, device_id)
    me = default.members[default.rank()]
    if use_local_synchronization and me not in members:
        return None
    makers = members if use_local_synchronization else None
    awaited = members if me in members else ()
    with (
        world.recorded("new_group", f"ranks={list(members)}", awaited, default, makers),
        limit_requests(seconds),
        store_failure_explained(default, "new_group"),
    ):
        agreed = False
        store = _member_store(world, members) if use_local_synchronization else _next_store(world)
        users = len(members) if use_local_synchronization else default.size()
        keys = KeyRange(store.underlying_store, store.prefix, users)
        if me not in members:
            _agree_on_members(store, me, members, chosen.on_cpu)
            keys.release()
            return GroupMember.NON_GROUP_MEMBER
        watch, options = watch_members(store, default, members, "new_group"), (pg_options, device_id)
        if not use_local_synchronization:
            with watch.interruption_published():
                agreed = _agree_on_members(store, me, members, chosen.on_cpu)
        name = group_desc or store.prefix.replace("/", " ")
        group = make_group(watch, store, chosen, name, members, members.index(me), seconds, options, agreed)
    group.keys = keys
    return world.add(group)


def check_description(operation: str, value: Any) -> None:
    """Raise unless the description of a new group is a text or None."""
    if value is not None and not isinstance(value, str):
        raise ArgumentTypeError(explain(operation, "group_desc", "a str or None", value))


def _members(ranks: Iterable[int] | None, default: ProcessGroup, sort: bool) -> tuple[int, ...]:
    if ranks is None:
        return default.members
    listed = _integers(ranks)
    for rank in listed:
        if rank not in default.members:
            expected = f"global ranks from 0 to {default.size() - 1}"
            raise ArgumentError(explain("new_group", "ranks", expected, listed, rank=default.rank()))
    if len(set(listed)) != len(listed):
        raise ArgumentError(f"new_group: ranks list must not contain duplicate entries, got {listed}{on_rank()}.")
    return tuple(sorted(listed) if sort else listed)


def _integers(ranks: Any) -> list[int]:
    listed = list(ranks) if isinstance(ranks, Iterable) else []
    integers = [value for rank in listed if (value := as_integer(rank)) is not None]
    if not integers or len(integers) < len(listed):
        types = sorted({type(rank).__name__ for rank in listed if as_integer(rank) is None})
        hint = f"Ranks are int, not {' or '.join(types)}." if types else ""
        raise ArgumentTypeError(explain("new_group", "ranks", "a list of at least one global rank", ranks, hint=hint))
    return integers


def _next_store(world: World) -> PrefixStore:
    """Return the store of the next group that all ranks create."""
    assert world.store is not None
    store = PrefixStore(f"group/{world.created}", world.store)
    world.created += 1
    return store


def _agree_on_members(store: PrefixStore, rank: int, members: tuple[int, ...], backend: str) -> bool:
    """Compare this rank's members and backend with those of the first rank that creates the same group.

    Returns:
        Whether the members have agreed on the backend. They have not if the first rank is not a member: its backend
        does not count.

    Raises:
        MismatchError: Another rank passed other members, or another member another backend.
    """
    own = ",".join(map(str, members))
    # Ranks outside the new group may have another backend.
    named = backend if rank in members else ""
    facts = f"{own}|{rank}|{named}"
    listed, first, other = store.compare_set("members", "", facts).decode().split("|", 2)
    if listed == own and (not other or rank not in members or other == backend):
        return other != ""
    if listed == own:
        error = backend_mismatch("new_group", (rank, backend), (int(first), other))
    else:
        sides = both_sides((rank, f"members [{own}]"), (int(first), f"members [{listed}]"))
        error = MismatchError(f"new_group: {sides}. All ranks must create the same groups in the same order.")
    waiting = [int(member) for member in listed.split(",")]
    if rank in waiting:
        MemberWatch(store, waiting.index(rank), waiting, "new_group").publish(error)
    raise error


def _member_store(world: World, members: tuple[int, ...]) -> PrefixStore:
    """Return the store of a group that only its members create."""
    assert world.store is not None
    # A list of thousands of ranks would be too long for a key.
    digest = sha256(",".join(map(str, members)).encode()).hexdigest()[:16]
    store = PrefixStore(f"members_only/{digest}/{world.member_only[members]}", world.store)
    world.member_only[members] += 1
    return store


@contextmanager
def store_failure_explained(parent: ProcessGroup, operation: str) -> Iterator[None]:
    """Raise, in place of an error of the network, that of the rank whose end caused it, or name the operation.

    The rank that serves the store need not be a member of the group that is created, nor need this one.
    """
    try:
        yield
    except AuthenticationError:
        raise
    except DistNetworkError as error:
        others = [rank for rank in range(parent.size()) if rank != parent.rank()]
        if (ended := parent.backend.failure_soon(others, operation)) is not None:
            raise ended from error
        if error.operation:
            raise
        raise of_operation(f"{operation} on rank {parent.members[parent.rank()]}", error) from error


def watch_members(store: PrefixStore, parent: ProcessGroup, members: Sequence[int], operation: str) -> MemberWatch:
    """Return a watch over some members of a group, who meet on this store; `members` are global ranks."""
    in_parent = [parent.members.index(member) for member in members]
    return MemberWatch(
        store,
        in_parent.index(parent.rank()),
        members,
        operation,
        lambda ranks, description, wait: parent.backend.failure([in_parent[r] for r in ranks], description, wait),
    )
