"""Site's data of a report: CUDA cells of the table of capabilities, docs/gpu.json and docs/gpu_tutorials.json.

Only a complete report of a run on a device is landed. The page "GPU report" shows the data with date, machine and
versions.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.capabilities import table
from tests.gpu.report import BAD, problems
from tests.gpu.supervise import ROOT

SUMMARY = ROOT / "docs" / "gpu.json"
OUTPUTS = ROOT / "docs" / "gpu_tutorials.json"
REASON_LINES = 12


def main(path: Path) -> int:
    """Land a report; return the exit code."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{path} cannot be read: {error}", file=sys.stderr)
        return 1
    reasons = refusals(report)
    if reasons:
        print(f"{path} is not landed: {'; '.join(reasons)}", file=sys.stderr)
        return 1
    land(report)
    print(f"wrote {table.FILE.relative_to(ROOT)}, {SUMMARY.relative_to(ROOT)} and {OUTPUTS.relative_to(ROOT)}")
    return 0


def refusals(report: Any) -> list[str]:
    """Return the reasons why a report must not become data of the site."""
    found = problems(report)
    if found:
        return found
    if report["device"] != "cuda" or not report["machine"]["devices"]:
        found.append("it was made without a CUDA device")
    if not report["complete"]:
        found.append("the run was interrupted")
    return found


def land(report: dict[str, Any]) -> None:
    """Write the site's data."""
    by_name = {part["name"]: part for part in report["parts"]}
    if "capabilities" in by_name:
        table.save(table.with_cuda(by_name["capabilities"]["cells"], stamp(report)))
    SUMMARY.write_text(json.dumps(summary(report), indent=1) + "\n", encoding="utf-8")
    OUTPUTS.write_text(json.dumps(outputs(report), indent=1) + "\n", encoding="utf-8")


def stamp(report: dict[str, Any]) -> str:
    """Return when, where and with which torch a report was made."""
    machine = report["machine"]
    devices = Counter(machine["devices"])
    shown = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in devices.items())
    return f"{report['date'][:10]} with torch {machine['torch']} on {shown}"


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return what the page shows: of each part the counts, what failed, and why tests were skipped."""
    kept = {key: report[key] for key in ("date", "commit", "machine", "seconds")}
    return kept | {"stamp": stamp(report), "parts": [short(part) for part in report["parts"]]}


def short(part: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of a part, its failures and the reasons of its skips."""
    items = part["items"]
    skips = Counter(item["reason"].partition("\n")[0] for item in items if item["outcome"] == "skipped")
    return {
        "name": part["name"],
        "outcome": part["outcome"],
        "seconds": part["seconds"],
        "counts": dict(Counter(item["outcome"] for item in items)),
        "failures": {
            item["name"]: f"{item['outcome']}: " + "\n".join(item["reason"].splitlines()[-REASON_LINES:])
            for item in items
            if item["outcome"] in BAD
        },
        "skips": dict(sorted(skips.items())),
        "rows": [row for row in part.get("rows", []) if row["event"] == "end"],
    }


def outputs(report: dict[str, Any]) -> dict[str, Any]:
    """Return by part and tutorial the cells that ran, each with its number of ranks and its output."""
    found: dict[str, Any] = {}
    for part in report["parts"]:
        for item in part["items"]:
            if "output" in item:
                tutorial, _, cell = item["name"].partition(", ")
                entry = {"ranks": item["ranks"], "outcome": item["outcome"], "output": item["output"]}
                found.setdefault(part["name"], {}).setdefault(tutorial, {})[cell] = entry
    return found
