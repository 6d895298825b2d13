"""Connection of the ranks of a group, by the transport that their hosts and processes allow.

Liveness: a pidfd becomes readable when its process ends, and cannot refer to a later process with the same pid. Blocked
waits poll the pidfds of all peers, so that a death is noticed within one poll, without threads or messages. A process
that calls `exec` lives on as another program; `torchdist_ref.processes.witness` finds it. There are no heartbeats: a
stopped process is not dead, and the time-out finds it.

`base` says how a transport is added. Do not add ways to move bytes here.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache, lru_cache
from typing import NamedTuple

from torchdist_ref.errors import RankStalledError, StoreTimeoutError, UnsupportedError, rank_names
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.processes.identity import HOST_VARIABLE, has_no_proc, host_identity, simulated_place
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.transports import tcp
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.segment import (
    SegmentLayout,
    SharedMemorySegment,
    announce_process,
    attach,
    created_segment,
    layout_for,
    private_segment,
    shared_segment,
    unavailable_reason,
    watched_processes,
)

MAX_PREPARED_RANKS = 16
"""Ranks up to which rank 0 creates a segment before all are known to share a host.

Larger groups often span hosts, and the time to create a segment grows with the square of the ranks: 1 ms for 16.
"""
log = logging.getLogger("torchdist_ref.transports")


class RankEndpoint(NamedTuple):
    """Location of a rank.

    Attributes:
        host: Identity of the host (see `processes.identity.host_identity`).
        process: Process id.
        segment: Handle of the segment that the rank has created; empty if none.
    """

    host: bytes
    process: bytes
    segment: bytes


class GroupEndpoints(NamedTuple):
    """Arguments of `connect`, with the endpoints of all ranks.

    Attributes:
        store: Store for the keys of this group only.
        rank: This rank in the group.
        members: Global ranks of all members.
        name: Name of the group, for messages.
        timeout: Longest duration of a wait in seconds.
        endpoints: RankEndpoint of each rank.
        segment: Segment that this rank has created, or None.
        watch: Watch over the members, or None.
    """

    store: Store
    rank: int
    members: Sequence[int]
    name: str
    timeout: float
    endpoints: Sequence[RankEndpoint]
    segment: SharedMemorySegment | None
    watch: MemberWatch | None


class Transport(NamedTuple):
    """Row of `TRANSPORTS`.

    Attributes:
        supports: Function that returns whether the transport can connect ranks at these endpoints. All ranks must get
            the same result.
        connect: Function that connects them.
    """

    supports: Callable[[Sequence[RankEndpoint]], bool]
    connect: Callable[[GroupEndpoints], Link]


def connect(
    store: Store, rank: int, members: Sequence[int], name: str, timeout: float, watch: MemberWatch | None = None
) -> Link:
    """Connect the ranks of a group with the first transport that supports their endpoints.

    Every rank publishes its host and process, and rank 0 also a segment. All ranks read all endpoints, so all select
    the same transport.

    Args:
        store: Store for the keys of this group only.
        rank: This rank in the group.
        members: Global ranks of all members.
        name: Name of the group, for messages.
        timeout: Longest duration of a wait in seconds.
        watch: Watch over the members until all have joined; None to wait for the time-out.

    Raises:
        UnsupportedError: Shared memory is not available on this platform.
        DistNetworkError: Ranks of several hosts cannot reach each other.
        RankStalledError: A rank did not join in time.
    """
    link_store, size = PrefixStore("link", store), len(members)
    with _prepared_segment(rank, size) as (segment, handle):
        operation = "init_process_group or new_group" if watch is None else watch.operation
        endpoints = _exchange_endpoints(link_store, rank, members, timeout, handle, operation)
        group = GroupEndpoints(link_store, rank, members, name, timeout, endpoints, segment, watch)
        return TRANSPORTS[select(endpoints)].connect(group)


def select(endpoints: Sequence[RankEndpoint]) -> str:
    """Return the name of the first transport that supports these endpoints.

    >>> near, far = (RankEndpoint(host, b"17", b"") for host in (b"a", b"b"))
    >>> select([near, near]), select([near, RankEndpoint(b"a", b"18", b"")]), select([near, far])
    ('threads', 'shared_memory', 'tcp')
    """
    return next(name for name, transport in TRANSPORTS.items() if transport.supports(endpoints))


def _connect_threads(group: GroupEndpoints) -> Link:
    return connect_threads(group.store, group.rank, group.members, group.name, group.timeout, group.watch)


def _connect_shared_memory(group: GroupEndpoints) -> Link:
    store, rank, members, name, timeout, endpoints, segment, watch = group
    if not endpoints[0].segment:
        return connect_shared_memory(store, rank, members, name, timeout, watch)
    layout = layout_for(len(members))
    segment = segment or attach(endpoints[0].segment, layout)
    return _join(segment, layout, rank, members, name, timeout, watch)


def _connect_tcp(group: GroupEndpoints) -> Link:
    hosts = [endpoint.host for endpoint in group.endpoints]
    if group.rank == 0 and any(has_no_proc(host.decode()) for host in hosts):
        _warn_without_proc()
    elif group.rank == 0:
        log.info("group %r spans %s: shared memory within each, TCP between them", group.name, _describe(set(hosts)))
    return tcp.connect(group.store, group.rank, group.members, group.name, group.timeout, hosts, group.watch)


@cache
def _warn_without_proc() -> None:
    """Log once that ranks of one host communicate by TCP, and why."""
    log.warning(
        "some ranks have no /proc of their pid namespace, as in a sandbox, so they cannot find the memory of others: "
        "ranks of one host communicate by TCP too, which is slower. Mount /proc for shared memory."
    )


TRANSPORTS: Mapping[str, Transport] = {
    "threads": Transport(
        lambda endpoints: len({(each.host, each.process) for each in endpoints}) == 1, _connect_threads
    ),
    "shared_memory": Transport(lambda endpoints: len({each.host for each in endpoints}) == 1, _connect_shared_memory),
    "tcp": Transport(lambda endpoints: True, _connect_tcp),
}
"""Transports by name, in order of preference."""


def _describe(hosts: set[bytes]) -> str:
    machines = {host.partition(b"/")[0] for host in hosts}
    one = " on one machine (containers, for example), which cannot share memory" if len(machines) == 1 else ""
    return f"{len(hosts)} {'sets of pid, ipc and user namespaces' if one else 'hosts'}{one}"


def _prepared_segment(rank: int, size: int) -> AbstractContextManager[tuple[SharedMemorySegment | None, bytes]]:
    """Create a segment on rank 0, in case that all ranks share a host: the others then need not request its handle."""
    if rank or not 1 < size <= MAX_PREPARED_RANKS or simulated_place.get() or unavailable_reason():
        return nullcontext((None, b""))
    return created_segment(layout_for(size))


def all_on_one_host(store: Store, rank: int, size: int) -> bool:
    """Return whether all ranks of a group can share memory. Every rank must call it; all get the same result."""
    return len({each.host for each in _exchange_endpoints(PrefixStore("choice", store), rank, range(size))}) == 1


def _exchange_endpoints(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout: float | None = None,
    segment: bytes = b"",
    operation: str = "init_process_group",
) -> Sequence[RankEndpoint]:
    """Publish the endpoint of this rank, and return those of all ranks.

    In a large group, rank 0 alone reads each of them, and publishes all as one value: if each rank read and checked the
    value of each other one, a world of 1,024 ranks would read a million.
    """
    host, process = simulated_place.get() or (os.environ.get(HOST_VARIABLE), os.getpid())
    endpoint = _own_endpoint(process, host)
    own = {_endpoint_of(rank): b"|".join([endpoint, segment])}
    limit = store.timeout if timeout is None else timedelta(seconds=timeout)
    is_large = len(members) > MAX_PREPARED_RANKS
    try:
        if is_large and rank:
            return _unpacked(*store.wait_get([_ALL_ENDPOINTS], limit, own))
        values = store.wait_get([_endpoint_of(each) for each in range(len(members))], limit, own)
        if not is_large:
            return _endpoints(values)
        packed = b"".join(_LENGTH.pack(len(value)) + value for value in values)
        store.set(_ALL_ENDPOINTS, packed)
        return _unpacked(packed)
    except StoreTimeoutError as error:
        # If all have published, rank 0 has not read it.
        absent = [each for each in range(len(members)) if not store.check([_endpoint_of(each)])] or [0]
        raise RankStalledError(
            f"{operation} on {rank_names([rank], members)}: {rank_names(absent, members)} of {len(members)} did not "
            f"join in time. Every member has to create the group."
        ).naming(members[r] for r in absent) from error


_ALL_ENDPOINTS, _LENGTH = "endpoints", struct.Struct("<I")


def _endpoint_of(rank: int) -> str:
    return f"endpoint/{rank}"


def _endpoints(values: Sequence[bytes]) -> tuple[RankEndpoint, ...]:
    return tuple(RankEndpoint(*value.rsplit(b"|", 2)) for value in values)


@lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> tuple[RankEndpoint, ...]:
    """Return the endpoints that rank 0 has published as one value. Ranks that are threads of one process share them."""
    values, at = [], 0
    while at < len(packed):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(packed, at)[0]
        values.append(packed[begin:at])
    return _endpoints(values)


@lru_cache(maxsize=1)
def _own_endpoint(pid: int, host: str | None) -> bytes:
    """Return host and process of this rank; `host` is the value of ``TORCHDIST_REF_HOST_ID``.

    The namespaces of a process take four system calls to find out, and do not change.
    """
    return b"%b|%d" % (host_identity().encode(), pid)


# ---- ranks of one host


def connect_shared_memory(
    store: Store, rank: int, members: Sequence[int], name: str, timeout: float, watch: MemberWatch | None = None
) -> Link:
    """Connect to the other ranks of this host through one segment, found through the store.

    Args:
        store: Store for the keys of this group only.
        rank: This rank in the group.
        members: Global ranks of all members.
        name: Name of the group, for messages.
        timeout: Longest duration of a wait in seconds.
        watch: Watch over the members until all have joined; None to wait for the time-out.

    Returns:
        Link of this rank, after all ranks have joined.

    Raises:
        UnsupportedError: The platform has no memfd, or the ranks cannot access each other's processes.
        RankStalledError: A rank did not join in time.
    """
    if reason := unavailable_reason():
        raise UnsupportedError(f"{reason}. Use backend 'gloo', or ranks as threads.")
    layout = layout_for(len(members))
    with shared_segment(store, layout, rank == 0) as segment:
        return _join(segment, layout, rank, members, name, timeout, watch)


def _join(
    segment: SharedMemorySegment,
    layout: SegmentLayout,
    rank: int,
    members: Sequence[int],
    name: str,
    timeout: float,
    watch: MemberWatch | None,
) -> Link:
    """Join a segment and wait until all ranks have. Arguments and result as in `connect_shared_memory`."""
    link = Link(segment, layout, rank, members, name, timeout)
    announce_process(link.row)
    with link.joining():
        link.handshake(watch)
        link.liveness = watched_processes({peer: link.rows[peer] for peer in link.peers})
    return link


def connect_threads(
    store: Store, rank: int, members: Sequence[int], name: str, timeout: float, watch: MemberWatch | None = None
) -> Link:
    """Connect to the other ranks, which are threads of this process. Arguments as in `connect_shared_memory`.

    For tests, examples and notebooks: no process starts, a debugger sees all ranks at once, and it runs wherever Python
    does. The segment has the same layout as in shared memory, so backends run the same code. Ranks share the
    interpreter lock: do not measure speed here.
    """
    layout = SegmentLayout(len(members), window=256 * 1024, cells=2, mailbox_bytes=0)
    link = Link(private_segment(store, layout, rank == 0), layout, rank, members, name, timeout)
    # Threads do not run in parallel: spinning would keep the interpreter lock from the awaited rank.
    link.spins = link.yields = 0
    link.row.join(os.getpid())
    with link.joining():
        link.handshake(watch)
    return link
