"""Listening sockets of the store's server: accepting connections, also when the process has no descriptor left.

A process without descriptors could only leave new clients waiting. So one descriptor is kept in reserve: it is closed
to accept such a client and disconnect it at once. Do not add requests or limits on connections here.
"""

from __future__ import annotations

import logging
import os
import socket
from time import monotonic

from torchdist_ref.stores.sockets import (
    EXHAUSTED,
    READ,
    TRUST_NETWORK,
    DescriptorPoller,
    Peer,
    SocketOwners,
    refused_users,
)

logger = logging.getLogger("torchdist_ref.stores")

ACCEPTED_AT_ONCE = 48
ACCEPT_RETRY_SECONDS = 0.1
WARNING_SECONDS = 60.0
MAX_REPORTED_USERS = 16


class ListeningSockets:
    """Listening sockets of a server.

    Attributes:
        sockets: the sockets.
        more: whether the last call of `accept` may have left connections waiting.
        exhausted: whether the last call of `accept` found no descriptor or memory for a connection.
        retry_at: when to listen again, in seconds of the monotonic clock; 0 while listening.
    """

    def __init__(self, sockets: list[socket.socket], poller: DescriptorPoller) -> None:
        self.sockets = sockets
        self.more = self.exhausted = False
        self.retry_at = 0.0
        self._poller = poller
        self._listening = False
        self._refused: set[int] = set()
        self._warned_at = -WARNING_SECONDS
        self._reserve: int | None = None
        self._owners = SocketOwners()
        self._reopen_reserve()
        for each in sockets:
            # Connections inherit it.
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.listen(True)

    def listen(self, wanted: bool) -> None:
        """Watch the sockets, or stop that for a while."""
        self.retry_at = 0.0 if wanted else monotonic() + ACCEPT_RETRY_SECONDS
        if wanted is self._listening:
            return  # two sockets of one turn may both be without a descriptor
        self._listening = wanted
        for each in self.sockets:
            if wanted:
                self._poller.register(each.fileno(), READ)
            else:
                self._poller.unregister(each.fileno())

    def accept(self, descriptor: int) -> list[socket.socket]:
        """Return connections that wait at one of the sockets, without those of other users."""
        self.more = self.exhausted = False
        listener = next((each for each in self.sockets if each.fileno() == descriptor), None)
        if listener is None:
            return []  # a connection that was closed in this turn
        peers: list[Peer] = []
        try:
            while len(peers) < ACCEPTED_AT_ONCE:
                peers.append(listener.accept())
            self.more = True
        except BlockingIOError:
            pass
        except OSError as error:
            # Other errors concern only the connection, which is closed already.
            if error.errno in EXHAUSTED:
                self._note_exhausted(error)
        # The kernel is asked once for all of them.
        users = refused_users(self._owners, listener, peers) if peers else []
        return [sock for (sock, _), user in zip(peers, users, strict=True) if self._admits(sock, user)]

    def turn_away(self, descriptor: int) -> None:
        """Accept a connection and close it, with the reserve; without the reserve, stop listening for a while."""
        if self._reserve is None:
            self._reopen_reserve()
        if self._reserve is None:
            return self.listen(False)
        os.close(self._reserve)
        self._reserve = None
        try:
            for listener in (each for each in self.sockets if each.fileno() == descriptor):
                listener.accept()[0].close()
        except BlockingIOError:
            pass
        except OSError:
            self.listen(False)
        self._reopen_reserve()

    def close(self) -> None:
        """Close the sockets and the reserve."""
        for each in self.sockets:
            each.close()
        self._owners.close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _admits(self, sock: socket.socket, user: int | None) -> bool:
        """Return whether the server answers a connection; close it if not."""
        if user is None:
            return True
        sock.close()
        if user < 0:
            # The client has gone, or there was no descriptor to ask the kernel for its user.
            self._check_descriptors()
        elif user not in self._refused and len(self._refused) < MAX_REPORTED_USERS:
            self._refused.add(user)
            logger.warning("store server: refused a client of user %d; %s=1 would admit it", user, TRUST_NETWORK)
        return False

    def _check_descriptors(self) -> None:
        try:
            os.close(os.dup(self.sockets[0].fileno()))
        except OSError as error:
            self._note_exhausted(error)

    def _note_exhausted(self, error: OSError) -> None:
        self.exhausted = True
        if monotonic() >= self._warned_at + WARNING_SECONDS:
            self._warned_at = monotonic()
            logger.warning("store server: cannot accept a connection: %s", error)

    def _reopen_reserve(self) -> None:
        try:
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._reserve = None  # another thread was quicker
