"""Everything that takes too long for each change: `nox -s nightly` runs it, and keeps what it saw in docs/nightly.json.

The hosted workflow runs it at night. The record has a row for each step, with the commit that it ran on. The site shows
the rows, and `python -m tests.mutants --changed` compares the working tree with the commit of the row `faults`.

Usage: python -m tests.nightly [STEP...]. Without arguments all steps run. A working tree with changes is not recorded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "nightly.json"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Step:
    """Step of the nightly run.

    Attributes:
        what: Description for readers of the site.
        arguments: Arguments of Python.
        environment: Variables that it sets.
        needs: Programs of which one must be installed; none if empty.
    """

    what: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


STEPS = {
    "tutorials": Step("all tutorials that can run on gloo", ("docs/run_tutorials.py", "--again", "--backend", "gloo")),
    "faults": Step("all planted faults", ("-m", "tests.mutants")),
    "deaths": Step(
        "a rank killed at one in twenty of the lines of each function",
        ("-m", "pytest", "-q", "-n", "2", "-m", "deaths and not long", "tests/soak"),
        {"TORCHDIST_REF_DEATHS_SHARE": "0.05"},
    ),
    "simulated": Step(
        "a simulated rank killed at each operation of each call, in worlds of 2 to 5 ranks and three orders",
        ("-m", "tests.simulation.deaths"),
    ),
    "orders": Step(
        "explore, which has to find eleven mended defects of order within 1,000 seeds each, planted again",
        ("-m", "tests.simulation.defects"),
    ),
    "long": Step("the tests that take minutes each", ("-m", "pytest", "-q", "-m", "long")),
    "soak": Step("each proof at length, for two minutes", ("-m", "tests.soak", "--seconds", "120", "--no-record")),
    "site": Step(
        "every page of the site in Chromium, in light and dark, on a desktop and a phone",
        ("-m", "pytest", "-q", "-m", "browser", "tests/docs"),
        {"TORCHDIST_REF_EVERY_PAGE": "1"},
        BROWSERS,
    ),
}


@dataclass(frozen=True)
class Row:
    """Outcome of one step: its last line of output, its duration, and where and on which commit it ran."""

    step: str
    what: str
    passed: bool
    result: str
    minutes: float
    date: str
    commit: str
    machine: str


def rows() -> list[Row]:
    """Return the recorded rows."""
    return [Row(**row) for row in json.loads(RECORD.read_text(encoding="utf-8"))] if RECORD.exists() else []


def run(name: str, commit: str) -> Row:
    """Run a step, pass its output on, and return its outcome."""
    # Imported here: it loads torch, which the choice of planted faults must not do.
    from tests.soak.proofs import machine

    step, started, last = STEPS[name], time.monotonic(), ""
    with subprocess.Popen(
        [sys.executable, *step.arguments],
        cwd=ROOT,
        env={**os.environ, **step.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip("= \n") or last
    minutes = round((time.monotonic() - started) / 60, 1)
    return Row(
        name, step.what, process.returncode == 0, last, minutes, f"{datetime.now(UTC):%Y-%m-%d}", commit, machine()
    )


def commit_of_a_clean_tree() -> str:
    """Return the commit that the working tree equals, or an empty string."""
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    # The record itself changes with each step.
    others = [line for line in changed.stdout.splitlines() if not line.endswith(str(RECORD.relative_to(ROOT)))]
    return "" if others or changed.returncode or head.returncode else head.stdout.strip()


def main(names: list[str]) -> int:
    """Run the named steps, or all; return the exit status."""
    if unknown := set(names) - STEPS.keys():
        sys.exit(f"unknown steps {sorted(unknown)}; there are {', '.join(STEPS)}")
    failed = []
    for name in names or STEPS:
        if STEPS[name].needs and not any(map(shutil.which, STEPS[name].needs)):
            print(f"=== {name}: not run, there is no {' or '.join(STEPS[name].needs)}", flush=True)
            continue
        print(f"=== {name}: {STEPS[name].what}", flush=True)
        commit = commit_of_a_clean_tree()
        row = run(name, commit)
        print(f"=== {name}: {'passed' if row.passed else 'FAILED'} in {row.minutes} minutes", flush=True)
        failed += [] if row.passed else [name]
        if commit:
            kept = {**{old.step: old for old in rows()}, name: row}
            RECORD.write_text(json.dumps([asdict(kept[each]) for each in STEPS if each in kept], indent=1) + "\n")
        else:
            print(f"=== {name}: not recorded, the working tree has changes or no commit", flush=True)
    print(f"=== {len(failed)} of {len(names or STEPS)} steps failed{': ' if failed else ''}{', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
