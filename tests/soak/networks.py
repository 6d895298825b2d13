"""`ref` over networks in small: hosts with links of a chosen rate, links that drop and return, and hosts that freeze.

Each run makes two or four network namespaces with one rank each. Sums are compared with a formula, and the time of an
all_reduce with what the slowest link needs for its bytes. A link that drops for three seconds must not be noticed but
by the time. A host that freezes must raise the same error on all others, after the group's time-out.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

import torchdist_ref as dist
from tests.soak.proofs import Limits, Outcome
from torchdist_ref.testing import fill, namespaces, run
from torchdist_ref.testing.namespaces import Host

PORT = 29_500
DROP_SECONDS = 3.0
FREEZE_TIMEOUT = timedelta(seconds=1.5)
# Time from the time-out to the error on the last survivor; other work may run beside.
RAISE_SECONDS = 5.0
# A tenth of a second on a link of each rate, about.
SIZES = {1e8: 1 << 18, 1e9: 1 << 21, 1e10: 1 << 22}


class Cell(NamedTuple):
    """Network and event of one run."""

    event: str
    hosts: int
    family: str
    rate: float

    @property
    def name(self) -> str:
        """Name in the record, which has one row for all numbers of hosts and both families."""
        rate = f"{self.rate / 1e9:g} Gbit/s" if self.rate >= 1e9 else f"{self.rate / 1e6:g} Mbit/s"
        return f"{self.event}, {rate}"


NAMES = ("drop", "drop of the store's host", "freeze", "freeze of the store's host")
CELLS = [
    *(Cell("sums", hosts, family, rate) for rate in SIZES for hosts in (2, 4) for family in ("ipv4", "ipv6")),
    *(Cell(event, hosts, family, 1e9) for event in NAMES for hosts in (2, 4) for family in ("ipv4", "ipv6")),
]


def victim(cell: Cell) -> int:
    """Return the rank whose link drops, or that freezes: the last one, or that of the store."""
    return 0 if "store" in cell.event else cell.hosts - 1


class Shared:
    """Memory that all ranks of a run share."""

    def __init__(self) -> None:
        self.frozen_pid = multiprocessing.Value("i", 0)
        self.raised = multiprocessing.Value("i", 0)
        self.since = multiprocessing.Value("d", 0.0)


def operand(rank: int, size: int, step: int) -> torch.Tensor:
    """Return integers in float32 whose sum over the ranks is exact."""
    return fill(rank + 7 * step, (size,)) if size < 1 << 16 else fill(rank + 7 * step, (1 << 16,)).repeat(size >> 16)


def add_up(rank: int, world: int, size: int, step: int) -> bool:
    """Sum over all ranks, and return whether the result is that of the formula."""
    tensor = operand(rank, size, step)
    dist.all_reduce(tensor)
    expected = sum((operand(other, size, step) for other in range(1, world)), operand(0, size, step))
    return torch.equal(tensor, expected)


def program(rank: int, hosts: Sequence[Host], cell: Cell, size: int, shared: Shared) -> tuple[bool, float, str]:
    """Return whether all values were right, a time in seconds, and the error."""
    hosts[rank].enter()
    # Nothing but the ranks reaches these networks.
    os.environ["TORCHDIST_REF_TRUST_NETWORK"] = "1"
    address = getattr(hosts[0], cell.family)
    url = f"tcp://[{address}]:{PORT}" if cell.family == "ipv6" else f"tcp://{address}:{PORT}"
    limit = FREEZE_TIMEOUT if "freeze" in cell.event else timedelta(seconds=60)
    dist.init_process_group("ref", init_method=url, rank=rank, world_size=cell.hosts, timeout=limit)
    try:
        return EVENTS[cell.event.split()[0]](rank, hosts, cell, size, shared)
    finally:
        dist.destroy_process_group()


def sums(rank: int, hosts: Sequence[Host], cell: Cell, size: int, shared: Shared) -> tuple[bool, float, str]:
    """Sum, and return the shortest time of three."""
    good, times = add_up(rank, cell.hosts, size, 0), []
    for step in range(1, 4):
        tensor = operand(rank, size, step)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - began)
        good &= add_up(rank, cell.hosts, size, step)
    return good, min(times), ""


def set_link(host: Host, state: str) -> None:
    subprocess.run(["ip", "link", "set", host.interface, state], check=True)


def drop(rank: int, hosts: Sequence[Host], cell: Cell, size: int, shared: Shared) -> tuple[bool, float, str]:
    """Sum while the link of one host is down for three seconds, and ten times after it has returned."""
    # Addresses survive a cable that is pulled; `ip link set down` would remove those of IPv6.
    with open(f"/proc/sys/net/ipv6/conf/{hosts[rank].interface}/keep_addr_on_down", "w") as setting:
        setting.write("1")
    good, step, after, longest = add_up(rank, cell.hosts, 1000, 0), 0, 0, 0.0
    back = threading.Event()

    def pull() -> None:
        set_link(hosts[rank], "down")
        time.sleep(DROP_SECONDS)
        set_link(hosts[rank], "up")
        back.set()

    if rank == victim(cell):
        threading.Thread(target=pull).start()
    while after < 10:
        step += 1
        began = time.perf_counter()
        good &= add_up(rank, cell.hosts, 1000, step)
        votes = torch.tensor([float(back.is_set())])
        dist.all_reduce(votes)
        after += int(votes.item())
        longest = max(longest, time.perf_counter() - began)
    return good, longest, ""


def freeze(rank: int, hosts: Sequence[Host], cell: Cell, size: int, shared: Shared) -> tuple[bool, float, str]:
    """Sum while one host freezes; it goes on when all others have raised."""
    good, step = True, 0
    try:
        while True:
            step += 1
            if rank == victim(cell) and step == 5:
                shared.frozen_pid.value, shared.since.value = os.getpid(), time.monotonic()
                os.kill(os.getpid(), signal.SIGSTOP)
            good &= add_up(rank, cell.hosts, 1000, step)
    except dist.DistError as error:
        seconds = time.monotonic() - shared.since.value
        text = f"{type(error).__name__}: {error}"
    if rank != victim(cell):
        with shared.raised.get_lock():
            shared.raised.value += 1
        if shared.raised.value == cell.hosts - 1:
            os.kill(shared.frozen_pid.value, signal.SIGCONT)
    return good, seconds, text


EVENTS = {"sums": sums, "drop": drop, "freeze": freeze}


def faults(cell: Cell, found: Sequence[tuple[bool, float, str]]) -> list[str]:
    """Return what is wrong about the results of a run."""
    wrong = [f"rank {rank} had other values" for rank, (good, _, _) in enumerate(found) if not good]
    if "freeze" in cell.event:
        for rank, (_, seconds, text) in enumerate(found):
            if rank == victim(cell):
                continue
            if f"rank {victim(cell)}" not in text:
                wrong.append(f"rank {rank} does not name the frozen one: {text}")
            if seconds > FREEZE_TIMEOUT.total_seconds() + RAISE_SECONDS:
                wrong.append(f"rank {rank} raised after {seconds:.1f} s")
    return wrong


def bytes_on_the_slowest_link(cell: Cell, size: int) -> float:
    """Return the bytes that a host has to send at least: those of all blocks but its own, twice."""
    return 2 * (cell.hosts - 1) / cell.hosts * size * 4


def one(cell: Cell, sizes: dict[float, int] = SIZES) -> tuple[Sequence[tuple[bool, float, str]], float]:
    """Run a cell; return the ranks' results, and for sums the time as a multiple of what the link needs."""
    size, shared = sizes[cell.rate], Shared()
    with namespaces.hosts(cell.hosts, cell.rate) as hosts:
        found: Any = run(program, cell.hosts, hosts, cell, size, shared, ranks="processes", init=False, timeout=120.0)
    seconds = max(seconds for _, seconds, _ in found)
    return found, seconds / (bytes_on_the_slowest_link(cell, size) * 8 / cell.rate)


def prove(limits: Limits, cells: Sequence[Cell] = CELLS, sizes: dict[float, int] = SIZES) -> Outcome:
    """Run the cells one after another, again and again."""
    outcome = Outcome()
    for seed, _ in limits.seeds():
        cell = cells[seed % len(cells)]
        outcome.done += 1
        outcome.counts[cell.name] += 1
        try:
            found, ratio = one(cell, sizes)
            wrong = faults(cell, found)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        for text in wrong:
            outcome.fail(f"seed {seed} ({cell}): {text}")
        if not wrong:
            name, value = f"{cell.name}: longest percent of the link's time", ratio * 100
            if cell.event != "sums":
                name, value = f"{cell.name}: longest milliseconds", max(seconds for _, seconds, _ in found) * 1e3
            outcome.counts[name] = max(outcome.counts[name], round(value))
    return outcome
