"""Request handling of TCPStore's server: replies, waiting requests, and clients that reconnect.

No sockets here: a `StoreClient` is any object that bytes can be sent to and that can be disconnected, so tests use
lists. One thread at a time may use a `RequestHandler`.

*Waiting.* A request whose conditions do not hold yet becomes a `PendingRequest`, filed under each of its conditions. A
change to a key wakes the requests whose condition it fulfills. A request without unmet conditions is answered in the
same step, so no other client can delete the key in between.

*Deleting.* The last user of a prefix deletes its keys (RELEASE). They may be all keys of the store, so they are deleted
in turns, and the user gets its response after the last one, like a request that waits.

*Memory.* Keys, values, queues, the keys of waiting requests and what is set for clients that disconnect use at most one
budget, 256 MiB by default. A request that would exceed it is refused; a client of torch's, which has no such reply, is
disconnected.

*Reconnecting.* A client that sends its name (HELLO) has a `ClientSession`, which outlives the connection and keeps the
last response to a request that is not idempotent. If the connection breaks before the response arrives, the client
repeats the request with the same number, and the server sends the kept response instead of running it twice.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice, repeat
from operator import is_
from time import monotonic
from typing import Any

from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores.hash import Deleted, Table, release_counter
from torchdist_ref.stores.tcp.operations import OPERATIONS, Condition, Op, Operation
from torchdist_ref.stores.tcp.protocol import (
    MAGIC,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    Piece,
    ProtocolError,
    Request,
    Status,
    write_reply,
    write_response,
    write_values,
)

MAX_SESSIONS = 4096
MEMORY_VARIABLE = "TORCHDIST_REF_STORE_MEMORY"
DEFAULT_MEMORY_MIB = 256
KEY_OVERHEAD_BYTES = 200
"""Memory of a key or of a queued value besides its bytes."""
QUEUE_OVERHEAD_BYTES = 800
"""Memory of a queue besides its key and its values."""
AWAITED_OVERHEAD_BYTES = 50
"""Memory of a key in a waiting request besides its bytes."""
MAX_NUMBER_BYTES = 20
KEPT_RESPONSE_BYTES = 32 * 2**20
"""Memory of the kept responses of clients that have disconnected; the oldest large ones go first."""
PARTS_IN_TURN = 16
"""Parts of a deletion that are deleted before the requests of other clients."""
RECONNECT_SECONDS = 0.04
"""Time that a client whose connection broke has to open another. One that waits for a key does so at once."""
# Looking up a member of an enumeration is a Python call, and every request needs this one.
_DONE = int(Status.DONE)


_CHANGES = {
    row
    for row in OPERATIONS.values()
    if row.wakes != "none" or row in (Op.DELETE_KEY, Op.QUEUE_POP, Op.WAIT_POP, Op.RELEASE)
}
"""Operations that change the memory of keys and values."""


def memory_budget() -> int:
    """Return the memory that keys and values of a server may use, in bytes."""
    text = os.environ.get(MEMORY_VARIABLE, "")
    return (int(text) if text.isdecimal() else DEFAULT_MEMORY_MIB) << 20


class StoreClient(ABC):
    """Connection of a client, as the request handler sees it.

    Attributes:
        validated: whether the client has sent the magic number.
        session: session of a client that has sent its name.
        pending: request that waits for its conditions.
    """

    validated = False
    session: ClientSession | None = None
    pending: PendingRequest | None = None

    @abstractmethod
    def send(self, pieces: Sequence[Piece]) -> None:
        """Send the pieces, in order, without blocking."""

    @abstractmethod
    def disconnect(self, reason: str) -> None:
        """Close the connection."""


@dataclass(eq=False)
class ClientSession:
    """State of a client that outlives its connections.

    Attributes:
        client: its connection, if there is one.
        number: highest request id.
        response: response to that request, if it was sent and the request is not idempotent.
        nbytes: its size in bytes; 0 if it is only an acknowledgement.
        counted: request id of the last BARRIER whose caller was counted.
        on_disconnect: key and value to set if the client disconnects and stays away.
    """

    client: StoreClient | None = None
    number: int = -1
    response: Sequence[Piece] | None = None
    nbytes: int = 0
    counted: int = -1
    on_disconnect: tuple[bytes, bytes] | None = None

    def later_bytes(self) -> int:
        """Return the memory of the key and value to set later."""
        return sum(map(len, self.on_disconnect)) + KEY_OVERHEAD_BYTES if self.on_disconnect else 0


@dataclass(eq=False)
class PendingRequest:
    """Request that waits for its conditions.

    Attributes:
        client: connection that sent it.
        request: the request.
        nbytes: memory of the keys in the request.
        unmet: conditions that it is filed under, in order.
    """

    client: StoreClient
    request: Request
    nbytes: int
    unmet: dict[Condition, None] = field(default_factory=dict)


class RequestHandler:
    """Keys of a store, and the sessions and waiting requests of its clients.

    Attributes:
        table: keys, values and queues.
        identity: random bytes by which clients distinguish this server from another at the same port.
        pending: waiting requests by key and by the number that the key must reach.
        budget: largest `used`, in bytes.
        used: memory that counts against the budget, in bytes.
        disconnected: sessions without a client that asked for a key to be set then, and when it is.
        releases: requests of last users of a prefix, with the deletion of its keys; `delete_released` goes on with it.
    """

    def __init__(self) -> None:
        self.table = Table(slash=b"/")
        self.identity = os.urandom(16)
        self.pending: dict[bytes, dict[int, dict[PendingRequest, None]]] = {}
        self.disconnected: dict[ClientSession, float] = {}
        self.releases: deque[tuple[PendingRequest, Iterator[Deleted]]] = deque()
        self.budget = memory_budget()
        self.used = 0
        self._sessions: dict[bytes, ClientSession] = {}
        self._kept = 0

    def handle(self, client: StoreClient, request: Request) -> None:
        """Run one request of a client.

        Raises:
            ProtocolError: the request is not valid in this state; the caller must close the connection.
        """
        operation, _, number = request
        if client.pending is not None or operation.execute is None or not client.validated:
            self._control(client, request)
        elif number is None or not self._resend(client, number):
            self._execute(client, request)

    def remove(self, client: StoreClient) -> None:
        """Forget a client whose connection is closed; its session stays for a while."""
        self._unfile(client)
        if client.session is not None and client.session.client is client:
            client.session.client = None
            if client.session.on_disconnect is not None:
                self.disconnected[client.session] = monotonic() + RECONNECT_SECONDS
            self._drop_old_session()
            if self._kept > KEPT_RESPONSE_BYTES:
                self._drop_large_responses()

    def set_for_disconnected(self, now: float) -> None:
        """Set the keys of clients that have disconnected and not connected again in time."""
        for session in [each for each, due in self.disconnected.items() if now >= due]:
            del self.disconnected[session]
            assert session.on_disconnect is not None
            key, value = session.on_disconnect
            self._set_later(session, None)
            if key not in self.table.values:
                self.table.values[key] = value
                self.used += self._value_bytes(key)
                self._wake(key)

    def _control(self, client: StoreClient, request: Request) -> None:
        """Handle the operations on the connection itself."""
        if not client.validated:
            if request.operation is not Op.VALIDATE or request.fields != (MAGIC,):
                raise ProtocolError("this is not a client of a store")
            client.validated = True
        elif request.operation is Op.CANCEL_WAIT:
            self._cancel(client)
        elif request.operation is Op.HELLO and client.pending is None:
            self._open_session(client, request)
        elif request.operation is Op.SET_ON_DISCONNECT and client.session is not None and client.pending is None:
            self._set_on_disconnect(client, client.session, request)
        else:
            raise ProtocolError(f"{request.operation.name} in the wrong state")

    def _resend(self, client: StoreClient, number: int) -> bool:
        """Send the kept response to a repeated request; return whether there was one."""
        session = client.session
        if session is None or number < session.number:
            raise ProtocolError("a numbered request without a session, or an old one")
        if number > session.number:
            session.number = number
            if session.response is not None:
                self._drop_response(session)
            return False
        if session.response is not None:
            client.send(session.response)
        return session.response is not None

    def _execute(self, client: StoreClient, request: Request) -> None:
        operation, fields, _ = request
        assert operation.execute is not None
        try:
            if operation.unmet is not None:
                return self._execute_or_wait(client, request)
            if operation is Op.RELEASE:
                return self._release(client, request)
            reply = self._run(operation, fields)
        except ArgumentError as error:
            return self._refuse(client, request, error)
        self._respond(client, request, reply)
        if self.pending and operation.wakes != "none":
            self._wake_changed(operation, fields)

    def _execute_or_wait(self, client: StoreClient, request: Request) -> None:
        if request.operation is Op.BARRIER:
            self._count(client, request)
        if unmet := self._attempt(client, request):
            keys = request.fields[0]
            several = isinstance(keys, list)
            nbytes = sum(map(len, keys)) + len(keys) * AWAITED_OVERHEAD_BYTES if several else len(keys)
            if self.used + nbytes > self.budget:
                raise self._full(request.operation)
            self._file(PendingRequest(client, request, nbytes), unmet)

    def _attempt(self, client: StoreClient, request: Request) -> Sequence[Condition]:
        """Respond to a request whose conditions hold; else return the others."""
        operation, fields, _ = request
        assert operation.execute is not None and operation.unmet is not None
        unmet = operation.unmet(self.table, *fields)
        if not unmet:
            self._respond(client, request, self._run(operation, fields))
        return unmet

    # Deletion in turns

    def _release(self, client: StoreClient, request: Request) -> None:
        """Count one more user of a prefix as gone. Delete the keys after the last one, then respond to it."""
        session, number = client.session, request.number
        for pending, _ in self.releases if session is not None else ():
            if pending.client.session is session and pending.request.number == number:
                pending.client, client.pending = client, pending
                return  # the client has repeated it after its connection broke
        reply = self._run(Op.RELEASE, request.fields)
        self._forget_on_disconnect(session, request.fields[0])
        if reply == (0,):
            return self._respond(client, request, reply)
        client.pending = PendingRequest(client, request, 0)
        self.releases.append((client.pending, self.table.delete_in_parts(request.fields[0])))
        if len(self.releases) == 1:
            self.delete_released()

    def delete_released(self) -> None:
        """Delete some of the keys of the first of the releases. After the last of them, respond to its client."""
        pending, parts = self.releases[0]
        deleted = list(islice(parts, PARTS_IN_TURN))
        for values, queues, nbytes in deleted:
            self.used -= values * KEY_OVERHEAD_BYTES + queues * QUEUE_OVERHEAD_BYTES + nbytes
        if len(deleted) == PARTS_IN_TURN:
            return
        self.releases.popleft()
        client, session = pending.client, pending.client.session
        if client.pending is pending:
            client.pending = None
        elif session is None or session.number != pending.request.number:
            return  # nobody expects a response any more; a client whose connection broke does
        self._respond(client, pending.request, (1,))

    # Memory

    def _run(self, operation: Operation, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run an operation and count the memory that it changes.

        Raises:
            ArgumentError: the operation is not possible, or would exceed the budget.
        """
        execute = operation.execute
        assert execute is not None
        if operation not in _CHANGES:
            return execute(self.table, *fields)
        if operation is Op.SET or operation is Op.ADD:
            # The most frequent changes, without the general bookkeeping below, which would double their cost.
            key, value = fields
            values = self.table.values
            before = len(values[key]) if key in values else -len(key) - KEY_OVERHEAD_BYTES
            if self.used + (len(value) if operation is Op.SET else MAX_NUMBER_BYTES) - before > self.budget:
                raise self._full(operation)
            reply = execute(self.table, key, value)
            self.used += len(values[key]) - before
            return reply
        if operation is Op.MULTI_SET:
            return self._set_all(dict(fields[0]))
        key = release_counter(fields[0]) if operation is Op.RELEASE else fields[0]
        before = self._value_bytes(key) + self._queue_bytes(key)
        if operation.wakes != "none" or (operation is Op.RELEASE and fields[1] > 1):
            self._require_memory(operation, (key, *fields[1:]))
        reply = execute(self.table, *fields)
        self.used += self._value_bytes(key) + self._queue_bytes(key) - before
        if operation is Op.QUEUE_PUSH:
            self.used += len(fields[1]) + KEY_OVERHEAD_BYTES
        elif operation in (Op.QUEUE_POP, Op.WAIT_POP):
            value = reply[0][1] if operation is Op.QUEUE_POP else reply[0]
            self.used -= 0 if value is None else len(value) + KEY_OVERHEAD_BYTES
        return reply

    def _set_all(self, pairs: dict[bytes, bytes]) -> tuple[Any, ...]:
        # Without a call in Python for each of up to 131072 pairs: other clients wait.
        former = list(map(self.table.values.get, pairs))
        added = list(compress(pairs, map(is_, former, repeat(None))))
        change = len(added) * KEY_OVERHEAD_BYTES + sum(map(len, added))
        change += sum(map(len, pairs.values())) - sum(map(len, filter(None, former)))
        if self.used + change > self.budget:
            raise self._full(Op.MULTI_SET)
        self.table.values.update(pairs)
        self.used += change
        return ()

    def _set_on_disconnect(self, client: StoreClient, session: ClientSession, request: Request) -> None:
        key, value, pairs = request.fields
        former = session.on_disconnect
        self._set_later(session, (key, value) if value else None)
        try:
            if self.used > self.budget:
                raise self._full(request.operation)
            self._run(Op.MULTI_SET, (pairs,))
        except ArgumentError as error:
            self._set_later(session, former)
            return self._refuse(client, request, error)
        self._respond(client, request, (0,))
        if self.pending:
            self._wake_changed(Op.MULTI_SET, (pairs,))

    def _forget_on_disconnect(self, session: ClientSession | None, prefix: bytes) -> None:
        """Withdraw the key that a client wants to be set when it disconnects, if it has released that key."""
        if session is not None and session.on_disconnect and session.on_disconnect[0].startswith(prefix + b"/"):
            self._set_later(session, None)

    def _set_later(self, session: ClientSession, pair: tuple[bytes, bytes] | None) -> None:
        """Keep the key and value to set when a client disconnects, and count them."""
        self.used -= session.later_bytes()
        session.on_disconnect = pair
        self.used += session.later_bytes()

    def _drop_session(self, name: bytes) -> None:
        session = self._sessions.pop(name)
        self._drop_response(session)
        # Without its session, the pair is set all the same when its time comes.
        if session not in self.disconnected:
            self._set_later(session, None)

    def _value_bytes(self, key: bytes) -> int:
        """Return the memory of a key and its value."""
        value = self.table.values.get(key)
        return 0 if value is None else len(key) + len(value) + KEY_OVERHEAD_BYTES

    def _queue_bytes(self, key: bytes) -> int:
        """Return the memory of a queue without the values in it."""
        return len(key) + QUEUE_OVERHEAD_BYTES if key in self.table.queues else 0

    def _require_memory(self, operation: Operation, fields: tuple[Any, ...]) -> None:
        key = fields[0]
        wanted = KEY_OVERHEAD_BYTES + sum([len(field) for field in fields if isinstance(field, bytes)])
        former = self._value_bytes(key)
        if operation is Op.APPEND:
            wanted += former
            if wanted > MAX_VALUE_BYTES + MAX_KEY_BYTES:
                raise ArgumentError(f"append: the value would be longer than {MAX_VALUE_BYTES} bytes, the limit.")
        if operation is Op.QUEUE_PUSH:
            former, wanted = 0, wanted + (0 if key in self.table.queues else QUEUE_OVERHEAD_BYTES)
        if self.used - former + wanted > self.budget:
            raise self._full(operation)

    def _full(self, operation: Operation) -> ArgumentError:
        return ArgumentError(
            f"{operation.name.lower()}: the store is full: keys, values and waiting requests may use "
            f"{self.budget >> 20} MiB. A store is for addresses and small values. Delete keys that are not needed, "
            f"send data with collectives, or set {MEMORY_VARIABLE} to a larger number of MiB where the server runs."
        )

    def _keep(self, session: ClientSession, response: Sequence[Piece]) -> None:
        """Keep a response until the session's next request. A bare acknowledgement is not counted: it is small."""
        session.response = response
        if len(response) > 1:
            session.nbytes = sum(map(len, response))
            self._kept += session.nbytes

    def _drop_response(self, session: ClientSession) -> None:
        self._kept -= session.nbytes
        session.response, session.nbytes = None, 0

    def _drop_large_responses(self) -> None:
        """Forget large responses to clients that have disconnected, the oldest first, down to the limit."""
        for name, session in list(self._sessions.items()):
            if self._kept <= KEPT_RESPONSE_BYTES:
                return
            if session.client is None and session.nbytes > MAX_KEY_BYTES:
                self._drop_session(name)

    def _open_session(self, client: StoreClient, request: Request) -> None:
        session = self._sessions.setdefault(request.fields[0], ClientSession())
        previous, session.client, client.session = session.client, client, session
        self.disconnected.pop(session, None)
        if previous is not None and previous is not client:
            self._unfile(previous)
            previous.disconnect("its client has connected again")
        self._respond(client, request, (self.identity,))

    def _drop_old_session(self) -> None:
        if len(self._sessions) > MAX_SESSIONS:
            gone = next((name for name, session in self._sessions.items() if session.client is None), None)
            if gone is not None:
                self._drop_session(gone)

    # Responses: a framed request gets its number, a status and the reply; others get the bare reply.

    def _respond(self, client: StoreClient, request: Request, reply: tuple[Any, ...]) -> None:
        operation, _, number = request
        if number is None:
            return client.send(write_reply(operation, reply))
        # The status implies the acknowledgement.
        pieces = [] if operation.reply in ("", "a") else write_reply(operation, reply)
        pieces = write_response(number, _DONE, pieces)
        if not operation.idempotent and client.session is not None:
            self._keep(client.session, pieces)
        client.send(pieces)

    def _refuse(self, client: StoreClient, request: Request, error: ArgumentError) -> None:
        if request.number is None:
            client.disconnect(str(error))
        else:
            client.send(write_response(request.number, Status.REFUSED, [str(error).encode()]))

    # Waiting

    def _count(self, client: StoreClient, request: Request) -> None:
        """Count the caller of a barrier, unless its request is repeated after a broken connection."""
        session, number = client.session, request.number
        if session is None or number is None or session.counted != number:
            self._run(Op.ADD, (request.fields[0], 1))
            self._wake(request.fields[0])
        if session is not None and number is not None:
            session.counted = number

    def _retry(self, pending: PendingRequest) -> bool:
        """Respond to a pending request or file it again; return whether it was completed."""
        client, pending.client.pending = pending.client, None
        self.used -= pending.nbytes
        try:
            unmet = self._attempt(client, pending.request)
        except ArgumentError as error:
            self._refuse(client, pending.request, error)
            return False
        if unmet:
            self._file(pending, unmet)
        return not unmet

    def _file(self, pending: PendingRequest, unmet: Sequence[Condition]) -> None:
        self.used += pending.nbytes
        pending.client.pending, pending.unmet = pending, dict.fromkeys(unmet)
        for key, number in unmet:
            self.pending.setdefault(key, {}).setdefault(number, {})[pending] = None

    def _unfile(self, client: StoreClient) -> list[bytes]:
        """Drop a client's pending request, and return the keys that it waited for."""
        pending, client.pending = client.pending, None
        if pending is None:
            return []
        self.used -= pending.nbytes
        unmet, pending.unmet = pending.unmet, {}
        for condition in unmet:
            self._unfile_condition(pending, condition)
        return [key for key, _ in unmet]

    def _unfile_condition(self, pending: PendingRequest, condition: Condition) -> None:
        key, number = condition
        by_number = self.pending[key]
        del by_number[number][pending]
        if not by_number[number]:
            del by_number[number]
        if not by_number:
            del self.pending[key]

    def _wake_changed(self, operation: Operation, fields: tuple[Any, ...]) -> None:
        keys = [key for key, _ in fields[0]] if operation is Op.MULTI_SET else [fields[0]]
        for key in filter(self.pending.__contains__, keys):
            self._wake(key, only_one=operation.wakes == "one")

    def _wake(self, key: bytes, only_one: bool = False) -> None:
        for number in list(self.pending.get(key, ())):
            if not number or self._reached(key, number):
                self._wake_condition((key, number), only_one)

    def _reached(self, key: bytes, number: int) -> bool:
        try:
            return self.table.number(key) >= number
        except ArgumentError:
            return True  # the value is no number any more, which the request reports

    def _wake_condition(self, condition: Condition, only_one: bool) -> None:
        key, number = condition
        for pending in list(self.pending.get(key, {}).get(number, ())):
            if condition not in pending.unmet:
                continue  # disconnected or completed while another one was
            self._unfile_condition(pending, condition)
            del pending.unmet[condition]
            if not pending.unmet and self._retry(pending) and only_one and _may_consume(pending.request):
                return

    def _cancel(self, client: StoreClient) -> None:
        pending, missing = client.pending, self._unfile(client)
        if client.session is None:
            client.send([b"\x01"])
        elif pending is not None and pending.request.number is not None:
            if isinstance(pending.request.fields[0], list):
                # It was filed under the first few only.
                missing = self.table.missing(pending.request.fields[0])
            client.send(write_response(pending.request.number, Status.CANCELED, write_values(missing)))


def _may_consume(request: Request) -> bool:
    """Return whether a completed request takes a queued value. A client of torch's pops by a WAIT, then QUEUE_POP."""
    return request.operation is Op.WAIT_POP or request.number is None
