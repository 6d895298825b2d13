"""An installed wheel in a repository of another project: pytest plugin, simulated device, acid test, a tutorial.

Slow, 40 s together: a wheel is built and installed into an environment of its own, which borrows torch and pytest from
this one, and each test starts interpreters that import torch. The simulated device is compiled once for each torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acid.test_acid import left, outcomes
from tests.on_sim import missing
from tests.release.scripts import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
PLUGIN = 'pytest_plugins = ["torchdist_ref.testing.plugin"]\n'
RANKS = """
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
DEVICE = """
import pytest
from torchdist_ref.testing import simulated_device

simulated_device.install(devices=2)

@pytest.fixture(autouse=True, params=["late", "none", 7])
def delay(request):
    with simulated_device.delay(request.param):
        yield request.param
"""
TRAINING = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchdist_ref import testing

def doubled(waits):
    side, tensor = torch.Stream("sim"), torch.ones(3, device="sim")
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        result = (tensor * 2).to("cpu", non_blocking=True)
    side.synchronize()
    return result.tolist()

def test_a_wait_gives_the_right_result():
    assert doubled(waits=True) == [2, 2, 2]

def test_a_forgotten_wait():
    assert doubled(waits=False) == [2, 2, 2]

def test_torchs_ddp_on_one_rank(tmp_path):
    assert testing.__file__.startswith(os.environ["INSTALLED"])
    dist.init_process_group("ref", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False).to("sim:1"))
    model(torch.tensor([[3.0, 5.0]], device="sim:1")).sum().backward()
    assert model.module.weight.grad.tolist() == [[3.0, 5.0]]
    dist.destroy_process_group()
"""
BACKEND = """
import torch.distributed as dist

def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("acme", create, devices=["cpu"])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel, and with what this interpreter has but for this project."""
    folder = tmp_path_factory.mktemp("installed")

    def run(*command: str) -> None:
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr

    run("build", "--wheel", "--no-isolation", "--outdir", str(folder / "built"), str(ROOT))
    [wheel] = (folder / "built").glob("*.whl")
    run("venv", "--without-pip", str(folder / "venv"))
    run("pip", "--python", str(folder / "venv"), "install", "-q", "--no-deps", "--no-index", str(wheel))
    [site] = (folder / "venv").glob("lib/python*/site-packages")
    # A path in such a file comes after the environment's own, and files like it that lie there are not read.
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "venv"


@pytest.fixture
def run_there(installed: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python of the environment in a folder of another project."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"INSTALLED": str(installed), "PATH": f"{installed / 'bin'}{os.pathsep}{environment['PATH']}"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        python = str(installed / "bin" / "python")
        return subprocess.run([python, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def results(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """Return the outcomes of each test function in a report of pytest."""
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        outcome, _, name = line.partition(" ")
        if "::" in name:
            found.setdefault(name.split("::")[1].split(" ")[0].split("[")[0], []).append(outcome)
    return found


def test_the_plugin_alone(run_there: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_ranks.py").write_text(RANKS)
    done = run_there("-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "-rA")
    expected = {"test_it_is_the_installed_one": ["PASSED"], "test_sum": ["PASSED"], "test_order": ["FAILED"]}
    assert results(done) == expected, done.stdout + done.stderr
    assert "To repeat it: simulation.run(..., seed=" in done.stdout, done.stdout


def test_the_simulated_device_alone(run_there: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    if missing():
        pytest.skip(missing())
    assert len(DEVICE.strip().splitlines()) <= 10
    (tmp_path / "conftest.py").write_text(DEVICE)
    (tmp_path / "test_training.py").write_text(TRAINING)
    done = run_there("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA")
    found = results(done)
    assert found["test_a_wait_gives_the_right_result"] == ["PASSED"] * 3, done.stdout + done.stderr
    assert found["test_torchs_ddp_on_one_rank"] == ["PASSED"] * 3, done.stdout + done.stderr
    # What runs late shows the mistake, and what runs at once hides it.
    assert "FAILED test_training.py::test_a_forgotten_wait[late]" in done.stdout, done.stdout
    assert "PASSED test_training.py::test_a_forgotten_wait[none]" in done.stdout, done.stdout


def test_the_acid_test_of_a_backend_of_another_project(
    run_there: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "acme.py").write_text(BACKEND)
    options = ("--backend", "acme", "--import", "acme", "--only", "all_reduce of", "--seconds", "100")
    done = run_there("-m", "torchdist_ref.acid", *options, "--report", str(tmp_path / "report"))
    found = outcomes(done)
    # Gloo's answers, as it has another name here.
    assert len(found) >= 5 and found.pop("all_reduce of a strided tensor") == "fail", done.stdout + done.stderr
    assert set(found.values()) == {"pass"} and done.returncode == 1, done.stdout
    kept = json.loads((tmp_path / "report" / "report.json").read_text())
    assert kept["about"]["imported"] == "acme" and len(kept["checks"]) == len(found) + 1
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.json", "report.html", "badge.svg"}
    assert not left(str(tmp_path))


def test_a_tutorial(run_there: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """nbclient runs it, as `jupyter execute` does; the build of the site unpacks and runs the archive of each."""
    [source] = (ROOT / "tutorials").glob("01_*.ipynb")
    shutil.copy(source, tmp_path)
    done = run_there("-c", "from nbclient.cli import main; main()", "--output", "executed", source.name)
    assert done.returncode == 0, done.stdout + done.stderr
    [executed] = tmp_path.glob("executed*")
    cells = json.loads(executed.read_text())["cells"]
    assert sum(bool(cell.get("outputs")) for cell in cells) >= 3
