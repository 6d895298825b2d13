"""Acceptor of connections from ranks of other hosts, and the handshake by which both ends authenticate each other.

Both prove that they know the group's key, by HMACs over random numbers of both::

    connector → u32 rank | 16 bytes nonce        acceptor → 16 bytes nonce | 32 bytes proof
    connector → 32 bytes proof

Do not add what connections carry here: it belongs to `transports.frames`.
"""

from __future__ import annotations

import hmac
import math
import secrets
import selectors
import socket
import struct
from collections.abc import Collection
from time import monotonic
from typing import NamedTuple

from torchdist_ref.errors import AuthenticationError, RankStalledError, advice_on_limit
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.processes.forks import close_copies_in_child
from torchdist_ref.timeouts import CHECK_SECONDS

HANDSHAKE_SECONDS = 5.0
MAX_HANDSHAKES = 64
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_RANK, _RANKS = struct.Struct("<I"), struct.Struct("<II")


class _Challenge(NamedTuple):
    """Facts of one handshake that both ends prove to know together with the key.

    Attributes:
        key: Key of the group's connections.
        acceptor: Rank that accepted the connection.
        connector: Rank that connected.
        nonces: Random numbers of the connector and of the acceptor.
    """

    key: bytes
    acceptor: int
    connector: int
    nonces: bytes

    def proof(self, side: bytes) -> bytes:
        """Return the proof of one side, ``b"acceptor"`` or ``b"connector"``: that of the other is no use here."""
        ranks = _RANKS.pack(self.acceptor, self.connector)
        return hmac.digest(self.key, b"%b\0%b%b" % (side, ranks, self.nonces), "sha256")


def authenticate_to(sock: socket.socket, key: bytes, rank: int, peer: int, deadline: float) -> None:
    """Prove to the `Acceptor` of a peer that this rank knows the key, after the peer has proved it.

    Neither proof can be replayed: each covers a random number of the other side.

    Raises:
        ConnectionError: The peer closed the connection.
        TimeoutError: The peer did not respond before the deadline, a time of `monotonic`.
        AuthenticationError: The process there does not know the key.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.settimeout(max(0.1, deadline - monotonic()))
    sock.sendall(_RANK.pack(rank) + nonce)
    response = _receive_exactly(sock, _NONCE_BYTES + _PROOF_BYTES)
    challenge = _Challenge(key, peer, rank, nonce + response[:_NONCE_BYTES])
    if not hmac.compare_digest(response[_NONCE_BYTES:], challenge.proof(b"acceptor")):
        raise AuthenticationError(
            f"the process at {sock.getpeername()} is not rank {peer} of this group: it does not know the group's key."
        )
    sock.sendall(challenge.proof(b"connector"))


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the peer closed the connection during the handshake")
        data += part
    return data


class _PendingHandshake:
    """One connection to an `Acceptor` whose client has not proved yet that it knows the key.

    Attributes:
        sock: The connection.
        expires: When it is closed, as a time of `monotonic`.
        rank: Rank that the client claims and, once `done`, has.
        done: Whether the handshake is complete.
    """

    def __init__(self, sock: socket.socket, key: bytes, acceptor: int) -> None:
        sock.setblocking(False)
        self.sock, self.expires = sock, monotonic() + HANDSHAKE_SECONDS
        self.rank, self.done = -1, False
        self._key, self._acceptor = key, acceptor
        self._received = b""
        self._proof = b""

    def advance(self) -> None:
        """Process the bytes that have arrived.

        Raises:
            OSError: The client has disconnected, or its proof is wrong.
        """
        missing = (_PROOF_BYTES if self._proof else _RANK.size + _NONCE_BYTES) - len(self._received)
        try:
            received = self.sock.recv(missing)
        except BlockingIOError:
            return
        if not received:
            raise ConnectionResetError("the client closed the connection")
        self._received += received
        if len(received) == missing:
            self._verify() if self._proof else self._respond()

    def _respond(self) -> None:
        [self.rank] = _RANK.unpack_from(self._received)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        challenge = _Challenge(self._key, self._acceptor, self.rank, self._received[_RANK.size :] + nonce)
        self._proof, self._received = challenge.proof(b"connector"), b""
        # An empty send buffer takes this at once.
        self.sock.sendall(nonce + challenge.proof(b"acceptor"))

    def _verify(self) -> None:
        if not hmac.compare_digest(self._received, self._proof):
            raise ConnectionRefusedError("the client does not know the key")
        self.done = True


class Acceptor:
    """Acceptor of connections from ranks on other hosts, which it authenticates.

    Handshakes run concurrently, so a client that stays silent, sends garbage or disconnects cannot delay or abort the
    others. Port scanners are such clients. A handshake may take `HANDSHAKE_SECONDS`, and `MAX_HANDSHAKES` may be
    unfinished: then the oldest one is closed, and its client has to connect again.

    Args:
        server: Listening socket.
        key: Key that only ranks of the group know.
        rank: This rank.
    """

    def __init__(self, server: socket.socket, key: bytes, rank: int) -> None:
        server.setblocking(False)
        self.listener, self._key, self._rank = server, key, rank
        self.handshakes: dict[int, _PendingHandshake] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        close_copies_in_child(self)

    def next(
        self, expected: Collection[int], deadline: float, watch: MemberWatch | None = None
    ) -> tuple[int, socket.socket]:
        """Return the next of the expected ranks that has authenticated itself, and its socket.

        Raises:
            RankStalledError: None did before the deadline, a time of `monotonic`.
            DistBackendError: One of them has failed, as `watch` knows.
            OSError: This process has reached a limit of the system, and no handshake can be closed.
        """
        check_at = monotonic() + CHECK_SECONDS
        while (left := deadline - monotonic()) > 0:
            events = self._selector.select(min(left, self._next_check(), CHECK_SECONDS))
            # Clients that others start without end must not delay the check.
            if watch is not None and monotonic() >= check_at:
                if (failure := watch.failure([*expected])) is not None:
                    raise failure
                check_at = monotonic() + CHECK_SECONDS
            for key, _ in events:
                if key.fd == self.listener.fileno():
                    self.accept()
                elif (client := self._advance(key.fd)) is not None:
                    if client.rank in expected:
                        return client.rank, client.sock
                    client.sock.close()
            self._close_expired()
        raise RankStalledError(f"init_process_group: ranks {sorted(expected)} did not connect in time.")

    def _next_check(self) -> float:
        first = next(iter(self.handshakes.values()), None)
        return max(0.0, first.expires - monotonic()) if first else math.inf

    def _close_expired(self) -> None:
        now = monotonic()
        while self.handshakes and (first := next(iter(self.handshakes.values()))).expires <= now:
            self._forget(first).close()

    def accept(self) -> None:
        """Accept a connection, and begin its handshake."""
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            # Other errors concern only the client, which has disconnected again.
            if not advice_on_limit(error):
                return
            if not self.handshakes:
                raise
            return self._close_oldest()
        if len(self.handshakes) >= MAX_HANDSHAKES:
            self._close_oldest()
        self.handshakes[sock.fileno()] = client = _PendingHandshake(sock, self._key, self._rank)
        self._selector.register(client.sock, selectors.EVENT_READ)

    def _close_oldest(self) -> None:
        """Close the oldest handshake, to make space for another one."""
        self._forget(next(iter(self.handshakes.values()))).close()

    def _advance(self, descriptor: int) -> _PendingHandshake | None:
        """Process a client's bytes; return the handshake if it is complete now."""
        client = self.handshakes.get(descriptor)
        if client is None:
            # Closed since the selector reported it.
            return None
        try:
            client.advance()
        except OSError:
            self._forget(client).close()
            return None
        if client.done:
            self._forget(client)
            return client
        return None

    def _forget(self, client: _PendingHandshake) -> socket.socket:
        self._selector.unregister(client.sock)
        del self.handshakes[client.sock.fileno()]
        return client.sock

    def close_copies(self) -> None:
        """See `DescriptorOwner.close_copies`. A child has the parent's selector, so nothing is unregistered."""
        for sock in (self.listener, *(client.sock for client in self.handshakes.values())):
            sock.close()

    def close(self) -> None:
        """Close the connections whose handshake is incomplete."""
        for client in [*self.handshakes.values()]:
            self._forget(client).close()
        self._selector.close()
