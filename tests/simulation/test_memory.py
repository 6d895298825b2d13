"""Memory of a simulated world: estimated, and refused before the run where the machine has less."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torchdist_ref as dist
from torchdist_ref import simulation
from torchdist_ref.simulation import memory


def system(root: Path, **files: str) -> Path:
    names = {"meminfo": "proc/meminfo", **{name: f"sys/fs/cgroup/memory.{name}" for name in ("max", "current", "stat")}}
    for name, text in files.items():
        path = root / names[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_what_is_left_is_the_machine_s_or_the_container_s(tmp_path: Path) -> None:
    assert memory.available_bytes(tmp_path) is None
    machine = "MemTotal:       16000 kB\nMemAvailable:    9000 kB\n"
    assert memory.available_bytes(system(tmp_path, meminfo=machine)) == 9000 * 1024
    system(tmp_path, max="max\n", current="4096\n")
    assert memory.available_bytes(tmp_path) == 9000 * 1024
    system(tmp_path, max="1000000\n", current="800000\n", stat="anon 500000\ninactive_file 100000\n")
    assert memory.available_bytes(tmp_path) == 300_000
    system(tmp_path, current="2000000\n", stat="")
    assert memory.available_bytes(tmp_path) == 0


def test_a_world_that_does_not_fit_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: memory.needed_bytes(100))
    ran = []
    with pytest.raises(dist.ArgumentError) as caught:
        simulation.run(ran.append, 101)
    text = str(caught.value)
    assert "argument 'world_size' must be a number of ranks that fit in memory: 101 need about 0.257 GiB" in text
    assert text.endswith("got 101. This machine has 0.254 GiB left.") and not ran
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    simulation.run(ran.append, 3)
    assert sorted(ran) == [0, 1, 2]


MEASURED = """
import resource, sys, torch
import torchdist_ref as dist
from torchdist_ref import simulation
world = int(sys.argv[1])

def used():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

tensor = torch.zeros(1 << 18)
def program(rank):
    for _ in range(3):
        dist.all_reduce(tensor)
simulation.run(program, 2)
before = used()
simulation.run(program, world)
print(used() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the measurement reads /proc")
@pytest.mark.parametrize("world", [48, pytest.param(80, marks=pytest.mark.long)])
def test_the_estimate_is_of_the_size_that_a_run_needs(world: int) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURED, str(world)], capture_output=True, text=True, check=True)
    measured = int(done.stdout) * 1024
    assert 0.5 * measured < memory.needed_bytes(world) < 2.5 * measured, f"{measured} bytes"
