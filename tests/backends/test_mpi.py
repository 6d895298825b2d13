"""Backend `mpi`: the backend contract under mpiexec, and the errors if MPI is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANKS = Path(__file__).with_name("mpi_ranks.py")
# The wheel of the extra `mpi` puts it beside Python.
MPIEXEC = Path(sys.executable).with_name("mpiexec")


def started(command: list[str], path: str = "", timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([path, str(ROOT)] if path else [str(ROOT)])}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)


# Over a second: each rank is a new interpreter that imports torch.
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("check", ["contract", "other_dtypes", "unequal_blocks", "callbacks", "faults"])
def test_under_mpiexec(check: str, size: int, tmp_path: Path) -> None:
    result = started([str(MPIEXEC), "-n", str(size), sys.executable, str(RANKS), check, str(tmp_path)])
    # mpiexec may join lines of several ranks.
    wanted = [f"rank {rank} of {size}: {check} passed" for rank in range(size)]
    assert result.returncode == 0 and all(line in result.stdout for line in wanted), result.stdout + result.stderr


ASK = """
import torchdist_ref as dist
try:
    dist.init_process_group("mpi", store=dist.HashStore(), rank=0, world_size=1)
    print("made")
    dist.destroy_process_group()
except dist.UnsupportedError as error:
    print(error)
"""


def test_a_single_rank_needs_no_mpiexec() -> None:
    assert started([sys.executable, "-c", ASK]).stdout == "made\n"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("raise ModuleNotFoundError('no mpi4py here')", "mpi4py is not installed"),
        ("class _:\n    pass\nraise RuntimeError('cannot load MPI library')", "no MPI library was found"),
        ("Query_thread = lambda: 1\nTHREAD_MULTIPLE = 3", "needs MPI_THREAD_MULTIPLE"),
    ],
)
def test_a_missing_mpi_is_an_error_that_names_the_remedy(module: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(module)
    said = started([sys.executable, "-c", ASK], str(tmp_path)).stdout
    assert words in said and ("pip install torchdist_ref[mpi]" in said or "thread_level" in said), said


ALONE = """
import torchdist_ref as dist
from torchdist_ref.testing import RankError, run
try:
    run(lambda rank: None, 2, backend="mpi")
except RankError as error:
    print(error)
"""


def test_ranks_that_mpiexec_did_not_start_raise_an_error() -> None:
    said = started([sys.executable, "-c", ALONE]).stdout
    assert "MPI knows 1 of them" in said and "mpiexec -n 2" in said
