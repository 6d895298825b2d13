"""The connections of one store object: as many as there are threads calling at once, one in the common case.

A thread that waits for a key would block every other thread if they shared one connection, and the thread that
is about to set that key may be among them. So each call takes an idle conversation, or opens one.
What is said in a conversation belongs to `tcp_client`.
"""

from __future__ import annotations

import os
from typing import Any

from torchdist_ref.errors import DistNetworkError
from torchdist_ref.stores.tcp_client import Conversation, Server
from torchdist_ref.stores.tcp_wire import Op
from torchdist_ref.stores.waiting import Deadline


class Pool:
    """Conversations of one process with one server."""

    def __init__(self, host: str, port: int) -> None:
        self.server = Server(host, port)
        self._idle: list[Conversation] = []
        self._busy: set[Conversation] = set()
        self._owner = os.getpid()
        self._closed = False

    def connect(self, deadline: Deadline) -> None:
        """See that there is a connection. Raises as `Conversation.connect`."""
        talk = self._take()
        try:
            talk.connect(deadline)
        finally:
            self._put_back(talk)

    def ask(self, op: Op, *fields: Any, seconds: float) -> tuple[Any, ...]:
        """Ask in a conversation that nobody else uses meanwhile. Returns and raises as `Conversation.ask`."""
        talk = self._take()
        try:
            return talk.ask(op, *fields, seconds=seconds)
        finally:
            self._put_back(talk)

    def close(self) -> None:
        """Close all connections. A thread that is in the middle of a call gets an error."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        for talk in list(self._busy):
            talk.abort()

    def _take(self) -> Conversation:
        if self._closed:
            raise DistNetworkError(f"TCPStore: this store ({self.server}) has been closed; make a new one.")
        if self._owner != os.getpid():
            self._leave_to_parent()
        try:
            talk = self._idle.pop()
        except IndexError:
            talk = Conversation(self.server)
        self._busy.add(talk)
        return talk

    def _put_back(self, talk: Conversation) -> None:
        self._busy.discard(talk)
        if self._closed:
            talk.close()
        else:
            self._idle.append(talk)

    def _leave_to_parent(self) -> None:
        # A forked child must not speak on its parent's connections; closing the copies says nothing to the server.
        self._owner = os.getpid()
        self._busy.clear()
        while self._idle:
            self._idle.pop().close()
