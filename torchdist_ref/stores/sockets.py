"""Sockets: listening, connecting before a deadline, and the users at the other ends.

A store listens on the addresses that it is asked for, while torch listens on every interface. A host name that the
hosts file maps to loopback, as Debian does with a host's own name, means loopback, which only this host reaches. An
address that no interface has would need another interface than the one asked for: that is an error. If the user trusts
the network, the store listens on every interface in both cases. On loopback, the kernel knows the users at both ends.

Do not add a protocol here.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import lru_cache
from time import monotonic, sleep
from typing import Any

from torchdist_ref.errors import ArgumentError, DistNetworkError, explain
from torchdist_ref.stores.addresses import Address, is_local, is_loopback, resolve
from torchdist_ref.timeouts import Deadline

logger = logging.getLogger("torchdist_ref.stores")
Peer = tuple[socket.socket, tuple[Any, ...]]
Ends = tuple[tuple[Any, ...], tuple[Any, ...] | None]
BACKLOG = 4096
TRUST_NETWORK = "TORCHDIST_REF_TRUST_NETWORK"
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a process or host without descriptors or memory."""
_NEXT_SECONDS, _SILENT_SECONDS = 0.25, 2.0
"""Time from the attempt to connect to one address to that to the next one (RFC 8305, 5), and time that an address has
to respond once another one has refused."""

_ACCEPTED_AT_ONCE, _MAX_REPORTED_USERS = 48, 16
_WARNING_SECONDS, _RETRY_SECONDS = 60.0, 0.01

# Constants of linux/netlink.h, sock_diag.h and inet_diag.h: a request with its two headers; kind and error code of a
# reply; `idiag_state`, `idiag_uid` and `idiag_inode`.
_SOCK_DIAG, _BY_FAMILY, _ANY, _REPLY_BYTES = 4, 20, 0xFFFFFFFF, 4096
_REQUEST, _REPLY_KIND, _REPLY = map(struct.Struct, ("=IHHIIBBBBIHH16s16sIII", "=4xH10xi", "=17xB62xII"))
# States: TCP_ESTABLISHED; those of connections that may wait to be accepted (also TCP_SYN_RECV); that of listeners.
_CONNECTED, _OPENED, _LISTENING = 1, (1, 3), 10
_CLOSED, _UNACCEPTED, _UNASKED = -1, -2, -3


class _Attempts:
    """Attempts to connect to the addresses of a host, which overlap where an address does not respond.

    Args:
        addresses: The addresses, in the order of preference.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._untried = deque(addresses)
        self._pending: dict[int, tuple[socket.socket, Address]] = {}
        self._failures: list[tuple[Address, OSError]] = []
        self._next = 0.0
        self._poll = select.poll()

    def connected(self, deadline: Deadline) -> socket.socket:
        """Return the socket that is connected first.

        Raises:
            OSError: No address accepts, or (TimeoutError) none responds before the deadline.
        """
        while True:
            if self._untried and (not self._pending or monotonic() >= self._next):
                self._begin(self._untried.popleft())
            if not self._pending and not self._untried:
                raise self._failure()
            for descriptor, _ in self._poll.poll(self._seconds(deadline) * 1000):
                if (sock := self._end(descriptor)) is not None:
                    return sock
            is_late = not self._untried and self._failures and monotonic() >= self._next
            if self._pending and (deadline.passed() or is_late):
                silent = TimeoutError(errno.ETIMEDOUT, "no response to the attempt to connect")
                self._failures[:0] = [(address, silent) for _, address in self._pending.values()]
                raise self._failure()

    def close(self) -> None:
        """Close the sockets of the other attempts."""
        for sock, _ in self._pending.values():
            sock.close()

    def _begin(self, address: Address) -> None:
        family, where = address
        self._next = monotonic() + (_NEXT_SECONDS if self._untried else _SILENT_SECONDS)
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._failures.append((address, error))
            return
        self._pending[sock.fileno()] = sock, address
        self._poll.register(sock, select.POLLOUT)
        sock.setblocking(False)
        if (code := sock.connect_ex(where)) not in (0, errno.EINPROGRESS):
            self._fail(sock.fileno(), code)

    def _end(self, descriptor: int) -> socket.socket | None:
        """Return the socket of an attempt that has ended if it is connected."""
        sock, _ = self._pending[descriptor]
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._fail(descriptor, code)
        elif sock.getsockname() == sock.getpeername():
            # If no process listens, Linux may choose the same port for both ends: the socket connects to itself.
            self._fail(descriptor, errno.ECONNREFUSED, "no process listens there")
        else:
            del self._pending[descriptor]
            return sock
        return None

    def _fail(self, descriptor: int, code: int, text: str = "") -> None:
        sock, address = self._pending.pop(descriptor)
        self._poll.unregister(descriptor)
        sock.close()
        text = text or f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"
        self._failures.append((address, OSError(code, text)))

    def _seconds(self, deadline: Deadline) -> float:
        """Return the time until the next action, unless a socket reports something before."""
        if not self._pending:
            return 0.0
        waits = self._untried or self._failures
        return min(deadline.sleep_seconds(), max(0.0, self._next - monotonic()) if waits else deadline.sleep_seconds())

    def _failure(self) -> OSError:
        """Return the last failure, with the reasons of all addresses if there are several."""
        (_, last), several = self._failures[-1], len(self._failures) > 1
        if not several:
            return last
        reasons = (f"{address[1][0]}: {error.strerror or error}" for address, error in self._failures)
        return OSError(last.errno, "; ".join(reasons))


def connect(addresses: Sequence[Address], deadline: Deadline) -> socket.socket:
    """Return a connected, non-blocking socket without Nagle's delay, to the address that accepts first.

    An address that does not respond could use up the time of the others. So the next one is tried too after a while.

    Raises:
        OSError: no address accepts, or (TimeoutError) none responds before the deadline.
    """
    attempts = _Attempts(addresses)
    try:
        sock = attempts.connected(deadline)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    finally:
        attempts.close()


def has_input(sock: socket.socket) -> bool:
    """Return whether a read of a socket would not block."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def listen(host: str, port: int, deadline: Deadline) -> list[socket.socket]:
    """Return non-blocking listening sockets on the addresses of a host, all on one port.

    Args:
        host: host name or address.
        port: port; 0 lets the system choose.
        deadline: deadline for resolving the name.

    Raises:
        DistNetworkError: the port is in use, or the name has no address.
    """
    try:
        addresses = _addresses_to_listen_on(host, port, deadline)
        return _open_listeners(addresses, port)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def adopt(descriptor: int) -> list[socket.socket]:
    """Take over a listening socket, and return it. The caller closes it.

    Raises:
        ArgumentError: the descriptor is closed, or that of something else, which stays open.
    """
    listener = None
    try:
        if not 0 <= descriptor < 2**31:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        listener = socket.socket(fileno=descriptor)
        if listener.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        if listener is not None:
            listener.detach()
        expected = "the descriptor of a TCP socket that listens"
        hint = f"{error.strerror}. Pass socket.fileno() of an open socket, and leave it open."
        raise ArgumentError(explain("TCPStore", "master_listen_fd", expected, descriptor, hint=hint)) from error
    return [listener]


def _addresses_to_listen_on(host: str, port: int, deadline: Deadline) -> list[Address]:
    found = resolve(host, port, deadline)
    local = [address for address in found if is_local(address)]
    loopback = [] if is_loopback(host) else [where for _, where in local if is_loopback(str(where[0]))]
    at = ", ".join(dict.fromkeys(str(where[0]) for _, where in found))
    if (loopback or not local) and trusts_network():
        logger.warning("store: %r is %s; listening on all interfaces", host, at)
        return [(socket.AF_INET6, ("::", port)), (socket.AF_INET, ("0.0.0.0", port))]
    if not local:
        raise DistNetworkError(
            f"TCPStore: the host name {host!r} is {at}, an address that no interface of this host has, so this store "
            f"cannot listen on the interface that was asked for. For ranks on this host only, use 127.0.0.1; else the "
            f"address or name of an interface ({TRUST_NETWORK}=1 listens on all interfaces)."
        )
    if loopback and len(loopback) == len(local):
        logger.info(
            "store: %r is %s on this host, which only this host reaches. For ranks on other hosts, set MASTER_ADDR to "
            "the address of an interface of this host.",
            host,
            at,
        )
    return local


def _open_listeners(addresses: list[Address], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    for family, where in addresses:
        chosen = port or (listeners[0].getsockname()[1] if listeners else 0)
        try:
            listeners.append(_open_listener(family, (where[0], chosen, *where[2:])))
        except OSError as error:
            # The other family may be disabled, or the port that the system chose may be in use there.
            none_left = not listeners and (family, where) == addresses[-1]
            if none_left or (port and error.errno == errno.EADDRINUSE):
                for listener in listeners:
                    listener.close()
                raise
    return listeners


def _open_listener(family: socket.AddressFamily, where: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> DistNetworkError:
    if isinstance(error, socket.gaierror):
        return DistNetworkError(f"TCPStore: the host name {host!r} did not resolve to an address ({error.strerror}).")
    return DistNetworkError(
        f"TCPStore: cannot listen on {host}:{port}: {error.strerror}. Another program, or an earlier run that is "
        f"still ending, may hold the port: find it with `ss -ltnp 'sport = :{port}'`, or choose another MASTER_PORT."
    )


def trusts_network() -> bool:
    """Return whether the user trusts everybody who can reach the ranks."""
    return os.environ.get(TRUST_NETWORK, "") not in ("", "0")


def refused_users(owners: SocketOwners, listener: socket.socket, peers: Sequence[Peer]) -> list[int | None]:
    """Return, for each connection that a listener accepted, its user if a server must not answer it, else None.

    Of the processes of this host, by whatever address they came, only those of this user and of root are answered; -1
    stands for one that is closed already. Clients of other hosts are unknown to the kernel.
    """
    if trusts_network():
        return [None] * len(peers)
    found = owners.find(listener.family, [(address, sock.getsockname()) for sock, address in peers])
    return [
        None if user == _CLOSED and _is_elsewhere(sock, address[0]) else _refused(user)
        for user, (sock, address) in zip(found, peers, strict=True)
    ]


def refused_server(sock: socket.socket) -> int | None:
    """Return the user that serves a connection if a client must not use it, else None.

    Of the processes of this host, only those of this user and of root are used; -1 stands for a connection that is
    closed already. Servers of other hosts are unknown to the kernel.

    A connection that was not accepted yet has no owner, so the owner of the listening socket counts. The kernel looks
    for that one first: a connection that still waits afterward is in its queue, and would have ended with it.
    """
    peer, own = sock.getpeername(), sock.getsockname()
    if trusts_network():
        return None
    with closing(SocketOwners()) as owners:
        listener, user = owners.find(sock.family, [(peer, None), (peer, own)])
    if user == _UNASKED:
        raise owners.error
    if user == _CLOSED and _is_elsewhere(sock, peer[0]):
        return None
    return _refused(listener if user == _UNACCEPTED else user)


def _is_elsewhere(sock: socket.socket, host: str) -> bool:
    """Return whether the peer, a socket that this host did not know a moment ago, is on another host.

    A peer on this host has been closed meanwhile. So this end is no longer connected, and what it received is not used.
    """
    return not is_loopback(host) and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CONNECTED


def _refused(user: int | None) -> int | None:
    return None if user is None or user == os.geteuid() or user == 0 else user


class SocketOwners:
    """Users that own TCP sockets of this host, as the kernel reports them over one socket, opened at first use.

    sock_diag(7) finds a socket by its two addresses, and one that listens by its own. One process asks at a time.

    Attributes:
        error: why the kernel could not be asked, where `find` returned `_UNASKED`.
    """

    def __init__(self) -> None:
        self.error = OSError()
        self._netlink: socket.socket | None = None

    def find(self, family: socket.AddressFamily, ends: Sequence[Ends]) -> list[int | None]:
        """Return the owner of each socket; `_CLOSED` or `_UNACCEPTED` for one without, None if unknown.

        `_UNASKED` stands for all of them if there was no descriptor or memory to ask the kernel.

        Args:
            family: address family of the sockets.
            ends: address of each socket, and that of its peer; None if it listens.
        """
        if not hasattr(socket, "AF_NETLINK"):
            return [None] * len(ends)
        try:
            if self._netlink is None:
                self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
            self._netlink.send(b"".join([_owner_request(family, own, peer) for own, peer in ends]))
            # The kernel replies within the system call that sends: nothing has to be waited for.
            replies = [self._netlink.recv(_REPLY_BYTES, socket.MSG_DONTWAIT) for _ in ends]
        except OSError as error:
            # If a reply is missing, the kernel had no memory for it.
            self.error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) if error.errno == errno.EAGAIN else error
            # Other replies may be left in it.
            self.close()
            # Without descriptors or memory, no user is trusted: others could use them up.
            return [_UNASKED if error.errno in (*EXHAUSTED, errno.EAGAIN) else None] * len(ends)
        # All have been read: a reply that cannot be parsed leaves none that the next request would get.
        return [_owner_in(reply, peer is None) for reply, (_, peer) in zip(replies, ends, strict=True)]

    def close(self) -> None:
        """Close the socket; the next request opens another."""
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None


def _owner_request(family: socket.AddressFamily, own: tuple[Any, ...], peer: tuple[Any, ...] | None) -> bytes:
    address, port = (_packed(family, peer[0]), socket.htons(peer[1])) if peer else (b"", 0)
    ends = socket.htons(own[1]), port, _packed(family, own[0]), address
    header = _REQUEST.size, _BY_FAMILY, 1, 1, 0
    return _REQUEST.pack(*header, family, socket.IPPROTO_TCP, 0, 0, _ANY, *ends, 0, _ANY, _ANY)


# Thousands of clients come from few hosts.
_packed = lru_cache(1024)(socket.inet_pton)


def _owner_in(reply: bytes, listening: bool) -> int | None:
    kind, code = _REPLY_KIND.unpack_from(reply)
    if kind != _BY_FAMILY:
        # The kernel has no such socket any more, or this kernel has no sock_diag.
        return _CLOSED if code == -errno.ENOENT else None
    state, user, inode = _REPLY.unpack_from(reply)
    if (state == _LISTENING) != listening:
        # Without the connection, the kernel finds a socket that listens at its address.
        return _CLOSED
    # A socket without an owner appears to be root's.
    return int(user) if inode else _UNACCEPTED if state in _OPENED else _CLOSED


class StoreAcceptor:
    """Listening sockets of a server: they accept clients, but none of other users, also without a free descriptor.

    A client that is not accepted would wait until its time-out. So one descriptor is kept in reserve: closed, it lets
    a process without any other accept such a client, and disconnect it.

    Attributes:
        listeners: the sockets by descriptor.
        exhausted: whether the last call of `accept` found a client, but no descriptor or memory for it.
    """

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        self.listeners = {each.fileno(): each for each in listeners}
        self.exhausted = self._had_client = False
        self._owners = SocketOwners()
        self._reserve: int | None = None
        self._refused: set[int] = set()
        self._warned_at = -_WARNING_SECONDS
        self._open_reserve()
        for each in listeners:
            # Connections inherit it.
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def accept(self, descriptor: int) -> list[socket.socket]:
        """Return some of the connections that wait at a listening socket, after the poller has reported it."""
        listener, peers, lack = self.listeners[descriptor], list[Peer](), None
        try:
            while len(peers) < _ACCEPTED_AT_ONCE:
                peers.append(listener.accept())
        except BlockingIOError:
            pass
        except OSError as error:
            # The kernel reports this even if no connection waits any more. Other errors concern only the connection,
            # which is closed already.
            lack = error if error.errno in EXHAUSTED and not peers else None
        # The kernel is asked once for the owners of all of them.
        users = refused_users(self._owners, listener, peers) if peers else []
        for (sock, _), user in zip(peers, users, strict=True):
            if user is None:
                continue
            sock.close()
            if user == _UNASKED:
                lack = self._owners.error
            elif user >= 0 and user not in self._refused and len(self._refused) < _MAX_REPORTED_USERS:
                self._refused.add(user)
                logger.warning("store server: refused a client of user %d; %s=1 would admit it", user, TRUST_NETWORK)
        self.exhausted = lack is not None
        if lack is not None and monotonic() >= self._warned_at + _WARNING_SECONDS:
            self._warned_at = monotonic()
            logger.warning("store server: cannot accept a connection: %s", lack)
        accepted = [sock for (sock, _), user in zip(peers, users, strict=True) if user is None]
        if accepted and not self._had_client:
            self._had_client = True
            logger.info("store server: the first client has connected to port %d", listener.getsockname()[1])
        return accepted

    def turn_away(self, descriptor: int) -> None:
        """Accept a connection by the descriptor in reserve, and close it."""
        if self._reserve is not None:
            os.close(self._reserve)
            with suppress(OSError):
                self.listeners[descriptor].accept()[0].close()
        self._open_reserve()
        if self._reserve is None:
            # Another thread was quicker. The poller reports the client again at once, and again.
            sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Close the sockets and the reserve."""
        for each in self.listeners.values():
            each.close()
        self._owners.close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _open_reserve(self) -> None:
        try:
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._reserve = None
