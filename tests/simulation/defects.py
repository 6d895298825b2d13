"""Defects of order that were mended in this repository, planted again one at a time, and the seeds that find them.

Each is a planted fault of `tests.mutants` that only some orders of events show, and a program of `orders` that fails in
them. ``python -m tests.simulation.defects`` plants each in a copy of the package, and has `explore` look for it among
the seeds from 0 to 999; words choose some of them. It prints the first seed that fails, and how many decisions are left
when they are shortened.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.planting import plant, planted

ROOT = Path(__file__).resolve().parents[2]
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Defect:
    """One mended defect.

    Attributes:
        commit: Commit that mended it.
        fault: Name of the planted fault.
        program: Name of the program in `orders.PROGRAMS` that shows it.
        seed: First seed that shows it; 0 is the plain order. It is another one after changes of the library that make
            more operations, or fewer: the command above finds it.
    """

    commit: str
    fault: str
    program: str
    seed: int


DEFECTS = (
    Defect("23e830d5", "a receive completes only after all that were posted before it", "chained_messages", 0),
    Defect("12a35c9b", "calls of callbacks are numbered like the program's", "nested", 5),
    Defect("12a35c9b", "callbacks that are late have no scope", "nested", 5),
    Defect("12a35c9b", "the largest number goes first", "nested", 5),
    Defect("23e830d5", "a call that waits does not run before a later one that is awaited", "nested", 362),
    Defect("23e830d5", "calls in callbacks of joined calls are numbered as the program's", "several_parts", 4),
    Defect("c425e93e", "a wait returns before the callbacks of its call have run", "callbacks", 0),
    Defect("c425e93e", "a callback overtakes the earlier ones of its future", "callbacks", 0),
    Defect("c425e93e", "code in a callback waits for the callbacks after it", "waiting_callbacks", 0),
    Defect("0b5aa048", "a receive posted beside a waiting one is not looked for", "beside", 0),
    Defect("e8f58c60", "those who create a group wait for a member that has left the world", "departure", 0),
)
"""Eleven defects. Programs in the plain order, seed 0, cannot show five of them."""


def explored(defect: Defect, first: int, count: int) -> str:
    """Plant a defect in a copy of the package, and return what `orders` prints of a search among some seeds."""
    fault = next(each for each in planted() if each.name == defect.fault)
    with tempfile.TemporaryDirectory() as folder:
        for part in ("torchdist_ref", "tests"):
            shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
        plant(fault, Path(folder, "torchdist_ref"))
        command = [sys.executable, "-m", "tests.simulation.orders", defect.program, str(first), str(count)]
        path = os.pathsep.join([folder, *sys.path])
        found = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stderr[-2000:]
        return found.stdout.strip().splitlines()[-1]


def main(words: list[str]) -> int:
    missed = 0
    chosen = [each for each in DEFECTS if " ".join(words) in each.fault]
    for defect in chosen:
        found = explored(defect, 0, MOST_SEEDS)
        missed += found == "none"
        print(f"{found:45} {defect.program}: {defect.fault}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} defects found within {MOST_SEEDS} seeds")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
