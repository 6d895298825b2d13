"""The table of what each backend can do: measured on ranks, kept as JSON, shown by the site.

CPU cells are measured anew by a test. CUDA cells are measured where there is a device, by ``python -m
tests.capabilities --cuda`` or by `tests.gpu`, and otherwise kept as they were recorded. Until somebody has recorded
them they say so.
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
from torchdist_ref.testing import run, simulated_device

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "reference" / "capabilities.json"
CPU = ("ref", "gloo", "mpi")
CUDA = ("ref", "gloo", "mpi", "nccl")
UNKNOWN = "not measured here"
WORLD = 2
MPIEXEC = Path(sys.executable).with_name("mpiexec")


def on_cpu(backend: str, python: str = sys.executable) -> Cells:
    """Measure a backend with two ranks, on CPU tensors; `python` is what mpiexec starts."""
    if backend == "mpi":
        return _under_mpiexec(python=python)
    results = run(lambda rank: measured(), WORLD, backend=backend, ranks="processes")
    return agreed(results)


def agreed(results: list[Cells]) -> Cells:
    """What all ranks found; where they differ, all of it."""
    first = results[0]
    return {
        name: {aspect: " / ".join(dict.fromkeys(cells[name][aspect] for cells in results)) for aspect in ASPECTS}
        for name in first
    }


def _under_mpiexec(device: str = "cpu", python: str = sys.executable) -> Cells:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(MPIEXEC),
            "-n",
            str(WORLD),
            python,
            "-m",
            "tests.capabilities",
            "--mpi-rank",
            folder,
            device,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=os.environ)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return agreed([json.loads((Path(folder) / str(rank)).read_text()) for rank in range(WORLD)])


def missing_on_device(backend: str, gpus: int, device: str = "cuda") -> str:
    """Return the reason why a backend cannot be measured on tensors of a device here; empty if it can."""
    if device == "sim":
        return "" if backend == "ref" else f"{backend} takes no tensors of simulated devices"
    if backend == "nccl" and gpus < WORLD:
        return f"not measured: two ranks of nccl need two GPUs, and there was {gpus}"
    if backend == "mpi" and not MPIEXEC.exists():
        return "not measured: no mpiexec was installed"
    return ""


def on_cuda(backend: str) -> Cells | str:
    """Measure a backend with two ranks, on CUDA tensors; return the reason if it cannot be measured.

    The ranks share the devices. They are forked from a process of their own, because CUDA survives no fork.
    """
    reason = missing_on_device(backend, torch.cuda.device_count())
    if reason:
        return reason
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cells")
        command = [sys.executable, "-m", "tests.capabilities", "--device-cells", "cuda", backend, str(path)]
        environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        cells: Cells = json.loads(path.read_text(encoding="utf-8"))
        return cells


def here_on_device(device: str, backend: str) -> Cells:
    """Measure a backend on tensors of a device, in children of this process, which must not have used the device."""
    if device == "sim":
        simulated_device.install()
    if backend == "mpi":
        return _under_mpiexec(device)

    def program(rank: int) -> Cells:
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
        return measured(device)

    return agreed(run(program, WORLD, backend=backend, ranks="processes"))


def kept() -> dict[str, Any]:
    """The table as it was last written."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def written(cpu: dict[str, Cells], cuda: dict[str, Any]) -> None:
    """Write the table with CPU cells measured now; CUDA cells keep the note of their own run."""
    today = datetime.date.today().isoformat()
    table = {"torch": torch.__version__, "date": today, "world": WORLD, "cpu": cpu, "cuda": cuda}
    run = kept().get("cuda_run", "") if FILE.exists() else ""
    save(table | {"cuda_run": run})


def with_cuda(cells: dict[str, Any], run: str) -> dict[str, Any]:
    """Return the table with new CUDA cells, and the date, machine and torch of their run; others stay as they were."""
    table = kept()
    return table | {"cuda": {name: cells.get(name, table["cuda"].get(name, UNKNOWN)) for name in CUDA}, "cuda_run": run}


def save(table: dict[str, Any]) -> None:
    """Write the table."""
    FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
