"""The connections of one store object: as many as there are threads calling at once, one in the common case.

A thread that waits for a key would block every other thread if they shared one connection, and the thread that
is about to set that key may be among them. So each call takes an idle conversation, or opens one.
What is said in a conversation belongs to `tcp_client`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torchdist_ref.errors import DistNetworkError
from torchdist_ref.stores.tcp_client import Conversation, Server


class Pool:
    """Conversations of one process with one server."""

    def __init__(self, host: str, port: int) -> None:
        self.server = Server(host, port)
        self._idle: list[Conversation] = []
        self._busy: set[Conversation] = set()
        self._owner = os.getpid()
        self._closed = False

    @contextmanager
    def conversation(self) -> Iterator[Conversation]:
        """A conversation that nobody else uses meanwhile."""
        talk = self._take()
        self._busy.add(talk)
        try:
            yield talk
        finally:
            self._busy.discard(talk)
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
            return self._idle.pop()
        except IndexError:
            return Conversation(self.server)

    def _put_back(self, talk: Conversation) -> None:
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
