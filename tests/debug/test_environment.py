"""`python -m torchdist_ref env`: what a report of a defect needs, from the system's files as they are written."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchdist_ref
from torchdist_ref import schedules
from torchdist_ref.debug import environment

FILES = {
    "proc/meminfo": "MemTotal:       16384000 kB\nMemFree:         100000 kB\nMemAvailable:    8192000 kB\n",
    "sys/fs/cgroup/memory.max": "2147483648\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
    "proc/sys/kernel/yama/ptrace_scope": "1\n",
    "dev/shm/ours": "",
}
VARIABLES = {
    "TORCHDIST_REF_TOKEN": "hush",
    "TORCHDIST_REF_TOKEN_FILE": "/run/hush",
    "TORCHDIST_REF_ALGORITHM": "all_reduce=ring",
    "NCCL_DEBUG": "INFO",
    "RANK": "3",
    "RANKING": "high",
    "PATH": "/usr/bin",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def test_the_machine_is_read_from_the_systems_files(root: Path) -> None:
    found = environment.report(str(root), {})["machine"]
    assert (found["memory"], found["free memory"]) == ("16000 MiB", "8000 MiB")
    assert found["limit of the container"] == "2048 MiB"
    assert (found["huge pages"], found["tracing of processes"]) == ("advise", "ptrace_scope 1")
    assert found["cores"] == f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    assert found["free in /dev/shm"].endswith(" MiB")


def test_what_a_system_lacks_is_said(root: Path) -> None:
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    (root / "proc/meminfo").write_text("Something: else\n")
    (root / "dev/shm/ours").unlink()
    (root / "dev/shm").rmdir()
    (root / "proc/sys/kernel/yama/ptrace_scope").unlink()
    found = environment.report(str(root), {})["machine"]
    assert (found["limit of the container"], found["memory"]) == ("none", "unknown")
    assert (found["free in /dev/shm"], found["tracing of processes"]) == ("there is none", "unknown")


def test_variables_that_change_what_ranks_do_without_the_values_of_secrets(root: Path) -> None:
    found = environment.report(str(root), VARIABLES)["variables"]
    assert found == {
        "NCCL_DEBUG": "INFO",
        "RANK": "3",
        "TORCHDIST_REF_ALGORITHM": "all_reduce=ring",
        "TORCHDIST_REF_TOKEN": "(set; not shown)",
        "TORCHDIST_REF_TOKEN_FILE": "(set; not shown)",
    }
    assert "hush" not in environment.text({"variables": found})


def test_versions_backends_and_choices_are_those_of_the_library() -> None:
    found = environment.report(environment={})
    assert found["versions"]["torchdist_ref"] == torchdist_ref.__version__
    assert found["versions"]["Python"].startswith(f"{platform.python_version()}, ")
    assert found["versions"]["torch"].startswith(f"{torch.__version__}, built for ")
    assert found["backends"]["gloo"] == ("yes" if torch.distributed.is_gloo_available() else "no")
    chosen = schedules.choose("all_reduce", 4, 1 << 20, hosts=(0, 0, 1, 1))
    assert f"1 MiB: {chosen}," in found["choice of ref"]["all_reduce, 4 ranks, two hosts"]


def test_the_command_prints_all_sections() -> None:
    command = [sys.executable, "-m", "torchdist_ref", "env"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "RANK": "7"})
    assert done.returncode == 0, done.stderr
    sections = [line for line in done.stdout.splitlines() if not line.startswith("  ")]
    assert sections == [*environment.report()]
    assert "  RANK" in done.stdout and f"  torchdist_ref  {torchdist_ref.__version__}" in done.stdout
