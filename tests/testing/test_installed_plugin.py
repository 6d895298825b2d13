"""The pytest plugin of an installed wheel, in a repository that has nothing of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CONFTEST = 'pytest_plugins = ["torchdist_ref.testing.plugin"]\n'
TESTS = """
import os
import pytest
import torch
import torchdist_ref as dist

def test_it_is_the_installed_one():
    assert dist.__file__.startswith(os.environ["INSTALLED"])

@pytest.mark.spmd(world_size=64, ranks="simulated", seeds=3)
def test_sum(rank):
    tensor = torch.tensor([rank**2])
    dist.all_reduce(tensor)
    assert tensor.item() == sum(other**2 for other in range(64))

@pytest.mark.spmd(world_size=3, ranks="simulated", seeds=20)
def test_order(rank):
    if rank:
        dist.send(torch.tensor([rank]), 0)
    else:
        assert [dist.recv(torch.zeros(1, dtype=torch.int64)) for _ in range(2)] == [2, 1]
"""


@pytest.mark.long
def test_the_plugin_works_from_a_wheel_in_another_repository(tmp_path: Path) -> None:
    """Slow, 20 s: a wheel is built and installed, and a new interpreter loads torch."""
    built, installed, other = (tmp_path / name for name in ("built", "installed", "repository"))
    commands = (
        ("-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(ROOT)),
        ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(installed)),
    )
    subprocess.run([sys.executable, *commands[0]], check=True, capture_output=True, cwd=tmp_path)
    [wheel] = built.glob("*.whl")
    subprocess.run([sys.executable, *commands[1], str(wheel)], check=True, capture_output=True, cwd=tmp_path)
    other.mkdir()
    (other / "conftest.py").write_text(CONFTEST)
    (other / "test_ranks.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": str(installed), "INSTALLED": str(installed)}
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "-rA"]
    found = subprocess.run(command, cwd=other, env=environment, capture_output=True, text=True).stdout
    outcomes = {line.split("::")[1].split(" ")[0]: line.split(" ")[0] for line in found.splitlines() if "::" in line}
    assert outcomes == {"test_it_is_the_installed_one": "PASSED", "test_sum": "PASSED", "test_order": "FAILED"}, found
    assert "To repeat it: simulation.run(..., seed=" in found, found
