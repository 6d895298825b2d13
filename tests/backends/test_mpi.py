"""Backend `mpi`: the backend contract under mpiexec, and the errors if MPI is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torchdist_ref as dist
from torchdist_ref.testing import run

CHECKS = ("contract", "other_dtypes", "unequal_blocks", "callbacks", "completion", "faults", "forked")
ROOT = Path(__file__).parents[2]
RANKS = Path(__file__).with_name("mpi_ranks.py")
# The wheel of the extra `mpi` puts it beside Python.
MPIEXEC = Path(sys.executable).with_name("mpiexec")


def started(command: list[str], timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def job(
    request: pytest.FixtureRequest, python_with_torch: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Any]:
    """Run all checks one after the other on new ranks of MPI; return their number and the outcome."""
    # Seconds: MPI's ranks wait busily, so four of them take long on two cores.
    size, folder = request.param, tmp_path_factory.mktemp("mpi")
    return size, started([str(MPIEXEC), "-n", str(size), python_with_torch, str(RANKS), str(folder), *CHECKS])


@pytest.mark.parametrize("check", CHECKS)
def test_under_mpiexec(check: str, job: tuple[int, Any]) -> None:
    size, result = job
    # mpiexec may join lines of several ranks.
    wanted = [f"rank {rank} of {size}: {check} passed" for rank in range(size)]
    assert all(line in result.stdout for line in wanted), result.stdout + result.stderr


def test_mpiexec_ends_well(job: tuple[int, Any]) -> None:
    assert job[1].returncode == 0, job[1].stdout + job[1].stderr


ASK = """
import torchdist_ref as dist
dist.init_process_group("mpi", store=dist.HashStore(), rank=0, world_size=1)
print("made")
dist.destroy_process_group()
"""


def test_a_single_rank_needs_no_mpiexec(python_with_torch: str) -> None:
    assert started([python_with_torch, "-c", ASK]).stdout == "made\n"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("raise ModuleNotFoundError('no mpi4py here')", "mpi4py is not installed"),
        ("class _:\n    pass\nraise RuntimeError('cannot load MPI library')", "no MPI library was found"),
        ("Query_thread = lambda: 1\nTHREAD_MULTIPLE = 3", "needs MPI_THREAD_MULTIPLE"),
    ],
)
def test_a_missing_mpi_is_an_error_that_names_the_remedy(module: str, words: str, tmp_path: Path) -> None:
    def program(rank: int) -> str:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
            del sys.modules[name]
        sys.path.insert(0, str(tmp_path))
        with pytest.raises(dist.UnsupportedError) as caught:
            dist.init_process_group("mpi", store=dist.HashStore(), rank=0, world_size=1)
        return str(caught.value)

    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(module)
    said = run(program, 1, ranks="processes", init=False)[0]
    assert words in said and ("pip install 'torchdist_ref[mpi]'" in said or "thread_level" in said), said


ALONE = """
import torchdist_ref as dist
from torchdist_ref.testing import RankError, run
try:
    run(lambda rank: None, 2, backend="mpi")
except RankError as error:
    print(error)
"""


def test_ranks_that_mpiexec_did_not_start_raise_an_error(python_with_torch: str) -> None:
    said = started([python_with_torch, "-c", ALONE]).stdout
    assert "MPI knows 1 of them" in said and "mpiexec -n 2" in said
