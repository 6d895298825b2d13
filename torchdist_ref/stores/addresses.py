"""Addresses: the host and the port in a text such as MASTER_ADDR or ``--rdzv-endpoint``, and what a host name means.

Every address of a store or of a rendezvous is read here, so all of them accept the same forms. A host is a name, an
IPv4 address, or an IPv6 address with or without the brackets of URLs, and may have a scope (``fe80::1%eth0``). Blanks
around it are ignored. Each `parse_*` raises a ValueError whose text says what is wrong; the caller names the argument.
Do not connect or listen here: that belongs to `sockets`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from torchdist_ref.timeouts import CHECK_SECONDS, Deadline

Address = tuple[socket.AddressFamily, tuple[Any, ...]]
MAX_PORT = 2**16 - 1
_DISCARD_PORT = 9
_NAME = re.compile(r"[\w.-]+")


def parse_host(text: str) -> str:
    """Return the host in a text, without blanks and brackets.

    Raises:
        ValueError: The text is neither a name nor an address.

    >>> parse_host(" node0 "), parse_host("[::1]"), parse_host("[fe80::1%25eth0]"), parse_host("::ffff:10.0.0.5")
    ('node0', '::1', 'fe80::1%eth0', '10.0.0.5')
    """
    host = text.strip()
    if host[:1] == "[" and host[-1:] == "]":
        # A URL has %25 in place of the percent sign (RFC 6874).
        address, _, scope = host[1:-1].strip().partition("%25")
        host = f"{address}%{scope}" if scope else host[1:-1].strip()
    if ":" not in host:
        if not _NAME.fullmatch(host):
            raise ValueError(_problem(host))
        return host
    parsed = _ipv6(host)
    if parsed is None:
        raise ValueError(_problem(host))
    if parsed.is_link_local and not parsed.scope_id:
        raise ValueError(f"a link-local address needs the name of this host's interface, as in {host}%eth0")
    # A socket for IPv6 alone cannot be bound to one.
    return str(parsed.ipv4_mapped or host)


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Return the host and the port in a text.

    Args:
        text: ``HOST:PORT`` or ``HOST``. An IPv6 address needs brackets if a port follows that could be a part of it.
        default_port: Port of a text without one.

    Raises:
        ValueError: The host is neither a name nor an address, or the port is not a port number.

    >>> parse_endpoint("node0:29400", 1), parse_endpoint("[fd77::1]:400", 1), parse_endpoint("::1", 1)
    (('node0', 29400), ('fd77::1', 400), ('::1', 1))
    """
    host, colon, port = text.strip().rpartition(":")
    is_address_alone = ":" in host and host[:1] != "[" and _ipv6(host) is None
    if not colon or port.endswith("]") or is_address_alone:
        return parse_host(text), default_port
    return parse_host(host), parse_port(port)


def parse_port(text: str) -> int:
    """Return the port in a text, which may have blanks around it and zeros in front.

    Raises:
        ValueError: The text is not a port number.

    >>> parse_port(" 029500 ")
    29500
    """
    digits = text.strip()
    if not digits.isdecimal() or int(digits) > MAX_PORT:
        raise ValueError(f"the port must be a number from 0 to {MAX_PORT}, got {text!r}")
    return int(digits)


def is_link_local(address: str) -> bool:
    """Return whether an address is one that only the hosts of one network use, so that it needs a scope.

    >>> is_link_local("fe80::1"), is_link_local("10.0.0.5")
    (True, False)
    """
    found = _ipv6(address)
    return found is not None and found.is_link_local


def _ipv6(text: str) -> ipaddress.IPv6Address | None:
    try:
        return ipaddress.IPv6Address(text)
    except ValueError:
        return None


def _problem(host: str) -> str:
    if not host:
        return "it is empty"
    if "://" in host:
        return "leave out the scheme in front of the host"
    name, _, port = host.rpartition(":")
    if port.isdecimal() and ":" not in name:
        return "leave out the port behind the host"
    return "it is neither a host name nor an IPv4 or IPv6 address"


# What a host means


@lru_cache
def is_loopback(host: str) -> bool:
    """Return whether the text itself means loopback, without resolving it."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
    # A socket of both families sees IPv4 addresses as parts of IPv6 ones.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def only_this_host(addresses: Sequence[str]) -> str:
    """Return the end of an error for absent ranks: that only this host reaches a store at these addresses.

    It is empty if other hosts reach it, or if there are no addresses.

    >>> only_this_host(["10.0.0.5"])
    ''
    """
    if not addresses or not all(map(is_loopback, addresses)):
        return ""
    return (
        f" The store listens on {', '.join(addresses)}, which only this host reaches: ranks on other hosts need "
        "another MASTER_ADDR."
    )


def is_local(address: Address) -> bool:
    """Return whether an interface of this host has an address."""
    family, where = address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((where[0], 0, *where[2:]))
    except OSError:
        return False
    return True


def loopback_address() -> str:
    """Return the loopback address of this host: that of IPv4 if it has one."""
    return "127.0.0.1" if is_local((socket.AF_INET, ("127.0.0.1", 0))) else "::1"


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
    if is_loopback(host) or ":" in host or host.replace(".", "").isdigit():
        return look_up(host, port)
    # The resolver cannot be interrupted, so it runs on another thread, which is abandoned if it takes too long.
    results: list[list[Address] | OSError] = []
    done = threading.Event()
    threading.Thread(target=_look_up_into, args=(results, done, host, port), daemon=True).start()
    # A name of the hosts file takes a millisecond, which an attempt at the very end of the time-out has too.
    while not done.wait(max(deadline.sleep_seconds(), CHECK_SECONDS)):
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


def local_ends(host: str) -> Iterator[tuple[socket.AddressFamily, str]]:
    """Return the addresses of this host from which it reaches those of another one, which need not respond.

    Addresses to which there is no route are left out, and so are all of a name that does not resolve.
    """
    with suppress(OSError):
        for family, where in look_up(host, _DISCARD_PORT):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
                # This sends nothing: the kernel only looks up the route.
                sock.connect(where)
                yield family, host_text(family, sock.getsockname())


def host_text(family: int, where: tuple[Any, ...]) -> str:
    """Return the host of a socket's address as text; that of a link-local IPv6 address ends with its interface."""
    host = str(where[0]).partition("%")[0]
    scope = where[3] if family == socket.AF_INET6 else 0
    return f"{host}%{socket.if_indextoname(scope)}" if scope else host
