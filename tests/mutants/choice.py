"""Choice of planted faults: by name, or those that a change concerns.

Which tests notice a fault changes only with the file that has the fault, with its tests, or with its row. So CI plants
the faults for which one of these differs from the commit at which all faults were planted last, and one in ten of the
others, which rotate with the number of commits. After a day of changes these are nearly all faults, ten minutes, so CI
takes at most `MOST`: rows that are new or changed first, since nobody has seen them noticed, then a sample of the
others, which changes with the number of commits. All of them are planted at night.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests import nightly
from tests.mutants.planting import FAULTS, Fault, places

ROOT = Path(__file__).resolve().parents[2]
SHARE = 10
# Over a minute on two cores.
MOST = 60


def named(faults: Iterable[Fault], words: str) -> list[Fault]:
    """Return the faults whose name has the words."""
    return [fault for fault in faults if words in fault.name]


def concerned(faults: Iterable[Fault]) -> tuple[list[Fault], str]:
    """Return at most `MOST` of the faults that the changes since the last record concern, and why these.

    A share of those that no change concerns is among them.
    """
    base = next((row.commit for row in nightly.rows() if row.step == "faults" and row.passed), "")
    changed, turn = _git("diff", "--name-only", base) if base else None, _git("rev-list", "--count", "HEAD")
    if changed is None or turn is None:
        chosen = former = list(faults)
        why = "faults: no record of a run with all of them, or its commit is not in this clone"
    else:
        former = _rows_at(base)
        chosen = chosen_by(faults, [ROOT / line for line in changed.splitlines()], former, int(turn))
        why = f"faults whose code, tests or row differ from {base[:9]}, and one in {SHARE} of the others"
    sample = bounded(chosen, former, int(turn or 0))
    return sample, why if len(sample) == len(chosen) else f"a sample of the {len(chosen)} {why}"


def chosen_by(faults: Iterable[Fault], changed: Sequence[Path], former: Iterable[Fault], turn: int) -> list[Fault]:
    """Return the faults to plant.

    Args:
        faults: All of them.
        changed: Files that differ.
        former: The faults at the commit that the files are compared with.
        turn: Number of the run, which chooses the share of the faults that no change concerns.
    """
    known = set(former)
    return [fault for fault in faults if fault not in known or _touches(fault, changed) or _is_its_turn(fault, turn)]


def bounded(chosen: Sequence[Fault], former: Iterable[Fault], turn: int) -> list[Fault]:
    """Return at most `MOST` of the chosen faults, in their order.

    Args:
        chosen: Faults that a change concerns or whose turn it is.
        former: The faults at the commit that the files are compared with; others are taken first.
        turn: Number of the run, from which the sample follows.
    """
    known = set(former)
    first = sorted(chosen, key=lambda fault: (fault in known, hashlib.sha256(f"{turn} {fault.name}".encode()).digest()))
    taken = set(first[:MOST])
    return [fault for fault in chosen if fault in taken]


def _touches(fault: Fault, changed: Sequence[Path]) -> bool:
    if not changed:
        return False
    paths = [ROOT / word.partition("::")[0] for word in fault.tests.partition(" -k ")[0].split()]
    paths += _files_of(fault)
    return any(file == path or path in file.parents for file in changed for path in paths)


@functools.cache
def _files_of(fault: Fault) -> list[Path]:
    return [file for file, _ in places(fault, ROOT / "torchdist_ref")]


def _is_its_turn(fault: Fault, turn: int) -> bool:
    return hashlib.sha256(fault.name.encode()).digest()[0] % SHARE == turn % SHARE


def _rows_at(commit: str) -> list[Fault]:
    """Return the faults of a commit; none of a file that it lacks."""
    texts = [_git("show", f"{commit}:{path.relative_to(ROOT)}") for path in sorted(FAULTS.glob("*.toml"))]
    return [Fault(**row) for text in texts if text for row in tomllib.loads(text)["fault"]]


def _git(*arguments: str) -> str | None:
    """Return the output of git, or None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
