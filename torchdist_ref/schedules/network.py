"""Network of a cluster as a few numbers: seconds per message and per byte, and the host of each rank.

One model serves the clock of schedules (`simulate`) and the simulation of whole programs (`torchdist_ref.simulation`).
Links of known speed have names (`LINKS`), and `Network.from_file` reads the numbers that
``python -m torchdist_ref.benchmark fit`` has measured.

Do not add here: clocks, or a number without its source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from torchdist_ref.errors import ArgumentError, explain


class LinkSpeed(NamedTuple):
    """Seconds per message and per byte on a link of known speed.

    Attributes:
        alpha: Seconds per message.
        beta: Seconds per byte in one direction.
        source: Document that the two numbers are from, or how they were measured.
    """

    alpha: float
    beta: float
    source: str


_LATENCY = "latency: NCCL, src/graph/tuning.cc (01afd20), hwLat of a ring, protocol Simple"
_CARD = f"rate of a card of this name (IEEE 802.3; InfiniBand Trade Association, roadmap); {_LATENCY}, NET"
_MEASURED = "measured: benchmark fit, two cores of an AMD EPYC in a virtual machine, Linux 6.18, 2026-11-29"
LINKS = {
    "shared_memory": LinkSpeed(1.2e-5, 8.7e-12, _MEASURED),
    "tcp": LinkSpeed(1.47e-4, 6.5e-10, f"{_MEASURED}, between two network namespaces"),
    "nvlink": LinkSpeed(3.4e-6, 1 / 450e9, f"NVIDIA H100 SXM data sheet: 900 GB/s both ways; {_LATENCY}, NVLINK"),
    "pcie": LinkSpeed(5.7e-6, 1 / 64e9, f"NVIDIA H100 data sheet: PCIe 5.0, 128 GB/s both ways; {_LATENCY}, PCI"),
    "25gbps": LinkSpeed(9.6e-6, 8 / 25e9, _CARD),
    "100gbps": LinkSpeed(9.6e-6, 8 / 100e9, _CARD),
    "400gbps": LinkSpeed(9.6e-6, 8 / 400e9, _CARD),
}
"""Links within a host and between hosts: of ranks on processors, as measured, and of accelerators."""
ACCELERATOR_GAMMA = 3 / 3.35e12
"""Seconds per byte that an accelerator reduces: it reads two bytes and writes one. NVIDIA H100 SXM data sheet: memory
bandwidth of 3.35 TB/s."""
HOST_PROCESSOR: dict[str, Any] = {
    "gamma": 2.3e-11,
    "copy": 7.8e-11,
    "overhead": 2.0e-5,
    "cache": 5.2e6,
    "memory": 9.0e-11,
    "overlap": False,
}
"""Numbers of a rank on a processor, measured with those of shared memory."""
WRITTEN, STAGED, COPIED = 2, 1, 3
"""Accesses of memory for each byte that is not in the cache. A byte from another rank that is written to a tensor: its
line is fetched, and written back. A byte that is copied to a staging buffer: it is fetched, and the buffer stays in the
cache. A byte that is copied from a tensor to another."""


@dataclass(frozen=True)
class Network:
    """Seconds per message, per byte moved and per byte reduced, and the host of each rank.

    Args:
        alpha: seconds per message between hosts (default 30 microseconds, TCP from Python).
        beta: seconds per byte between hosts (default 1.25 GB/s, a 10 Gbit/s card).
        gamma: seconds per byte reduced (default 8 GB/s).
        hosts: the host of each rank, numbered in any way (default: every rank on a host of its own).
        local_alpha: seconds per message within a host (default 0.3 microseconds, a semaphore).
        local_beta: seconds per byte within a host (default 8 GB/s, a copy).
        copy: seconds per byte that a rank copies in its own memory, as to a staging buffer (default 0).
        overhead: further seconds that a rank needs for each call (default 0).
        cache: bytes of a rank's tensors in a call that its cache holds (default: any number).
        memory: seconds per byte that a rank reads from memory or writes to it where a call exceeds the cache (default
            0); see `WRITTEN` for how often that is.
        overlap: whether a rank computes, sends and receives at once, as with a network card that reads and writes its
            memory (default). False for a processor that does one of these at a time; waiting for `alpha` seconds does
            not occupy it.

    Raises:
        ArgumentError: a number is negative or not finite.

    >>> from torchdist_ref.schedules import Network
    >>> Network.preset("nvlink", "400gbps", hosts=(0, 0, 1, 1)).beta == 8 / 400e9
    True
    """

    alpha: float = 30e-6
    beta: float = 1 / 1.25e9
    gamma: float = 1 / 8e9
    hosts: tuple[int, ...] | None = None
    local_alpha: float = 0.3e-6
    local_beta: float = 1 / 8e9
    copy: float = 0.0
    overhead: float = 0.0
    cache: float | None = None
    memory: float = 0.0
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma", "local_alpha", "local_beta", "copy", "overhead", "memory"):
            _check(name, getattr(self, name), 0, "seconds, 0 or more")
        if self.cache is not None:
            _check("cache", self.cache, 0, "bytes, 0 or more, or None")
        hosts = self.hosts
        are_numbers = isinstance(hosts, Sequence) and all(hasattr(host, "__index__") for host in hosts)
        if hosts is not None and not are_numbers:
            raise ArgumentError(explain("Network", "hosts", "the number of the host of each rank, or None", hosts))

    def uncached(self, nbytes: float) -> float:
        """Return the part of a call on so many bytes that memory limits: 0 up to `cache`, 1 from twice that on.

        >>> network = Network(cache=1000)
        >>> network.uncached(1000), network.uncached(1500), network.uncached(4000), Network().uncached(4000)
        (0.0, 0.5, 1.0, 0.0)
        """
        if self.cache is None or nbytes <= self.cache:
            return 0.0
        return min(1.0, (nbytes - self.cache) / max(self.cache, 1.0))

    def per_byte(self, seconds: float, accesses: int, uncached: float) -> float:
        """Return the seconds per byte of a copy or reduction, from those in the cache.

        Args:
            seconds: Seconds per byte in the cache, such as `gamma`.
            accesses: Number of times that memory is read or written for each byte, if it is not in the cache.
            uncached: Part of the call that memory limits (see `uncached`).

        >>> Network(memory=2.0).per_byte(1.0, 3, 0.5)
        3.5
        """
        return seconds + uncached * max(0.0, accesses * self.memory - seconds)

    @classmethod
    def preset(cls, within: str, between: str, hosts: tuple[int, ...] | None = None) -> Network:
        """Return the network of links with known speed.

        Args:
            within: Link within a host: ``"nvlink"`` or ``"pcie"``, or ``"shared_memory"`` for ranks on processors.
            between: Link between hosts: ``"25gbps"``, ``"100gbps"`` or ``"400gbps"``, Ethernet or InfiniBand; or
                ``"tcp"``, between two network namespaces of one machine. `LINKS` has the sources.
            hosts: The host of each rank (default: every rank on a host of its own).

        Raises:
            ArgumentError: No link has such a name.
        """
        for argument, name in (("within", within), ("between", between)):
            if name not in LINKS:
                known = " or ".join(map(repr, LINKS))
                raise ArgumentError(explain("Network.preset", argument, known, name))
        near, far = LINKS[within], LINKS[between]
        numbers = HOST_PROCESSOR if within == "shared_memory" else {"gamma": ACCELERATOR_GAMMA}
        return cls(far.alpha, far.beta, hosts=hosts, local_alpha=near.alpha, local_beta=near.beta, **numbers)

    @classmethod
    def from_file(cls, path: str | Path, hosts: tuple[int, ...] | None = None) -> Network:
        """Return the network that ``python -m torchdist_ref.benchmark fit --json PATH`` has measured.

        Args:
            path: The file.
            hosts: The host of each rank (default: every rank on a host of its own).

        Raises:
            ArgumentError: The file has no such numbers.
        """
        try:
            numbers = json.loads(Path(path).read_text(encoding="utf-8"))["network"]
            unknown = set(numbers) - {field.name for field in fields(cls)}
            if unknown:
                raise ValueError(f"unknown {', '.join(sorted(unknown))}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            expected = "a file that benchmark fit --json has written"
            raise ArgumentError(explain("Network.from_file", "path", expected, str(path), hint=f"{error}.")) from error
        return cls(**{**numbers, "hosts": hosts})


def _check(name: str, value: Any, least: float, expected: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not number or value < least:
        raise ArgumentError(explain("Network", name, expected, value))
