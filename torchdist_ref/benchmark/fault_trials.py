"""What ranks do in one trial of a fault: get into a call, be hit, and say when the error came.

Times are of a clock that all processes share. Survivors stay alive after their error until all have theirs, so that
nobody learns of the fault from a neighbour's exit. How often, in which operations, and what it means: `faults`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.benchmark import competitors
from torchdist_ref.benchmark.crew import Place, go
from torchdist_ref.benchmark.operations import OPERATIONS, Action
from torchdist_ref.errors import MismatchError
from torchdist_ref.testing import RankError

# How long survivors go on calling, and wait for each other. Less than what `testing.run` leaves them.
PATIENCE = 2.0
RECV = "recv"
_SOON = 0.04


@dataclass(frozen=True)
class Heard:
    """When an error came on one rank, and which; `when` is None where none came in time."""

    when: float | None
    error: str = ""


def death(backend: str, op: str, nbytes: int, world: int, busy: bool, seed: int) -> list[float | None]:
    """Kill the last rank with SIGKILL and wait for the others' errors.

    Args:
        backend: A backend, as in ``--backends``.
        op: An operation, or ``recv``: everybody waits for a message of the last rank.
        nbytes: Of the whole buffer.
        world: Ranks.
        busy: Whether the rank dies while it makes calls itself; else the others wait for it in a call.
        seed: Decides when.

    Returns:
        For each survivor the seconds until its error; None where it came to none.
    """
    killed: list[float] = []
    try:
        go(lambda place: _until_death(place, backend, op, nbytes, busy, seed), world, killed.append)
    except RankError as error:
        if not killed or error.rank != world - 1:
            raise
        heard = [error.outcomes[rank].value if rank in error.outcomes else Heard(None) for rank in range(world - 1)]
        return [in_time(each.when - killed[0]) if each.when is not None else None for each in heard]
    raise AssertionError("a killed rank cannot have returned")


def in_time(seconds: float) -> float | None:
    """None for an error that came only because others had run out of patience and were gone."""
    return seconds if seconds < PATIENCE else None


def _until_death(place: Place, backend: str, op: str, nbytes: int, busy: bool, seed: int) -> Heard:
    competitor = competitors.join([backend], place)[0]
    action = _action(competitor, place, op, nbytes)
    last = place.world - 1
    moment = _SOON * (1 + random.Random(seed).random())
    place.line_up()
    if place.rank == last:
        threading.Thread(target=_die, args=(place, moment), daemon=True).start()
        while busy and op != RECV:
            action()
        threading.Event().wait()
    heard = _call_until_error(action)
    place.circle.linger(place.rank, range(last), PATIENCE)
    return heard


def _die(place: Place, moment: float) -> None:
    sleep(moment)
    place.report(perf_counter(), whoever=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _action(competitor: competitors.Competitor, place: Place, op: str, nbytes: int) -> Action:
    if op == RECV:
        into = torch.zeros(max(1, nbytes // 4))
        return lambda: competitor.api.recv(into, place.world - 1, group=competitor.group)
    operation = OPERATIONS[op]
    action = operation.bind(
        competitor.api, competitor.group, operation.buffers(place.rank, place.world, nbytes, torch.float32)
    )
    action()
    return action


def _call_until_error(action: Action) -> Heard:
    """Call on and on: some backends' calls come back on some ranks although a rank is missing."""
    end = perf_counter() + PATIENCE
    try:
        while perf_counter() < end:
            action()
    except RuntimeError as error:
        return Heard(perf_counter(), type(error).__name__)
    return Heard(None)


def _one(rank: int) -> torch.Tensor:
    return torch.full((4 + rank % 2,), 0.5)


# By what differs: the calls of even and of odd ranks.
MISMATCHES: dict[str, Callable[[int], Any]] = {
    "shape": lambda rank: groups.all_reduce(_one(rank)),
    "dtype": lambda rank: groups.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int32)[rank % 2])),
    "operation": lambda rank: groups.barrier() if rank % 2 else groups.all_reduce(torch.ones(4)),
    "root": lambda rank: groups.broadcast(torch.ones(4), rank % 2),
}


def mismatches(backend: str, kind: str, world: int, trials: int) -> list[float]:
    """Let ranks call different things, again and again on one group: seconds to the error on each rank, each time."""
    by_rank = go(lambda place: _mismatch(place, backend, kind, trials), world, lambda event: None)
    return [seconds for times in by_rank for seconds in times]


def _mismatch(place: Place, backend: str, kind: str, trials: int) -> list[float]:
    competitors.join([backend], place)
    return [_until_mismatch(place, MISMATCHES[kind]) for _ in range(trials)]


def _until_mismatch(place: Place, call: Callable[[int], Any]) -> float:
    place.line_up()
    begin = perf_counter()
    try:
        call(place.rank)
    except MismatchError:
        return perf_counter() - begin
    raise AssertionError("ranks made different calls and got no error")


def interrupt(backend: str, op: str, nbytes: int) -> float | None:
    """Press Ctrl-C on rank 0, which waits in a call for rank 1: seconds to the KeyboardInterrupt there."""
    caught, pressed = go(lambda place: _interrupted(place, backend, op, nbytes), 2, lambda event: None)
    return in_time(caught - pressed)


def _interrupted(place: Place, backend: str, op: str, nbytes: int) -> float:
    competitor = competitors.join([backend], place)[0]
    action = _action(competitor, place, op, nbytes)
    pids = place.exchange(os.getpid())
    if place.rank:
        sleep(_SOON)
        when = perf_counter()
        os.kill(pids[0], signal.SIGINT)
    else:
        when = _until_interrupt(action)
    place.circle.linger(place.rank, range(2), PATIENCE)
    return when


def _until_interrupt(action: Action) -> float:
    try:
        while True:
            action()
    except (KeyboardInterrupt, RuntimeError):
        return perf_counter()
