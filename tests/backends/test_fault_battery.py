"""Two hundred random faults: any rank, operation, moment and executor, on shared memory, on sockets and on both.

A trial is a world of new processes that make calls until one of them is killed or stopped. Every survivor must soon get
an error of the right class that names the failed rank, the operation, the group and the call; no rank may hang. A trial
that fails prints its number, which reproduces it. The test takes minutes.
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
from torchdist_ref.processes.linux_calls import pidfd_open
from torchdist_ref.testing import RankError, run

TRIALS = 200
SOON = 2.0
STALL = 3.0
"""Time-out of trials in which a rank is stopped, in seconds: a busy machine needs part of it for the initialization."""

pytestmark = pytest.mark.long


def ring(rank: int, world: int) -> None:
    """Send to the next rank and receive from the previous one."""
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
    """Fault, victim, operation, moment and executor of one trial, all derived from its number."""

    number: int
    fault: str
    world: int
    hosts: str
    victim: int
    operation: str
    moment: float
    executor: str

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
            chance.choice(["fast", "reference"]),
        )


@dataclass(frozen=True)
class Outcome:
    """Error that ended a rank's calls, and its time."""

    kind: str
    text: str
    when: float


def live(rank: int, trial: Trial, path: str) -> Outcome:
    os.environ["TORCHDIST_REF_HOST_ID"] = trial.hosts[rank]
    os.environ["TORCHDIST_REF_EXECUTOR"] = trial.executor
    timeout = STALL if trial.fault == "stall" else 20.0
    store = dist.FileStore(f"{path}/store", trial.world)
    dist.init_process_group("ref", store=store, rank=rank, world_size=trial.world, timeout=timedelta(seconds=timeout))
    Path(path, f"pid{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank == trial.victim:
        # A timer, not a wait: the moment must be anywhere in the calls of the others.
        timer = threading.Timer(trial.moment, strike, (trial, path))
        timer.daemon = True
        timer.start()
    if "idle" in trial.fault:
        return idle(rank, trial, path)
    outcome = call_until_error(rank, trial)
    Path(path, f"outcome{rank}").touch()
    return outcome


def strike(trial: Trial, path: str) -> None:
    """Kill or stop this process."""
    Path(path, "when").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGSTOP if trial.fault == "stall" else signal.SIGKILL)


def idle(rank: int, trial: Trial, path: str) -> Outcome:
    """Make the next call only after the victim has ended: it must raise on each survivor."""
    if rank == trial.victim:
        threading.Event().wait()
    ended = pidfd_open(int(Path(path, f"pid{trial.victim}").read_text()))
    import select

    select.select([ended], [], [], 10.0)
    return call_until_error(rank, trial)


def call_until_error(rank: int, trial: Trial) -> Outcome:
    end = time.monotonic() + 10.0
    try:
        while time.monotonic() < end:
            OPERATIONS[trial.operation](rank, trial.world)
    except dist.DistError as error:
        return Outcome(type(error).__name__, str(error), time.monotonic())
    return Outcome("", "no error", time.monotonic())


def wake(trial: Trial, path: str) -> None:
    """Continue a stopped rank once all others have raised, or have had time to."""
    others = [Path(path, f"outcome{rank}") for rank in range(trial.world) if rank != trial.victim]
    end = time.monotonic() + 10.0
    while time.monotonic() < end and not all(each.exists() for each in others):
        # The survivors report by files, which are polled.
        threading.Event().wait(0.01)
    os.kill(int(Path(path, f"pid{trial.victim}").read_text()), signal.SIGCONT)


def survivors(trial: Trial, path: str) -> dict[int, Outcome]:
    """Run the trial; return the outcome of each rank but the victim."""
    if trial.fault == "stall":
        waker = threading.Thread(target=wake, args=(trial, path))
        waker.start()
        results = run(live, trial.world, trial, path, ranks="processes", init=False, timeout=40.0)
        waker.join()
        return {rank: outcome for rank, outcome in enumerate(results) if rank != trial.victim}
    with pytest.raises(RankError, match=f"rank {trial.victim} of {trial.world} was killed by SIGKILL") as caught:
        run(live, trial.world, trial, path, ranks="processes", init=False, timeout=40.0)
    return {rank: each.value for rank, each in caught.value.outcomes.items() if rank != trial.victim}


EXPECTED = {
    "death": ("RankDiedError", "GroupAbortedError"),
    "death, idle": ("RankDiedError", "GroupAbortedError"),
    "stall": ("RankStalledError", "GroupAbortedError"),
}
NAMED = {"death": "rank {} died", "death, idle": "rank {} died", "stall": "rank {} did not arrive"}


def wrong(trial: Trial, rank: int, outcome: Outcome, hit: float) -> str:
    """Return what is wrong with the error of a survivor; empty if nothing."""
    late = outcome.when - hit - (STALL if trial.fault == "stall" else 0.0)
    if outcome.kind not in EXPECTED[trial.fault]:
        return f"rank {rank} got {outcome.kind or 'no error'}: {outcome.text}"
    # In a ring a rank waits for its own neighbor, who may be a survivor that aborted first.
    if NAMED[trial.fault].format(trial.victim) not in outcome.text and trial.operation != "ring":
        return f"rank {rank} does not name rank {trial.victim}: {outcome.text}"
    if not re.search(r"\w+\(", outcome.text) or "group 'world'" not in outcome.text:
        return f"rank {rank} does not name the operation and the group: {outcome.text}"
    return f"rank {rank} raised after {late:.2f} s" if late > SOON and "idle" not in trial.fault else ""


@pytest.mark.timeout(1800)
def test_two_hundred_faults(tmp_path: Path) -> None:
    found, late = [], []
    for number in range(TRIALS):
        trial = Trial.of(number)
        path = tmp_path / str(number)
        path.mkdir()
        outcome = survivors(trial, str(path))
        assert len(outcome) == trial.world - 1 and all(outcome.values()), trial
        hit = float((path / "when").read_text())
        late += [each.when - hit for each in outcome.values() if trial.fault == "death"]
        found += [f"{trial}: {text}" for rank, each in outcome.items() if (text := wrong(trial, rank, each, hit))]
    late.sort()
    print(f"{len(late)} survivors of deaths in calls: median {late[len(late) // 2]:.3f} s, worst {late[-1]:.3f} s")
    assert not found, f"{len(found)} wrong:\n" + "\n".join(found)
