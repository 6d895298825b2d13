"""Server of TCPStore: one thread with a loop over one poller, and one object for each client.

In each round the loop polls all sockets, accepts new clients, and reads once from each client that has sent something.
Requests run in the order in which they arrive (`requests`), each from beginning to end. So a request with 100,000 keys
delays the other clients by the time that it takes. Clients are protected from each other's use of memory, but not from
each other's use of the processor.

Clients of torch cannot authenticate themselves, so any process that reaches the port can connect, except those of other
users of this host. Each has limits:

- a client that sends no complete request within `HANDSHAKE_SECONDS` is disconnected, and so is the oldest of more than
  `MAX_NEWCOMERS` that have sent only greetings. If the process has no descriptor left, the oldest of these gives its
  own to a new client. All others may be idle for any time;
- before it is validated, a client can make the server hold five bytes;
- requests that have not arrived whole and replies that were not read count in the memory budget. A client is not read
  from while it has an unread reply. When the budget is used up, the clients whose bytes have not moved for the longest
  time are disconnected.

The server ends when its `TCPServer` is closed or collected: no thread, descriptor or port stays behind. A forked child
closes its copies of the sockets at once, so that the port is free when the parent's server ends. Do not add the meaning
of requests here.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from time import monotonic, sleep
from typing import cast

from torchdist_ref.processes.forks import close_copies_in_child
from torchdist_ref.stores.sockets import StoreAcceptor, adopt, listen
from torchdist_ref.stores.tcp.operations import Op
from torchdist_ref.stores.tcp.protocol import WHOLE_REPLY_BYTES, ManyValues, Piece, ProtocolError, RequestDecoder
from torchdist_ref.stores.tcp.requests import RequestHandler, StoreClient
from torchdist_ref.timeouts import Deadline

logger = logging.getLogger("torchdist_ref.stores")

# Events of epoll. `selectors` would look up and wrap each one in Python, a tenth of the time of a small request.
READ, WRITE = 1, 4
HANDSHAKE_SECONDS, MAX_NEWCOMERS = 5.0, 4096
READ_BYTES, MAX_READ_BYTES = 4096, 64 * 1024
# A busy server waits so much longer for clients that have disconnected to connect again.
BUSY_SECONDS = 0.2
ERROR_PAUSE_SECONDS, STOP_SECONDS = 0.1, 5.0
_GREETINGS = (Op.VALIDATE, Op.PING)


class ServerClient(StoreClient):
    """One client: its socket, the request that has arrived in part, and the reply that it has not read yet.

    Attributes:
        descriptor: file descriptor of the socket.
        decoder: parser of its requests.
        unsent: bytes of its reply that are held because the client has not read them.
        interest: events that its socket is polled for.
        closed: whether the socket is closed.
    """

    __slots__ = ("_chunk", "_loop", "_rest", "_sock", "closed", "decoder", "descriptor", "interest", "unsent")

    def __init__(self, loop: ServerLoop, sock: socket.socket) -> None:
        super().__init__()
        sock.setblocking(False)
        self._loop, self._sock, self.descriptor, self.closed = loop, sock, sock.fileno(), False
        self.decoder, self.unsent, self.interest = RequestDecoder(), 0, READ
        # The piece of the reply that is being sent, and the pieces after it.
        self._chunk: memoryview | None = None
        self._rest: Iterator[bytes] = iter(())

    def serve(self, events: int) -> None:
        """Do what the poller reports: send a part of the reply, or read and run requests."""
        try:
            if self._chunk is not None:
                self._send_more()
                self._run_requests()
            elif events & ~WRITE:
                self._read()
        except (ProtocolError, OSError) as error:
            if not isinstance(error, BlockingIOError):
                self.disconnect(str(error))
        except Exception:
            logger.exception("store server: internal error; only the connection that caused it is closed")
            self.disconnect("internal error of the server")

    def _read(self) -> None:
        data = self._sock.recv(MAX_READ_BYTES if self.decoder.held else READ_BYTES)
        if not data:
            return self.disconnect("the client closed the connection")
        request = self.decoder.only_request(data)
        if request is not None:
            return self._loop.handler.handle(self, request)
        self.decoder.feed(data)
        self._run_requests()

    def _run_requests(self) -> None:
        """Run the requests that have arrived whole, until one of them has a reply that is not read at once."""
        loop = self._loop
        while not self.closed and self._chunk is None and (request := self.decoder.next()) is not None:
            # It has left the buffer. The store may need as much memory for what is in it.
            loop.count_buffers(self)
            loop.handler.handle(self, request)
            loop.silent.pop(self, None)
            if request.operation not in _GREETINGS:
                loop.newcomers.pop(self, None)
        loop.count_buffers(self)

    def send(self, pieces: Sequence[Piece]) -> None:
        size = sum(map(len, pieces))
        if size <= WHOLE_REPLY_BYTES:
            whole = b"".join(cast("Sequence[bytes]", pieces))
            try:
                sent = self._sock.send(whole) if whole else 0
            except OSError:
                sent = 0  # if the connection is broken, the poller reports it
            if sent == size:
                return
            pieces, size = [whole[sent:]], size - sent
        self._rest = chain.from_iterable(p.pieces() if isinstance(p, ManyValues) else (p,) for p in pieces)
        self._chunk, self.unsent = memoryview(next(self._rest)), size
        self._loop.count_buffers(self)

    def _send_more(self) -> None:
        """Send what the socket accepts, up to the end of the next large piece."""
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while self._chunk is not None and sent <= READ_BYTES:
                sent = self._sock.send(self._chunk)
                if sent < len(self._chunk):
                    self._chunk = self._chunk[sent:]
                    break
                # Until now the piece was in memory as a whole.
                self.unsent -= len(cast("bytes", self._chunk.obj))
                piece = next(filter(None, self._rest), None)
                self._chunk = None if piece is None else memoryview(piece)

    def disconnect(self, reason: str) -> None:
        self._loop.drop(self, reason)

    def close(self) -> None:
        """Close the socket, and release the memory of the unfinished request and of the reply."""
        self._sock.close()
        self.closed, self.unsent, self._chunk, self._rest = True, 0, None, iter(())
        self.decoder.clear()


class ServerLoop:
    """Loop of the server's thread. It holds no reference to `TCPServer`, which can be collected.

    Args:
        listeners: listening sockets, which do not block.
        clock: function that returns the seconds of a monotonic clock.

    Attributes:
        handler: what the requests mean.
        acceptor: the listening sockets.
        clients: clients by the descriptor of their socket.
        silent: clients that are not validated, and when they were accepted, in order.
        newcomers: clients that have sent only greetings, in the order in which they were accepted.
        unused: set while no client is connected.
        thread: the thread, not yet started.
    """

    def __init__(self, listeners: Sequence[socket.socket], clock: Callable[[], float] = monotonic) -> None:
        self.handler = RequestHandler(clock)
        self.handler.memory.reclaim = self._reclaim
        self.acceptor = StoreAcceptor(listeners)
        self.clients: dict[int, ServerClient] = {}
        self.unused = threading.Event()
        self._clock, self._poller, self._stopping = clock, select.epoll(), False
        self.silent: dict[ServerClient, float] = {}
        self.newcomers: dict[ServerClient, None] = {}
        # Bytes in the buffers of clients, in the order in which these have moved last.
        self._buffers: dict[ServerClient, int] = {}
        self._buffered = 0
        self._waker, self._woken = socket.socketpair()
        for descriptor in (self._woken.fileno(), *self.acceptor.listeners):
            self._poller.register(descriptor, READ)
        self.thread = threading.Thread(target=self._run, name="torchdist_ref store server", daemon=True)

    def stop(self) -> None:
        """End the thread and close everything. Any thread may call this, more than once."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        # Where a limit on threads is reached, it has never started.
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(timeout=STOP_SECONDS)

    def close_copies(self) -> None:
        """Close the descriptors; in a forked child these are copies, and the parent's clients do not notice."""
        # The child shares the epoll instance with the parent: to unregister here would unregister there.
        for client in self.clients.values():
            client.close()
        for sock in (self._waker, self._woken):
            sock.close()
        self.acceptor.close()
        self._poller.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self.run_round()
                except Exception:
                    # Without this thread, no rank has a store. A pause keeps a lasting error from filling the log.
                    logger.exception("store server: internal error; the server continues")
                    sleep(ERROR_PAUSE_SECONDS)
        finally:
            self.close_copies()
            # Without this cycle, the table is freed at once, not by the garbage collector.
            self.handler.memory.reclaim = None

    def run_round(self, wait: bool = True) -> None:
        """Wait until there is something to do, unless told not to, and do it: once for each socket that is ready."""
        timeout = self._timeout()
        # By default, epoll reports 1,023 descriptors.
        ready = self._poller.poll(timeout if wait else 0.0, 1 + len(self.acceptor.listeners) + len(self.clients))
        for descriptor, events in ready:
            if (client := self.clients.get(descriptor)) is not None:
                client.serve(events)
            elif descriptor in self.acceptor.listeners:
                self._accept(descriptor)
        if timeout is not None:
            self._check_time(idle=not ready)

    def _timeout(self) -> float | None:
        """Return the time until something is due without a request; None if nothing is."""
        due = list(self.handler.sessions.disconnected.values())
        due += [next(iter(self.silent.values())) + HANDSHAKE_SECONDS] if self.silent else []
        return max(0.0, min(due) - self._clock()) if due else None

    def _check_time(self, idle: bool) -> None:
        now = self._clock()
        # A client that connects again may be among those that wait for this thread.
        self.handler.execute_wills(now if idle else now - BUSY_SECONDS)
        for client in [each for each, accepted in self.silent.items() if now >= accepted + HANDSHAKE_SECONDS]:
            self.drop(client, "no request in time")

    def _accept(self, descriptor: int) -> None:
        """Accept some of the clients that wait; the others are accepted after the requests of this round."""
        socks = self.acceptor.accept(descriptor)
        if self.acceptor.exhausted and self.newcomers:
            self.drop(next(iter(self.newcomers)), "its descriptor was needed for another connection")
        elif self.acceptor.exhausted:
            self.acceptor.turn_away(descriptor)
        for sock in socks:
            client = ServerClient(self, sock)
            try:
                self._poller.register(client.descriptor, READ)
            except OSError as error:
                logger.warning("store server: cannot watch a connection: %s", error)
                client.close()
                continue
            if len(self.newcomers) >= MAX_NEWCOMERS:
                self.drop(next(iter(self.newcomers)), "too many clients that sent no request")
            self.clients[client.descriptor] = client
            self.silent[client], self.newcomers[client] = self._clock(), None
            self.unused.clear()

    def drop(self, client: ServerClient, reason: str) -> None:
        """Disconnect a client and forget it."""
        if client.closed:
            return
        logger.debug("store server: closed a connection: %s", reason)
        del self.clients[client.descriptor]
        self._poller.unregister(client.descriptor)
        client.close()
        self.count_buffers(client)
        self.silent.pop(client, None)
        self.newcomers.pop(client, None)
        self.handler.remove(client)
        if not self.clients:
            self.unused.set()

    def count_buffers(self, client: ServerClient) -> None:
        """Count the bytes in the buffers of a client that have changed, and poll for what it waits for."""
        former, size = self._buffers.pop(client, 0), client.decoder.held + client.unsent
        if size:
            self._buffers[client] = size
        self._buffered += size - former
        self.handler.memory.used += size - former
        if client.interest != (wanted := WRITE if client.unsent else READ) and not client.closed:
            client.interest = wanted
            self._poller.modify(client.descriptor, wanted)
        if size > former:
            self._reclaim(0, client)

    def _reclaim(self, nbytes: int, mover: ServerClient | None = None) -> None:
        """Disconnect the clients whose buffers have not moved for the longest time, until so many bytes fit."""
        memory = self.handler.memory
        # Nobody is disconnected for what would not fit even then. The buffers may always use a sixteenth of the memory,
        # also in a store that is full of keys.
        while 0 <= memory.limit - nbytes - memory.used + self._buffered < self._buffered > memory.limit // 16:
            slowest = next((each for each in self._buffers if each is not mover), None)
            if slowest is None:
                return
            self.drop(slowest, "its buffers held memory that others needed")


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
        values: values by key. Other threads may look up keys, while the server's thread changes them.
        queues: queues by key, likewise.
    """

    def __init__(self, host: str, port: int, descriptor: int | None = None, timeout: float = 300.0) -> None:
        listeners = listen(host, port, Deadline(timeout)) if descriptor is None else adopt(descriptor)
        self.addresses = [listener.getsockname() for listener in listeners]
        self.port: int = self.addresses[0][1]
        at = ", ".join(str(address[0]) for address in self.addresses)
        logger.info("store server: listening on %s, port %d; SECURITY.md states what it is trusted with", at, self.port)
        loop = ServerLoop(listeners)
        self.values, self.queues, self._unused = loop.handler.table.values, loop.handler.table.queues, loop.unused
        close_copies_in_child(loop)
        # In a forked child, it finds a loop whose descriptors are closed, and no thread.
        self._finalizer = weakref.finalize(self, loop.stop)
        loop.thread.start()

    def close(self) -> None:
        """Stop now; the connections of clients close."""
        self._finalizer()

    def await_clients(self, seconds: float) -> None:
        """Wait until no client is connected any more, for at most this time."""
        self._unused.wait(seconds)
