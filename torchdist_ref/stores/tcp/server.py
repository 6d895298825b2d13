"""Server side of TCPStore: listening sockets, one thread with an event loop, bounded memory.

The thread reads from the sockets, parses requests (`protocol`), runs them (`requests`) and sends the replies. Clients
of torch cannot authenticate themselves, so any process that reaches the port can connect, except those of other users
on loopback. Each connection has limits:

- a connection that sends no complete request within `HANDSHAKE_SECONDS` is closed, and so is the oldest of more than
  `MAX_UNVALIDATED` such connections. One that has sent something waits for its first turn, and is neither; others are
  accepted while fewer than `MAX_UNSERVED` wait so;
- unfinished requests hold at most `MEMORY_LIMIT` bytes together. Above that, only one connection may continue a large
  request; the others are not read. One that is unfinished for `HANDSHAKE_SECONDS` while others wait is closed;
- a client that does not read its replies is not read from; unsent replies count in the budget of `memory`, and the
  clients that have not read for the longest time are disconnected when the budget is used up;
- a client is served for `SERVICE_SECONDS` at a time, less if there are many; the requests and replies that are left
  wait for its next turn. Clients whose requests took little time lately come first in one half of a turn, those that
  were served longest ago in the other. A new client counts as slow until it has left no request for a later turn;
- a request with a long list or a large value, or one that goes through many keys, waits for others of its kind. Only
  one short and one long of them have a turn at a time, in which a part is read, or the whole is handled. Nothing else
  is read from its client. The keys of a prefix are deleted in turns, and many waiting clients are answered in turns;
- at most `MAX_NEWCOMERS` connections have sent only greetings, and the oldest of them gives its descriptor to a new
  client if the process has none left. Other connections may be idle for any time.

The server ends when its `TCPServer` is closed or collected: no thread, descriptor or port stays behind. A forked child
closes its copies of the sockets at once, so that the port is free when the parent's server ends. Do not add the meaning
of requests here.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sized
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from time import monotonic
from typing import TypeAlias

from torchdist_ref.processes.forks import close_copies_in_child
from torchdist_ref.stores.sockets import READ, WRITE, adopt, listen, poller
from torchdist_ref.stores.tcp.connections import SERVICE_SECONDS, ConnectionOwner, ServerConnection, ThreadClock
from torchdist_ref.stores.tcp.listeners import ListeningSockets
from torchdist_ref.stores.tcp.operations import MAX_FILED, Op
from torchdist_ref.stores.tcp.protocol import ProtocolError, Request
from torchdist_ref.stores.tcp.requests import RequestHandler
from torchdist_ref.timeouts import Deadline

logger = logging.getLogger("torchdist_ref.stores")

BUSY_SECONDS = 0.2
"""Time that a busy server waits longer for clients that have disconnected to connect again."""
HANDSHAKE_SECONDS = 5.0
MEMORY_LIMIT = 4 * 2**20
READ_BYTES, MAX_READ_BYTES = 4096, 64 * 1024
MAX_UNVALIDATED, MAX_UNSERVED, MAX_NEWCOMERS = 1024, 2048, 4096
UNSENT_SHARE = 16
"""Part of the budget, as its divisor, that unsent replies may always use, also in a store that is full of keys."""
TURN_SECONDS = 0.005
"""Time of each half of a turn, of this thread: a busy host lets the thread wait, which is no fault of a client."""
ACCEPT_SECONDS = 0.05
"""Time in a turn for new connections, longer than that for the others: a client behind many waits for few turns."""
ROUND_SECONDS = 0.02
"""Time in which all ready clients should have had a turn: each is served for its share of that, but one request."""
SHORT_BYTES = 64 * 1024
SHORT_WEIGHT = 4096
"""Size and weight of a request that waits only for other short ones, not for the long."""
PAUSED_CHECK_SECONDS, ERROR_PAUSE_SECONDS = 0.25, 0.1
STOP_SECONDS = 5.0
_GREETINGS = (Op.VALIDATE, Op.PING)
_Ready: TypeAlias = tuple[float, float, int, int]
"""Cost of a client, when it was served last, its descriptor, and the events there."""


class ServerLoop(ConnectionOwner):
    """Event loop of the server's thread. It holds no reference to `TCPServer`, which can be collected."""

    def __init__(self, listeners: list[socket.socket]) -> None:
        self.handler = RequestHandler()
        self.handler.memory.reclaim = self._reclaim
        self._poller = poller()
        self.listeners = ListeningSockets(listeners, self._poller)
        self.connections: dict[int, ServerConnection] = {}
        self.unused = threading.Event()
        self._unserved: dict[ServerConnection, None] = {}
        self._unvalidated: dict[ServerConnection, None] = {}
        self._newcomers: dict[ServerConnection, None] = {}
        self._paused: dict[ServerConnection, None] = {}
        self._unprocessed: dict[ServerConnection, None] = {}
        self._readers: dict[ServerConnection, None] = {}
        self._short: deque[ServerConnection] = deque()
        self._long: deque[ServerConnection] = deque()
        self._clock = ThreadClock()
        self._held = self._unsent = 0
        self._service_seconds = SERVICE_SECONDS
        self._had_client = False
        self._stopping = False
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._poller.register(self._wake_receiver.fileno(), READ)
        self.thread = threading.Thread(target=self._run, name="torchdist_ref store server", daemon=True)

    def stop(self) -> None:
        """End the thread and close everything. Any thread may call this, more than once."""
        self._stopping = True
        try:
            self._wake_sender.send(b"x")
        except OSError:
            return
        # Where a limit on threads is reached, it has never started.
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(timeout=STOP_SECONDS)

    def close_copies(self) -> None:
        """Close a forked child's copies of the descriptors, which the parent's clients do not notice."""
        # The child shares the epoll instance with the parent: to unregister here would unregister there.
        copies = [connection.sock for connection in self.connections.values()]
        for sock in [*copies, self._wake_sender, self._wake_receiver]:
            sock.close()
        self.listeners.close()
        self._poller.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._run_turn()
                except Exception:
                    # Without this thread, no rank has a store. A pause keeps a lasting error from filling the log.
                    logger.exception("store server: internal error; the server continues")
                    time.sleep(ERROR_PAUSE_SECONDS)
        finally:
            self.close_copies()
            # Without this cycle, the table is freed at once, not by the garbage collector.
            self.handler.memory.reclaim = None

    def _run_turn(self) -> None:
        timeout = self._poll_timeout()
        # By default, epoll reports 1,023 descriptors: with more clients, a quick one may not be among them.
        ready = self._poller.poll(timeout, 1 + len(self.listeners.sockets) + len(self.connections))
        self._serve_all(ready)
        if timeout is not None:
            self._check_limits(idle=not ready)

    def _serve_all(self, ready: list[tuple[int, int]]) -> None:
        """Serve the ready descriptors for a while: one half those of clients that took little time lately.

        Among these, those that were served longest ago come first. The quickest of them would delay the others by all
        that they send.

        The other half serves those that were served longest ago, so that nobody waits in vain. The poller reports the
        rest again, together with clients that have sent requests meanwhile.
        """
        if self._unprocessed or self._unserved:
            reported = {descriptor for descriptor, _ in ready}
            for connection in [each for each in self._unserved if each.descriptor not in reported]:
                self._note_silent(connection)
            ready += [(each.descriptor, 0) for each in self._unprocessed if each.descriptor not in reported]
        self._share_time(ready)
        find = self.connections.get
        # Listening sockets come first.
        ordered = [(*(each.order() if (each := find(at)) else (0.0, 0.0)), at, events) for at, events in ready]
        if others := self._serve_some(ordered):
            self._serve_some([(0.0, abs(served), descriptor, events) for _, served, descriptor, events in others])

    def _share_time(self, ready: Sized) -> None:
        self._service_seconds = min(SERVICE_SECONDS, ROUND_SECONDS / (len(ready) or 1))

    def _serve_some(self, ready: list[_Ready]) -> list[_Ready]:
        """Serve descriptors in the order of these tuples for `TURN_SECONDS`, and return the rest."""
        # A heap: of thousands of clients, few are served before the order changes.
        heapify(ready)
        before = self._clock.read()
        end = before + TURN_SECONDS
        while ready and before <= end:
            _, _, descriptor, events = heappop(ready)
            connection = self.connections.get(descriptor)
            if connection is None:
                known = len(self._unserved)
                self._accept(descriptor)
                for new in islice(self._unserved, known, None):
                    heappush(ready, (*new.order(), new.descriptor, READ))
                self._share_time(ready)
                # Neither the time of the clients in this turn, nor of the next one, which would come after new ones.
                now = self._clock.read()
                before, end = now, end + now - before
                continue
            if connection.queue is not None:
                continue
            self._serve(connection, events)
            now = self._clock.read()
            if connection.validated:
                self._unserved.pop(connection, None)
                connection.charge(now - before, now)
            before = now
        return ready

    def _serve(self, connection: ServerConnection, events: int) -> None:
        try:
            if events & ~READ or connection.unprocessed:  # writable, or an error
                connection.flush()
                self._process(connection)
            if events & ~WRITE and not (connection.closed or connection.unprocessed):
                self._read(connection)
        except Exception:
            self._drop_failed(connection)

    # Opening and closing connections

    def _accept(self, descriptor: int) -> None:
        silent, end = list(islice(self._unvalidated, 1)), self._clock.read() + ACCEPT_SECONDS
        more = True
        while more:
            for sock in self.listeners.accept(descriptor):
                self._add(ServerConnection(self, sock, -self._clock.read()))
            more = self.listeners.more and len(self._unserved) < MAX_UNSERVED and self._clock.read() < end
        if self.listeners.exhausted:
            # The kernel reports that even if nobody waits, so a client that was accepted just now must not go.
            idle = next(chain(silent, self._newcomers), None)
            if idle is not None:
                self.drop(idle, "its descriptor was needed for another connection")
            else:
                self.listeners.turn_away(descriptor)

    def _add(self, connection: ServerConnection) -> None:
        try:
            self._poller.register(connection.descriptor, READ)
        except OSError as error:
            logger.warning("store server: cannot watch a connection: %s", error)
            return connection.sock.close()
        self.connections[connection.descriptor] = connection
        self.unused.clear()
        if not self._had_client:
            self._had_client = True
            logger.info("store server: the first client has connected to port %d", connection.sock.getsockname()[1])
        self._unserved[connection] = None

    def _note_silent(self, connection: ServerConnection) -> None:
        """Take note of a new client that has sent nothing, and close the oldest of too many."""
        del self._unserved[connection]
        if len(self._unvalidated) >= MAX_UNVALIDATED:
            self.drop(next(iter(self._unvalidated)), "too many clients that sent no request")
        self._unvalidated[connection] = None

    def drop(self, connection: ServerConnection, reason: str) -> None:
        """Close a connection and forget it."""
        if connection.closed:
            return
        logger.debug("store server: closed a connection: %s", reason)
        connection.closed = True
        self._held -= connection.counted
        self._count_unsent(connection, 0)
        del self.connections[connection.descriptor]
        for several in (self._unserved, self._unvalidated, self._newcomers, self._unprocessed, self._readers):
            several.pop(connection, None)
        if connection.queue is not None:
            connection.queue.remove(connection)
        if connection in self._paused:
            del self._paused[connection]
        else:
            self._poller.unregister(connection.descriptor)
        connection.sock.close()
        connection.clear()
        self.handler.remove(connection)
        if not self.connections:
            self.unused.set()

    def _drop_failed(self, connection: ServerConnection) -> None:
        logger.exception("store server: internal error; only the connection that caused it is closed")
        self.drop(connection, "internal error of the server")

    # Reading requests and sending replies

    def watch(self, connection: ServerConnection, progress: bool) -> None:
        """Poll a connection for writing if it has unsent replies, else for reading, and count these replies."""
        wanted = WRITE if connection.send_queue else READ
        if connection.closed:
            return
        if wanted != connection.interest:
            connection.interest = wanted
            if connection not in self._paused:
                self._poller.modify(connection.descriptor, wanted)
        if connection.unsent != connection.counted_unsent or connection in self._readers:
            self._order_readers(connection, progress)

    def _order_readers(self, connection: ServerConnection, progress: bool) -> None:
        """Count unsent replies. Beyond the budget, disconnect clients that do not read."""
        self._count_unsent(connection, connection.unsent)
        if progress or not connection.unsent:
            self._readers.pop(connection, None)
        if connection.unsent:
            self._readers[connection] = None
        self._reclaim(0, connection)

    def _reclaim(self, nbytes: int, reader: ServerConnection | None = None) -> None:
        """Disconnect the clients that have not read for the longest time, but one, until so many bytes fit."""
        memory = self.handler.memory
        if memory.used - self._unsent + nbytes > memory.budget:
            return
        while memory.used + nbytes > memory.budget and self._unsent > memory.budget // UNSENT_SHARE:
            slowest = next((each for each in self._readers if each is not reader), None)
            if slowest is None:
                break
            self.drop(slowest, "unsent replies held memory that others needed")

    def _count_unsent(self, connection: ServerConnection, unsent: int) -> None:
        change = unsent - connection.counted_unsent
        connection.counted_unsent = unsent
        self._unsent += change
        self.handler.memory.used += change

    def _read(self, connection: ServerConnection) -> None:
        size = self._read_size(connection) if connection.decoder.held else READ_BYTES
        if size <= 0:
            self._poller.unregister(connection.descriptor)
            self._paused[connection] = None
            return
        try:
            data = connection.sock.recv(size)
        except BlockingIOError:
            return
        except OSError as error:
            return self.drop(connection, str(error))
        if not data:
            return self.drop(connection, "the client closed the connection")
        if connection.send_queue or not self._handle_alone(connection, data):
            connection.decoder.feed(data)
            self._process(connection)

    def _handle_alone(self, connection: ServerConnection, data: bytes) -> bool:
        """Handle one request that arrived alone and whole; return whether these bytes are that."""
        try:
            request = connection.decoder.only_request(data)
            if request is None:
                return False
            if not self._park(connection, request):
                self.handler.handle(connection, request)
        except ProtocolError as error:
            self.drop(connection, str(error))
        return True

    def _park(self, connection: ServerConnection, request: Request) -> bool:
        """Let a request that takes long wait for its turn; return whether it does."""
        weight = self.handler.weight(connection, request)
        if weight <= MAX_FILED:
            return False
        connection.parked = request
        self._enqueue(connection, self._short if weight <= SHORT_WEIGHT else self._long)
        return True

    def _enqueue(self, connection: ServerConnection, queue: deque[ServerConnection]) -> None:
        connection.queue = queue
        queue.append(connection)

    def _read_size(self, connection: ServerConnection) -> int:
        wanted = min(max(connection.decoder.wanted, READ_BYTES), MAX_READ_BYTES)
        if self._held + wanted <= MEMORY_LIMIT or connection is self._largest():
            return wanted
        return READ_BYTES - connection.decoder.held

    def _largest(self) -> ServerConnection:
        return max(self.connections.values(), key=lambda connection: connection.decoder.held)

    def _process(self, connection: ServerConnection, handled: bool = False) -> None:
        decoder, end, late = connection.decoder, monotonic() + self._service_seconds, False
        try:
            while decoder.held and not (connection.closed or connection.send_queue or connection.queue or late):
                if (request := decoder.next()) is None:
                    break
                # The magic number and the name of a client are no turn: a request comes with them.
                known = connection.validated and (connection.session is not None or request.operation is not Op.HELLO)
                if not self._park(connection, request):
                    self.handler.handle(connection, request)
                handled = True
                if not connection.in_use and request.operation not in _GREETINGS:
                    connection.in_use = True
                late = known and monotonic() > end
        except ProtocolError as error:
            self.drop(connection, str(error))
        if connection.closed:
            return
        if (handled and not connection.in_use) or connection in self._newcomers:
            self._note_newcomer(connection)
        if handled:
            self._unvalidated.pop(connection, None)
        if late or connection.unprocessed:
            self._leave_unprocessed(connection, late)
        if decoder.held or connection.counted:
            self._count(connection, handled)

    def _note_newcomer(self, connection: ServerConnection) -> None:
        """Take note of a client that has sent only greetings, or no longer only these."""
        if connection.in_use:
            del self._newcomers[connection]
        elif connection not in self._newcomers:
            if len(self._newcomers) >= MAX_NEWCOMERS:
                self.drop(next(iter(self._newcomers)), "too many clients that sent no request")
            self._newcomers[connection] = None

    def _leave_unprocessed(self, connection: ServerConnection, late: bool) -> None:
        """Leave the other requests of a connection to its next turn, or take note that there are none."""
        connection.unprocessed = late and connection.decoder.held > 0
        if connection.unprocessed:
            self._unprocessed[connection] = None
        else:
            self._unprocessed.pop(connection, None)

    def _count(self, connection: ServerConnection, fresh: bool) -> None:
        """Record the memory that a connection's unfinished request holds, and since when."""
        if fresh or not connection.counted:
            connection.unfinished_since = monotonic()
        self._held += connection.decoder.held - connection.counted
        connection.counted = connection.decoder.held
        if connection.decoder.reading and connection.queue is None:
            self._enqueue(connection, self._short if connection.decoder.held <= SHORT_BYTES else self._long)

    def _take_long_turn(self, queue: deque[ServerConnection]) -> None:
        """Read a part of the first request of a queue, and handle it after its last part."""
        connection = queue[0]
        try:
            request = connection.parked or connection.decoder.resume()
            if request is not None:
                queue.popleft()
                connection.queue = connection.parked = None
                connection.in_use = True
                self.handler.handle(connection, request)
                self._process(connection, handled=True)
        except ProtocolError as error:
            self.drop(connection, str(error))
        except Exception:
            self._drop_failed(connection)

    # Housekeeping

    def _poll_timeout(self) -> float | None:
        # Whether a new client has sent anything, the next poll tells.
        if self._short or self._long or self._unprocessed or self._unserved or self.handler.busy:
            return 0.0
        waits = [self.listeners.retry_at - monotonic()] if self.listeners.retry_at else []
        if self._unvalidated:
            waits.append(next(iter(self._unvalidated)).accepted + HANDSHAKE_SECONDS - monotonic())
        if self._paused:
            waits.append(PAUSED_CHECK_SECONDS)
        if self.handler.sessions.disconnected:
            waits.append(min(self.handler.sessions.disconnected.values()) - monotonic())
        return max(0.0, min(waits)) if waits else None

    def _check_limits(self, idle: bool) -> None:
        for queue in (self._short, self._long):
            if queue:
                self._take_long_turn(queue)
        if self.handler.busy:
            self.handler.take_turn()
        now = monotonic()
        # A client that connects again may be among those that wait for this thread.
        self.handler.set_for_disconnected(now if idle else now - BUSY_SECONDS)
        if self.listeners.retry_at and now >= self.listeners.retry_at:
            self.listeners.listen(True)
        while self._unvalidated and now >= (first := next(iter(self._unvalidated))).accepted + HANDSHAKE_SECONDS:
            self.drop(first, "no request in time")
        if self._paused:
            self._resume_paused(now)

    def _resume_paused(self, now: float) -> None:
        for connection in [each for each in self.connections.values() if each.decoder.held > READ_BYTES]:
            if now > connection.unfinished_since + HANDSHAKE_SECONDS:
                self.drop(connection, "an unfinished request held memory that others wait for")
        if self._held <= MEMORY_LIMIT:
            for connection in list(self._paused):
                self._resume(connection)

    def _resume(self, connection: ServerConnection) -> None:
        try:
            self._poller.register(connection.descriptor, connection.interest)
            del self._paused[connection]
        except OSError as error:
            self.drop(connection, f"cannot watch it: {error}")


class TCPServer:
    """Running server of a store. It stops when closed, or when the last reference to it is dropped.

    Args:
        host: host name or address to listen on.
        port: port; 0 lets the system choose one.
        descriptor: file descriptor of a listening socket to use instead.
        timeout: seconds in which the host name must resolve.

    Attributes:
        port: port that it listens on.
        addresses: addresses at which it listens.
    """

    def __init__(self, host: str, port: int, descriptor: int | None = None, timeout: float = 300.0) -> None:
        listeners = listen(host, port, Deadline(timeout)) if descriptor is None else adopt(descriptor)
        self.addresses = [listener.getsockname() for listener in listeners]
        self.port: int = self.addresses[0][1]
        at = ", ".join(str(address[0]) for address in self.addresses)
        logger.info(
            "store server: listening on %s, port %d; see SECURITY.md for what it is trusted with", at, self.port
        )
        loop = ServerLoop(listeners)
        close_copies_in_child(loop)
        self._loop = loop
        self._finalizer = weakref.finalize(self, _stop, loop, os.getpid())
        loop.thread.start()

    @property
    def values(self) -> Mapping[bytes, bytes]:
        """Values by key. Other threads may look up keys, while the server's thread changes them."""
        return self._loop.handler.table.values

    @property
    def queues(self) -> Mapping[bytes, deque[bytes]]:
        """Queues by key. Other threads may look at them, while the server's thread changes them."""
        return self._loop.handler.table.queues

    def close(self) -> None:
        """Stop now; the connections of clients close."""
        self._finalizer()

    def await_clients(self, seconds: float) -> None:
        """Wait until no client is connected any more, for at most this time."""
        self._loop.unused.wait(seconds)


def _stop(loop: ServerLoop, owner: int) -> None:
    if os.getpid() == owner:
        loop.stop()
