"""Address of the server of a TCPStore, and a socket to it if the client may use it.

The kernel knows the user of each server of this host. A client sends nothing to a server of another user,
and believes nothing that it sends: the port may have been free before rank 0 listened there. Do not add the protocol
here: `client` has requests and responses.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchdist_ref.errors import AuthenticationError, DistNetworkError, advice_on_limit
from torchdist_ref.stores import sockets
from torchdist_ref.timeouts import Deadline, LongWait

logger = logging.getLogger("torchdist_ref.stores")


class ConnectionLost(Exception):
    """The connection broke before the response arrived."""


def as_option(seconds: float) -> bytes:
    """Return a time-out as the value of a socket's option."""
    if os.name == "nt":
        return struct.pack("@L", max(1, int(seconds * 1000)))
    return struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))


@dataclass
class ServerAddress:
    """Server of a store object, shared by all of its connections.

    Attributes:
        host: host name.
        port: port number.
        reached: whether a connection was ever opened.
        is_ours: whether it is a server of this library.
        listening: addresses at which a server of this process listens, while it cannot have ended.
        identity: random bytes that a server of ours sends after HELLO; another server at the same port has others.
        wait: the wait until it is reached.
    """

    host: str
    port: int
    reached: bool = False
    is_ours: bool = False
    listening: Sequence[Any] = ()
    identity: bytes | None = None
    wait: LongWait = field(default_factory=LongWait, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def note(self, error: BaseException, deadline: Deadline) -> None:
        """Take note that it was not reached; log that once, when it has taken long."""
        if self.wait.is_due():
            logger.warning(
                "TCPStore: no connection to %s within %g s (%s); trying for %.0f s more. Check that rank 0, which runs "
                "the store, is up and uses the same MASTER_ADDR and MASTER_PORT.",
                self,
                self.wait.seconds,
                error,
                deadline.remaining(),
            )


def open_socket(server: ServerAddress, deadline: Deadline) -> socket.socket:
    """Return a socket to a server, at the first of its addresses that accepts.

    Raises:
        AuthenticationError: the server belongs to another user.
        OSError: the name does not resolve, or no address accepts before the deadline.
        ConnectionLost: the server has closed the connection.
    """
    addresses = sockets.resolve(server.host, server.port, deadline)
    for index, address in enumerate(addresses):
        try:
            sock = sockets.connect(address, Deadline(deadline.remaining() / (len(addresses) - index)))
            break
        except OSError:
            if address is addresses[-1]:
                raise
    try:
        user = None if sock.getpeername() in server.listening else sockets.refused_server(sock)
        if user is not None:
            raise _refused(server, user)
    except BaseException:
        sock.close()
        raise
    return sock


def _refused(server: ServerAddress, user: int) -> Exception:
    if user < 0:
        return ConnectionLost("the server closed the connection")
    return AuthenticationError(
        f"TCPStore: the server at {server} belongs to user {user}, and this process to user {os.geteuid()}: it may be "
        f"no part of this job. Choose another MASTER_PORT, run all ranks as one user, or set "
        f"{sockets.TRUST_NETWORK}=1 if every user of this host may run code in the ranks."
    )


def unreachable(server: ServerAddress, error: Exception, deadline: Deadline) -> DistNetworkError:
    """Return the error for a server to which no socket could be opened."""
    if advice := advice_on_limit(error):
        return DistNetworkError(f"TCPStore: no socket to {server} can be opened ({error}). {advice}")
    if server.reached:
        return DistNetworkError(
            f"TCPStore: the server at {server} is gone ({error}). Its process (rank 0, or the launcher) has ended "
            f"or cannot be reached; see the log of that process for the reason."
        )
    if isinstance(error, socket.gaierror):
        return DistNetworkError(
            f"TCPStore: the host name {server.host!r} did not resolve to an address within "
            f"{deadline.seconds:g} s ({error.strerror}). Check MASTER_ADDR, or use an IP address."
        )
    reason = str(error) or "no time was left"
    return DistNetworkError(
        f"TCPStore: no connection to {server} within {deadline.seconds:g} s ({reason}). Check that rank 0, which "
        f"runs the store, is up and uses the same MASTER_ADDR and MASTER_PORT, and that no firewall is between."
    )
