"""The table of what each backend can do: measured on ranks, kept as JSON, shown by the site.

CPU cells are measured anew by a test. CUDA cells are measured where there is a device, by ``python -m
tests.capabilities --cuda``, and otherwise kept as they were recorded; until somebody has recorded them they say so.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.capabilities.measure import ASPECTS, Cells, measured
from torchdist_ref.testing import run

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "reference" / "capabilities.json"
CPU = ("ref", "gloo", "mpi")
CUDA = ("ref", "gloo", "mpi", "nccl")
UNKNOWN = "not measured here"
WORLD = 2
MPIEXEC = Path(sys.executable).with_name("mpiexec")


def on_cpu(backend: str) -> Cells:
    """Measure a backend with two ranks, on CPU tensors."""
    if backend == "mpi":
        return _under_mpiexec()
    results = run(lambda rank: measured(), WORLD, backend=backend, ranks="processes")
    return agreed(results)


def agreed(results: list[Cells]) -> Cells:
    """What all ranks found; where they differ, all of it."""
    first = results[0]
    return {
        name: {aspect: " / ".join(dict.fromkeys(cells[name][aspect] for cells in results)) for aspect in ASPECTS}
        for name in first
    }


def _under_mpiexec() -> Cells:
    with tempfile.TemporaryDirectory() as folder:
        command = [str(MPIEXEC), "-n", str(WORLD), sys.executable, "-m", "tests.capabilities", "--mpi-rank", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=os.environ)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return agreed([json.loads((Path(folder) / str(rank)).read_text()) for rank in range(WORLD)])


def on_cuda(backend: str) -> Cells:
    """Measure a backend on CUDA tensors: with one rank for each device, at most two."""
    ranks = min(WORLD, torch.cuda.device_count())

    def program(rank: int) -> Cells:
        torch.cuda.set_device(rank)
        return measured("cuda")

    return agreed(run(program, ranks, backend=backend, ranks="processes"))


def kept() -> dict[str, Any]:
    """The table as it was last written."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def written(cpu: dict[str, Cells], cuda: dict[str, Any]) -> None:
    """Write the table."""
    today = datetime.date.today().isoformat()
    table = {"torch": torch.__version__, "date": today, "world": WORLD, "cpu": cpu, "cuda": cuda}
    FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
