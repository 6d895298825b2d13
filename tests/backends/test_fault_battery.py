"""Two hundred faults at random: any rank, any operation, any moment, on shared memory, on sockets and on both.

One trial is one world of fresh processes that calls on and on until it is hit. What must hold is the same each time:
every survivor gets an error, soon, whose class is right and which names the culprit, the operation, the group and the
call; and nobody hangs. A trial that fails prints its number, and its number is all that it takes to see it again.
Minutes long: a world of processes and a moment of work for each trial.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.testing import RankError, run

TRIALS = 200
SOON = 2.0
STALL = 0.5

pytestmark = pytest.mark.long


def ring(rank: int, world: int) -> None:
    """Everybody sends to the next and receives from the one before."""
    sending = dist.isend(torch.ones(20_000), (rank + 1) % world)
    dist.recv(torch.ones(20_000), (rank - 1) % world)
    sending.wait()


def overlapped(rank: int, world: int) -> None:
    works = [dist.all_reduce(torch.ones(5_000), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()


def gathered(rank: int, world: int) -> None:
    dist.all_gather([torch.ones(300) for _ in range(world)], torch.ones(300))


OPERATIONS: dict[str, Callable[[int, int], object]] = {
    "all_reduce": lambda rank, world: dist.all_reduce(torch.ones(64)),
    "all_reduce, large": lambda rank, world: dist.all_reduce(torch.ones(3_000_000)),
    "broadcast": lambda rank, world: dist.broadcast(torch.ones(9_000), world - 1),
    "reduce": lambda rank, world: dist.reduce(torch.ones(9_000), 0),
    "barrier": lambda rank, world: dist.barrier(),
    "all_gather": gathered,
    "overlapped": overlapped,
    "ring": ring,
}


@dataclass(frozen=True)
class Trial:
    """What happens to whom, where and when; all of it follows from the number."""

    number: int
    fault: str
    world: int
    hosts: str
    victim: int
    operation: str
    moment: float

    @classmethod
    def of(cls, number: int) -> Trial:
        chance = random.Random(number)
        world = chance.choice([2, 3, 4])
        return cls(
            number,
            chance.choice(["death", "death", "death, idle", "stall"]),
            world,
            chance.choice(["a" * world, "abcd"[:world], "aabb"[:world]]),
            chance.randrange(world),
            chance.choice(list(OPERATIONS)),
            chance.uniform(0.0, 0.04),
        )


@dataclass(frozen=True)
class Heard:
    """How a rank's calls ended."""

    kind: str
    text: str
    when: float


def live(rank: int, trial: Trial, path: str) -> Heard:
    os.environ["TORCHDIST_REF_HOST_ID"] = trial.hosts[rank]
    patience = STALL if trial.fault == "stall" else 20.0
    store = dist.FileStore(f"{path}/store", trial.world)
    dist.init_process_group("ref", store=store, rank=rank, world_size=trial.world, timeout=timedelta(seconds=patience))
    Path(path, f"pid{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank == trial.victim:
        # A timer, not a wait: the moment must be anywhere in the calls of the others.
        timer = threading.Timer(trial.moment, strike, (trial, path))
        timer.daemon = True
        timer.start()
    if "idle" in trial.fault:
        return idle(rank, trial, path)
    heard = call_until_error(rank, trial)
    Path(path, f"heard{rank}").touch()
    return heard


def strike(trial: Trial, path: str) -> None:
    """Kill or stop this process."""
    Path(path, "when").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGSTOP if trial.fault == "stall" else signal.SIGKILL)


def idle(rank: int, trial: Trial, path: str) -> Heard:
    """Nobody is in a call when it happens; the next call of each survivor must say so."""
    if rank == trial.victim:
        threading.Event().wait()
    ended = os.pidfd_open(int(Path(path, f"pid{trial.victim}").read_text()))
    import select

    select.select([ended], [], [], 10.0)
    return call_until_error(rank, trial)


def call_until_error(rank: int, trial: Trial) -> Heard:
    end = time.monotonic() + 10.0
    try:
        while time.monotonic() < end:
            OPERATIONS[trial.operation](rank, trial.world)
    except dist.DistError as error:
        return Heard(type(error).__name__, str(error), time.monotonic())
    return Heard("", "no error", time.monotonic())


def wake(trial: Trial, path: str) -> None:
    """Let a stopped rank go on once all others have given it up, or they never will."""
    others = [Path(path, f"heard{rank}") for rank in range(trial.world) if rank != trial.victim]
    end = time.monotonic() + 10.0
    while time.monotonic() < end and not all(each.exists() for each in others):
        # A stopped process can't be waited for, and the others tell of themselves by files: looked at, now and then.
        threading.Event().wait(0.01)
    os.kill(int(Path(path, f"pid{trial.victim}").read_text()), signal.SIGCONT)


def survivors(trial: Trial, path: str) -> dict[int, Heard]:
    """Run the trial; what each rank but the victim heard."""
    if trial.fault == "stall":
        waker = threading.Thread(target=wake, args=(trial, path))
        waker.start()
        results = run(live, trial.world, trial, path, ranks="processes", init=False, timeout=40.0)
        waker.join()
        return {rank: heard for rank, heard in enumerate(results) if rank != trial.victim}
    with pytest.raises(RankError, match=f"rank {trial.victim} of {trial.world} was killed by SIGKILL") as caught:
        run(live, trial.world, trial, path, ranks="processes", init=False, timeout=40.0)
    return {rank: each.value for rank, each in caught.value.outcomes.items() if rank != trial.victim}


RIGHT = {
    "death": ("RankDiedError", "GroupAbortedError"),
    "death, idle": ("RankDiedError", "GroupAbortedError"),
    "stall": ("RankStalledError", "GroupAbortedError"),
}
SAID = {"death": "rank {} died", "death, idle": "rank {} died", "stall": "rank {} did not arrive"}


def wrong(trial: Trial, rank: int, heard: Heard, hit: float) -> str:
    """What is wrong with what a survivor heard; empty if nothing."""
    late = heard.when - hit - (STALL if trial.fault == "stall" else 0.0)
    if heard.kind not in RIGHT[trial.fault]:
        return f"rank {rank} got {heard.kind or 'no error'}: {heard.text}"
    # In a ring a rank waits for its own neighbour, who may be a survivor that aborted first.
    if SAID[trial.fault].format(trial.victim) not in heard.text and trial.operation != "ring":
        return f"rank {rank} was not told of rank {trial.victim}: {heard.text}"
    if not re.search(r"\w+\(", heard.text) or "group 'world'" not in heard.text:
        return f"rank {rank} was not told the operation and the group: {heard.text}"
    return f"rank {rank} heard after {late:.2f} s" if late > SOON and "idle" not in trial.fault else ""


@pytest.mark.timeout(1800)
def test_two_hundred_faults(tmp_path: Path) -> None:
    found, late = [], []
    for number in range(TRIALS):
        trial = Trial.of(number)
        path = tmp_path / str(number)
        path.mkdir()
        heard = survivors(trial, str(path))
        assert len(heard) == trial.world - 1 and all(heard.values()), trial
        hit = float((path / "when").read_text())
        late += [each.when - hit for each in heard.values() if trial.fault == "death"]
        found += [f"{trial}: {text}" for rank, each in heard.items() if (text := wrong(trial, rank, each, hit))]
    late.sort()
    print(f"{len(late)} survivors of deaths in calls: median {late[len(late) // 2]:.3f} s, worst {late[-1]:.3f} s")
    assert not found, f"{len(found)} wrong:\n" + "\n".join(found)
