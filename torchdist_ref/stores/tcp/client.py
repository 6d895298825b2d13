"""Client side of TCPStore: one request and its response, deadlines, reconnecting, and a pool of connections.

*Deadlines.* A call ends at its deadline, or a short grace period later. A server that does not respond (stopped, or cut
off from the network) costs the connection, not more time. A request that waits for keys is canceled at its deadline,
and the server reports which keys are missing.

*Reconnecting.* If the connection breaks, the next attempt opens another. Our server recognizes the client and does not
run a request twice. At torch's server, only idempotent requests are repeated.

*Limits.* A response has a largest size that follows from its request, so a server cannot fill the memory of a client.
Bytes that are not a response raise `DistNetworkError`.

*Emulation.* torch's servers run a `get` in two steps, WAIT and GET, between which another client may delete the key.
They do not acknowledge a `set`; the reply to a PING behind it shows that the value is in the store.

*Trust.* The kernel knows the user of each server of this host. A client sends nothing to a server of another user, and
believes nothing that it sends: the port may have been free before rank 0 listened there.

The meaning of the operations belongs to `store`, their bytes to `protocol`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NoReturn

from torchdist_ref.errors import ArgumentError, AuthenticationError, DistNetworkError, advice_on_limit
from torchdist_ref.processes.forks import close_copies_in_child
from torchdist_ref.stores import addresses, sockets
from torchdist_ref.stores.tcp import protocol
from torchdist_ref.stores.tcp.operations import MAX_VALUE_BYTES, NONCE_MARK, Op, Operation, recognized
from torchdist_ref.stores.tcp.protocol import RESPONSE_HEADER, ProtocolError, Status, read, receive, write_request
from torchdist_ref.timeouts import CHECK_SECONDS, Deadline, LongWait, grace, max_sleep

logger = logging.getLogger("torchdist_ref.stores")

MAX_ATTEMPTS = 5
READ_BYTES, MAX_READ_BYTES, SMALL_REPLY_BYTES = 4096, 2**20, 4096
# Longest wait for responses that a server sends at once, and longest text of a server that refuses a request.
BUSY_SECONDS, MAX_TEXT_BYTES = 0.5, 64 * 1024
_HEADER_BYTES, _unpack_header = RESPONSE_HEADER.size, RESPONSE_HEADER.unpack_from
_DONE = int(Status.DONE)
_ONE_VALUE, _WITH_VALUES = frozenset("rq"), frozenset("rqL*")
# Replies that the status implies.
_ACKNOWLEDGED = ("", "a")
_PROBE_NONCE = 0x5E7

# A request that is sent ahead of another: operation and fields.
Ahead = tuple[Operation, tuple[Any, ...]]


class ConnectionLost(Exception):
    """The connection broke before the response arrived."""


@dataclass
class ServerAddress:
    """Server of a store object, shared by all of its connections.

    Attributes:
        host: host name.
        port: port number.
        reached: whether a connection was ever opened.
        is_ours: whether it is a server of this library.
        listening: addresses at which a server of this process listens, while it cannot have ended.
        resolved: addresses of the host, when it was last resolved.
        local_end: family and address of this process's end of the last connection; None before the first.
        identity: random bytes that a server of ours sends after HELLO; another server at the same port has others.
        wait: the wait until it is reached.
    """

    host: str
    port: int
    reached: bool = False
    is_ours: bool = False
    listening: Sequence[Any] = ()
    resolved: Sequence[str] = ()
    local_end: tuple[socket.AddressFamily, str] | None = None
    identity: bytes | None = None
    wait: LongWait = field(default_factory=LongWait, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def note(self, error: BaseException, deadline: Deadline) -> None:
        """Take note that it was not reached; log that once, when it has taken long."""
        if self.wait.is_due():
            logger.warning(
                "TCPStore: no connection to %s within %g s (%s); trying for %.0f s more. Check that rank 0, which runs "
                "the store, is up and uses the same MASTER_ADDR and MASTER_PORT.",
                self,
                self.wait.seconds,
                error,
                deadline.remaining(),
            )


def open_socket(server: ServerAddress, deadline: Deadline) -> DeadlineSocket:
    """Return a socket to a server, at the address that accepts first.

    Raises:
        AuthenticationError: the server belongs to another user.
        OSError: the name does not resolve, or no address accepts before the deadline.
        ConnectionLost: the server has closed the connection.
    """
    found = addresses.resolve(server.host, server.port, deadline)
    server.resolved = [str(where[0]) for _, where in found]
    sock = sockets.connect(found, deadline)
    server.local_end = sock.family, addresses.host_text(sock.family, sock.getsockname())
    try:
        user = None if sock.getpeername() in server.listening else sockets.refused_server(sock)
        if user is not None:
            raise _refused(server, user)
    except BaseException:
        sock.close()
        raise
    return DeadlineSocket(sock)


def _refused(server: ServerAddress, user: int) -> Exception:
    if user < 0:
        return ConnectionLost("the server closed the connection")
    return AuthenticationError(
        f"TCPStore: the server at {server} belongs to user {user}, and this process to user {os.geteuid()}: it may not "
        f"belong to this job. Choose another MASTER_PORT, run all ranks as one user, or set "
        f"{sockets.TRUST_NETWORK}=1 if every user of this host may run code in the ranks."
    )


def unreachable(server: ServerAddress, error: Exception, deadline: Deadline) -> DistNetworkError:
    """Return the error for a server to which no socket could be opened."""
    if advice := advice_on_limit(error):
        return DistNetworkError(f"TCPStore: no socket to {server} can be opened ({error}). {advice}")
    if server.reached:
        return DistNetworkError(
            f"TCPStore: the server at {server} is gone ({error}). Its process (rank 0, or the launcher) has ended "
            f"or cannot be reached; see the log of that process for the reason."
        )
    if isinstance(error, socket.gaierror):
        return DistNetworkError(
            f"TCPStore: the host name {server.host!r} did not resolve to an address within "
            f"{deadline.seconds:g} s ({error.strerror}). Check MASTER_ADDR, or use an IP address."
        )
    reason = str(error) or "no time was left"
    return DistNetworkError(
        f"TCPStore: no connection to {server} within {deadline.seconds:g} s ({reason}). Check that rank 0, which "
        f"runs the store, is up and uses the same MASTER_ADDR and MASTER_PORT, and that no firewall blocks the "
        f"connection. {_advice_on_address(server)}".rstrip()
    )


def _advice_on_address(server: ServerAddress) -> str:
    """Return what may be wrong with the address here or on rank 0's host; empty if it is an address of another host."""
    host = server.host
    if server.resolved and all(map(addresses.is_loopback, server.resolved)):
        at = "" if addresses.is_loopback(host) else f"is {', '.join(server.resolved)} here, which "
        return f"{host} {at}is this host itself: if rank 0 runs on another host, set MASTER_ADDR to its address."
    if not server.resolved or host.partition("%")[0] in server.resolved:
        return ""
    return (
        f"{host} is {', '.join(server.resolved)} here. If it is a loopback address on rank 0's host, as in the "
        f"/etc/hosts of Debian, rank 0 listens only there: set MASTER_ADDR to the address of one of its interfaces."
    )


def _as_option(seconds: float) -> bytes:
    """Return a time-out as the value of a socket's option."""
    if os.name == "nt":
        return struct.pack("@L", max(1, int(seconds * 1000)))
    return struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))


class DeadlineSocket:
    """Socket of a client; each call takes a moment on the monotonic clock, by which it ends.

    The socket blocks, but for `CHECK_SECONDS` at most on the main thread, so that Ctrl-C is answered. One system call
    writes a request, one waits for the response and reads it.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _as_option(CHECK_SECONDS))
        self._limit = CHECK_SECONDS
        self._buffer = bytearray()

    def send(self, data: bytes, until: float) -> None:
        """Send everything.

        Raises:
            ConnectionLost: the connection broke.
            TimeoutError: the deadline passed.
        """
        sent = 0
        while sent < len(data):
            try:
                sent += self._socket.send(memoryview(data)[sent:] if sent else data)
            except (TimeoutError, BlockingIOError):
                if monotonic() >= until:
                    raise TimeoutError from None
            except OSError as error:
                raise ConnectionLost(str(error)) from error

    def take(self, size: int, until: float) -> bytes:
        """Return exactly `size` bytes. Raises as `send`."""
        while len(self._buffer) < size:
            self._buffer += self.receive(until, max(READ_BYTES, min(size - len(self._buffer), MAX_READ_BYTES)))
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece

    def take_rest(self) -> bytes:
        """Return the bytes that were received with those already taken; it may be none."""
        rest, self._buffer = bytes(self._buffer), bytearray()
        return rest

    def receive(self, until: float, limit: int = READ_BYTES) -> bytes:
        """Return the next bytes, between 1 and `limit`. Raises as `send`."""
        longest = CHECK_SECONDS
        while True:
            if self._limit != longest or until - monotonic() < longest:
                self._limit_wait(until, longest)
            try:
                data = self._socket.recv(limit)
            except (TimeoutError, BlockingIOError):
                longest = max_sleep()
                continue
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not data:
                raise ConnectionLost("the server closed the connection")
            return data

    def _limit_wait(self, until: float, longest: float) -> None:
        """Let the next read block until the deadline, and for `longest` seconds at most."""
        seconds = min(until - monotonic(), longest)
        # A process that did not run until the deadline must not blame the server, which may have responded.
        if seconds <= 0 and not sockets.has_input(self._socket):
            raise TimeoutError
        if 0 < seconds != self._limit:
            # Not `settimeout`, which would have Python call `poll` before every read and write.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _as_option(seconds))
            self._limit = seconds

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def abort(self) -> None:
        """Wake the thread that waits on this socket; it raises `ConnectionLost`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class RequestTimeout(Exception):
    """The deadline of a request passed.

    Attributes:
        missing: keys that the server reported as missing, if it did.
        no_response: whether the server did not respond at all.
    """

    def __init__(self, missing: list[bytes] | None = None, no_response: bool = False) -> None:
        super().__init__()
        self.missing, self.no_response = missing, no_response


class ClientConnection:
    """Connection of a client to the server: one request at a time, over as many sockets as it takes."""

    def __init__(self, server: ServerAddress) -> None:
        self._server = server
        self._framed = False
        self._name = os.urandom(16)
        self._socket: DeadlineSocket | None = None
        # Open until its successor is: a server would take its end for the end of this process.
        self._silent: DeadlineSocket | None = None
        self._number = self._unread = 0
        # The HELLO that goes with the next request, and whether its reply has not been read.
        self._hello, self._identity_due = b"", False
        self._aborted = False

    def close(self) -> None:
        """Close the socket; the next request opens another."""
        self._set_aside()
        self._close_silent()

    def _set_aside(self) -> None:
        """Give up a socket on which the server does not respond; the next request opens another."""
        if self._socket is not None:
            self._close_silent()
            self._silent = self._socket
        self._socket, self._unread = None, 0
        self._hello, self._identity_due = b"", False

    def _close_silent(self) -> None:
        sock, self._silent = self._silent, None
        if sock is not None:
            sock.close()

    def abort(self) -> None:
        """End a request of another thread, which raises `DistNetworkError`."""
        self._aborted = True
        if (sock := self._socket) is not None:
            sock.abort()

    def connect(self, deadline: Deadline) -> DeadlineSocket:
        """Open a socket, and retry until the deadline.

        Raises:
            DistNetworkError: the server is unreachable, its name does not resolve, or it is not a store.
        """
        # Ranks start together, so the server is late by a millisecond or two, rarely by more.
        pause = 0.0005
        while True:
            try:
                return self._open(deadline)
            except (OSError, ConnectionLost) as error:
                if isinstance(error, TimeoutError) and self._server.reached:
                    raise  # a server that was reached and is silent now is a time-out, not a lost server
                # A server that was reached and refuses now has ended; one that disconnects may still listen.
                retry = not self._server.reached or (isinstance(error, ConnectionLost) and pause < 0.1)
                if deadline.passed() or not retry or self._aborted or advice_on_limit(error):
                    raise unreachable(self._server, error, deadline) from error
                self._server.note(error, deadline)
                sleep(min(pause, deadline.remaining()))
                pause = min(pause * 1.5, 0.25)

    def request(
        self, operation: Operation, fields: tuple[Any, ...], seconds: float, ahead: Sequence[Ahead] = ()
    ) -> tuple[Any, ...]:
        """Send a request and return the fields of its response.

        Args:
            operation: the operation.
            fields: fields of the request.
            seconds: time-out in seconds.
            ahead: requests to run before, sent in the same write. They may run twice, and so may the operation.

        Raises:
            RequestTimeout: the keys did not appear in time, or the server did not respond.
            ArgumentError: the server refused the request.
            DistNetworkError: the connection broke, and the request could not be repeated; or the response is none.
        """
        self._number += 1 + len(ahead) if ahead else 1
        until = monotonic() + seconds
        for attempt in range(MAX_ATTEMPTS):
            try:
                sock = self._socket or self.connect(Deadline(until + grace(seconds) - monotonic()))
                if self._framed:
                    return self._exchange_framed(sock, operation, fields, seconds, until, ahead)
                for each, values in ahead:
                    _exchange_plain(sock, each, values, seconds, until)
                exchange = _exchange_plain if operation.emulation is None else _emulate
                return exchange(sock, operation, fields, seconds, until)
            except ConnectionLost as lost:
                self.close()
                self._number += len(ahead) and 1 + len(ahead)
                if self._aborted or attempt == MAX_ATTEMPTS - 1 or not (self._framed or operation.idempotent):
                    raise self._broken(operation, lost) from lost
            except TimeoutError:
                self._set_aside()
                raise RequestTimeout(no_response=True) from None
            except (ArgumentError, RequestTimeout):
                raise
            except ProtocolError as error:
                self.close()
                raise DistNetworkError(
                    f"{operation.name.lower()}: the server at {self._server} sent an invalid response ({error}). "
                    f"Another program may hold the port, or run another version: check MASTER_ADDR and MASTER_PORT."
                ) from error
            except BaseException:
                self.close()  # the next request must not read the response to this one
                raise
        raise AssertionError("unreachable")

    def post(self, operation: Operation, fields: tuple[Any, ...], seconds: float) -> None:
        """Send a request without waiting for the response, which the next request skips. Raises as `request`."""
        if not self._framed or self._socket is None or self._identity_due:
            self.request(operation, fields, seconds)
            return
        self._number += 1
        try:
            self._socket.send(write_request(operation, *fields, number=self._number), monotonic() + seconds)
        except (ConnectionLost, TimeoutError) as error:
            self.close()
            raise self._broken(operation, ConnectionLost(str(error))) from error
        self._unread += 1

    def _exchange_framed(
        self,
        sock: DeadlineSocket,
        operation: Operation,
        fields: tuple[Any, ...],
        seconds: float,
        until: float,
        ahead: Sequence[Ahead] = (),
    ) -> tuple[Any, ...]:
        """Run a request at our server, whose response has the request id and its length in front.

        Raises:
            RequestTimeout: the keys did not appear in time.
            TimeoutError: the server did not respond, not even in the grace period after the deadline.
            ArgumentError: the server refused the request.
            ConnectionLost: the connection broke.
        """
        requests = write_request(operation, *fields, number=self._number)
        if ahead:
            numbered = enumerate(ahead, self._number - len(ahead))
            requests = b"".join([write_request(each, *values, number=n) for n, (each, values) in numbered] + [requests])
        self._send(sock, requests, until)
        response = b""
        if self._unread or ahead or self._identity_due:
            response = self._skip_responses(sock, self._unread + len(ahead), until + grace(seconds))
        try:
            response = response or sock.receive(until)
        except TimeoutError:
            # From now on: this process may not have run since the deadline.
            extended = monotonic() + grace(seconds)
            if operation.unmet is not None:
                sock.send(write_request(Op.CANCEL_WAIT), extended)
            response = sock.receive(extended)
        if len(response) < _HEADER_BYTES:
            response += sock.take(_HEADER_BYTES - len(response), until + grace(seconds))
        number, size, status = _unpack_header(response)
        if size > SMALL_REPLY_BYTES:
            _check_size(size, status, operation, fields, len(requests))
        if len(response) < _HEADER_BYTES + size:
            response += sock.take(_HEADER_BYTES + size - len(response), until + grace(seconds))
        if number != self._number:
            raise ProtocolError(f"response {number} to request {self._number}")
        if status != _DONE:
            _raise_status(status, response[_HEADER_BYTES:])
        if not size and operation.reply in _ACKNOWLEDGED:
            return ()
        reply = read(operation.reply, response, _HEADER_BYTES)
        if operation is Op.WAIT_GET_ALL and len(reply[0]) != len(fields[0]):
            raise ProtocolError(f"{len(reply[0])} values of {len(fields[0])} keys")
        return reply

    def _skip_responses(self, sock: DeadlineSocket, count: int, until: float) -> bytes:
        """Read the responses to earlier requests; return bytes after them. Raise if one of them was refused."""
        # These need no wait, so a server without a response is busy, or stopped.
        extended = until + (BUSY_SECONDS if count else 0.0)
        if self._identity_due:
            self._read_identity(sock, extended)
        for _ in range(count):
            _, size, status = _unpack_header(sock.take(_HEADER_BYTES, extended))
            if size > MAX_TEXT_BYTES:
                raise ProtocolError(f"a response of {size} bytes to a request without values")
            text = sock.take(size, extended)
            self._unread = max(0, self._unread - 1)
            if status != _DONE:
                self.close()
                _raise_status(status, text)
        return sock.take_rest()

    def _send(self, sock: DeadlineSocket, requests: bytes, until: float) -> None:
        """Send requests, the first ones of a connection behind its greeting."""
        sock.send(self._hello + requests if self._hello else requests, until)
        self._hello = b""

    # Handshake

    def _open(self, deadline: Deadline) -> DeadlineSocket:
        sock = open_socket(self._server, deadline)
        try:
            self._shake_hands(sock, deadline.at)
        except BaseException:
            sock.close()
            raise
        self._socket, self._server.reached = sock, True
        if self._aborted:
            # Meanwhile: `abort` has found no socket.
            sock.abort()
        self._close_silent()
        return sock

    def _shake_hands(self, sock: DeadlineSocket, until: float) -> None:
        # VALIDATE and PING go in one write: torch's server drops a client whose first bytes arrive in two parts.
        nonce = NONCE_MARK | int.from_bytes(os.urandom(2), "little")
        sock.send(write_request(Op.VALIDATE, protocol.MAGIC) + write_request(Op.PING, nonce), until)
        try:
            [echo] = receive(Op.PING.reply, lambda size: sock.take(size, until), SMALL_REPLY_BYTES)
        except TimeoutError:
            raise TimeoutError("a program accepts connections, but does not answer: stopped, or no store") from None
        self._framed = echo == recognized(nonce)
        if not self._framed and echo != nonce:
            raise DistNetworkError(
                f"TCPStore: the service at {self._server} is not a store (the reply to a PING was {echo:#x} instead "
                f"of {nonce:#x}). Another service may hold the port: check MASTER_ADDR and MASTER_PORT."
            )
        if self._framed:
            self._server.is_ours = self._identity_due = True
            self._hello = write_request(Op.HELLO, self._name)
            if self._server.identity is not None:
                # Another server must not get a request.
                self._send(sock, b"", until)
                self._read_identity(sock, until)

    def _read_identity(self, sock: DeadlineSocket, until: float) -> None:
        [identity] = receive(Op.HELLO.reply, lambda size: sock.take(size, until), 8 + protocol.IDENTITY_BYTES)
        if len(identity) != protocol.IDENTITY_BYTES:
            raise ProtocolError(f"an identity of {len(identity)} bytes instead of {protocol.IDENTITY_BYTES}")
        if self._server.identity not in (None, identity):
            raise DistNetworkError(
                f"TCPStore: the server at {self._server} has been restarted since this client connected, and its "
                f"keys are lost. Make a new store, and initialize the process group again."
            )
        self._server.identity, self._identity_due = identity, False

    # Errors

    def _broken(self, operation: Operation, lost: ConnectionLost) -> DistNetworkError:
        return DistNetworkError(
            f"{operation.name.lower()}: the connection to the store at {self._server} broke ({lost}); the operation "
            f"may or may not have been done. The next call connects again."
        )


def _raise_status(status: int, body: bytes) -> NoReturn:
    if status == Status.REFUSED:
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a refusal that is not text: {error}") from error
        raise ArgumentError(text)
    if status == Status.CANCELED:
        raise RequestTimeout(read("L", body)[0])
    raise ProtocolError(f"a response of status {status}")


def _check_size(size: int, status: int, operation: Operation, fields: tuple[Any, ...], request_bytes: int) -> None:
    """Raise if a response of our server is longer than its request allows."""
    limit, hint = max(MAX_TEXT_BYTES, request_bytes + 8), ""
    if status == _DONE and operation.reply in _ONE_VALUE:
        limit = 16 + MAX_VALUE_BYTES
    elif status == _DONE and operation.reply in _WITH_VALUES:
        limit, hint = _max_values_bytes(request_bytes), f"; {protocol.MEMORY_VARIABLE} sets the limit of all values"
        if operation.request == "K":
            limit = min(limit, 8 + len(fields[0]) * (8 + MAX_VALUE_BYTES))
    if size > limit:
        raise ProtocolError(f"a response of {size} bytes, where at most {limit} are allowed{hint}")


def _max_values_bytes(request_bytes: int) -> int:
    """Return the largest size of values from a store: its memory, and a length for each key in the request."""
    return protocol.memory_budget() + request_bytes


# Requests to torch's servers. They refuse nothing, but may disconnect.


def _exchange_plain(
    sock: DeadlineSocket, operation: Operation, fields: tuple[Any, ...], seconds: float, until: float
) -> tuple[Any, ...]:
    request, extended = write_request(operation, *fields), until + grace(seconds)
    waits = operation.unmet is not None
    if not operation.reply:
        sock.send(request + write_request(Op.PING, _PROBE_NONCE), extended)
        receive(Op.PING.reply, lambda size: sock.take(size, extended), SMALL_REPLY_BYTES)
        return ()
    sock.send(request, extended)
    latest = until if waits else extended
    try:
        # These servers limit no value: `append` may have made it as large as the memory.
        limit = _max_values_bytes(len(request)) if operation.reply in _WITH_VALUES else SMALL_REPLY_BYTES
        return receive(protocol.reply_kinds(operation, fields), lambda size: sock.take(size, latest), limit)
    except TimeoutError:
        if not waits:
            raise
    extended = monotonic() + grace(seconds)
    sock.send(write_request(Op.CANCEL_WAIT), extended)
    if sock.take(1, extended) == b"\x01":
        raise RequestTimeout
    sock.take(1, extended)  # the keys appeared before the cancellation arrived, so both have a reply
    return (0,)


def _emulate(
    sock: DeadlineSocket, operation: Operation, fields: tuple[Any, ...], seconds: float, until: float
) -> tuple[Any, ...]:
    assert operation.emulation is not None
    following, convert = operation.emulation
    keys = fields[0] if isinstance(fields[0], list) else [fields[0]]
    while True:
        _exchange_plain(sock, Op.WAIT, (keys,), seconds, until)
        # A COMPARE_SET of a missing key ends waits for it too, though it stores nothing.
        reads = following in (Op.GET, Op.MULTI_GET)
        present = not (reads and _exchange_plain(sock, Op.CHECK, (keys,), seconds, until)[0])
        reply = convert(_exchange_plain(sock, following, fields, seconds, until)) if present else None
        if reply is not None:
            return reply


class ConnectionPool:
    """Connections of one store object: as many as threads call it at once, one in the common case.

    If threads shared a connection, one that waits for a key would block the thread that is about to set it. So each
    call takes an idle connection, or opens one.
    """

    def __init__(self, host: str, port: int) -> None:
        self.server = ServerAddress(host, port)
        self._idle: list[ClientConnection] = []
        self._busy: set[ClientConnection] = set()
        self._closed = False
        close_copies_in_child(self)

    def connect(self, deadline: Deadline) -> None:
        """Open a first connection. Raises as `ClientConnection.connect`."""
        connection = ClientConnection(self.server)
        connection.connect(deadline)
        self._idle.append(connection)

    def request(
        self,
        operation: Operation,
        fields: tuple[Any, ...],
        seconds: float,
        ahead: Sequence[Ahead] = (),
        await_response: bool = True,
    ) -> tuple[Any, ...]:
        """Run a request on a connection that no other thread uses. Returns and raises as `ClientConnection.request`.

        Without `await_response` it is only sent, as by `ClientConnection.post`.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._new_connection()
        self._busy.add(connection)
        if self._closed:
            # Meanwhile: `close` has not found this connection.
            connection.abort()
        try:
            if await_response:
                return connection.request(operation, fields, seconds, ahead)
            connection.post(operation, fields, seconds)
            return ()
        finally:
            self._busy.discard(connection)
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)

    def close(self) -> None:
        """Close all connections. Calls of other threads raise `DistNetworkError`."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        for connection in list(self._busy):
            connection.abort()

    def _new_connection(self) -> ClientConnection:
        if self._closed:
            raise DistNetworkError(f"TCPStore: this store ({self.server}) has been closed; make a new one.")
        return ClientConnection(self.server)

    def close_copies(self) -> None:
        """See `DescriptorOwner.close_copies`; the child opens connections of its own."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        self._busy.clear()
