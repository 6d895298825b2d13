"""Which address of this host other hosts can reach."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from torchdist_ref.errors import DistNetworkError
from torchdist_ref.stores import PrefixStore, Store

_SIOCGIFADDR = 0x8915
_LINK_SCOPE = "20"
VARIABLES = ("TORCHDIST_REF_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def interface_address(store: Store) -> tuple[socket.AddressFamily, str]:
    """The address to listen on.

    That of the interface named in ``TORCHDIST_REF_SOCKET_IFNAME`` (or ``GLOO_SOCKET_IFNAME``; the first of a list that
    this host has), else the one from which this host reaches the store's server, else the loopback.

    Raises:
        DistNetworkError: An interface is named, and this host has none of that name with an address.
    """
    for variable in VARIABLES:
        if names := os.environ.get(variable):
            return _of_interface(variable, names)
    return _towards(_host_of(store))


def _of_interface(variable: str, names: str) -> tuple[socket.AddressFamily, str]:
    for name in (name.strip() for name in names.split(",")):
        found = _inet(name) or _inet6(name)
        if found is not None:
            return found
    have = sorted(name for _, name in socket.if_nameindex())
    raise DistNetworkError(f"{variable}={names}: this host has no such interface with an address; it has {have}.")


def _inet(name: str) -> tuple[socket.AddressFamily, str] | None:
    """The IPv4 address of an interface, which Linux tells about any socket."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.AF_INET, socket.inet_ntoa(answer[20:24])


def _inet6(name: str) -> tuple[socket.AddressFamily, str] | None:
    """The first IPv6 address of an interface that means the same on other hosts: not one of its own link."""
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return None
    found = next((row[0] for row in rows if row[-1] == name and row[3] != _LINK_SCOPE), None)
    return None if found is None else (socket.AF_INET6, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(found)))


def _host_of(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def _towards(host: str | None) -> tuple[socket.AddressFamily, str]:
    """The local address of a route; a datagram socket finds it without sending anything."""
    if host is None:
        return socket.AF_INET, "127.0.0.1"
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        return socket.AddressFamily(family), sock.getsockname()[0]
