"""Program of `tests.soak.restarts`: one rank of a job that a planned rank ends, once in each attempt.

Arguments: a folder that all ranks share, the backend, the number of failures. With the backend ``torch:ref``, ranks use
torch's functions on `ref`. Attempts are counted by the failures so far, not by the launcher's variables, which differ
between two agents.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed

import torchdist_ref as dist

PLACES = ("before init", "between calls", "in a call")
ENDS = ("raise", "exit", "kill")
PLANS = tuple(product(ENDS, PLACES))


class PlannedError(RuntimeError):
    """The failure that an attempt is to survive."""


def culprit(attempt: int, world: int) -> int:
    """Return the rank that ends an attempt."""
    return attempt * 7 % world if world != 7 else attempt % 7


def note(folder: Path, kind: str, *facts: object) -> None:
    """Append one line to a file, whole, so that ranks do not mix theirs."""
    with (folder / kind).open("ab", buffering=0) as file:
        file.write((" ".join(str(fact) for fact in (time.time(), *facts)).replace("\n", " ") + "\n").encode())


def notes(folder: Path, kind: str) -> list[str]:
    """Return the lines of a file."""
    path = folder / kind
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def wait_for_all(folder: Path, attempt: int, world: int) -> None:
    """Wait until each rank has begun the attempt: one that begins after the failure would count it as the next."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if len({line.split()[2] for line in notes(folder, "starts") if int(line.split()[1]) == attempt}) == world:
            return
        time.sleep(0.01)


def fail(folder: Path, attempt: int, end: str, rank: int) -> NoReturn:
    note(folder, "failures", attempt, rank, end)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "exit":
        sys.exit(3)
    raise PlannedError(f"attempt {attempt}")


def work(folder: Path, backend: str, attempt: int, plan: tuple[str, str] | None) -> None:
    """Meet the other ranks, compare the attempts, and compute; fail where the plan says so."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    end, place = plan or ("", "")
    if place == "before init":
        fail(folder, attempt, end, rank)
    of_torch = backend.startswith("torch:")
    library: Any = torch.distributed if of_torch else dist
    library.init_process_group(backend.removeprefix("torch:"), timeout=timedelta(seconds=20))
    met: list[int] = [-1] * world
    library.all_gather_object(met, attempt)
    if set(met) != {attempt}:
        note(folder, "stale", attempt, rank, met)
    for step in range(3):
        tensor = torch.tensor([float((rank + 2) ** 2 + step)])
        if place == "in a call" and step == 1:
            library.all_reduce(tensor, async_op=True)
            fail(folder, attempt, end, rank)
        library.all_reduce(tensor)
        if tensor.item() != sum((each + 2) ** 2 + step for each in range(world)):
            note(folder, "stale", attempt, rank, "wrong sum", tensor.item())
        if place == "between calls" and step == 1:
            fail(folder, attempt, end, rank)
    library.destroy_process_group()
    note(folder, "done", attempt, rank)


def main() -> None:
    folder, backend, total = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = len(notes(folder, "failures"))
    note(folder, "starts", attempt, rank)
    planned = attempt < total and rank == culprit(attempt, world)
    if planned:
        wait_for_all(folder, attempt, world)
    try:
        work(folder, backend, attempt, PLANS[attempt % len(PLANS)] if planned else None)
    except Exception as error:
        if not planned:
            named = re.search(rf"\brank {culprit(attempt, world)}\b", str(error)) is not None
            kind = "survivors" if len(notes(folder, "failures")) > attempt else "lost"
            note(folder, kind, attempt, rank, "named" if named else "not-named", type(error).__name__, error)
        raise


if __name__ == "__main__":
    main()
