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
from torchdist_ref.stores import addresses, sockets
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
        resolved: addresses of the host, when it was last resolved.
        local_end: family and address of this process's end of the last connection; None before the first.
        identity: random bytes that a server of ours sends after HELLO; another server at the same port has others.
        wait: the wait until it is reached.
    """

    host: str
    port: int
    reached: bool = False
    is_ours: bool = False
    listening: Sequence[Any] = ()
    resolved: Sequence[str] = ()
    local_end: tuple[socket.AddressFamily, str] | None = None
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
    """Return a socket to a server, at the address that accepts first.

    Raises:
        AuthenticationError: the server belongs to another user.
        OSError: the name does not resolve, or no address accepts before the deadline.
        ConnectionLost: the server has closed the connection.
    """
    found = addresses.resolve(server.host, server.port, deadline)
    server.resolved = [str(where[0]) for _, where in found]
    sock = sockets.connect(found, deadline)
    server.local_end = sock.family, addresses.host_text(sock.family, sock.getsockname())
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
        f"runs the store, is up and uses the same MASTER_ADDR and MASTER_PORT, and that no firewall is between. "
        f"{_advice_on_address(server)}".rstrip()
    )


def _advice_on_address(server: ServerAddress) -> str:
    """Return what may be wrong with the address here or on rank 0's host; empty if it is an address of another host."""
    host = server.host
    if server.resolved and all(map(addresses.is_loopback, server.resolved)):
        at = "" if addresses.is_loopback(host) else f"is {', '.join(server.resolved)} here, which "
        return f"{host} {at}is this host itself: if rank 0 runs on another host, set MASTER_ADDR to an address of that."
    if not server.resolved or host.partition("%")[0] in server.resolved:
        return ""
    return (
        f"{host} is {', '.join(server.resolved)} here. If it is a loopback address on rank 0's host, as in the "
        f"/etc/hosts of Debian, rank 0 listens only there: set MASTER_ADDR to the address of one of its interfaces."
    )
