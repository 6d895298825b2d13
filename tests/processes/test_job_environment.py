"""Scripts that say ``init_process_group()`` and no more, under torchrun, mpiexec and Slurm's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as c10d

import torchdist_ref as dist
from torchdist_ref.errors import RendezvousError
from torchdist_ref.processes.job_environment import derived, first_host, ranks_on_this_host
from torchdist_ref.rendezvous import rendezvous

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
import torchdist_ref as dist

dist.init_process_group()
tensor = torch.tensor([dist.get_rank() ** 2 + 1])
dist.all_reduce(tensor)
line = f"rank {dist.get_rank()} of {dist.get_world_size()} has {tensor.item()} on {dist.get_backend()}\\n"
# In one piece, end included: mpiexec passes on what it gets as it gets it.
sys.stdout.write(line)
dist.destroy_process_group()
"""
WANTED = ["rank 0 of 2 has 3 on ref", "rank 1 of 2 has 3 on ref"]
OURS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_", "MPI_", "SLURM_")


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


def environment(**more: str) -> dict[str, str]:
    """This process's, without what a launcher of jobs would have set."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**plain, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def lines(*commands: tuple[list[str], dict[str, str]]) -> list[str]:
    """What processes print that run at once, sorted; each must end well."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=env, **pipes) for command, env in commands]
    results = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0] * len(running), results
    return sorted(line for out, _ in results for line in out.splitlines())


def test_under_torchrun(script: str, python_with_torch: str) -> None:
    command = [python_with_torch, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    assert lines((command, environment())) == WANTED


# A shell between mpiexec and the rank is what many job scripts have.
def test_under_mpiexec(script: str, python_with_torch: str) -> None:
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    python = python_with_torch
    command = [mpiexec, "-n", "1", python, script, ":", "-n", "1", "sh", "-c", f"{python} {script}; :"]
    assert lines((command, environment())) == WANTED


def slurm(rank: int) -> dict[str, str]:
    place = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
    return environment(**place, SLURM_JOB_ID=str(os.getpid()), SLURM_STEP_ID="0", SLURM_JOB_NODELIST="localhost")


def test_with_slurms_variables(script: str, python_with_torch: str) -> None:
    assert lines(*(([python_with_torch, script], slurm(rank)) for rank in range(2))) == WANTED


STARTED = {
    "MPICH": {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "5"},
    "OpenMPI": {
        **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        **{"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "5"},
    },
    "Slurm": {
        **{"SLURM_PROCID": "1", "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "2"},
        **{"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_LOCALID": "5"},
    },
}


@pytest.mark.parametrize("launcher", STARTED)
def test_variables_that_are_set_are_not_derived(launcher: str) -> None:
    given = STARTED[launcher]
    found = derived(given)
    host = "n3" if launcher == "Slurm" else "127.0.0.1"
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("1", "2", host)
    assert 20000 <= int(found["MASTER_PORT"]) < 30000
    assert derived({**given, "MASTER_ADDR": "a", "MASTER_PORT": "1"}).keys() == {"RANK", "WORLD_SIZE"}
    # A rank of one's own and somebody else's size would not go together.
    for name in ("RANK", "WORLD_SIZE"):
        assert derived({**given, name: "0"}).keys() == {"MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.parametrize("launcher", STARTED)
def test_local_rank_is_derived_only_where_nothing_else_names_it(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)
    for name, value in STARTED[launcher].items():
        monkeypatch.setenv(name, value)
    # torch returns the fallback here, and raises without one.
    assert (dist.get_node_local_rank(), dist.get_node_local_rank(7), c10d.get_node_local_rank(7)) == (5, 7, 7)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_node_local_rank() == dist.get_node_local_rank(7) == 3


def test_mpiexec_within_a_slurm_job_takes_precedence() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_JOB_ID": "77"}
    found = derived({**batch, "PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"})
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("5", "8", "n3")
    assert (
        found["MASTER_PORT"] == derived(batch)["MASTER_PORT"] != derived({**batch, "SLURM_JOB_ID": "78"})["MASTER_PORT"]
    )


def test_a_step_of_slurm_on_one_host_meets_on_the_loopback() -> None:
    step = {**STARTED["Slurm"], "SLURM_STEP_NUM_NODES": "1"}
    assert (ranks_on_this_host(step), derived(step)["MASTER_ADDR"]) == (2, "127.0.0.1")
    others = (
        {**step, "SLURM_STEP_NUM_NODES": "2"},
        # Each part of a heterogeneous job counts its own hosts.
        {**step, "SLURM_HET_SIZE": "2"},
        # Ranks of MPICH inherit the variables of the step in which its mpiexec runs.
        {**step, "PMI_RANK": "0", "PMI_SIZE": "2"},
    )
    for given in others:
        assert (ranks_on_this_host(given), derived(given)["MASTER_ADDR"]) == (0, "n3")


@pytest.mark.parametrize("given", [{}, {"PMI_RANK": "0"}, {"SLURM_PROCID": "0"}, {"SLURM_NTASKS": "2"}])
def test_without_a_known_launcher_nothing_is_derived(given: dict[str, str]) -> None:
    assert derived(given) == {}


def test_unknown_master_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)
    for name, value in {**STARTED["MPICH"], "MPI_LOCALNRANKS": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match="MASTER_ADDR expected, but not set"):
        next(rendezvous("env://"))


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1,3-4]", "n1"), ("a[01-10]-ib,b", "a01-ib"), ("a.b-[9],c", "a.b-9")],
)
def test_slurms_lists_of_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
