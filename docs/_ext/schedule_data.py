"""Schedules as JSON for the player and the cost explorer: the algorithms of an operation on 2 to 16 ranks, and choices.

A round is one list of integers, eight for each run of moves: source, destination, buffer and slot that are read,
buffer and slot that are written, length, and 1 for a reduction. `unpack` is the inverse, which the tests use.

The explorer also has schedules of 32 and 64 ranks. To keep their files small, they have only what a clock reads: all
slots that one rank sends to another in a round are one run, with no slot's number.

Do not add here: HTML (`player`) or text of the pages (`collective_pages`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby, pairwise
from typing import Any

from torchdist_ref import schedules
from torchdist_ref.schedules import Move, Schedule, Slot
from torchdist_ref.schedules.schedule import BUFFERS, messages

WORLDS = range(2, 17)
LARGE_WORLDS = (32, 64)
"""Numbers of ranks that only the explorer has."""
# Bytes of the whole buffer that a reader of the page can select.
SIZES = tuple(1 << power for power in (2, 10, 16, 18, 20, 22, 24, 27))
# Power of two beyond which no choice changes.
LARGEST = 40
NETWORKS = ("one host", "two hosts", "one host per rank")
FULL_HOSTS = "8 ranks per host"
"""Hosts of `LARGE_WORLDS` alone: with up to 16 ranks they would be those of `NETWORKS`."""
WIDTH = 8


def hosts(network: str, world: int) -> tuple[int, ...]:
    """Return the host of each rank; on two hosts the first half of the ranks is on the first."""
    if network == FULL_HOSTS:
        return tuple(rank // 8 for rank in range(world))
    if network == "two hosts":
        return tuple(int(rank >= (world + 1) // 2) for rank in range(world))
    return tuple(range(world)) if network == "one host per rank" else (0,) * world


def schedule(operation: str, algorithm: str, world: int, network: str = "two hosts") -> Schedule:
    """Return a schedule; only a hierarchical one depends on the network, and on one host it is the direct one."""
    where = hosts(network, world) if algorithm == "hierarchical" else None
    return schedules.build(operation, algorithm, world, hosts=where)


@cache
def of_operation(operation: str) -> dict[str, Any]:
    """Return everything that the player can show of an operation."""
    worlds = {world: of_world(operation, world) for world in WORLDS}
    names = list(schedules.algorithms(operation))
    return {"operation": operation, "algorithms": names, "sizes": list(SIZES), "worlds": worlds}


def of_world(operation: str, world: int) -> dict[str, Any]:
    """Return the schedules of all algorithms for a number of ranks, and for each network hosts and choices."""
    found = {name: of_schedule(operation, schedule(operation, name, world)) for name in schedules.algorithms(operation)}
    where = {network: hosts(network, world) for network in NETWORKS}
    chosen = {network: list(choices(operation, world, where[network])) for network in NETWORKS}
    return {"schedules": found, "chosen": chosen, "hosts": where}


@cache
def of_large_worlds(operation: str) -> dict[str, Any]:
    """Return everything that the explorer reads of an operation on `LARGE_WORLDS`."""
    names = list(schedules.algorithms(operation))
    return {"algorithms": names, "worlds": {world: _of_large_world(operation, names, world) for world in LARGE_WORLDS}}


def _of_large_world(operation: str, names: list[str], world: int) -> dict[str, Any]:
    where = {network: hosts(network, world) for network in (*NETWORKS, FULL_HOSTS)}
    by_hosts = {}
    if "hierarchical" in names:
        for network in ("two hosts", FULL_HOSTS):
            by_hosts[network] = {"hierarchical": for_a_clock(schedule(operation, "hierarchical", world, network))}
    return {
        "schedules": {name: for_a_clock(schedule(operation, name, world)) for name in names if name != "hierarchical"},
        "by_hosts": by_hosts,
        "chosen": {network: list(choices(operation, world, found)) for network, found in where.items()},
        "hosts": where,
    }


def for_a_clock(found: Schedule) -> dict[str, Any]:
    """Return a schedule with one run of moves for all that a rank sends to another in a round, and one if it reduces.

    >>> for_a_clock(schedule("all_reduce", "ring", 2))["rounds"][0]
    [1, 0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1]
    """
    rounds = []
    for moves in found.rounds:
        row = []
        for message in messages(moves):
            for length, reduced in ((message.slots - message.reduced, 0), (message.reduced, 1)):
                row += [message.src, message.dst, 0, 0, 0, 0, length, reduced] if length else []
        rounds.append(row)
    return {"rounds": rounds, "share": float(found.share)}


def choices(operation: str, world: int, where: tuple[int, ...]) -> Iterator[tuple[int | None, str]]:
    """Yield the algorithms that `choose` picks, each with the largest size up to which it does; None for no limit.

    >>> list(choices("all_to_all", 4, (0, 0, 0, 0)))
    [(2097152, 'direct'), (None, 'pairwise')]
    """

    def at(size: int) -> str:
        return schedules.choose(operation, world, size, hosts=where)

    for low, high in pairwise(1 << power for power in range(LARGEST)):
        if at(low) != at(high):
            # The first size of the next algorithm.
            first = low + bisect_left(range(low, high), True, key=lambda size: at(size) != at(low))
            yield first - 1, at(low)
    yield None, at(1 << LARGEST)


def of_schedule(operation: str, found: Schedule) -> dict[str, Any]:
    """Return one schedule with its contract and its cost."""
    contract = schedules.contract(operation, found.world, found.chunks or 1)
    cost = schedules.cost(found)
    return {
        "rounds": [packed(moves) for moves in found.rounds],
        "before": [list(spans(contract.before(rank))) for rank in range(found.world)],
        "after": [list(spans(contract.after(rank))) for rank in range(found.world)],
        "share": float(found.share),
        "cost": [cost.steps, cost.messages, *(str(part) for part in (cost.sent, cost.received, cost.reduced))],
    }


def packed(moves: Iterable[Move]) -> list[int]:
    """Return a round as integers; neighboring moves between the same two ranks become one run."""
    rows: list[list[int]] = []
    for move in moves:
        row = [move.src, move.dst, *number(move.read), *number(move.write), 1, int(move.reduce)]
        last = rows[-1] if rows else row
        length = last[6]
        continued = [*last[:3], last[3] + length, last[4], last[5] + length, 1, last[7]]
        if rows and row == continued:
            last[6] += 1
        else:
            rows.append(row)
    return [value for row in rows for value in row]


def number(slot: Slot) -> tuple[int, int]:
    """Return a slot as two integers."""
    return BUFFERS.index(slot[0]), slot[1]


def unpack(values: list[int]) -> tuple[Move, ...]:
    """Return the moves of a packed round.

    >>> unpack([0, 1, 0, 2, 0, 2, 2, 1])
    (Move(src=0, dst=1, read=('data', 2), write=('data', 2), reduce=True), \
Move(src=0, dst=1, read=('data', 3), write=('data', 3), reduce=True))
    """
    rows = (values[start : start + WIDTH] for start in range(0, len(values), WIDTH))
    return tuple(
        Move(src, dst, (BUFFERS[read], i + by), (BUFFERS[write], j + by), bool(reduced))
        for src, dst, read, i, write, j, length, reduced in rows
        for by in range(length)
    )


def spans(slots: Iterable[Slot]) -> Iterator[tuple[int, int, int]]:
    """Yield neighboring slots together: buffer, first slot, number of slots."""
    numbered = sorted(number(slot) for slot in slots)
    for (buffer, _), group in groupby(enumerate(numbered), key=lambda pair: (pair[1][0], pair[1][1] - pair[0])):
        run = [slot for _, (_, slot) in group]
        yield buffer, run[0], len(run)
