"""Record of a test run for one pair of Python and torch; `nox -s versions` calls this.

``python -m tests.versions RESULTS.xml ...`` adds the results of a pytest run (``--junitxml``) to docs/versions.json.
With several files, a later result of a test replaces an earlier one. The key is the pair of Python and torch that runs
this command. The page "Tested platforms" shows the file.
"""

from __future__ import annotations

import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
RECORD = TESTS.parent / "docs" / "versions.json"


def summary(results: Iterable[Path]) -> dict[str, Any]:
    """Count the outcomes of a run, and keep the names of failures and the reasons of skips."""
    found = {
        (str(case.get("classname")), str(case.get("name"))): case
        for path in results
        for case in ElementTree.parse(path).getroot().iter("testcase")
    }
    outcomes = {".".join(name): outcome_of(case) for name, case in found.items()}
    counts = Counter(outcomes.values())
    reasons = Counter(
        str(skip.get("message")) for case in found.values() for skip in case.iter("skipped") if skip.get("message")
    )
    return {
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "failures": sorted(name for name, outcome in outcomes.items() if outcome == "failed"),
        "reasons": dict(sorted(reasons.items())),
        "folders_not_run": folders_without({name for name, _ in found}),
    }


def outcome_of(case: ElementTree.Element) -> str:
    """Return how one test ended; an error in a fixture counts as a failure."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def folders_without(modules: set[str]) -> list[str]:
    """Return the folders of tests that have no result."""
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    return sorted(folders - {name.split(".")[1] for name in modules if name.startswith("tests.")})


def add(results: Iterable[Path], record: Path = RECORD) -> dict[str, Any]:
    """Add the results to the record, in place of an earlier run of the same pair, and return them."""
    import torch

    python = platform.python_version()
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    row = {"python": python, "torch": torch.__version__, "system": system, "date": date.today().isoformat()}
    row |= summary(results)
    rows = json.loads(record.read_text(encoding="utf-8")) if record.exists() else []
    rows = [other for other in rows if (minor(other["python"]), other["torch"]) != (minor(python), row["torch"])]
    rows = sorted([*rows, row], key=lambda each: (each["python"], each["torch"]))
    record.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return row


def minor(version: str) -> str:
    """Return the first two numbers of a version."""
    return ".".join(version.split(".")[:2])


if __name__ == "__main__":
    added = add([Path(name) for name in sys.argv[1:]])
    print(", ".join(f"{added[key]} {key}" for key in ("passed", "failed", "skipped")))
    sys.exit(bool(added["failed"]))
