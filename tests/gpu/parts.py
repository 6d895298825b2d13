"""Parts of a run: the marked tests, the table of capabilities, the collectives, and the tutorials on `ref` and `nccl`.

Each part gets a deadline, runs subprocesses until then, and returns its results. It raises nothing: a subprocess that
crashes or hangs is a result too.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import marked_tests, supervise
from tests.gpu.cells import CELL_SECONDS, code_cells
from tests.gpu.report import BAD, part
from tests.gpu.supervise import ROOT, Events
from torchdist_ref.benchmark.operations import OPERATIONS

TEST_SECONDS = 60.0
# A process that has less time is not started.
LEAST_SECONDS = 5.0
CAPABILITY_SECONDS = 60.0
COLLECTIVES_SECONDS = 90.0
NO_DEVICE = "no CUDA device"
NO_TIME = "no time was left"
TUTORIALS = ROOT / "tutorials"
# Words of files with tests on devices.
ON_DEVICES = ("mark.gpu", "@on_each_device", "@on_sim")


@dataclass
class Setting:
    """Device of a run, and what it runs.

    Attributes:
        device: ``cuda``, ``sim`` or ``cpu``; empty if the run is for a GPU and there is none.
        gpus: Number of GPUs.
        tutorials: Notebooks.
        tests: Files of tests; those with tests on devices if empty.
        test_seconds: Time for one test.
        cell_seconds: Time for one cell.
        ranks: Largest number of ranks of a tutorial on `ref`.
        operations: Collectives that are timed.
        sizes: Their sizes.
    """

    device: str
    gpus: int
    tutorials: list[Path] = field(default_factory=lambda: sorted(TUTORIALS.glob("*.ipynb")))
    tests: list[str] = field(default_factory=list)
    test_seconds: float = TEST_SECONDS
    cell_seconds: float = CELL_SECONDS
    ranks: int = 16
    operations: str = ",".join(OPERATIONS)
    sizes: str = "1K,1M,16M"


def left(deadline: float) -> float:
    """Return the seconds until a deadline on the monotonic clock."""
    return deadline - time.monotonic()


def item(name: str, outcome: str, seconds: float = 0.0, reason: str = "", **more: Any) -> dict[str, Any]:
    """Return one result."""
    return {"name": name, "outcome": outcome, "seconds": seconds, "reason": reason, **more}


def broken(ended: supervise.Ended) -> tuple[str, str]:
    """Return the outcome and the reason for what ran when a process ended early."""
    hung = ended.timed_out or "Timeout (" in ended.tail
    return "timed out" if hung else "crashed", f"{ended.why}\n{ended.tail}"


def marked(setting: Setting, deadline: float) -> dict[str, Any]:
    """Run the tests on devices: those marked ``gpu``, or those marked ``sim``.

    Without a GPU each one that is marked reports why it is skipped.
    """
    started = time.monotonic()
    files = setting.tests or sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").glob("*/test_*.py")
        if any(words in path.read_text(encoding="utf-8") for words in ON_DEVICES) and path.parent.name != "gpu"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", marked_tests.__name__, "-p", "no:cacheprovider"]
    # Without NumPy, torch warns at import, and the tests make errors of warnings.
    command += ["-W", "ignore:Failed to initialize NumPy:UserWarning"]
    selected = ["-m", setting.device if setting.device == "sim" else "gpu"]
    items: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="torchdist_ref-gpu-") as folder:
        events = Events(Path(folder, "events"))
        settings = {marked_tests.EVENTS: str(events.path), marked_tests.SECONDS: str(setting.test_seconds)}
        reason = ""
        while not reason:
            if left(deadline) < LEAST_SECONDS:
                reason = NO_TIME
                break
            ended = supervise.run([*command, *selected, *files], left(deadline), settings)
            before, stack = len(items), marked_tests.stack_of(events)
            ended.tail += stack.read_text(encoding="utf-8") if stack.exists() else ""
            for event in events.read():
                if event["event"] == "end":
                    items[event["name"]] = item(event["name"], event["outcome"], event["seconds"], event["reason"])
                elif event["name"] not in items:
                    items[event["name"]] = item(event["name"], "started")
            begun = [name for name, found in items.items() if found["outcome"] == "started"]
            for name in begun:
                outcome, why = broken(ended)
                items[name] = item(name, outcome, ended.seconds, why)
            if not begun and ended.code in (0, 1, 5):
                break
            if len(items) == before:
                # It ended before the first test: a second try would do the same.
                reason = f"{ended.why}\n{ended.tail}"
    found = list(items.values())
    if reason:
        found.append(item("the other tests", "not run", 0.0, reason))
    return part("tests", found, time.monotonic() - started, reason)


def capabilities(setting: Setting, deadline: float) -> dict[str, Any]:
    """Measure the cells of the table on a device, each backend in a process of its own."""
    from tests.capabilities import table

    started = time.monotonic()
    items, cells = [], {}
    for number, backend in enumerate(table.CUDA):
        lacks = table.missing_on_device(backend, setting.gpus, setting.device)
        if setting.device not in ("cuda", "sim"):
            items.append(item(backend, "skipped", 0.0, NO_DEVICE if not setting.device else "for tensors of devices"))
        elif lacks:
            cells[backend] = lacks
            items.append(item(backend, "skipped", 0.0, lacks))
        elif left(deadline) < LEAST_SECONDS:
            items.append(item(backend, "not run", 0.0, NO_TIME))
        else:
            share = min(CAPABILITY_SECONDS, left(deadline) / (len(table.CUDA) - number) + LEAST_SECONDS)
            with tempfile.TemporaryDirectory(prefix="torchdist_ref-gpu-") as folder:
                path = Path(folder, "cells")
                command = [
                    sys.executable,
                    "-m",
                    "tests.capabilities",
                    "--device-cells",
                    setting.device,
                    backend,
                    str(path),
                ]
                ended = supervise.run(command, min(share, left(deadline)))
                if ended.why:
                    items.append(
                        item(
                            backend,
                            "timed out" if ended.timed_out else "failed",
                            ended.seconds,
                            f"{ended.why}\n{ended.tail}",
                        )
                    )
                else:
                    cells[backend] = json.loads(path.read_text(encoding="utf-8"))
                    items.append(item(backend, "passed", ended.seconds))
    return part("capabilities", items, time.monotonic() - started, cells=cells)


def collectives(setting: Setting, deadline: float) -> dict[str, Any]:
    """Time the collectives: two ranks of `ref` on one device, and `nccl` with a rank for each GPU."""
    started = time.monotonic()
    items, rows = [], []
    for backend, world in (("ref", 2), ("nccl", setting.gpus)):
        if not setting.device:
            items.append(item(backend, "skipped", 0.0, NO_DEVICE))
        elif backend == "nccl" and (setting.device != "cuda" or world < 2):
            items.append(
                item(backend, "skipped", 0.0, f"two ranks of nccl need two GPUs, and there are {setting.gpus}")
            )
        elif left(deadline) < LEAST_SECONDS:
            items.append(item(backend, "not run", 0.0, NO_TIME))
        else:
            with tempfile.TemporaryDirectory(prefix="torchdist_ref-gpu-") as folder:
                events = Events(Path(folder, "events"))
                command = [sys.executable, "-m", "tests.gpu.collectives", str(events.path), setting.device, str(world)]
                ended = supervise.run(
                    [*command, setting.operations, setting.sizes, backend], min(COLLECTIVES_SECONDS, left(deadline))
                )
                rows += events.read()
            outcome, why = broken(ended) if ended.why else ("passed", "")
            items.append(
                item(backend, "failed" if ended.code == 1 and outcome == "crashed" else outcome, ended.seconds, why)
            )
    return part("collectives", items, time.monotonic() - started, rows=rows)


def tutorials(backend: str) -> Callable[[Setting, float], dict[str, Any]]:
    """Return the part that runs the tutorials on a backend."""

    def run(setting: Setting, deadline: float) -> dict[str, Any]:
        started = time.monotonic()
        items: list[dict[str, Any]] = []
        for number, notebook in enumerate(setting.tutorials):
            reason = unable(notebook, backend, setting)
            if reason:
                items.append(item(notebook.stem, "skipped", 0.0, reason))
                continue
            share = max(left(deadline) / (len(setting.tutorials) - number) * 2, LEAST_SECONDS)
            items += of_notebook(notebook, backend, setting, min(share, left(deadline)))
        return part(f"tutorials on {backend}", items, time.monotonic() - started)

    return run


def unable(notebook: Path, backend: str, setting: Setting) -> str:
    """Return the reason why a notebook cannot run on a backend here; empty if it can."""
    if not setting.device:
        return NO_DEVICE
    if backend == "nccl" and setting.device != "cuda":
        return "nccl needs CUDA tensors"
    metadata = json.loads(notebook.read_text(encoding="utf-8"))["metadata"].get("torchdist_ref", {})
    about = metadata.get("backends")
    if setting.device not in metadata.get("devices", [setting.device]):
        return "about simulated devices alone"
    return f"about {' and '.join(about)} alone" if about and backend not in about else ""


def of_notebook(notebook: Path, backend: str, setting: Setting, seconds: float) -> list[dict[str, Any]]:
    """Return the results of a notebook's cells.

    A cell that failed with fewer ranks than it is written for runs again on CPU tensors with as few: where it fails
    there too, the number of ranks is the reason, and the cell is skipped.
    """
    end = time.monotonic() + seconds
    limit = setting.gpus if backend == "nccl" else setting.ranks
    found = executed(notebook, backend, setting.device, limit, setting.cell_seconds, left(end))
    doubtful = [each for each in found if each["outcome"] == "failed" and each["reason"].startswith("written for")]
    if doubtful and left(end) > LEAST_SECONDS:
        control = "gloo" if backend == "nccl" else backend
        there = executed(notebook, control, "cpu", limit, setting.cell_seconds, left(end))
        outcomes = {each["name"]: each["outcome"] for each in there}
        for each in doubtful:
            if outcomes.get(each["name"]) == "failed":
                first, _, rest = each["reason"].partition("\n")
                each["outcome"] = "skipped"
                each["reason"] = f"needs more ranks: {first}, and fails on the CPU too\n{rest}"
    return found


def executed(
    notebook: Path, backend: str, device: str, ranks: int, cell_seconds: float, seconds: float
) -> list[dict[str, Any]]:
    """Run a notebook in a process, and return a result for each of its cells."""
    total = len(code_cells(notebook))
    if seconds < LEAST_SECONDS:
        return [item(notebook.stem, "not run", 0.0, NO_TIME)]
    with tempfile.TemporaryDirectory(prefix="torchdist_ref-gpu-") as folder:
        events = Events(Path(folder, "events"))
        command = [sys.executable, "-m", "tests.gpu.cells", str(notebook), str(events.path), "--backend", backend]
        command += ["--device", device, "--ranks", str(ranks), "--cell-seconds", str(cell_seconds)]
        ended = supervise.run(command, seconds)
        seen = events.read()
    done = {event["number"]: event for event in seen if event["event"] == "end"}
    begun = max([event["number"] for event in seen], default=0)
    items = []
    for number in range(1, total + 1):
        name = f"{notebook.stem}, cell {number}"
        if number in done:
            event = done[number]
            more = {"ranks": event["ranks"], "output": event["output"]}
            items.append(item(name, event["outcome"], event["seconds"], event["reason"], **more))
        elif number == max(begun, 1):
            outcome, why = broken(ended)
            items.append(item(name, outcome, 0.0, why))
        else:
            items.append(item(name, "not run", 0.0, f"an earlier cell ended the process: {ended.why}"))
    if ended.why and all(each["outcome"] not in BAD for each in items):
        items.append(item(f"{notebook.stem}, end", *_ended_late(ended)))
    return items


def _ended_late(ended: supervise.Ended) -> tuple[str, float, str]:
    outcome, why = broken(ended)
    return outcome, ended.seconds, why


# Part by name: the function, and its share of the time. Time that a part leaves goes to those after it.
PARTS: dict[str, tuple[Callable[[Setting, float], dict[str, Any]], float]] = {
    "tests": (marked, 3.0),
    "capabilities": (capabilities, 1.5),
    "collectives": (collectives, 1.5),
    "ref": (tutorials("ref"), 4.0),
    "nccl": (tutorials("nccl"), 1.5),
}
