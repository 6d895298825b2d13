"""Ports for servers that a test starts later, in other processes: taken by nothing else in between."""

from __future__ import annotations

import random
import socket
from pathlib import Path

PORTS = frozenset(range(10_000, 65_000)) - frozenset(range(20_000, 30_000))
"""Not the ports that launchers use when none is given, nor those that ranks derive from the number of a job."""


def given_by_kernel() -> range:
    """Return the ports that the kernel gives to clients, and to servers that ask for port 0."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    return range(int(first), int(last) + 1)


def reserve_port() -> int:
    """Return a free port that no other test gets before this process ends, and that the kernel gives to nobody.

    A port found by binding to port 0 is the kernel's again as soon as the probe is closed: while a program starts, a
    client of another test may get it.
    """
    candidates = sorted(PORTS.difference(given_by_kernel())) or sorted(PORTS)
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        name = socket.socket(socket.AF_UNIX)
        try:
            # A name in the abstract namespace, which all tests of this network see, and which ends with the process.
            name.bind(f"\0torchdist_ref port {port}")
            with socket.create_server(("127.0.0.1", port)):
                pass
        except OSError:
            name.close()
            continue
        name.detach()
        return port
    raise AssertionError("no port is free")
