"""Connections of simulated ranks to stores: those of `TCPStore`, with its own requests and responses, in virtual time.

Only sockets are replaced: a client's by `SimulatedSocket`, the loop of a server by `SimulatedServer`. The meaning of
requests, the reconnection of clients and the sessions of a server are the library's own code. Each piece of bytes takes
the time of a message without data, and arrives after those before it.

A process that ends closes its connections, and its ports refuse new ones. A host that ends (`Wires.silent`) sends
nothing any more: a rank that sends something to it waits until its own time-out.
"""

from __future__ import annotations

import errno
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchdist_ref.elastic import coordinator
from torchdist_ref.errors import DistNetworkError
from torchdist_ref.simulation.scheduler import TIMEOUT, Task, current_task
from torchdist_ref.simulation.world import SimulatedWorld
from torchdist_ref.stores.addresses import is_loopback
from torchdist_ref.stores.tcp import client as tcp_client
from torchdist_ref.stores.tcp import store as tcp_store
from torchdist_ref.stores.tcp.protocol import ManyValues, Piece, ProtocolError, RequestDecoder
from torchdist_ref.stores.tcp.requests import RequestHandler, StoreClient
from torchdist_ref.stores.tcp.server import TCPServer
from torchdist_ref.timeouts import Deadline

_FIRST_FREE_PORT = 40_000
_ANY = ("0.0.0.0", "::", "")


def address_of_host(host: int) -> str:
    """Return the address of a simulated host.

    >>> address_of_host(0), address_of_host(255)
    ('10.0.0.1', '10.0.1.0')
    """
    number = host + 1
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"


class SimulatedSocket:
    """A client's end of a connection, in place of `DeadlineSocket`.

    Args:
        ports: Servers of the world.
        task: Task that connects.
        server: Server.
    """

    def __init__(self, ports: Ports, task: Task, server: ServedStore) -> None:
        self._ports, self.owner, self.server = ports, task.owner, server
        self._scheduler = ports.world.scheduler
        self._buffer = bytearray()
        self._reader: Task | None = None
        self.is_open, self._ended, self._aborted = True, False, False
        self._to_server = ports.line(self.owner, server.owner)
        self.from_server = ports.line(server.owner, self.owner)
        self._client = SimulatedStoreClient(self)
        server.clients[self._client] = None

    def send(self, data: bytes, until: float) -> None:
        """See `DeadlineSocket.send`. The system takes everything at once."""
        self._scheduler.step()
        if self._ended or self._aborted:
            raise tcp_client.ConnectionLost("the server closed the connection")
        self._to_server(lambda: self._client.receive(data))

    def arrived(self, data: bytes) -> None:
        """Let the client read bytes; none for the end of the connection."""
        self._buffer += data
        self._ended = self._ended or not data
        self._wake()

    def receive(self, until: float, limit: int = tcp_client.READ_BYTES) -> bytes:
        """See `DeadlineSocket.receive`; the time is virtual."""
        task = self._scheduler.running()
        kind, task.watched = task.watched, None
        self._await_bytes(until, 1, kind)
        return self.take(min(limit, len(self._buffer)), until)

    def take(self, size: int, until: float) -> bytes:
        """See `DeadlineSocket.take`."""
        self._await_bytes(until, size)
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece

    def _await_bytes(self, until: float, size: int, kind: int | None = None) -> None:
        """Wait until so many bytes are there. A wait of a `kind` looks for failures, and so ends at an alarm too."""
        task, scheduler = self._scheduler.running(), self._scheduler
        while len(self._buffer) < size:
            if self._ended or self._aborted:
                raise tcp_client.ConnectionLost("the server closed the connection")
            seconds = until - scheduler.now
            if kind is not None and task.alarmed:
                task.alarmed, seconds = False, 0.0
            if seconds <= 0:
                raise TimeoutError
            self._reader, task.purpose = task, f"the store at {self.server}"
            task.alarmable += kind is not None
            try:
                scheduler.block(self, seconds, TIMEOUT if kind is None else kind)
            finally:
                self._reader, task.purpose = None, ""
                task.alarmable -= kind is not None

    def take_rest(self) -> bytes:
        """See `DeadlineSocket.take_rest`."""
        rest, self._buffer = bytes(self._buffer), bytearray()
        return rest

    def close(self) -> None:
        """See `DeadlineSocket.close`."""
        if self.is_open:
            self.is_open = False
            if not self._scheduler.is_over:
                self._to_server(self._client.ended)

    def abort(self) -> None:
        """See `DeadlineSocket.abort`."""
        self._aborted = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and self._reader.waits_for is self:
            self._scheduler.wake(self._reader)

    def __str__(self) -> str:
        return f"a response of the store at {self.server}"


class SimulatedStoreClient(StoreClient):
    """A server's end of a connection.

    Args:
        sock: The other end.
    """

    def __init__(self, sock: SimulatedSocket) -> None:
        super().__init__()
        self._socket, self._decoder = sock, RequestDecoder()

    def receive(self, data: bytes) -> None:
        """Run the requests that have arrived whole."""
        server = self._socket.server
        if self not in server.clients:
            return
        try:
            self._decoder.feed(data)
            while self in server.clients and (request := self._decoder.next()) is not None:
                server.handler.handle(self, request)
        except ProtocolError as error:
            self.disconnect(str(error))
        server.keep_time()

    def send(self, pieces: Sequence[Piece]) -> None:
        """See `StoreClient.send`."""
        sock = self._socket
        parts = (b"".join(piece.pieces()) if isinstance(piece, ManyValues) else piece for piece in pieces)
        data = b"".join(parts)
        if data:
            sock.from_server(lambda: sock.arrived(data))

    def disconnect(self, reason: str) -> None:
        """See `StoreClient.disconnect`."""
        if self in self._socket.server.clients:
            self.ended()
            self._socket.from_server(lambda: self._socket.arrived(b""))

    def ended(self) -> None:
        """Forget the client, whose connection has ended."""
        server = self._socket.server
        if server.clients.pop(self, self) is None:
            server.handler.remove(self)
            server.keep_time()

    @property
    def owner(self) -> int:
        """Rank of the run to which the client belongs."""
        return self._socket.owner


class ServedStore:
    """Store that a rank serves at a port: its requests run when they arrive, in the order of their arrival.

    Args:
        world: World of the rank.
        owner: Rank of the run that serves.

    Attributes:
        owner: As the argument.
        host: Simulated host of the rank.
        address: Address of that host.
        port: Port; 0 before it listens.
        handler: Meaning of the requests.
        clients: Connections.
    """

    def __init__(self, world: SimulatedWorld, owner: int) -> None:
        self._world, self.owner, self.host, self.port = world, owner, world.wires.hosts[owner], 0
        self.address = address_of_host(self.host)
        self.handler = RequestHandler(lambda: world.scheduler.now)
        self.clients: dict[SimulatedStoreClient, None] = {}
        self._due = 0.0

    def keep_time(self) -> None:
        """Set the keys of clients that have disconnected and stay away, when that is due."""
        due = min(self.handler.sessions.disconnected.values(), default=0.0)
        if due and due != self._due:
            self._due = due
            self._world.scheduler.at(due, self._execute_wills)

    def _execute_wills(self) -> None:
        self._due = 0.0
        if self.owner not in self._world.wires.silent:
            self.handler.execute_wills(self._world.scheduler.now)
            self.keep_time()

    def end(self) -> None:
        """Close all connections."""
        if not self._world.scheduler.is_over:
            for client in [*self.clients]:
                client.disconnect("the server has ended")

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class SimulatedServer:
    """Server of a store, in place of `TCPServer`. It ends when it is closed, or no longer referenced.

    Args:
        ports: Servers of the world.
        task: Task that serves.
        host: Address to listen on, as for `TCPServer`.
        port: Port; 0 for a free one.

    Attributes:
        addresses: See `TCPServer`.
        port: See `TCPServer`.
        values: See `TCPServer`.
        queues: See `TCPServer`.
    """

    def __init__(self, ports: Ports, task: Task, host: str, port: int) -> None:
        self._scheduler, self._served = ports.world.scheduler, ServedStore(ports.world, task.owner)
        ports.listen(self._served, host, port)
        self.port = self._served.port
        self.addresses = [(self._served.address if host in _ANY else host, self.port)]
        table = self._served.handler.table
        self.values, self.queues = table.values, table.queues
        self._finalizer = weakref.finalize(self, ports.close, self._served)
        self._finalizer.atexit = False

    def close(self) -> None:
        """See `TCPServer.close`."""
        self._finalizer()

    def await_clients(self, seconds: float) -> None:
        """See `TCPServer.await_clients`."""
        end = self._scheduler.now + seconds
        while self._served.clients and self._scheduler.now < end:
            self._scheduler.sleep(min(_LOOK_SECONDS, end - self._scheduler.now))


_LOOK_SECONDS = 0.001


class Ports:
    """Servers of a world by host and port, and the way to them.

    Args:
        world: The world.
    """

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._served: dict[tuple[int, int], ServedStore] = {}
        world.on_death.append(self.end_process)

    def line(self, source: int, target: int) -> Callable[[Callable[[], None]], None]:
        """Return a function that has something happen at a rank, once a message of another one has arrived there."""
        world = self.world
        scheduler, wires, latest = world.scheduler, world.wires, [0.0]

        def send(happens: Callable[[], None]) -> None:
            def arrive() -> None:
                if {source, target} & wires.silent:
                    return
                if wires.is_cut(source, target):
                    world.held.append((source, target, arrive))
                    return
                happens()

            # Order is kept although a delay may end meanwhile.
            latest[0] = arrival = max(latest[0], wires.notice(scheduler.now, source, target))
            if source == target or arrival <= scheduler.now:
                arrive()
            else:
                scheduler.at(arrival, arrive)

        return send

    def listen(self, served: ServedStore, host: str, port: int) -> None:
        """Let a store be reached at a port of its host.

        Raises:
            DistNetworkError: The port is in use, or the address is that of another host.
        """
        if not (host in _ANY or is_loopback(host) or host == served.address):
            number, cure = errno.EADDRNOTAVAIL, f"this simulated host has the address {served.address}"
        else:
            free = (each for each in range(_FIRST_FREE_PORT, 1 << 16) if (served.host, each) not in self._served)
            served.port = port or next(free)
            if self._served.setdefault((served.host, served.port), served) is served:
                return
            number, cure = errno.EADDRINUSE, "choose another port, or 0 for a free one"
        error = OSError(number, os.strerror(number))
        raise DistNetworkError(f"TCPStore: cannot listen on {host}:{port}: {error.strerror}; {cure}.") from error

    def close(self, served: ServedStore) -> None:
        """End a server: its port is free, and its connections are closed."""
        if self._served.get((served.host, served.port)) is served:
            del self._served[served.host, served.port]
        served.end()

    def connect(self, address: tcp_client.ServerAddress, deadline: Deadline) -> SimulatedSocket:
        """Return a socket of the calling task, as `client.open_socket`.

        Raises:
            OSError: No process listens there, or no such host answers before the deadline.
        """
        task, scheduler, wires = current_task(), self.world.scheduler, self.world.wires
        assert task is not None
        scheduler.step()
        here = wires.hosts[task.owner]
        is_own = is_loopback(address.host) or address.host in _ANY
        address.local_end = socket.AF_INET, address.host if is_own else address_of_host(here)
        address.resolved = [address.host]
        reached = (
            rank
            for rank, host in enumerate(wires.hosts)
            if (host == here if is_own else address_of_host(host) == address.host)
        )
        target = next(reached, None)
        if target is None or target in wires.silent or wires.is_cut(task.owner, target):
            scheduler.sleep(deadline.remaining())
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if seconds := 2 * (wires.notice(scheduler.now, task.owner, target) - scheduler.now):
            scheduler.sleep(seconds)
        served = self._served.get((wires.hosts[target], address.port))
        if served is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return SimulatedSocket(self, task, served)

    def end_process(self, rank: int) -> None:
        """Close everything of a rank whose process has ended."""
        for served in [*self._served.values()]:
            if served.owner == rank:
                self.close(served)
            for client in [each for each in served.clients if each.owner == rank]:
                client.ended()


@contextmanager
def connected(ports: Ports) -> Iterator[None]:
    """Let stores of simulated ranks use the connections of a world in the block."""
    real_open, real_server = tcp_client.open_socket, TCPServer

    def open_socket(server: tcp_client.ServerAddress, deadline: Deadline) -> Any:
        return real_open(server, deadline) if current_task() is None else ports.connect(server, deadline)

    def make_server(host: str, port: int, descriptor: int | None = None, timeout: float = 300.0) -> Any:
        task = current_task()
        if task is None:
            return real_server(host, port, descriptor, timeout)
        return SimulatedServer(ports, task, host, port)

    tcp_client.open_socket = open_socket
    for module in (tcp_store, coordinator):
        setattr(module, "TCPServer", make_server)  # noqa: B010 (mypy lets nobody assign to a class)
    try:
        yield
    finally:
        tcp_client.open_socket = real_open
        tcp_store.forget_simulated_servers()
        for module in (tcp_store, coordinator):
            setattr(module, "TCPServer", real_server)  # noqa: B010
