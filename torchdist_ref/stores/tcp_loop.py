"""The loop of TCPStore's server: one thread, many sockets, bounded memory.

The thread takes bytes from sockets, has them parsed (`tcp_parse`) and acted on (`tcp_service`), and sends the
answers. Anybody may connect, so nobody may take more than a share:

- a connection that does not introduce itself within 5 s is closed;
- unfinished messages hold at most `BUDGET` bytes together; beyond that only one connection may go on with a large
  message, the others wait unread, and one that is unfinished for 5 s while others wait is closed;
- whoever does not read his answers is not read from either.

What a request means belongs to `tcp_service`; who starts and ends the loop, to `tcp_server`.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

from torchdist_ref.stores.sockets import READ, WRITE, poller
from torchdist_ref.stores.tcp_parse import Decoder
from torchdist_ref.stores.tcp_service import Peer, Service
from torchdist_ref.stores.tcp_wire import WireError

logger = logging.getLogger("torchdist_ref.stores")

HANDSHAKE_LIMIT = 5.0
BUDGET = 4 * 2**20
SMALL = 4096
LARGE = 256 * 1024


class Connection(Peer):
    """One client's socket, with what came in unfinished and what has not gone out yet."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.loop, self.descriptor = sock, loop, sock.fileno()
        self.decoder = Decoder()
        self.outbox: deque[memoryview] = deque()
        self.arrived = self.since = time.monotonic()
        self.counted = 0
        self.interest = READ
        self.closed = False

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        if not self.outbox and sum(map(len, pieces)) <= SMALL:
            # Most answers are small and go out whole: they never see the queue.
            whole = b"".join(pieces)
            try:
                sent = self.sock.send(whole) if whole else 0
            except OSError:
                sent = 0  # whatever it is, `flush` meets it again
            if sent == len(whole):
                return
            pieces = [memoryview(whole)[sent:]]
        self.outbox.extend(memoryview(piece) for piece in pieces if piece)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        try:
            while self.outbox and not self.closed:
                self._sent(self.sock.sendmsg(list(islice(self.outbox, 64))))
        except BlockingIOError:
            pass
        except OSError as error:
            self.cut(str(error))
        self.loop.watch(self)

    def _sent(self, size: int) -> None:
        while self.outbox and size >= len(self.outbox[0]):
            size -= len(self.outbox.popleft())
        if size:
            self.outbox[0] = self.outbox[0][size:]

    def cut(self, why: str) -> None:
        self.loop.drop(self, why)


class Loop:
    """The thread's own object. It holds no reference to `TCPServer`, so that that can be collected."""

    def __init__(self, listeners: list[socket.socket]) -> None:
        self.service = Service()
        self.listeners = listeners
        self.connections: dict[int, Connection] = {}
        self._strangers: dict[Connection, None] = {}
        self._paused: dict[Connection, None] = {}
        self._held = 0
        self._resume_accepting = 0.0
        self._stopping = False
        self._poller = poller()
        self._bell, self._ear = socket.socketpair()
        self._poller.register(self._ear.fileno(), READ)
        self._listen(True)
        self.thread = threading.Thread(target=self._run, name="torchdist_ref store server", daemon=True)

    def stop(self) -> None:
        """End the thread and close everything. Any thread may call this, more than once."""
        self._stopping = True
        try:
            self._bell.send(b"x")
        except OSError:
            return
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout=5)

    def abandon(self) -> None:
        """In a forked child: close the copied descriptors without a word to the parent's clients."""
        # The kernel's list is shared with the parent: unregistering here would unregister there.
        mine = [connection.sock for connection in self.connections.values()]
        for sock in [*self.listeners, *mine, self._bell, self._ear]:
            sock.close()
        self._poller.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                for descriptor, events in self._poller.poll(self._patience()):
                    connection = self.connections.get(descriptor)
                    if connection is not None:
                        self._serve(connection, events)
                    else:
                        self._accept(descriptor)
                if self._strangers or self._paused or self._resume_accepting:
                    self._look_after()
        finally:
            self.abandon()

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & ~READ:  # room to write, or an error
                connection.flush()
                self._process(connection)
            if events & ~WRITE and not connection.closed:
                self._read(connection)
        except Exception:
            logger.exception("store server: an error of its own; only the connection that met it is closed")
            self.drop(connection, "an error in the server")

    # Connections come and go

    def _accept(self, descriptor: int) -> None:
        try:
            for listener in (each for each in self.listeners if each.fileno() == descriptor):
                for _ in range(16):
                    self._welcome(Connection(self, listener.accept()[0]))
        except BlockingIOError:
            pass
        except OSError as error:
            # Anything but a lack of descriptors or memory concerns that one connection, which is gone already.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._too_many(error)

    def _welcome(self, connection: Connection) -> None:
        self.connections[connection.descriptor] = connection
        self._strangers[connection] = None
        self._poller.register(connection.descriptor, READ)

    def _too_many(self, error: OSError) -> None:
        logger.warning("store server: cannot accept a connection: %s", error)
        if self._strangers:
            self.drop(next(iter(self._strangers)), "room was needed")
        else:
            self._listen(False)
            self._resume_accepting = time.monotonic() + 0.1

    def _listen(self, wanted: bool) -> None:
        for listener in self.listeners:
            if wanted:
                self._poller.register(listener.fileno(), READ)
            else:
                self._poller.unregister(listener.fileno())

    def drop(self, connection: Connection, why: str) -> None:
        """Close a connection and forget it."""
        if connection.closed:
            return
        logger.debug("store server: closed a connection: %s", why)
        connection.closed = True
        self._held -= connection.counted
        del self.connections[connection.descriptor]
        self._strangers.pop(connection, None)
        if connection in self._paused:
            del self._paused[connection]
        else:
            self._poller.unregister(connection.descriptor)
        connection.sock.close()
        connection.outbox.clear()
        self.service.leave(connection)

    # Bytes in, answers out

    def watch(self, connection: Connection) -> None:
        """Wait for what the connection needs: room to write if answers are stuck, else requests."""
        wanted = WRITE if connection.outbox else READ
        if wanted != connection.interest and not connection.closed:
            connection.interest = wanted
            if connection not in self._paused:
                self._poller.modify(connection.descriptor, wanted)

    def _read(self, connection: Connection) -> None:
        size = self._allowance(connection) if connection.decoder.held else SMALL
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
            return self.drop(connection, "the client left")
        connection.decoder.feed(data)
        self._process(connection)

    def _allowance(self, connection: Connection) -> int:
        wanted = min(max(connection.decoder.wanted, SMALL), LARGE)
        if self._held + wanted <= BUDGET or connection is self._largest():
            return wanted
        return SMALL - connection.decoder.held

    def _largest(self) -> Connection:
        return max(self.connections.values(), key=lambda connection: connection.decoder.held)

    def _process(self, connection: Connection) -> None:
        decoder, handled = connection.decoder, False
        try:
            while decoder.held and not (connection.closed or connection.outbox):
                if (request := decoder.next()) is None:
                    break
                self.service.handle(connection, request)
                handled = True
        except WireError as error:
            self.drop(connection, str(error))
        if handled:
            self._strangers.pop(connection, None)
        if (decoder.held or connection.counted) and not connection.closed:
            self._count(connection, handled)

    def _count(self, connection: Connection, fresh: bool) -> None:
        """Take down what a connection holds unfinished, and since when."""
        if fresh or not connection.counted:
            connection.since = time.monotonic()
        self._held += connection.decoder.held - connection.counted
        connection.counted = connection.decoder.held

    # Housekeeping

    def _patience(self) -> float | None:
        waits = [self._resume_accepting - time.monotonic()] if self._resume_accepting else []
        if self._strangers:
            waits.append(next(iter(self._strangers)).arrived + HANDSHAKE_LIMIT - time.monotonic())
        if self._paused:
            waits.append(0.25)
        return max(0.0, min(waits)) if waits else None

    def _look_after(self) -> None:
        now = time.monotonic()
        if self._resume_accepting and now >= self._resume_accepting:
            self._resume_accepting = 0.0
            self._listen(True)
        while self._strangers and now >= (first := next(iter(self._strangers))).arrived + HANDSHAKE_LIMIT:
            self.drop(first, "no greeting in time")
        if self._paused:
            self._relieve(now)

    def _relieve(self, now: float) -> None:
        for connection in [each for each in self.connections.values() if each.decoder.held > SMALL]:
            if now > connection.since + HANDSHAKE_LIMIT:
                self.drop(connection, "an unfinished message held memory that others wait for")
        if self._held <= BUDGET:
            paused, self._paused = self._paused, {}
            for connection in paused:
                self._poller.register(connection.descriptor, connection.interest)
