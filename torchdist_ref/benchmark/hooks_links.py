"""The links of the hook laboratory: this machine's own, a slow one between two network namespaces, or a modelled one.

``fast`` is whatever a backend does on one host: shared memory for ``ref``, the loopback for ``gloo``. A rate such as
``100mbit`` puts the first half of the ranks on one host of `torchdist_ref.testing.namespaces` and the rest on another,
with a cable of that rate between them. Where such hosts can't be had the rate is put into a formula instead, and
everything that comes of it is marked as modelled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchdist_ref.errors import ArgumentError, UnsupportedError, explain
from torchdist_ref.testing import namespaces

FAST = "fast"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")


@dataclass(frozen=True)
class Link:
    """What lies between the ranks.

    Attributes:
        name: As in ``--links``.
        bits_per_second: The rate, or None for as fast as this machine can.
    """

    name: str
    bits_per_second: float | None = None

    def seconds(self, nbytes: float) -> float:
        """How long so many bytes are under way at least.

        >>> parse("100mbit").seconds(1_250_000), parse("fast").seconds(1_250_000)
        (0.1, 0.0)
        """
        return 0.0 if self.bits_per_second is None else nbytes * 8 / self.bits_per_second


def parse(text: str) -> Link:
    """A link from its name.

    >>> parse("1gbit")
    Link(name='1gbit', bits_per_second=1000000000.0)
    """
    if text == FAST:
        return Link(FAST)
    found = _RATE.fullmatch(text.lower())
    if found is None or not float(found[1]):
        expected = f"{FAST!r}, or rates such as 100mbit or 1gbit, with commas between"
        raise ArgumentError(explain("benchmark hooks", "--links", expected, text))
    return Link(text.lower(), float(found[1]) * _UNITS[found[2]])


@contextmanager
def laid(link: Link) -> Iterator[Sequence[namespaces.Host]]:
    """Make the hosts of a link: none for the fast one, two for a rate."""
    if link.bits_per_second is None:
        yield ()
        return
    with namespaces.hosts(2, link.bits_per_second) as hosts:
        yield hosts


def obstacle(link: Link) -> str:
    """Why a link can't be laid on this machine; empty where it can.

    >>> obstacle(parse("fast"))
    ''
    """
    if link.bits_per_second is None:
        return ""
    if why := namespaces.missing():
        return why
    try:
        with laid(link):
            return ""
    except UnsupportedError as error:
        return str(error)


def settle(hosts: Sequence[namespaces.Host], rank: int, world: int) -> namespaces.Host | None:
    """Move this rank's process to its host, if there are any: the first half of the ranks to the first."""
    if not hosts:
        return None
    host = hosts[rank * len(hosts) // world]
    host.enter()
    # `ref` reads this one too.
    os.environ["GLOO_SOCKET_IFNAME"] = host.interface
    return host


def on_the_wire(host: namespaces.Host) -> int:
    """Bytes that left a host by its cable since it was made, headers and acknowledgements included."""
    return sent_by(Path("/proc/thread-self/net/dev").read_text(), host.interface)


def sent_by(table: str, interface: str) -> int:
    """The bytes sent, from the text of /proc/net/dev.

    >>> sent_by("Inter-| Receive\\n lo: 1 2 0 0 0 0 0 0 3 4\\ncable: 10 1 0 0 0 0 0 0 20 2 0", "cable")
    20
    """
    line = next(line for line in table.splitlines() if line.strip().startswith(f"{interface}:"))
    return int(line.partition(":")[2].split()[8])
