"""Record the result of a test run for one pair of Python and torch; `nox -s versions` calls this.

``python -m tests.versions RESULTS.xml`` adds the results of a pytest run (``--junitxml``) to docs/versions.json.
The key is the pair of Python and torch that runs this command. The page "Tested platforms" shows the file.
"""

from __future__ import annotations

import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parents[1] / "docs" / "versions.json"


def summary(results: Path) -> dict[str, Any]:
    """Count the outcomes of a run, and keep the names of failures and the reasons of skips."""
    cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    outcomes = [(case, outcome_of(case)) for case in cases]
    counts = Counter(outcome for _, outcome in outcomes)
    reasons = Counter(
        str(skip.get("message", "")) for case in cases for skip in case.iter("skipped") if skip.get("message")
    )
    return {
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "failures": sorted(f"{case.get('classname')}.{case.get('name')}" for case, how in outcomes if how == "failed"),
        "reasons": dict(sorted(reasons.items())),
    }


def outcome_of(case: ElementTree.Element) -> str:
    """Return how one test ended; an error in a fixture counts as a failure."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def add(results: Path, record: Path = RECORD) -> dict[str, Any]:
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
    found = add(Path(sys.argv[1]))
    print(", ".join(f"{found[key]} {key}" for key in ("passed", "failed", "skipped")))
    sys.exit(bool(found["failed"]))
