"""TCP transport: ranks on several hosts. Ranks of one host share memory; sockets replicate the segment between hosts.

All ranks have the same layout of the segment. The parts of ranks on this host are in shared memory. The parts of remote
ranks are private copies, which those ranks update: a semaphore that crosses hosts travels in one frame with the bytes
that it signals (see `frames`). So backends run the same code and the same schedules.

Every rank listens on one address (see `interface_address`) and publishes it in the store. Of each pair of remote ranks
the higher one connects. Both then prove that they know the group's key, which is in no store (see `membership.trust`).

All pairs connect at the start, not on first use, because a connection also detects failures: every survivor sees it
close within milliseconds of a death. Without a connection, a rank would notice the death at the time-out.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

from torchdist_ref.errors import DistNetworkError, advice_on_limit
from torchdist_ref.membership.events import DISCONNECTED, Ending
from torchdist_ref.membership.peer_processes import Liveness, NoPeerProcesses
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.stores import PrefixStore, Store, TCPStore
from torchdist_ref.stores.addresses import is_link_local, is_loopback, local_ends, look_up, loopback_address
from torchdist_ref.stores.sealed import channel_key, innermost
from torchdist_ref.transports.acceptor import Acceptor, authenticate_to
from torchdist_ref.transports.base import DirectPath, Range, Segment, Semaphore
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.mesh import (
    ConnectionMesh,
    IncomingSemaphore,
    LocalSemaphore,
    MeshDirectPath,
    OutgoingSemaphore,
)
from torchdist_ref.transports.segment import (
    ROW_BYTES,
    PrivateSegment,
    SegmentLayout,
    StatusRow,
    announce_process,
    shared_segment,
    watched_processes,
)

_INTERFACE_VARIABLES = ("TORCHDIST_REF_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# ioctl number and /proc/net/if_inet6 scope of Linux.
_SIOCGIFADDR = 0x8915
_LINK_LOCAL_SCOPE = "20"
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that no host has (RFC 5737, RFC 3849): the default route leads there."""


class ReplicatedSegment:
    """Segment with the parts of this host's ranks in common memory, and copies of the parts of remote ranks."""

    kind = "tcp"
    rows_are_common = False

    def __init__(self, rank: int, layout: SegmentLayout, local: Sequence[int], common: Segment, timeout: float) -> None:
        self._local, self._common = frozenset(local), common
        self._copies = PrivateSegment(layout.nbytes)
        self.mesh = ConnectionMesh(rank, layout, self.bytes_of, timeout)
        self._rank = rank

    def set_timeout(self, seconds: float) -> None:
        """Set the seconds for which a peer may leave sent bytes unread."""
        self.mesh.timeout = seconds

    def buffer_of(self, rank: int) -> Any:
        """See `Segment.buffer_of`."""
        return (self._common if rank in self._local else self._copies).buffer_of(rank)

    def bytes_of(self, rank: int) -> memoryview:
        """See `Segment.bytes_of`."""
        return (self._common if rank in self._local else self._copies).bytes_of(rank)

    def semaphore(self, layout: SegmentLayout, kind: str, source: int, target: int) -> Semaphore:
        """See `Segment.semaphore`."""
        if target != self._rank and target not in self._local:
            return OutgoingSemaphore(self.mesh, kind, target)
        if source not in self._local:
            return IncomingSemaphore(self.mesh, kind, source)
        semaphore = self._common.semaphore(layout, kind, source, target)
        if kind == "doorbell" and target == self._rank:
            self.mesh.ring_doorbell = semaphore.release
        return LocalSemaphore(self.mesh, semaphore)

    def make_signal(
        self, semaphore: Semaphore, kind: str, target: int, owner: int, ranges: Sequence[Range]
    ) -> Callable[[], Any]:
        """See `Segment.make_signal`."""
        if target in self._local:
            return semaphore.release
        return lambda: self.mesh.send(target, kind, owner, ranges)

    def publish_row(self, layout: SegmentLayout, rank: int) -> None:
        """See `Segment.publish_row`."""
        for target in range(layout.size):
            if target not in self._local:
                self.mesh.send(target, "status", rank, [(layout.status_row(rank), ROW_BYTES)])

    def direct_path(self, peer: int) -> DirectPath | None:
        """See `Segment.direct_path`."""
        return None if peer in self._local else MeshDirectPath(self.mesh, peer)


class HostAndMeshLiveness:
    """`Liveness` from the processes of this host and the connections to the others.

    A connection that ends after its rank has closed the group says nothing of the process.
    """

    def __init__(self, local: Liveness, mesh: ConnectionMesh, rows: Sequence[StatusRow]) -> None:
        self._local, self._mesh, self._rows = local, mesh, rows

    def dead(self) -> list[int]:
        """See `Liveness.dead`."""
        self._mesh.progress(0.0)
        # Other threads add to it meanwhile.
        disconnected = tuple(self._mesh.disconnected)
        return sorted({*self._local.dead(), *(rank for rank in disconnected if not self._rows[rank].closed)})

    def ending(self, rank: int) -> Ending | None:
        """See `Liveness.ending`."""
        return self._local.ending(rank) or Ending(DISCONNECTED, address=self._mesh.address_of(rank))

    def close(self) -> None:
        """See `Liveness.close`."""
        self._local.close()
        self._mesh.close()


def connect(
    store: Store,
    rank: int,
    members: Sequence[int],
    name: str,
    timeout: float,
    hosts: Sequence[object],
    watch: MemberWatch | None = None,
) -> Link:
    """Connect to ranks on several hosts, and return this rank's link.

    Args:
        store: See `selection.connect`.
        rank: See `selection.connect`.
        members: See `selection.connect`.
        name: See `selection.connect`.
        timeout: See `selection.connect`.
        hosts: Identity of each rank's host; equal for ranks of one host.
        watch: See `selection.connect`.

    Raises:
        DistNetworkError: No address to listen on, or a rank cannot be reached.
        RankStalledError: A rank did not join in time.
    """
    # Only this rank reads its copies, so reusing the same cache lines early is best: two cells.
    layout = SegmentLayout(len(members), cells=2)
    local = [r for r in range(len(members)) if hosts[r] == hosts[rank]]
    with _common_segment(PrefixStore(f"host/{local[0]}", store), layout, rank, local) as common:
        segment = ReplicatedSegment(rank, layout, local, common, timeout)
        remote = [r for r in range(len(members)) if r not in local]
        _connect_mesh(store, segment.mesh, rank, remote, timeout, watch)
        link = Link(segment, layout, rank, members, name, timeout)
        link.on_timeout = segment.set_timeout
        link.hosts = tuple([*dict.fromkeys(hosts)].index(host) for host in hosts)
        announce_process(link.row)
        link.liveness = HostAndMeshLiveness(NoPeerProcesses(), segment.mesh, link.rows)
        with link.joining():
            link.handshake(watch)
            processes = watched_processes({peer: link.rows[peer] for peer in local if peer != rank})
    link.liveness = HostAndMeshLiveness(processes, segment.mesh, link.rows)
    return link


def _common_segment(
    store: Store, layout: SegmentLayout, rank: int, local: Sequence[int]
) -> AbstractContextManager[Any]:
    if len(local) == 1:
        return nullcontext(PrivateSegment(layout.nbytes))
    return shared_segment(store, layout, rank == local[0])


def _connect_mesh(
    store: Store, mesh: ConnectionMesh, rank: int, remote: Sequence[int], timeout: float, watch: MemberWatch | None
) -> None:
    family, address = interface_address(store)
    address, _, scope = address.partition("%")
    where = look_up(f"{address}%{scope}" if scope else address, 0)[0][1]
    with socket.create_server(where, family=family, backlog=len(remote) + 8) as server:
        key = channel_key(store, "mesh")
        store.set(f"address/{rank}", f"{address} {server.getsockname()[1]}".encode())
        deadline = monotonic() + timeout
        lower = [peer for peer in remote if peer < rank]
        addresses = store.multi_get([f"address/{peer}" for peer in lower]) if lower else []
        for peer, text in zip(lower, addresses, strict=True):
            mesh.add(peer, connect_to(text.decode(), scope, key, rank, peer, deadline, watch))
        expected = {peer for peer in remote if peer > rank}
        with closing(Acceptor(server, key, rank)) as acceptor:
            while expected:
                peer, sock = acceptor.next(expected, deadline, watch)
                mesh.add(peer, sock)
                expected.discard(peer)


def connect_to(
    text: str, scope: str, key: bytes, rank: int, peer: int, deadline: float, watch: MemberWatch | None
) -> socket.socket:
    """Connect to a peer and authenticate.

    Args:
        text: Address and port of the peer.
        scope: Interface through which a link-local address is reached.
        key: Key of the group's connections.
        rank: This rank.
        peer: Rank to connect to.
        deadline: Monotonic time until which to try, in seconds.
        watch: Watch that knows whether the peer has failed.

    Raises:
        DistNetworkError: The peer cannot be reached.
    """
    address, port = text.split()
    if scope and is_link_local(address):
        # Each host has its own name for the network that joins them.
        address = f"{address}%{scope}"
    try:
        while True:
            sock = socket.create_connection((address, int(port)), max(0.1, deadline - monotonic()))
            try:
                authenticate_to(sock, key, rank, peer, deadline)
                return sock
            except ConnectionError:
                # The peer closes connections that others have delayed, for instance while somebody floods it.
                sock.close()
                if monotonic() > deadline or (watch is not None and watch.failure([peer]) is not None):
                    raise
            except BaseException:
                sock.close()
                raise
    except OSError as error:
        if advice_on_limit(error):
            raise
        if watch is not None and (failure := watch.failure([peer])) is not None:
            raise failure from error
        raise DistNetworkError(
            f"rank {peer} cannot be reached at {address} port {port}: {error}. "
            f"Set TORCHDIST_REF_SOCKET_IFNAME to the right interface on that host."
        ) from error


def interface_address(store: Store) -> tuple[socket.AddressFamily, str]:
    """Return the address to listen on, which other hosts can reach.

    In order of precedence: the address of the interface named in ``TORCHDIST_REF_SOCKET_IFNAME`` or
    ``GLOO_SOCKET_IFNAME`` (the first of a list that this host has), the address from which this host reaches the
    store's server, that of the default route, the loopback. The loopback leads to the server of a store on this host
    (a name of its own that /etc/hosts maps to 127.0.1.1, for instance), but other hosts cannot use it.

    Raises:
        DistNetworkError: None of the named interfaces exists and has an address.
    """
    for variable in _INTERFACE_VARIABLES:
        if names := os.environ.get(variable):
            return _address_of_interface(variable, names)
    return _source_address(store)


def _address_of_interface(variable: str, names: str) -> tuple[socket.AddressFamily, str]:
    for name in (name.strip() for name in names.split(",")):
        address = _ipv4_address(name) or _ipv6_address(name)
        if address is not None:
            return address
    existing = sorted(name for _, name in socket.if_nameindex())
    raise DistNetworkError(f"{variable}={names}: this host has no such interface with an address; it has {existing}.")


def _ipv4_address(name: str) -> tuple[socket.AddressFamily, str] | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            response = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.AF_INET, socket.inet_ntoa(response[20:24])


def _ipv6_address(name: str) -> tuple[socket.AddressFamily, str] | None:
    """Return the first IPv6 address of an interface that is not link-local: other hosts cannot use those."""
    try:
        rows = [text.split() for text in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return None
    digits = next((row[0] for row in rows if row[-1] == name and row[3] != _LINK_LOCAL_SCOPE), None)
    return None if digits is None else (socket.AF_INET6, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))


def _source_address(store: Store) -> tuple[socket.AddressFamily, str]:
    """Return the local address of the route to a store's server, or of the default route if the first is the loopback.

    A `TCPStore` knows from which address it has reached its server. If that is the loopback, the name of the server's
    host may have further addresses. Of torch's store, only the name is known.
    """
    inner = innermost(store)
    reached = [inner.local_end] if isinstance(inner, TCPStore) and inner.local_end else []
    hosts = [host for host in (getattr(inner, "host", None), *_ELSEWHERE) if host is not None]
    for found in chain(reached, chain.from_iterable(map(local_ends, hosts))):
        if not is_loopback(found[1]):
            return found
    address = loopback_address()
    return socket.AF_INET6 if ":" in address else socket.AF_INET, address
