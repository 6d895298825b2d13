"""Request handling of TCPStore's server: replies, and requests that wait.

No sockets here: a `StoreClient` is any object that bytes can be sent to and that can be disconnected, so tests use
lists. One thread at a time may use a `RequestHandler`. The memory that requests use is counted in `memory`, the state
of clients that connect again is in `sessions`, and the keys of released prefixes are deleted in `releases`.

*Waiting.* A request whose conditions do not hold yet becomes a `PendingRequest`, filed under each of its conditions. A
change to a key wakes the requests whose condition it fulfills. A request without unmet conditions is answered in the
same step, so no other client can delete the key in between. Only requests with more than `MAX_FILED` keys, which are
looked at in several steps anyway, are answered in turns: one change may fulfill the conditions of many of them. If a
change fulfills the conditions of more than `WOKEN_AT_ONCE` requests, the others are answered in turns too; those that
wait for one key see its value as of the change.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores.base import INT64
from torchdist_ref.stores.hash import Table
from torchdist_ref.stores.tcp.memory import StoreMemory
from torchdist_ref.stores.tcp.operations import MAX_FILED, Condition, Op, Operation
from torchdist_ref.stores.tcp.protocol import (
    MAGIC,
    ProtocolError,
    Request,
    Status,
    write_reply,
    write_response,
    write_values,
)
from torchdist_ref.stores.tcp.releases import Releases
from torchdist_ref.stores.tcp.sessions import (
    AWAITED_OVERHEAD_BYTES,
    ClientSession,
    PendingRequest,
    SessionTable,
    StoreClient,
)

# Looking up a member of an enumeration is a Python call, and every request needs this one.
_DONE = int(Status.DONE)
WOKEN_AT_ONCE = 16
"""Requests that a change answers before it is answered itself."""
WOKEN_IN_TURN = 64


@dataclass(eq=False, slots=True)
class Wake:
    """Requests whose condition a change has fulfilled, and that have not been looked at since.

    Attributes:
        condition: the condition.
        waiters: the requests.
        only_one: whether the change serves only one of them.
        table: the key and its value as of the change; None if that is the present one, or the key is a queue.
    """

    condition: Condition
    waiters: Iterator[PendingRequest]
    only_one: bool
    table: Table | None = None


class RequestHandler:
    """Responses to the requests of a store's clients.

    Attributes:
        memory: keys, values and queues, and the budget.
        table: table of `memory`.
        sessions: sessions of clients.
        releases: prefixes whose keys are being deleted.
        identity: random bytes by which clients distinguish this server from another at the same port.
        pending: waiting requests by key and by the number that the key must reach.
        ready: requests that need not wait any more and are answered in turns, in order.
    """

    def __init__(self) -> None:
        self.memory = StoreMemory()
        self.table = self.memory.table
        self.sessions = SessionTable(self.memory)
        self.releases = Releases(self.memory)
        self.identity = os.urandom(16)
        self.pending: dict[bytes, dict[int, dict[PendingRequest, None]]] = {}
        self.ready: dict[PendingRequest, None] = {}
        self._wakes: deque[Wake] = deque()
        self._queued_releases: dict[PendingRequest, None] = {}

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

    def weight(self, client: StoreClient, request: Request) -> int:
        """Return the number of keys, or KiB, that a request goes through; 0 for a small one."""
        if request.operation is Op.CANCEL_WAIT and client.pending is not None:
            request = client.pending.request  # the keys that are missing are looked for
        weight = request.operation.weight
        return 0 if weight is None else weight(self.table, *request.fields)

    def remove(self, client: StoreClient) -> None:
        """Forget a client whose connection is closed; its session stays for a while."""
        self._unfile(client)
        self.sessions.leave(client)

    def set_for_disconnected(self, now: float) -> None:
        """Set the keys of clients that have disconnected and not connected again in time."""
        for key, value in self.sessions.due(now):
            self._settle(Op.SET, (key,))
            if self.memory.set_unless_present(key, value):
                self._wake(key)

    @property
    def busy(self) -> bool:
        """Whether there is work for `take_turn`."""
        return bool(self._wakes or self.ready or self.releases.batches)

    def take_turn(self) -> None:
        """Do a part of the work that is done in turns: answer some requests, and delete some keys."""
        if self._wakes:
            wake = self._wakes.popleft()
            if self._answer(wake, WOKEN_IN_TURN) == 0:
                self._wakes.append(wake)
        if self.ready:
            self._retry(next(iter(self.ready)))
        if self.releases.batches:
            self._delete_released()

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
            if session.response is not None or session.lost:
                self.sessions.forget_response(session)
            return False
        if session.response is not None:
            client.send(session.response)
        elif session.lost:
            text = "the request was done, but its response was dropped: too many clients have unread responses."
            client.send(write_response(number, Status.REFUSED, [text.encode()]))
        return session.response is not None or session.lost

    def _execute(self, client: StoreClient, request: Request) -> None:
        operation, fields, _ = request
        try:
            if self.releases.batches:
                self.releases.settle(operation, fields)
            if operation.unmet is not None:
                return self._execute_or_wait(client, request)
            if operation is Op.RELEASE:
                return self._release(client, request)
            reply = self.memory.run(operation, fields)
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
            if not self.memory.fits(nbytes):
                raise self.memory.full(request.operation)
            self._file(PendingRequest(client, request, nbytes), unmet)

    def _attempt(self, client: StoreClient, request: Request, former: Table | None = None) -> Sequence[Condition]:
        """Respond to a request whose conditions hold, in a former table if there is one; else return the others."""
        operation, fields, _ = request
        assert operation.unmet is not None and operation.execute is not None
        unmet = operation.unmet(former or self.table, *fields)
        if not unmet:
            reply = operation.execute(former, *fields) if former else self.memory.run(operation, fields)
            self._respond(client, request, reply)
        return unmet

    def _settle(self, operation: Operation, fields: tuple[Any, ...]) -> None:
        if self.releases.batches:
            self.releases.settle(operation, fields)

    # Releases

    def _release(self, client: StoreClient, request: Request) -> None:
        """Count one more user of a prefix as gone. After the last one, delete the keys, then respond to it."""
        session, (prefix, users) = client.session, request.fields
        running = session.release if session is not None else None
        if running is not None and running.request.number == request.number:
            running.client, client.pending = client, running
            return  # the client has repeated it after its connection broke
        pending = PendingRequest(client, request, 0)
        if self.table.is_last_release(prefix, users) and not self.releases.accepts(prefix):
            # It has no effect before its turn comes: the keys that it deletes are those of the step that counts it.
            pending.nbytes = len(prefix)
            self._queued_releases[pending] = None
            return self._hold(pending)
        reply = self.memory.run(Op.RELEASE, request.fields)
        if session is not None and session.on_disconnect and session.on_disconnect[0].startswith(prefix + b"/"):
            self.sessions.set_later(session, None)  # the client has released the key that it wanted to be set
        if reply == (0,):
            return self._respond(client, request, reply)
        self._hold(pending)
        if session is not None:
            session.release = pending
        self.releases.begin(pending, prefix)
        if self.releases.batches[0].requests[0] is pending:
            self._delete_released()

    def _delete_released(self) -> None:
        """Delete some of the released keys, and respond to the clients whose keys are deleted."""
        finished = self.releases.delete_some()
        for pending in finished:
            client, session = pending.client, pending.client.session
            if session is not None and session.release is pending:
                session.release = None
            if client.pending is pending:
                self._unfile(client)
            elif session is None or session.number != pending.request.number:
                continue  # nobody expects a response any more; a client whose connection broke does
            self._respond(client, pending.request, (1,))
        if finished:
            self.ready.update(self._queued_releases)
            self._queued_releases.clear()

    def _set_on_disconnect(self, client: StoreClient, session: ClientSession, request: Request) -> None:
        key, value, pairs = request.fields
        former = session.on_disconnect
        self.sessions.set_later(session, (key, value) if value else None)
        try:
            if not self.memory.fits(0):
                raise self.memory.full(request.operation)
            self._settle(Op.MULTI_SET, (pairs,))
            self.memory.run(Op.MULTI_SET, (pairs,))
        except ArgumentError as error:
            self.sessions.set_later(session, former)
            return self._refuse(client, request, error)
        self._respond(client, request, (0,))
        if self.pending:
            self._wake_changed(Op.MULTI_SET, (pairs,))

    def _open_session(self, client: StoreClient, request: Request) -> None:
        previous = self.sessions.open(request.fields[0], client)
        if previous is not None:
            self._unfile(previous)
            previous.disconnect("its client has connected again")
        self._respond(client, request, (self.identity,))

    # Responses: a framed request gets its number, a status and the reply; others get the bare reply.

    def _respond(self, client: StoreClient, request: Request, reply: tuple[Any, ...]) -> None:
        operation, _, number = request
        if number is None:
            return client.send(write_reply(operation, reply))
        # The status implies the acknowledgement.
        pieces = [] if operation.reply in ("", "a") else write_reply(operation, reply)
        pieces = write_response(number, _DONE, pieces)
        if not operation.idempotent and client.session is not None:
            self.sessions.keep(client.session, pieces)
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
            self.memory.run(Op.ADD, (request.fields[0], 1))
            self._wake(request.fields[0])
        if session is not None and number is not None:
            session.counted = number

    def _retry(self, pending: PendingRequest, former: Table | None = None) -> bool:
        """Run a request that has waited, or file it again; return whether it was completed."""
        client = pending.client
        self._unfile(client)
        try:
            if former is None:
                self._settle(pending.request.operation, pending.request.fields)
            if pending.request.operation is Op.RELEASE:
                self._release(client, pending.request)
                return client.pending is None
            unmet = self._attempt(client, pending.request, former)
        except ArgumentError as error:
            self._refuse(client, pending.request, error)
            return False
        if unmet:
            self._file(pending, unmet)
        return not unmet

    def _hold(self, pending: PendingRequest) -> None:
        self.memory.used += pending.nbytes
        pending.client.pending = pending

    def _file(self, pending: PendingRequest, unmet: Sequence[Condition]) -> None:
        self._hold(pending)
        pending.unmet = dict.fromkeys(unmet)
        for key, number in unmet:
            self.pending.setdefault(key, {}).setdefault(number, {})[pending] = None

    def _unfile(self, client: StoreClient) -> list[bytes]:
        """Forget that a client's request waits, and return the keys that it waited for."""
        pending, client.pending = client.pending, None
        if pending is None:
            return []
        self.memory.used -= pending.nbytes
        self.ready.pop(pending, None)
        self._queued_releases.pop(pending, None)
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
        most = WOKEN_AT_ONCE
        for key in filter(self.pending.__contains__, keys):
            most = self._wake(key, operation.wakes == "one", most)

    def _wake(self, key: bytes, only_one: bool = False, most: int = WOKEN_AT_ONCE) -> int:
        """Answer `most` of the requests that a change of a key fulfills, and the rest in turns; return what is left."""
        numbers = self.pending.get(key, {})
        reached = self._number(key) if any(numbers) else 0
        for number in [each for each in numbers if each <= reached or not each]:
            wake = Wake((key, number), iter(list(numbers.get(number, ()))), only_one)
            most = self._answer(wake, most)
            if most == 0:
                if key in self.table.values:
                    wake.table = Table(slash=b"/")
                    wake.table.values[key] = self.table.values[key]
                self._wakes.append(wake)
        return most

    def _number(self, key: bytes) -> int:
        try:
            return self.table.number(key)
        except ArgumentError:
            return INT64.stop  # the value is no number any more, which the requests report

    def _answer(self, wake: Wake, most: int) -> int:
        """Look at `most` requests of a wake. Return how many more may be looked at; 0 if some may be left."""
        for pending in islice(wake.waiters, most):
            most -= 1
            if wake.condition not in pending.unmet:
                continue  # disconnected or completed while another one was
            self._unfile_condition(pending, wake.condition)
            del pending.unmet[wake.condition]
            if pending.unmet:
                continue
            if _is_long(pending.request):
                self.ready[pending] = None
            elif self._retry(pending, wake.table and _table_for(pending.request, wake)):
                if wake.only_one and _may_consume(pending.request):
                    return most + 1
        return most

    def _cancel(self, client: StoreClient) -> None:
        pending = client.pending
        if pending is not None and pending.request.operation is Op.RELEASE:
            raise ProtocolError("a release cannot be canceled")
        if pending in self.ready:
            self._retry(pending)  # what it waited for came first
            pending = client.pending
        missing = self._unfile(client)
        if client.session is None:
            client.send([b"\x01"])
        elif pending is not None and pending.request.number is not None:
            if isinstance(pending.request.fields[0], list):
                # It was filed under the first few only.
                missing = self.table.missing(pending.request.fields[0])
            client.send(write_response(pending.request.number, Status.CANCELED, write_values(missing)))


def _is_long(request: Request) -> bool:
    return isinstance(request.fields[0], list) and len(request.fields[0]) > MAX_FILED


def _table_for(request: Request, wake: Wake) -> Table | None:
    """Return the table of a wake for a request that reads only its key; None for others."""
    reads_one = request.operation is not Op.WAIT_POP and request.fields[0] in (wake.condition[0], [wake.condition[0]])
    return wake.table if reads_one else None


def _may_consume(request: Request) -> bool:
    """Return whether a completed request takes a queued value. A client of torch's pops by a WAIT, then QUEUE_POP."""
    return request.operation is Op.WAIT_POP or request.number is None
