"""What TCPStore's server does with requests: answers, waiting clients, and clients that come back.

No sockets here: a `Peer` is anything that can be sent bytes and be cut off, so this file can be tested with
lists. One thread at a time may use a `Service`.

*Waiting.* A request that lacks something becomes a `Waiter`, filed under each key that it lacks and the number that
the key must reach. A change to a key wakes those for whom it is enough; a waiter that lacks nothing any more is
answered at once, in the same step, so nobody can delete the key in between.

*Coming back.* A client that names itself (HELLO) has a `Session`, which outlives its connection and remembers the
last answer to a request that changes something. If the connection broke before the answer arrived, the client
asks again with the same number, and the change is not made twice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores.hash import Table
from torchdist_ref.stores.tcp_answers import ANSWERS, LACKING, Need
from torchdist_ref.stores.tcp_wire import (
    MAGIC,
    Op,
    Request,
    Status,
    WireError,
    write,
    write_answer,
    write_reply,
)

MOST_SESSIONS = 4096
CHANGES = {Op.SET, Op.COMPARE_SET, Op.ADD, Op.APPEND, Op.MULTI_SET, Op.QUEUE_PUSH}
ONCE = CHANGES | {Op.DELETE_KEY, Op.QUEUE_POP, Op.WAIT_POP}
APART = {Op.VALIDATE, Op.CANCEL_WAIT, Op.HELLO}
# That it is over is all there is to say, and the status of a numbered answer says it.
WORDLESS = {Op.SET, Op.APPEND, Op.MULTI_SET, Op.QUEUE_PUSH, Op.WAIT, Op.BARRIER}
# To look up a member of an enumeration takes a Python function's time; this is needed for every request.
_DONE = int(Status.DONE)


class Peer:
    """One connection, as the service sees it."""

    greeted = False
    session: Session | None = None
    waiter: Waiter | None = None

    def send(self, pieces: Sequence[bytes]) -> None:
        """Send the pieces, in order, without blocking."""
        raise NotImplementedError(f"{type(self).__name__} must say how to send")

    def cut(self, why: str) -> None:
        """Close the connection."""
        raise NotImplementedError(f"{type(self).__name__} must say how to close")


@dataclass(eq=False)
class Session:
    """What is remembered of a client between its connections."""

    peer: Peer | None = None
    number: int = -1
    answer: Sequence[bytes] | None = None
    counted: int = -1


@dataclass(eq=False)
class Waiter:
    """A request that can't be answered yet, and what it lacks."""

    peer: Peer
    request: Request
    filed: dict[Need, None] = field(default_factory=dict)


class Service:
    """The keys of one store and everybody who waits for them."""

    def __init__(self) -> None:
        self.table = Table(slash=b"/")
        self.identity = os.urandom(16)
        self._waiting: dict[bytes, dict[int, dict[Waiter, None]]] = {}
        self._sessions: dict[bytes, Session] = {}

    def handle(self, peer: Peer, request: Request) -> None:
        """Act on one request of one peer.

        Raises:
            WireError: the request makes no sense here; the caller must close the connection.
        """
        op, _, number = request
        if peer.waiter is not None or op in APART or not peer.greeted:
            self._apart(peer, request)
        elif number is None or not self._repeat(peer, number):
            self._execute(peer, request)

    def leave(self, peer: Peer) -> None:
        """Forget a peer whose connection is closed; its session stays for a while."""
        self._unfile(peer)
        if peer.session is not None and peer.session.peer is peer:
            peer.session.peer = None
            self._forget_old_sessions()

    def _apart(self, peer: Peer, request: Request) -> None:
        if not peer.greeted:
            self._greet(peer, request)
        elif request.op is Op.CANCEL_WAIT:
            self._cancel(peer)
        elif request.op is Op.HELLO and peer.waiter is None:
            self._hello(peer, request)
        else:
            raise WireError(f"{request.op.name} out of turn")

    def _greet(self, peer: Peer, request: Request) -> None:
        if request.op is not Op.VALIDATE or request.fields != (MAGIC,):
            raise WireError("this is no client of a store")
        peer.greeted = True

    def _repeat(self, peer: Peer, number: int) -> bool:
        session = peer.session
        if session is None or number < session.number:
            raise WireError("a numbered request without a session, or an old one")
        if number > session.number:
            session.number, session.answer = number, None
            return False
        if session.answer is not None:
            peer.send(session.answer)
        return session.answer is not None

    def _execute(self, peer: Peer, request: Request) -> None:
        op, fields, _ = request
        try:
            if op in LACKING:
                return self._execute_when_ready(peer, request)
            reply = ANSWERS[op](self.table, *fields)
        except ArgumentError as error:
            return self._refuse(peer, request, error)
        self._answer(peer, request, reply)
        if self._waiting and op in CHANGES:
            self._tell(op, fields)

    def _execute_when_ready(self, peer: Peer, request: Request) -> None:
        if request.op is Op.BARRIER:
            self._count_in(peer, request)
        if lacks := self._attempt(peer, request):
            self._file(Waiter(peer, request), lacks)

    def _attempt(self, peer: Peer, request: Request) -> Sequence[Need]:
        """Answer a request that waits if it lacks nothing, or tell what it lacks."""
        op, fields, _ = request
        lacks = LACKING[op](self.table, *fields)
        if not lacks:
            self._answer(peer, request, ANSWERS[op](self.table, *fields))
        return lacks

    def _hello(self, peer: Peer, request: Request) -> None:
        session = self._sessions.setdefault(request.fields[0], Session())
        before, session.peer, peer.session = session.peer, peer, session
        if before is not None and before is not peer:
            self._unfile(before)
            before.cut("its client has connected again")
        self._answer(peer, request, (self.identity,))

    def _forget_old_sessions(self) -> None:
        if len(self._sessions) > MOST_SESSIONS:
            gone = next((name for name, session in self._sessions.items() if session.peer is None), None)
            if gone is not None:
                del self._sessions[gone]

    # Answers: torch's dialect gets the bare reply, a numbered request gets number, status and reply.

    def _answer(self, peer: Peer, request: Request, reply: tuple[Any, ...]) -> None:
        op, fields, number = request
        if number is None:
            return peer.send(write_reply(op, fields, reply))
        pieces = write_answer(number, _DONE, [] if op in WORDLESS else write_reply(op, fields, reply))
        if op in ONCE and peer.session is not None:
            peer.session.answer = pieces
        peer.send(pieces)

    def _refuse(self, peer: Peer, request: Request, error: ArgumentError) -> None:
        if request.number is None:
            peer.cut(str(error))
        else:
            peer.send(write_answer(request.number, Status.REFUSED, [str(error).encode()]))

    # Waiting

    def _count_in(self, peer: Peer, request: Request) -> None:
        """A barrier counts its callers; who asks again after a broken connection is not counted again."""
        session, number = peer.session, request.number
        if session is None or number is None or session.counted != number:
            self.table.add(request.fields[0], 1)
            self._wake(request.fields[0])
        if session is not None and number is not None:
            session.counted = number

    def _settle(self, waiter: Waiter) -> bool:
        """Answer the waiter if it lacks nothing any more, else file it; whether it was answered."""
        peer, peer.waiter = waiter.peer, None
        try:
            lacks = self._attempt(peer, waiter.request)
        except ArgumentError as error:
            self._refuse(peer, waiter.request, error)
            return False
        if lacks:
            self._file(waiter, lacks)
        return not lacks

    def _file(self, waiter: Waiter, lacks: Sequence[Need]) -> None:
        waiter.peer.waiter, waiter.filed = waiter, dict.fromkeys(lacks)
        for key, enough in lacks:
            self._waiting.setdefault(key, {}).setdefault(enough, {})[waiter] = None

    def _unfile(self, peer: Peer) -> list[bytes]:
        """Forget what a peer waits for: the keys that it lacked."""
        waiter, peer.waiter = peer.waiter, None
        if waiter is None:
            return []
        lacked, waiter.filed = waiter.filed, {}
        for need in lacked:
            self._take_out(waiter, need)
        return [key for key, _ in lacked]

    def _take_out(self, waiter: Waiter, need: Need) -> None:
        key, enough = need
        by_number = self._waiting[key]
        del by_number[enough][waiter]
        if not by_number[enough]:
            del by_number[enough]
        if not by_number:
            del self._waiting[key]

    def _tell(self, op: Op, fields: tuple[Any, ...]) -> None:
        for key in [key for key, _ in fields[0]] if op is Op.MULTI_SET else [fields[0]]:
            self._wake(key, only_one=op is Op.QUEUE_PUSH)

    def _wake(self, key: bytes, only_one: bool = False) -> None:
        for enough in list(self._waiting.get(key, ())):
            if not enough or self._reached(key, enough):
                self._wake_all(key, enough, only_one)

    def _reached(self, key: bytes, enough: int) -> bool:
        try:
            return self.table.number(key) >= enough
        except ArgumentError:
            return True  # no number any more: who waits for one is to hear that

    def _wake_all(self, key: bytes, enough: int, only_one: bool) -> None:
        need = (key, enough)
        for waiter in list(self._waiting.get(key, {}).get(enough, ())):
            if need not in waiter.filed:
                continue  # cut off or answered while another was being answered
            self._take_out(waiter, need)
            del waiter.filed[need]
            if not waiter.filed and self._settle(waiter) and only_one:
                return

    def _cancel(self, peer: Peer) -> None:
        waiter, lacked = peer.waiter, self._unfile(peer)
        if peer.session is None:
            peer.send([b"\x01"])
        elif waiter is not None and waiter.request.number is not None:
            peer.send(write_answer(waiter.request.number, Status.CANCELLED, write("L", [lacked])))
