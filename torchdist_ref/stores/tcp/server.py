"""Server side of TCPStore: listening sockets, one thread with an event loop, bounded memory.

The thread reads from the sockets, parses requests (`protocol`), runs them (`requests`) and sends the replies. Clients
of torch cannot authenticate themselves, so any process that reaches the port can connect, except those of other users
on loopback. Each connection has limits:

- a connection that sends no complete request within `HANDSHAKE_SECONDS` is closed, and so is the oldest of more than
  `MAX_UNVALIDATED` such connections;
- unfinished requests hold at most `MEMORY_LIMIT` bytes together. Above that, only one connection may continue a large
  request; the others are not read. One that is unfinished for `HANDSHAKE_SECONDS` while others wait is closed;
- a client that does not read its replies is not read from;
- a request with a long list is read in turns, one such request after another, and nothing else is read from its client;
  the keys of a prefix are deleted in turns, too.

The server ends when its `TCPServer` is closed or collected: no thread, descriptor or port stays behind. A forked child
closes its copies of the sockets at once, so that the port is free when the parent's server ends. Do not add the meaning
of requests here.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from time import monotonic
from typing import cast

from torchdist_ref.stores.sockets import READ, TRUST_NETWORK, WRITE, adopt, listen, poller, refused_user
from torchdist_ref.stores.tcp.protocol import ManyValues, Piece, ProtocolError, RequestDecoder
from torchdist_ref.stores.tcp.requests import RequestHandler, StoreClient
from torchdist_ref.timeouts import Deadline

logger = logging.getLogger("torchdist_ref.stores")

BUSY_SECONDS = 0.2
"""Time that a busy server waits longer for clients that have disconnected to connect again."""
HANDSHAKE_SECONDS = 5.0
MEMORY_LIMIT = 4 * 2**20
READ_BYTES = 4096
MAX_READ_BYTES = 64 * 1024
MAX_UNVALIDATED = 1024
SEND_PIECES = 64
SENDS_PER_TURN = 64
TURN_SECONDS = 0.005
BRIEF_SECONDS = 0.0005
"""Time of a request that does not count toward `TURN_SECONDS`: many clients with such requests do not end a turn."""
PAUSED_CHECK_SECONDS = 0.25
ACCEPT_RETRY_SECONDS = 0.1
ERROR_PAUSE_SECONDS = 0.1
STOP_SECONDS = 5.0
MAX_REPORTED_USERS = 16


class ServerConnection(StoreClient):
    """Socket of one client, with its unfinished requests and unsent replies.

    Attributes:
        accepted: when the connection was accepted, in seconds of the monotonic clock.
        unfinished_since: when the unfinished request began to hold memory.
        counted: bytes that it holds, as the loop has counted them.
        recent_seconds: time that its requests took lately, in seconds.
    """

    def __init__(self, loop: ServerLoop, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.loop, self.descriptor = sock, loop, sock.fileno()
        self.decoder = RequestDecoder()
        self.send_queue: deque[memoryview] = deque()
        self.accepted = self.unfinished_since = monotonic()
        self.counted = 0
        # A new client comes after those that are known to be quick: its first request may take long.
        self.recent_seconds = TURN_SECONDS
        self._more: Iterator[bytes] | None = None
        self.interest = READ
        self.closed = False

    def send(self, pieces: Sequence[Piece]) -> None:
        if not self.send_queue and sum(map(len, pieces)) <= READ_BYTES:
            # Most replies are small and are sent whole, without the queue. `ManyValues` are longer.
            whole = b"".join(cast("Sequence[bytes]", pieces))
            try:
                sent = self.sock.send(whole) if whole else 0
            except OSError:
                sent = 0  # `flush` meets the same error
            if sent == len(whole):
                return
            pieces = [whole[sent:]]
        for piece in pieces:
            if isinstance(piece, ManyValues):
                self._more = piece.pieces()
            elif piece:
                self.send_queue.append(memoryview(piece))
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as the socket accepts, a few megabytes at most: others wait for this thread."""
        try:
            for _ in range(SENDS_PER_TURN):
                if self.closed or not self._has_more():
                    break
                self._drop_sent(self.sock.sendmsg(list(islice(self.send_queue, SEND_PIECES))))
        except BlockingIOError:
            pass
        except OSError as error:
            self.disconnect(str(error))
        self._has_more()
        self.loop.watch(self)

    def _has_more(self) -> bool:
        """Return whether the queue has anything to send; get the next piece of a long reply if it is empty."""
        while not self.send_queue and self._more is not None:
            piece = next(self._more, None)
            if piece is None:
                self._more = None
            else:
                self.send_queue.append(memoryview(piece))
        return bool(self.send_queue)

    def _drop_sent(self, size: int) -> None:
        while self.send_queue and size >= len(self.send_queue[0]):
            size -= len(self.send_queue.popleft())
        if size:
            self.send_queue[0] = self.send_queue[0][size:]

    def disconnect(self, reason: str) -> None:
        self.loop.drop(self, reason)


class ServerLoop:
    """Event loop of the server's thread. It holds no reference to `TCPServer`, which can be collected."""

    def __init__(self, listeners: list[socket.socket]) -> None:
        self.handler = RequestHandler()
        self.listeners = listeners
        self.connections: dict[int, ServerConnection] = {}
        self.unused = threading.Event()
        self._unvalidated: dict[ServerConnection, None] = {}
        self._paused: dict[ServerConnection, None] = {}
        self._long: deque[ServerConnection] = deque()
        self._held = 0
        self._accept_again = 0.0
        self._listening = False
        self._refused: set[int] = set()
        self._had_client = False
        self._stopping = False
        self._poller = poller()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._poller.register(self._wake_receiver.fileno(), READ)
        self._listen(True)
        self.thread = threading.Thread(target=self._run, name="torchdist_ref store server", daemon=True)

    def stop(self) -> None:
        """End the thread and close everything. Any thread may call this, more than once."""
        self._stopping = True
        try:
            self._wake_sender.send(b"x")
        except OSError:
            return
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout=STOP_SECONDS)

    def close_copies(self) -> None:
        """Close a forked child's copies of the descriptors, which the parent's clients do not notice."""
        # The child shares the epoll instance with the parent: to unregister here would unregister there.
        copies = [connection.sock for connection in self.connections.values()]
        for sock in [*self.listeners, *copies, self._wake_sender, self._wake_receiver]:
            sock.close()
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

    def _run_turn(self) -> None:
        timeout = self._poll_timeout()
        ready = self._poller.poll(timeout)
        self._serve_all(ready)
        if timeout is not None:
            self._check_limits(idle=not ready)

    def _serve_all(self, ready: list[tuple[int, int]]) -> None:
        """Serve the ready descriptors, clients that took little time lately first, until some have taken long.

        The poller reports the others again, together with clients that have sent requests meanwhile.
        """
        if len(ready) > 1:
            ready.sort(key=self._recent_seconds)
        spent, before = 0.0, monotonic()
        for descriptor, events in ready:
            connection = self.connections.get(descriptor)
            if connection is None:
                self._accept(descriptor)
                continue
            self._serve(connection, events)
            now = monotonic()
            connection.recent_seconds = connection.recent_seconds * 0.9 + (now - before)
            if now - before > BRIEF_SECONDS:
                spent += now - before
                if spent > TURN_SECONDS:
                    return
            before = now

    def _recent_seconds(self, event: tuple[int, int]) -> float:
        connection = self.connections.get(event[0])
        return 0.0 if connection is None else connection.recent_seconds

    def _serve(self, connection: ServerConnection, events: int) -> None:
        try:
            if events & ~READ:  # writable, or an error
                connection.flush()
                self._process(connection)
            if events & ~WRITE and not connection.closed:
                self._read(connection)
        except Exception:
            self._drop_failed(connection)

    # Opening and closing connections

    def _accept(self, descriptor: int) -> None:
        try:
            for listener in (each for each in self.listeners if each.fileno() == descriptor):
                for _ in range(16):
                    self._admit(listener.accept()[0])
        except BlockingIOError:
            pass
        except OSError as error:
            # Other errors concern only the connection, which is closed already.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._make_space(error)

    def _admit(self, sock: socket.socket) -> None:
        user = refused_user(sock)
        if user is None:
            return self._add(ServerConnection(self, sock))
        sock.close()
        if user >= 0 and user not in self._refused and len(self._refused) < MAX_REPORTED_USERS:
            self._refused.add(user)
            logger.warning("store server: refused a client of user %d; %s=1 would admit it", user, TRUST_NETWORK)

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
        if len(self._unvalidated) >= MAX_UNVALIDATED:
            self.drop(next(iter(self._unvalidated)), "too many clients that sent no request")
        self._unvalidated[connection] = None

    def _make_space(self, error: OSError) -> None:
        logger.warning("store server: cannot accept a connection: %s", error)
        if self._unvalidated:
            self.drop(next(iter(self._unvalidated)), "its descriptor was needed for another connection")
        else:
            self._listen(False)
            self._accept_again = monotonic() + ACCEPT_RETRY_SECONDS

    def _listen(self, wanted: bool) -> None:
        if wanted is self._listening:
            return  # two listeners of one turn may both be without a descriptor
        self._listening = wanted
        for listener in self.listeners:
            if wanted:
                self._poller.register(listener.fileno(), READ)
            else:
                self._poller.unregister(listener.fileno())

    def drop(self, connection: ServerConnection, reason: str) -> None:
        """Close a connection and forget it."""
        if connection.closed:
            return
        logger.debug("store server: closed a connection: %s", reason)
        connection.closed = True
        self._held -= connection.counted
        del self.connections[connection.descriptor]
        self._unvalidated.pop(connection, None)
        if connection.decoder.reading:
            self._long.remove(connection)
        if connection in self._paused:
            del self._paused[connection]
        else:
            self._poller.unregister(connection.descriptor)
        connection.sock.close()
        connection.send_queue.clear()
        connection.decoder.clear()
        self.handler.remove(connection)
        if not self.connections:
            self.unused.set()

    def _drop_failed(self, connection: ServerConnection) -> None:
        logger.exception("store server: internal error; only the connection that caused it is closed")
        self.drop(connection, "internal error of the server")

    # Reading requests and sending replies

    def watch(self, connection: ServerConnection) -> None:
        """Poll a connection for writing if it has unsent replies, else for reading."""
        wanted = WRITE if connection.send_queue else READ
        if wanted != connection.interest and not connection.closed:
            connection.interest = wanted
            if connection not in self._paused:
                self._poller.modify(connection.descriptor, wanted)

    def _read(self, connection: ServerConnection) -> None:
        size = self._read_size(connection) if connection.decoder.held else READ_BYTES
        if size <= 0:
            if not connection.decoder.reading:
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
            self.handler.handle(connection, request)
        except ProtocolError as error:
            self.drop(connection, str(error))
        return True

    def _read_size(self, connection: ServerConnection) -> int:
        if connection.decoder.reading:
            return 0
        wanted = min(max(connection.decoder.wanted, READ_BYTES), MAX_READ_BYTES)
        if self._held + wanted <= MEMORY_LIMIT or connection is self._largest():
            return wanted
        return READ_BYTES - connection.decoder.held

    def _largest(self) -> ServerConnection:
        return max(self.connections.values(), key=lambda connection: connection.decoder.held)

    def _process(self, connection: ServerConnection, handled: bool = False) -> None:
        decoder = connection.decoder
        try:
            while decoder.held and not (connection.closed or connection.send_queue):
                if (request := decoder.next()) is None:
                    break
                self.handler.handle(connection, request)
                handled = True
        except ProtocolError as error:
            self.drop(connection, str(error))
        if handled:
            self._unvalidated.pop(connection, None)
        if (decoder.held or connection.counted) and not connection.closed:
            self._count(connection, handled)

    def _count(self, connection: ServerConnection, fresh: bool) -> None:
        """Record the memory that a connection's unfinished request holds, and since when."""
        if fresh or not connection.counted:
            connection.unfinished_since = monotonic()
        self._held += connection.decoder.held - connection.counted
        connection.counted = connection.decoder.held
        if connection.decoder.reading and connection not in self._long:
            self._long.append(connection)

    def _read_on(self) -> None:
        """Read a part of the first of the long requests, and handle it after its last part."""
        connection = self._long[0]
        try:
            request = connection.decoder.resume()
            if request is not None:
                self._long.popleft()
                self.handler.handle(connection, request)
                self._process(connection, handled=True)
        except ProtocolError as error:
            self.drop(connection, str(error))
        except Exception:
            self._drop_failed(connection)

    # Housekeeping

    def _poll_timeout(self) -> float | None:
        if self._long or self.handler.releases:
            return 0.0
        waits = [self._accept_again - monotonic()] if self._accept_again else []
        if self._unvalidated:
            waits.append(next(iter(self._unvalidated)).accepted + HANDSHAKE_SECONDS - monotonic())
        if self._paused:
            waits.append(PAUSED_CHECK_SECONDS)
        if self.handler.disconnected:
            waits.append(min(self.handler.disconnected.values()) - monotonic())
        return max(0.0, min(waits)) if waits else None

    def _check_limits(self, idle: bool) -> None:
        if self._long:
            self._read_on()
        if self.handler.releases:
            self.handler.delete_released()
        now = monotonic()
        # A client that connects again may be among those that wait for this thread.
        self.handler.set_for_disconnected(now if idle else now - BUSY_SECONDS)
        if self._accept_again and now >= self._accept_again:
            self._accept_again = 0.0
            self._listen(True)
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
        except OSError as error:
            self.drop(connection, f"cannot watch it: {error}")
        else:
            del self._paused[connection]


class TCPServer:
    """Running server of a store. It stops when closed, or when the last reference to it is dropped.

    Args:
        host: host name or address to listen on.
        port: port; 0 lets the system choose one.
        descriptor: file descriptor of a listening socket to use instead.
        timeout: seconds in which the host name must resolve.

    Attributes:
        port: port that it listens on.
    """

    def __init__(self, host: str, port: int, descriptor: int | None = None, timeout: float = 300.0) -> None:
        listeners = listen(host, port, Deadline(timeout)) if descriptor is None else adopt(descriptor)
        self.port: int = listeners[0].getsockname()[1]
        at = ", ".join(str(listener.getsockname()[0]) for listener in listeners)
        logger.info(
            "store server: listening on %s, port %d; see SECURITY.md for what it is trusted with", at, self.port
        )
        loop = ServerLoop(listeners)
        _loops.add(loop)
        self._loop = loop
        self._finalizer = weakref.finalize(self, _stop, loop, os.getpid())
        loop.thread.start()

    @property
    def values(self) -> Mapping[bytes, bytes]:
        """Values by key. Other threads may look up keys, while the server's thread changes them."""
        return self._loop.handler.table.values

    def close(self) -> None:
        """Stop now; the connections of clients close."""
        self._finalizer()

    def await_clients(self, seconds: float) -> None:
        """Wait until no client is connected any more, for at most this time."""
        self._loop.unused.wait(seconds)


def _stop(loop: ServerLoop, owner: int) -> None:
    if os.getpid() == owner:
        loop.stop()


_loops: weakref.WeakSet[ServerLoop] = weakref.WeakSet()


def _close_all_copies() -> None:
    for loop in list(_loops):
        loop.close_copies()
    _loops.clear()


os.register_at_fork(after_in_child=_close_all_copies)
