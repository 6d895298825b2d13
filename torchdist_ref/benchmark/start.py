"""``benchmark start``: from nothing to a group of all ranks, and the whole cycle of making and destroying it.

Ranks have torch loaded already. Every backend meets through a store of its own library at a TCP address, as under a
launcher; a time is from the moment when the last rank began to the moment when the last rank completed.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from time import perf_counter

import torch.distributed as torch_distributed

from torchdist_ref.benchmark.harness import AddOption, Harness, Settings, at_least, many
from torchdist_ref.benchmark.report import cell, ratio, table, time
from torchdist_ref.benchmark.rounds import RankContext, Result, durations, library, take_turns

HOST = "127.0.0.1"
# Parts of the cycle that a turn times.
PARTS = ("init", "init and destroy")


def add_options(add: AddOption) -> None:
    """Add the options of the command."""
    add("--backends", default="ref,gloo,torch:gloo", type=many(str), help="backends")
    add("--worlds", default="2,4", type=many(at_least(1)), help="numbers of ranks")
    add("--repetitions", default=9, type=at_least(1), help="rounds")


def measure(context: RankContext, settings: Settings) -> None:
    """Measure all backends on one rank. Reports a result for each part of the cycle."""
    turns = {name: partial(_cycle, context, name) for name in settings.backends}
    samples, disturbed = take_turns(context, turns, settings.repetitions)
    for number, part in enumerate(PARTS):
        found = {name: each[number :: len(PARTS)] for name, each in samples.items()}
        context.report(Result({"operation": part, "world": context.world}, found, disturbed))


def _cycle(context: RankContext, name: str) -> list[float]:
    """Return the seconds of making the default group, and those of making and destroying it."""
    method = f"tcp://{HOST}:{context.exchange(free_port())[0]}"
    api, backend = (torch_distributed, name.partition(":")[2]) if ":" in name else (library, name)
    context.wait()
    begin = perf_counter()
    api.init_process_group(backend, init_method=method, rank=context.rank, world_size=context.world)
    made = perf_counter()
    # The rank that serves the store must not leave while others are still joining.
    context.wait()
    api.destroy_process_group()
    return durations(context.exchange([(begin, made), (begin, perf_counter())]))


def free_port() -> int:
    """Return a port that was free just now, and that the kernel gives to nobody before it is served."""
    candidates = []
    with suppress(OSError):  # other systems than Linux
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
        candidates = [port for port in range(10_000, 65_000) if not first <= port <= last]
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        with suppress(OSError), closing(socket.create_server((HOST, port))):
            return port
    with closing(socket.create_server((HOST, 0))) as probe:
        return int(probe.getsockname()[1])


def run(harness: Harness) -> None:
    """Measure for each number of ranks."""
    settings = harness.settings
    settings.backends = harness.choose_backends()
    for world in settings.worlds:
        harness.head(f"{world} ranks")
        harness.run(partial(measure, settings=settings), world)


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table: milliseconds, and how many times faster than the last backend."""
    *others, against = names = harness.settings.backends
    columns = [cell("operation"), cell("world", "ranks"), *(time(name, "ms") for name in names)]
    return table(columns + [ratio(f"{name} x {against}", against, name) for name in others], results)
