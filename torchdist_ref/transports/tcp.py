"""TCP: ranks on several hosts. Within a host they share memory; between hosts, copies are kept up over sockets.

Each rank has the same map of the segment as everywhere. Parts that belong to ranks of its own host are in shared
memory; parts of distant ranks are private copies, which those ranks fill: a token that crosses hosts travels in a
frame together with the bytes that it announces (`connection`). So backends run the same code, and the same schedules.

Every rank listens on one address, chosen as `interface_address` says, and publishes it in the store; of each pair
of distant ranks the higher one connects. A secret from the store keeps strangers out.

All pairs are connected at the start and not when they first have something to say, because a connection is also how a
death is learnt: its end is seen by every survivor within milliseconds, whichever ranks its last call was with. A pair
without one would learn of it at the time-out, or from others, who would have to be asked or to pass it on.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from time import monotonic
from typing import Any

from torchdist_ref.errors import DistNetworkError
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.transports import shared_memory
from torchdist_ref.transports.addresses import interface_address
from torchdist_ref.transports.base import Link
from torchdist_ref.transports.door import SECRET, Door, greeting
from torchdist_ref.transports.layout import Layout
from torchdist_ref.transports.liveness import NoPeers, Peers
from torchdist_ref.transports.memory import Lane, Liveness, Memory, Range, Token
from torchdist_ref.transports.mesh import Incoming, Mesh, PeerLane, Pumped
from torchdist_ref.transports.threads import PrivateMemory


class TcpMemory:
    """Parts of this host's ranks in a common segment, parts of distant ranks as copies."""

    kind = "tcp"

    def __init__(self, rank: int, layout: Layout, near: Sequence[int], common: Any, patience: float) -> None:
        self._near, self._common = frozenset(near), common
        self._copies = PrivateMemory(layout.nbytes)
        self.mesh = Mesh(rank, layout, self.bytes_of, patience)
        self._rank = rank

    def buffer_of(self, rank: int) -> Any:
        """See `Memory`."""
        return (self._common if rank in self._near else self._copies).buffer

    def bytes_of(self, rank: int) -> memoryview:
        """See `Memory`."""
        found: memoryview = (self._common if rank in self._near else self._copies).bytes
        return found

    def token(self, layout: Layout, kind: str, source: int, target: int) -> Token:
        """See `Memory`."""
        if target != self._rank and target not in self._near:
            return Outgoing(self.mesh, kind, target)
        if source not in self._near:
            return Incoming(self.mesh, kind, source)
        token: Token = self._common.token(layout, kind, source, target)
        if kind == "bell" and target == self._rank:
            self.mesh.ring = token.release
        return Pumped(self.mesh, token)

    def giver(self, token: Token, kind: str, target: int, owner: int, ranges: Sequence[Range]) -> Callable[[], Any]:
        """See `Memory`."""
        if target in self._near:
            return token.release
        return lambda: self.mesh.send(target, kind, owner, ranges)

    def lane(self, peer: int) -> Lane | None:
        """See `Memory`."""
        return None if peer in self._near else PeerLane(self.mesh, peer)


class Outgoing:
    """A token for a distant rank, without bytes to show."""

    def __init__(self, mesh: Mesh, kind: str, target: int) -> None:
        self._mesh, self._kind, self._target = mesh, kind, target

    def release(self) -> None:
        """Send it."""
        self._mesh.send(self._target, self._kind, self._mesh.rank, ())

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Not for this end."""
        raise DistNetworkError("a token for a distant rank is taken there.")


class NearAndFar:
    """Processes of this host, and connections to the others."""

    def __init__(self, near: Liveness, mesh: Mesh) -> None:
        self._near, self._mesh = near, mesh

    def dead(self) -> list[int]:
        """See `Liveness`."""
        self._mesh.pump(0.0)
        return sorted({*self._near.dead(), *self._mesh.gone})

    def close(self) -> None:
        """See `Liveness`."""
        self._near.close()
        self._mesh.close()


def connect(
    store: Store, rank: int, members: Sequence[int], name: str, timeout: float, hosts: Sequence[object]
) -> Link:
    """Meet ranks of several hosts. Arguments and result as in `shared_memory.connect`.

    Args:
        hosts: For every rank something that is equal for ranks of one host.

    Raises:
        DistNetworkError: No address to listen on, or a rank cannot be reached.
        RankStalledError: A rank did not come in time.
    """
    # What crosses hosts is read by this rank alone, out of its copy: the sooner again in the same place, the better.
    layout = Layout(len(members), turns=2)
    near = [r for r in range(len(members)) if hosts[r] == hosts[rank]]
    with _common(PrefixStore(f"host/{near[0]}", store), layout, rank, near) as common:
        memory = TcpMemory(rank, layout, near, common, timeout)
        far = [r for r in range(len(members)) if r not in near]
        _connect_all(store, memory.mesh, rank, far, timeout)
        typed: Memory = memory
        link = Link(typed, layout, rank, members, name, timeout)
        link.hosts = tuple([*dict.fromkeys(hosts)].index(host) for host in hosts)
        link.line.arrive(os.getpid())
        link.alive = NearAndFar(NoPeers(), memory.mesh)
        link.meet("init_process_group")
    link.alive = NearAndFar(Peers({r: link.lines[r].pid for r in near if r != rank}), memory.mesh)
    return link


def _common(store: Store, layout: Layout, rank: int, near: Sequence[int]) -> AbstractContextManager[Any]:
    if len(near) == 1:
        return nullcontext(PrivateMemory(layout.nbytes))
    return shared_memory.found(store, layout, rank == near[0])


def _connect_all(store: Store, mesh: Mesh, rank: int, far: Sequence[int], timeout: float) -> None:
    family, address = interface_address(store)
    with socket.create_server((address, 0), family=family, backlog=len(far) + 8) as server:
        secret = secrets.token_bytes(SECRET)
        store.set(f"address/{rank}", f"{family} {address} {server.getsockname()[1]} {secret.hex()}".encode())
        deadline = monotonic() + timeout
        lower = [peer for peer in far if peer < rank]
        addresses = store.multi_get([f"address/{peer}" for peer in lower]) if lower else []
        for peer, text in zip(lower, addresses, strict=True):
            mesh.add(peer, _dial(text.decode(), rank, peer, deadline))
        waiting = {peer for peer in far if peer > rank}
        with closing(Door(server, secret)) as door:
            while waiting:
                peer, sock = door.next(waiting, deadline)
                mesh.add(peer, sock)
                waiting.discard(peer)


def _dial(text: str, rank: int, peer: int, deadline: float) -> socket.socket:
    _, address, port, secret = text.split()
    try:
        sock = socket.create_connection((address, int(port)), max(0.1, deadline - monotonic()))
        sock.sendall(greeting(bytes.fromhex(secret), rank))
    except OSError as error:
        raise DistNetworkError(
            f"init_process_group on rank {rank}: rank {peer} cannot be reached at {address} port {port}: {error}. "
            f"Name the right interface in TORCHDIST_REF_SOCKET_IFNAME on that host."
        ) from error
    return sock
