"""Random deaths: a random rank is killed at a random moment of a random program of collectives and messages.

The programs are those of `collectives`, on groups of all ranks. Each survivor must raise an error that names the dead
rank. The time from the death, or from the survivor's own call if that came later, to the error is recorded.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import select
import signal
import sys
import time
from typing import Any

import torchdist_ref as dist
from tests.soak import collectives, deaths
from tests.soak.proofs import Limits, Outcome

HANG_SECONDS, TIMEOUT = 20.0, deaths.TIMEOUT
LATEST_SECONDS = 0.05
DIED = re.compile(r"rank (\d+)(?: \(global (\d+)\))? died")


class Clock:
    """Time at which the last call began."""

    def __init__(self) -> None:
        self.began = 0.0

    def __call__(self) -> None:
        self.began = time.monotonic()


def survive(rank: int, world: int, transport: str, port: int, seed: int, ready: int) -> tuple[float, float, str, str]:
    """Run random calls until one fails; return when it began, when it failed, and the error."""
    collectives.initialize(rank, world, transport, port, f"deaths {seed}", timeout=TIMEOUT)
    rng, clock = random.Random(f"deaths {seed}"), Clock()
    groups = {"world": list(range(world)), "reversed": list(range(world))[::-1]}
    made = {name: dist.new_group(members, sort_ranks=False) for name, members in groups.items()}
    os.write(ready, b".")
    try:
        steps = (collectives.random_step(rng, groups) for _ in itertools.count())
        collectives.run_steps(rank, steps, groups, made, clock)
    except dist.DistError as error:
        ended = time.monotonic()
        # As in a program that this ends: one that waits in another group learns why no message comes.
        sys.excepthook(type(error), error, error.__traceback__)
        return clock.began, ended, type(error).__name__, str(error)
    raise AssertionError("an endless program ended")


def run_rank(sender: int, *arguments: Any) -> None:
    """Run one rank in a forked process, and write its report."""
    signal.alarm(int(HANG_SECONDS) + 5)
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until this process ends
    try:
        os.write(sender, json.dumps(survive(*arguments)).encode()[:65536])
    except BaseException as error:
        os.write(sender, f"failed: {error!r}"[:4096].encode())
    # Only the dead rank has ended; the others stay until all have reported.
    time.sleep(HANG_SECONDS)


def read_report(receiver: int, deadline: float) -> Any:
    """Return the report of a rank, or a text without one."""
    poll = select.poll()
    poll.register(receiver, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        return "hung"
    data = os.read(receiver, 65536)
    return json.loads(data) if data.startswith(b"[") else data.decode() or "ended without a report"


def judge(report: Any, victim: int, died: float) -> tuple[str, float]:
    """Return a failure, or an empty text and the seconds to the error."""
    if isinstance(report, str):
        return report, 0.0
    began, ended, kind, text = report
    named = {int(global_rank or rank) for rank, global_rank in DIED.findall(text)} == {victim}
    return "" if named else f"does not name the dead rank: {kind}: {text}", ended - max(began, died)


def death(seed: int, port: int) -> tuple[list[str], list[float]]:
    """Kill one rank; return the failures of the survivors, and their times."""
    rng = random.Random(seed)
    world, transport = 2 + seed % 3, deaths.TRANSPORTS[seed // 3 % 2]
    victim, moment = rng.randrange(world), rng.random() * LATEST_SECONDS
    ready_receiver, ready_sender = os.pipe()
    children = {}
    sys.stdout.flush()
    for rank in range(world):
        receiver, sender = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(receiver)
                run_rank(sender, rank, world, transport, port, seed, ready_sender)
            finally:
                os._exit(0)
        os.close(sender)
        children[rank] = pid, receiver
    deadline = time.monotonic() + HANG_SECONDS
    for _ in range(world):
        if select.select([ready_receiver], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.read(ready_receiver, 1)
    time.sleep(moment)
    died = time.monotonic()
    os.kill(children[victim][0], signal.SIGKILL)
    judged = {
        rank: judge(read_report(receiver, deadline), victim, died)
        for rank, (_, receiver) in children.items()
        if rank != victim
    }
    for pid, receiver in children.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(receiver)
    os.close(ready_receiver)
    os.close(ready_sender)
    where = f"seed {seed}, {world} ranks, {transport}, rank {victim} killed after {moment * 1000:.0f} ms"
    failures = [f"{where}: rank {rank} {found}" for rank, (found, _) in judged.items() if found]
    return failures, [seconds for found, seconds in judged.values() if not found]


def prove(limits: Limits) -> Outcome:
    """Kill ranks, and count the survivors that name them."""
    outcome, times = Outcome(), []
    deaths.warm_up()
    with deaths.store_server() as port:
        for seed, _ in limits.seeds():
            failures, found = death(seed, port)
            for failure in failures:
                outcome.fail(failure)
            times += found
            outcome.done += 1
    times.sort()
    outcome.counts["survivors"] = len(times)
    if times:
        outcome.counts["median milliseconds to the error"] = round(times[len(times) // 2] * 1000)
        outcome.counts["worst milliseconds to the error"] = round(times[-1] * 1000)
        outcome.counts["errors after more than 100 ms"] = sum(each > 0.1 for each in times)
    return outcome
