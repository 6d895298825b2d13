"""Report of a run: its form, the facts about the machine, and the check that a file is such a report.

``python -m tests.gpu.report`` prints the facts. They are read in a process of their own, because a broken driver can
hang or crash whoever asks.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu import supervise
from tests.gpu.supervise import ROOT

SCHEMA = 1
OUTCOMES = ("passed", "failed", "skipped", "crashed", "timed out", "not run")
BAD = ("failed", "crashed", "timed out", "not run")
FACTS_SECONDS = 60.0
FACTS = ("python", "torch", "cuda", "nccl", "driver", "devices", "system", "processor", "processors")


def facts() -> dict[str, Any]:
    """Return the versions and the devices of this machine."""
    import torch

    processor = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, _nccl_version())),
        "driver": _driver(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "processor": processor[0].partition(":")[2].strip() if processor else "",
        "processors": os.cpu_count(),
    }


def _nccl_version() -> tuple[int, ...]:
    import torch.cuda.nccl

    if not torch.distributed.is_nccl_available():
        return ()
    return tuple(torch.cuda.nccl.version())


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = [line.split("Kernel Module")[1].split()[0] for line in _lines("/proc/driver/nvidia/version")[:1]]
    return found[0] if found else ""


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def commit() -> str:
    """Return the commit of this checkout, with a plus sign if files differ; empty without git."""
    try:
        settings = {"cwd": ROOT, "capture_output": True, "text": True, "check": True, "timeout": 20}
        head = subprocess.run(["git", "rev-parse", "HEAD"], **settings).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **settings).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return head + ("+" if changed else "")


def begun(device: str) -> dict[str, Any]:
    """Return a report without parts."""
    ended = supervise.run([sys.executable, "-m", "tests.gpu.report"], FACTS_SECONDS)
    known: dict[str, Any] = dict.fromkeys(FACTS, "") | {"devices": []}
    if not ended.why:
        # Warnings of torch or of the driver may stand beside it.
        known |= json.loads([line for line in ended.tail.splitlines() if line.startswith("{")][-1])
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device,
        "machine": known,
        "machine_error": f"{ended.why}\n{ended.tail}" if ended.why else "",
        "complete": False,
        "seconds": 0.0,
        "parts": [],
    }


def part(name: str, items: list[dict[str, Any]], seconds: float, reason: str = "", **data: Any) -> dict[str, Any]:
    """Return a part of a report; its outcome follows from those of its items.

    Args:
        name: Name.
        items: Results, each with ``name``, ``outcome``, ``seconds`` and ``reason``.
        seconds: Time that the part took.
        reason: Reason why the part as a whole did not run, or ended early.
        data: Further results.
    """
    outcomes = {item["outcome"] for item in items}
    outcome = "failed" if outcomes & set(BAD) else "passed" if "passed" in outcomes else "skipped"
    return {"name": name, "outcome": outcome, "seconds": round(seconds, 3), "reason": reason, "items": items, **data}


def problems(report: Any) -> list[str]:
    """Return the reasons why a value is no report; empty if it is one."""
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        return [f"the schema is not {SCHEMA}"]
    found = [
        f"{key} is missing"
        for key in ("date", "commit", "device", "machine", "complete", "parts", "seconds")
        if key not in report
    ]
    found += [f"machine.{key} is missing" for key in FACTS if key not in report.get("machine", {})]
    for each in report.get("parts", []):
        wrong = [key for key in ("name", "outcome", "seconds", "reason", "items") if key not in each]
        found += [f"a part has no {key}" for key in wrong]
        for item in each.get("items", []):
            if item.get("outcome") not in OUTCOMES or not isinstance(item.get("seconds"), int | float):
                found.append(f"an item of {each.get('name')} has no outcome or no seconds: {item.get('name')}")
    return found


def write(report: dict[str, Any], path: Path) -> None:
    """Write a report in one step, so that a reader never sees half of it."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


if __name__ == "__main__":
    print(json.dumps(facts()))
