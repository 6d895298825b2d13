"""What TCPStore's server does with requests: answers, waiting clients, and clients that come back.

No sockets here: a `Peer` is anything that can be sent bytes and be cut off, so this file can be tested with
lists. One thread at a time may use a `Service`.

*Waiting.* A request whose keys are missing becomes a `Waiter`, filed under each of them. A change to a key wakes
those filed there; when nothing that a waiter waits for is missing, it is answered at once, in the same step, so
nobody can delete the key in between.

*Coming back.* A client that names itself (HELLO) has a `Session`, which outlives its connection and remembers the
last answer to a request that changes something. If the connection broke before the answer arrived, the client
asks again with the same number, and the change is not made twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores.table import Table
from torchdist_ref.stores.tcp_answers import ANSWERS
from torchdist_ref.stores.tcp_wire import (
    MAGIC,
    Op,
    Request,
    Status,
    WireError,
    reply_shape,
    write,
    write_answer,
)

MOST_SESSIONS = 4096
CHANGES = {Op.SET, Op.COMPARE_SET, Op.ADD, Op.APPEND, Op.MULTI_SET, Op.QUEUE_PUSH}
ONCE = CHANGES | {Op.DELETE_KEY, Op.QUEUE_POP, Op.WAIT_POP}


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
    """A request that can't be answered yet: what it lacks, and how to answer when it lacks nothing."""

    peer: Peer
    request: Request
    lacking: Callable[[], list[bytes]]
    finish: Callable[[], tuple[Any, ...]]
    filed: dict[bytes, None] = field(default_factory=dict)


class Service:
    """The keys of one store and everybody who waits for them."""

    def __init__(self) -> None:
        self.table = Table(slash=b"/")
        self.identity = os.urandom(16)
        self._waiting: dict[bytes, dict[Waiter, None]] = {}
        self._sessions: dict[bytes, Session] = {}

    def handle(self, peer: Peer, request: Request) -> None:
        """Act on one request of one peer.

        Raises:
            WireError: the request makes no sense here; the caller must close the connection.
        """
        if not peer.greeted:
            self._greet(peer, request)
        elif request.op == Op.CANCEL_WAIT:
            self._cancel(peer)
        elif peer.waiter is not None or request.op == Op.VALIDATE:
            raise WireError(f"{request.op.name} out of turn")
        elif request.number is None:
            self._execute(peer, request)
        elif not self._repeat(peer, request.number):
            self._execute(peer, request)

    def leave(self, peer: Peer) -> None:
        """Forget a peer whose connection is closed; its session stays for a while."""
        self._unfile(peer)
        if peer.session is not None and peer.session.peer is peer:
            peer.session.peer = None
            self._forget_old_sessions()

    def _greet(self, peer: Peer, request: Request) -> None:
        if request.op != Op.VALIDATE or request.fields != (MAGIC,):
            raise WireError("this is no client of a store")
        peer.greeted = True

    def _repeat(self, peer: Peer, number: int) -> bool:
        session = peer.session
        if session is None or number < session.number:
            raise WireError("a numbered request without a session, or an old one")
        if number > session.number:
            session.number, session.answer = number, None
        if session.answer is not None:
            peer.send(session.answer)
        return session.answer is not None

    def _execute(self, peer: Peer, request: Request) -> None:
        try:
            if request.op == Op.HELLO:
                self._hello(peer, request)
            elif request.op in WAITING:
                self._settle(WAITING[request.op](self, peer, request))
            else:
                self._answer(peer, request, ANSWERS[request.op](self.table, *request.fields))
                self._tell(request)
        except ArgumentError as error:
            self._refuse(peer, request, error)

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
        pieces = write(reply_shape(request.op, request.fields), reply)
        if request.number is not None:
            pieces = write_answer(request.number, Status.DONE, pieces)
            if request.op in ONCE and peer.session is not None:
                peer.session.answer = pieces
        peer.send(pieces)

    def _refuse(self, peer: Peer, request: Request, error: ArgumentError) -> None:
        if request.number is None:
            peer.cut(str(error))
        else:
            peer.send(write_answer(request.number, Status.REFUSED, [str(error).encode()]))

    # Waiting

    def _settle(self, waiter: Waiter) -> bool:
        """Answer the waiter if it lacks nothing any more, else file it; whether it was answered."""
        try:
            waiter.filed = dict.fromkeys(waiter.lacking())
            if not waiter.filed:
                waiter.peer.waiter = None
                self._answer(waiter.peer, waiter.request, waiter.finish())
                return True
        except ArgumentError as error:
            waiter.peer.waiter = None
            self._refuse(waiter.peer, waiter.request, error)
            return False
        waiter.peer.waiter = waiter
        for key in waiter.filed:
            self._waiting.setdefault(key, {})[waiter] = None
        return False

    def _unfile(self, peer: Peer) -> tuple[Waiter | None, list[bytes]]:
        waiter, peer.waiter = peer.waiter, None
        if waiter is None:
            return None, []
        lacked, waiter.filed = list(waiter.filed), {}
        for key in lacked:
            self._take_out(waiter, key)
        return waiter, lacked

    def _take_out(self, waiter: Waiter, key: bytes) -> None:
        filed = self._waiting[key]
        del filed[waiter]
        if not filed:
            del self._waiting[key]

    def _tell(self, request: Request) -> None:
        if request.op not in CHANGES:
            return
        changed = [key for key, _ in request.fields[0]] if request.op == Op.MULTI_SET else [request.fields[0]]
        for key in changed:
            self._wake(key, only_one=request.op == Op.QUEUE_PUSH)

    def _wake(self, key: bytes, only_one: bool = False) -> None:
        for waiter in list(self._waiting.get(key, ())):
            if key not in waiter.filed:
                continue  # cut off or answered while another was being answered
            self._take_out(waiter, key)
            del waiter.filed[key]
            if not waiter.filed and self._settle(waiter) and only_one:
                return

    def _cancel(self, peer: Peer) -> None:
        waiter, lacked = self._unfile(peer)
        if peer.session is None:
            peer.send([b"\x01"])
        elif waiter is not None and waiter.request.number is not None:
            peer.send(write_answer(waiter.request.number, Status.CANCELLED, write("L", [lacked])))

    def _wait(self, peer: Peer, request: Request) -> Waiter:
        return Waiter(peer, request, lambda: self.table.missing(request.fields[0]), lambda: (0,))

    def _wait_get(self, peer: Peer, request: Request) -> Waiter:
        keys, values = request.fields[0], self.table.values
        lacking = lambda: [key for key in dict.fromkeys(keys) if key not in values]  # noqa: E731
        return Waiter(peer, request, lacking, lambda: ([values[key] for key in keys],))

    def _wait_pop(self, peer: Peer, request: Request) -> Waiter:
        [key] = request.fields
        lacking = lambda: [] if self.table.length(key) else [key]  # noqa: E731
        return Waiter(peer, request, lacking, lambda: (self.table.pop(key),))

    def _wait_number(self, peer: Peer, request: Request) -> Waiter:
        key, enough = request.fields
        lacking = lambda: [] if self.table.number(key) >= enough else [key]  # noqa: E731
        return Waiter(peer, request, lacking, lambda: (self.table.number(key),))

    def _barrier(self, peer: Peer, request: Request) -> Waiter:
        key, world = request.fields
        session = peer.session
        if session is None or request.number is None or session.counted != request.number:
            self.table.add(key, 1)
            self._wake(key)
        if session is not None and request.number is not None:
            session.counted = request.number  # asked again after a broken connection, it is not counted again
        lacking = lambda: [] if self.table.number(key) >= world else [key]  # noqa: E731
        return Waiter(peer, request, lacking, lambda: (0,))


WAITING: dict[Op, Callable[[Service, Peer, Request], Waiter]] = {
    Op.WAIT: Service._wait,
    Op.WAIT_GET: Service._wait_get,
    Op.WAIT_POP: Service._wait_pop,
    Op.WAIT_NUMBER: Service._wait_number,
    Op.BARRIER: Service._barrier,
}
