"""Sockets: resolving names, listening, connecting before a deadline, and polling many descriptors.

A store listens on the addresses that it is asked for, while torch listens on every interface. A host name that the
hosts file maps to loopback, or an address that no interface has, would need another interface than the one asked for:
that is an error, unless the user trusts the network. On loopback, the kernel knows the users at both ends.

A server polls with the kernel's `epoll` if there is one, else with `selectors`. `selectors` looks up and wraps each
event in Python, which costs a server of small requests a tenth of its time. Do not add a protocol here.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import select
import selectors
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any, Protocol

from torchdist_ref.errors import ArgumentError, DistNetworkError, explain
from torchdist_ref.timeouts import Deadline

logger = logging.getLogger("torchdist_ref.stores")
Address = tuple[socket.AddressFamily, tuple[Any, ...]]
Peer = tuple[socket.socket, tuple[Any, ...]]
Ends = tuple[tuple[Any, ...], tuple[Any, ...] | None]
BACKLOG = 4096
TRUST_NETWORK = "TORCHDIST_REF_TRUST_NETWORK"
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a process or host without descriptors or memory."""

# Constants of linux/netlink.h, sock_diag.h and inet_diag.h: a request with its two headers; kind and error code of a
# reply; `idiag_state`, `idiag_uid` and `idiag_inode`.
_SOCK_DIAG, _BY_FAMILY, _ANY, _REPLY_BYTES = 4, 20, 0xFFFFFFFF, 4096
_REQUEST, _REPLY_KIND, _REPLY = map(struct.Struct, ("=IHHIIBBBBIHH16s16sIII", "=4xH10xi", "=17xB62xII"))
# States: TCP_ESTABLISHED; those of connections that may wait to be accepted (also TCP_SYN_RECV); that of listeners.
_CONNECTED, _OPENED, _LISTENING = 1, (1, 3), 10
_CLOSED, _UNACCEPTED, _UNASKED = -1, -2, -3


@lru_cache
def is_loopback(host: str) -> bool:
    """Return whether the text itself means loopback, without resolving it."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
    # A socket of both families sees IPv4 addresses as parts of IPv6 ones.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def look_up(host: str, port: int) -> list[Address]:
    """Return the addresses of a name. The system's resolver may block for any time."""
    # As bytes where possible: for text, Python imports its codec for international names first.
    found = socket.getaddrinfo(host.encode() if host.isascii() else host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def resolve(host: str, port: int, deadline: Deadline) -> list[Address]:
    """Return the addresses of a name before the deadline.

    Raises:
        socket.gaierror: the name has no address, or the resolver did not respond in time.
    """
    if is_loopback(host) or host.replace(".", "").isdigit():
        return look_up(host, port)
    # The resolver cannot be interrupted, so it runs on another thread, which is abandoned if it takes too long.
    results: list[list[Address] | OSError] = []
    done = threading.Event()
    threading.Thread(target=_look_up_into, args=(results, done, host, port), daemon=True).start()
    while not done.wait(deadline.sleep_seconds()):
        if deadline.passed():
            raise socket.gaierror(socket.EAI_AGAIN, "the resolver did not respond in time")
    if isinstance(results[0], OSError):
        raise results[0]
    return results[0]


def _look_up_into(results: list[list[Address] | OSError], done: threading.Event, host: str, port: int) -> None:
    try:
        results.append(look_up(host, port))
    except OSError as error:
        results.append(error)
    except UnicodeError as error:
        results.append(socket.gaierror(socket.EAI_NONAME, f"no name: {error}"))
    done.set()


def connect(address: Address, deadline: Deadline) -> socket.socket:
    """Return a connected, non-blocking socket without Nagle's delay.

    Raises:
        OSError: the address is unreachable or refuses, or (TimeoutError) does not respond before the deadline.
    """
    family, where = address
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        _finish_connecting(connection, connection.connect_ex(where), deadline)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.getsockname() == connection.getpeername():
            # If no process listens, Linux may choose the same port for both ends: the socket connects to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "no process listens there")
    except BaseException:
        connection.close()
        raise
    return connection


def _finish_connecting(connection: socket.socket, code: int, deadline: Deadline) -> None:
    if code == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        while not poll.poll(deadline.sleep_seconds() * 1000):
            if deadline.passed():
                raise TimeoutError(errno.ETIMEDOUT, "no response to the attempt to connect")
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, f"{errno.errorcode.get(code, code)}: {os.strerror(code)}")


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
    outside = not is_loopback(host) and any(is_loopback(str(where[0])) for _, where in found)
    if outside or not any(_is_local(address) for address in found):
        at = ", ".join(dict.fromkeys(str(where[0]) for _, where in found))
        if not trusts_network():
            reason = "only this host reaches" if outside else "no interface of this host has"
            raise DistNetworkError(
                f"TCPStore: the host name {host!r} is {at}, an address that {reason}, so this store cannot listen on "
                f"the interface that was asked for. For ranks on this host only, use 127.0.0.1; else the address or "
                f"name of an interface ({TRUST_NETWORK}=1 listens on all interfaces)."
            )
        logger.warning("store: %r is %s; listening on all interfaces", host, at)
        return [(socket.AF_INET6, ("::", port)), (socket.AF_INET, ("0.0.0.0", port))]
    return [address for address in found if _is_local(address)]


def _is_local(address: Address) -> bool:
    family, where = address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((where[0], 0, *where[2:]))
    except OSError:
        return False
    return True


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

    A connection that was not accepted yet has no owner, so that of the listening socket counts. The kernel looks for
    that one first: a connection that still waits afterward waits in its queue, and would have ended with it.
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

    One of this host was closed then, and so this end is no longer connected: what it sent before is not believed.
    """
    return not is_loopback(host) and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CONNECTED


def _refused(user: int | None) -> int | None:
    return None if user is None or user == os.geteuid() or user == 0 else user


class SocketOwners:
    """Users that own TCP sockets of this host, as the kernel says; it is asked over one socket, opened at first use.

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
            # A reply that has not come had no memory.
            self.error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) if error.errno == errno.EAGAIN else error
            # Other replies may be left in it.
            self.close()
            # Without descriptors or memory, nobody is believed: others could use them up.
            return [_UNASKED if error.errno in (*EXHAUSTED, errno.EAGAIN) else None] * len(ends)
        # All have been read: a reply that cannot be parsed leaves none that the next question would get.
        return [_owner_in(reply, peer is None) for reply, (_, peer) in zip(replies, ends, strict=True)]

    def close(self) -> None:
        """Close the socket; the next question opens another."""
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


READ, WRITE = 1, 4
"""Events of `epoll`: readable, writable. Other bits mean an error."""


class DescriptorPoller(Protocol):
    """Methods of `select.epoll` that a server needs."""

    def register(self, fd: int, eventmask: int, /) -> None:
        """Watch a descriptor for these events."""

    def modify(self, fd: int, eventmask: int, /) -> None:
        """Change the events of a descriptor."""

    def unregister(self, fd: int, /) -> None:
        """Stop watching a descriptor."""

    def poll(self, timeout: float | None, maxevents: int = -1, /) -> list[tuple[int, int]]:
        """Wait up to `timeout` seconds, forever if None; return so many descriptors at most, with their events."""

    def close(self) -> None:
        """Close the poller; the descriptors stay open."""


class SelectorPoller:
    """`DescriptorPoller` for kernels without `epoll`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def register(self, fd: int, eventmask: int) -> None:
        self._selector.register(fd, _as_events(eventmask))

    def modify(self, fd: int, eventmask: int) -> None:
        self._selector.modify(fd, _as_events(eventmask))

    def unregister(self, fd: int) -> None:
        self._selector.unregister(fd)

    def poll(self, timeout: float | None, maxevents: int = -1) -> list[tuple[int, int]]:
        return [(key.fd, _as_mask(events)) for key, events in self._selector.select(timeout)]

    def close(self) -> None:
        self._selector.close()


def poller() -> DescriptorPoller:
    """Return the fastest poller of this machine."""
    return select.epoll() if hasattr(select, "epoll") else SelectorPoller()


def _as_events(mask: int) -> int:
    return (selectors.EVENT_READ if mask & READ else 0) | (selectors.EVENT_WRITE if mask & WRITE else 0)


def _as_mask(events: int) -> int:
    return (READ if events & selectors.EVENT_READ else 0) | (WRITE if events & selectors.EVENT_WRITE else 0)
