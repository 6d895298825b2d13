"""Requests at TCPStore's server: each runs at once, or waits for its keys; sessions outlive a client's connection.

No sockets here: a `StoreClient` is any object that bytes can be sent to and that can be disconnected, so tests use
lists. One thread at a time may use a `RequestHandler`.

*Waiting.* A request whose keys are missing waits under each of them. A change to the last one runs the request at once,
before the next request of any client, so no other client can delete a key in between. Several requests that wait for
one key run in the order in which they arrived.

*Sessions.* If a connection breaks before the response to a request that is not idempotent arrives, the client connects
again and repeats the request with the same number. The server sends the response that it has kept, instead of running
the request twice.

*Memory.* Keys, values, queues, the keys of waiting requests, sessions, kept responses and wills count in one budget. A
request that does not fit is refused. `server` adds what clients leave in the buffers of their connections.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores.base import INT64
from torchdist_ref.stores.hash import KEY_OVERHEAD_BYTES, MemoryBudget, StoreFullError, Table
from torchdist_ref.stores.tcp import protocol
from torchdist_ref.stores.tcp.operations import Op, Operation
from torchdist_ref.stores.tcp.protocol import Piece, ProtocolError, Request

_CHANGE_WILL = (Op.SET_ON_DISCONNECT, Op.RELEASE)
# Memory of a session besides its name and a short response, and of a key in a waiting request besides its bytes.
SESSION_OVERHEAD_BYTES, SHORT_RESPONSE_BYTES, AWAITED_OVERHEAD_BYTES = 600, 128, 50
# A client whose connection broke has this time to open another. One that waits for a key does so at once.
RECONNECT_SECONDS = 0.03


@dataclass(eq=False, slots=True)
class StoreClient(ABC):
    """Connection of a client, as the request handler sees it.

    Attributes:
        validated: whether the client has sent the magic number.
        session: session of a client that has sent its name.
        waiting: request that waits for keys, or None.
        unmet: keys that it waits for, with the number that each must reach; 0 if the key only has to exist.
    """

    validated: bool = False
    session: ClientSession | None = None
    waiting: Request | None = None
    unmet: dict[bytes, int] = field(default_factory=dict)

    @abstractmethod
    def send(self, pieces: Sequence[Piece]) -> None:
        """Send the pieces, in order, without blocking."""

    @abstractmethod
    def disconnect(self, reason: str) -> None:
        """Close the connection."""


@dataclass(eq=False, slots=True)
class ClientSession:
    """State of a client that outlives its connections.

    Attributes:
        name: name that the client has sent.
        client: its connection, if there is one.
        number: highest request id.
        response: response to that request, if it was sent and the request is not idempotent.
        nbytes: memory of the response, as far as it is counted.
        counted: request id of the last BARRIER whose caller was counted.
        will: key and value to set if the client disconnects and stays away (SET_ON_DISCONNECT).
    """

    name: bytes
    client: StoreClient | None = None
    number: int = -1
    response: Sequence[Piece] | None = None
    nbytes: int = 0
    counted: int = -1
    will: tuple[bytes, bytes] | None = None


class SessionTable:
    """Sessions by name; they use a quarter of the memory at most.

    Attributes:
        sessions: all sessions.
        disconnected: sessions with a will and without a client, and when the will is due.
    """

    def __init__(self, memory: MemoryBudget) -> None:
        self.sessions: dict[bytes, ClientSession] = {}
        self.disconnected: dict[ClientSession, float] = {}
        self._memory, self._limit, self._used = memory, memory.limit // 4, 0
        # Sessions without a client, in the order in which the clients have disconnected.
        self._gone: dict[ClientSession, None] = {}

    def open(self, name: bytes, client: StoreClient) -> None:
        """Give a client its session, and close the connection that had the session before, if that is still open."""
        session = self.sessions.get(name)
        if session is None:
            session = self.sessions[name] = ClientSession(name)
            self._count(len(name) + SESSION_OVERHEAD_BYTES)
        self._gone.pop(session, None)
        self.disconnected.pop(session, None)
        previous, session.client, client.session = session.client, client, session
        if previous is not None and previous is not client:
            previous.disconnect("its client has connected again")

    def leave(self, client: StoreClient, now: float) -> None:
        """Keep the session of a client that has disconnected, if the client may need it when it connects again."""
        session = client.session
        if session is None or session.client is not client:
            return
        session.client = None
        self._gone[session] = None
        if session.will is not None:
            self.disconnected[session] = now + RECONNECT_SECONDS
        elif session.response is None and not session.counted == session.number >= 0:
            self._drop(session)
        self._shrink(0)

    def set_will(self, session: ClientSession, will: tuple[bytes, bytes] | None) -> None:
        """Replace the will of a session. Raise `StoreFullError` if a larger one does not fit."""
        self._memory.reserve(will_bytes(will) - will_bytes(session.will))
        session.will = will

    def keep(self, session: ClientSession, response: Sequence[Piece]) -> None:
        """Keep a response until the session's next request."""
        session.response, nbytes = response, sum(map(len, response))
        if nbytes > SHORT_RESPONSE_BYTES:
            self._shrink(nbytes)
            if self._used + nbytes <= self._limit:
                session.nbytes = nbytes
                self._count(nbytes)
            else:
                # A repeated request must not run again.
                text = "the request was done, but its response was dropped: too many clients have unread responses."
                session.response = protocol.refusal(session.number, text)

    def forget_response(self, session: ClientSession) -> None:
        """Drop the kept response of a session."""
        self._count(-session.nbytes)
        session.response, session.nbytes = None, 0

    def _shrink(self, nbytes: int) -> None:
        """Drop the sessions whose clients have been gone for the longest time until so many more bytes fit."""
        while self._gone and self._used + nbytes > self._limit:
            self._drop(next(iter(self._gone)))

    def _drop(self, session: ClientSession) -> None:
        del self.sessions[session.name], self._gone[session]
        self.forget_response(session)
        self._count(-len(session.name) - SESSION_OVERHEAD_BYTES)

    def _count(self, nbytes: int) -> None:
        self._used += nbytes
        self._memory.used += nbytes


def will_bytes(will: tuple[bytes, bytes] | None) -> int:
    """Return the memory of a will, which is that of its key and value once they are set."""
    return sum(map(len, will)) + KEY_OVERHEAD_BYTES if will else 0


class RequestHandler:
    """Responses to the requests of a store's clients.

    Args:
        clock: function that returns the seconds of a monotonic clock.

    Attributes:
        memory: budget of everything that clients leave here.
        table: keys, values and queues.
        sessions: sessions of clients.
        identity: random bytes by which clients distinguish this server from another at the same port.
        pending: by key, the clients that wait for it, and the number that it must reach for each.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.memory = MemoryBudget(protocol.memory_budget())
        self.table = Table(b"/", self.memory)
        self.sessions = SessionTable(self.memory)
        self.identity = os.urandom(16)
        self.pending: dict[bytes, dict[StoreClient, int]] = {}
        self._clock = clock

    def handle(self, client: StoreClient, request: Request) -> None:
        """Run one request of a client.

        Raises:
            ProtocolError: the request is not valid in this state; the caller must close the connection.
        """
        operation, _, number = request
        if client.waiting is not None or operation.execute is None or not client.validated:
            self._control(client, request)
        elif number is None or not self._resend(client, number):
            self._run(client, request)

    def remove(self, client: StoreClient) -> None:
        """Forget a client whose connection is closed; its session stays for a while."""
        self._unfile(client)
        self.sessions.leave(client, self._clock())

    def execute_wills(self, now: float) -> None:
        """Set the keys of clients that have disconnected and not connected again in time, unless they exist."""
        disconnected = self.sessions.disconnected
        for session in [each for each, at in disconnected.items() if now >= at]:
            del disconnected[session]
            will, session.will = session.will, None
            if will is None or will[0] in self.table.values:
                self.memory.used -= will_bytes(will)
            else:
                # Not `Table.set`, which may refuse it: the will was counted when the client made it.
                self.table.values[will[0]] = will[1]
                self._wake(will[0])

    def _control(self, client: StoreClient, request: Request) -> None:
        """Handle the operations on the connection itself."""
        operation, fields, _ = request
        if not client.validated:
            if operation is not Op.VALIDATE or fields != (protocol.MAGIC,):
                raise ProtocolError("this is not a client of a store")
            client.validated = True
        elif operation is Op.CANCEL_WAIT:
            self._cancel(client)
        elif operation is Op.HELLO and client.waiting is None:
            self.sessions.open(fields[0], client)
            self._respond(client, request, (self.identity,))
        else:
            raise ProtocolError(f"{operation.name} in the wrong state")

    def _resend(self, client: StoreClient, number: int) -> bool:
        """Send the kept response to a repeated request; return whether there was one."""
        session = client.session
        if session is None or number < session.number:
            raise ProtocolError("a numbered request without a session, or an old one")
        if number > session.number:
            session.number = number
            if session.response is not None:
                self.sessions.forget_response(session)
        elif session.response is not None:
            client.send(session.response)
            return True
        return False

    def _run(self, client: StoreClient, request: Request, waited: bool = False) -> None:
        """Run a request, or let it wait for its keys; `waited` is whether it has waited before."""
        operation, fields, _ = request
        assert operation.execute is not None
        try:
            if operation is Op.BARRIER and not waited:
                self._count_caller(client, request)
            if operation.unmet is not None and (unmet := operation.unmet(self.table, *fields)):
                return self._file(client, request, dict(unmet))
            reply = operation.execute(self.table, *fields)
            if operation in _CHANGE_WILL and client.session is not None:
                self._change_will(client.session, operation, fields)
        except StoreFullError:
            return self._refuse(client, request, protocol.full_error(operation, self.memory.limit))
        except ArgumentError as error:
            return self._refuse(client, request, error)
        self._respond(client, request, reply)
        if self.pending and operation.wakes != "none":
            self._wake_changed(operation, fields)

    def _change_will(self, session: ClientSession, operation: Operation, fields: tuple[Any, ...]) -> None:
        """Replace the will of a client, or drop it because the client has released its key."""
        if operation is Op.SET_ON_DISCONNECT:
            self.sessions.set_will(session, (fields[0], fields[1]) if fields[1] else None)
        elif session.will is not None and session.will[0].startswith(fields[0] + b"/"):
            self.sessions.set_will(session, None)

    def _count_caller(self, client: StoreClient, request: Request) -> None:
        """Count the caller of a barrier, unless its request is repeated after a broken connection."""
        if request.number is not None and client.session is not None:
            if client.session.counted == request.number:
                return
            client.session.counted = request.number
        self.table.add(request.fields[0], 1)
        self._wake(request.fields[0])

    def _respond(self, client: StoreClient, request: Request, reply: tuple[Any, ...]) -> None:
        pieces = protocol.response_to(request, reply)
        # The client waits for this. If its connection is broken, the poller reports that later, in another step.
        client.send(pieces)
        if request.number is not None and client.session is not None and not request.operation.idempotent:
            self.sessions.keep(client.session, pieces)

    def _refuse(self, client: StoreClient, request: Request, error: ArgumentError) -> None:
        if request.number is None:
            client.disconnect(str(error))
        else:
            client.send(protocol.refusal(request.number, str(error)))

    # Waiting

    def _file(self, client: StoreClient, request: Request, unmet: dict[bytes, int]) -> None:
        self.memory.reserve(_awaited_bytes(request))
        client.waiting, client.unmet = request, unmet
        for key, number in unmet.items():
            self.pending.setdefault(key, {})[client] = number

    def _unfile(self, client: StoreClient) -> Request | None:
        """Return the request of a client that waits, which it does no longer."""
        request, client.waiting = client.waiting, None
        if request is not None:
            self.memory.used -= _awaited_bytes(request)
            for key in client.unmet:
                self._unfile_key(client, key)
            client.unmet = {}
        return request

    def _unfile_key(self, client: StoreClient, key: bytes) -> None:
        clients = self.pending[key]
        del clients[client]
        if not clients:
            del self.pending[key]

    def _wake_changed(self, operation: Operation, fields: tuple[Any, ...]) -> None:
        keys = [key for key, _ in fields[-1]] if operation.request[-1] == "P" else [fields[0]]
        for key in filter(self.pending.__contains__, keys):
            self._wake(key, operation.wakes == "one")

    def _wake(self, key: bytes, only_one: bool = False) -> None:
        """Run the requests that have waited only for this change of a key; of several that consume it, the first."""
        clients = self.pending.get(key, {})
        reached = self._number(key) if any(clients.values()) else 0
        for client in [each for each, number in clients.items() if not number or number <= reached]:
            if key not in client.unmet:
                continue  # it was disconnected while another request ran
            self._unfile_key(client, key)
            del client.unmet[key]
            if not client.unmet and (request := self._unfile(client)) is not None:
                self._run(client, request, waited=True)
                # Of the requests that one value in a queue ends, a pop takes the value. torch's pop is a WAIT at first.
                if only_one and client.waiting is None and (request.operation is Op.WAIT_POP or request.number is None):
                    return

    def _number(self, key: bytes) -> int:
        try:
            return self.table.number(key)
        except ArgumentError:
            return INT64.stop  # the value is not a number any more, which the requests report

    def _cancel(self, client: StoreClient) -> None:
        request = self._unfile(client)
        if client.session is None:
            client.send([b"\x01"])
        elif request is not None and request.number is not None:
            keys = request.fields[0]
            # A request with many keys is filed under the first few that are missing.
            missing = self.table.missing(keys) if isinstance(keys, list) else [keys]
            client.send(protocol.canceled_response(request.number, missing))


def _awaited_bytes(request: Request) -> int:
    """Return the memory of the keys of a waiting request."""
    keys = request.fields[0]
    return sum(map(len, keys)) + len(keys) * AWAITED_OVERHEAD_BYTES if isinstance(keys, list) else len(keys)
