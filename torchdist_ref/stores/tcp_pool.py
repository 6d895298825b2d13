"""The connections of one store object: as many as there are threads calling at once, one in the common case.

A thread that waits for a key would block every other thread if they shared one connection, and the thread that
is about to set that key may be among them. So each call takes an idle conversation, or opens one.
What is said in a conversation belongs to `tcp_client`.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from torchdist_ref.errors import DistNetworkError
from torchdist_ref.stores.tcp_client import Conversation, Server
from torchdist_ref.stores.tcp_wire import Op
from torchdist_ref.timeouts import Deadline


class Pool:
    """Conversations of one process with one server."""

    def __init__(self, host: str, port: int) -> None:
        self.server = Server(host, port)
        self._idle: list[Conversation] = []
        self._busy: set[Conversation] = set()
        self._closed = False
        _pools.add(self)

    def connect(self, deadline: Deadline) -> None:
        """See that there is a connection. Raises as `Conversation.connect`."""
        talk = Conversation(self.server)
        talk.connect(deadline)
        self._idle.append(talk)

    def ask(self, op: Op, fields: tuple[Any, ...], seconds: float) -> tuple[Any, ...]:
        """Ask in a conversation that nobody else uses meanwhile. Returns and raises as `Conversation.ask`."""
        try:
            talk = self._idle.pop()
        except IndexError:
            talk = self._another()
        self._busy.add(talk)
        try:
            return talk.ask(op, fields, seconds)
        finally:
            self._busy.discard(talk)
            if self._closed:
                talk.close()
            else:
                self._idle.append(talk)

    def close(self) -> None:
        """Close all connections. A thread that is in the middle of a call gets an error."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        for talk in list(self._busy):
            talk.abort()

    def _another(self) -> Conversation:
        if self._closed:
            raise DistNetworkError(f"TCPStore: this store ({self.server}) has been closed; make a new one.")
        return Conversation(self.server)

    def leave_to_parent(self) -> None:
        """In a forked child: never speak on the parent's connections. To close the copies tells the server nothing."""
        for talk in (*self._idle, *self._busy):
            talk.close()
        self._idle.clear()
        self._busy.clear()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _leave_all() -> None:
    for pool in list(_pools):
        pool.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all)
