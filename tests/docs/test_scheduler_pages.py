"""The job files of the pages on Slurm, MPI and Kubernetes run as they stand; `srun` and the pods are simulated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.docs import pages
from tests.ports import reserve_port
from tests.processes.test_job_environment import STARTED, environment

HOW_TO = pages.DOCS / "how-to"
# As srun does, for each task: its own number and those of its host and its place there.
SRUN = """#!/bin/sh
while case "$1" in -*) ;; *) false ;; esac; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$SLURM_NTASKS SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST
rank=0
while [ $rank -lt $SLURM_NTASKS ]; do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % TASKS)) SLURM_NODEID=$((rank / TASKS)) "$@" & tasks="$tasks $!"
    rank=$((rank + 1))
done
code=0
for task in $tasks; do wait $task || code=$?; done
exit $code
"""
# Needs no torch: what a rank would form its group from.
SHOW = """
import os, sys
from torchdist_ref.processes.job_environment import derived, local_rank

found = {**derived(os.environ), **os.environ}
found.setdefault("LOCAL_RANK", local_rank(os.environ))
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
sys.stdout.write(" ".join(found[name] for name in names) + "\\n")
"""


def texts(page: str, language: str) -> list[str]:
    return [block.text for block in pages.blocks(HOW_TO / f"{page}.md") if block.language == language]


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run_all(
    commands: Sequence[tuple[Sequence[str], dict[str, str]]], folder: Path, python: str = sys.executable
) -> list[str]:
    """Run commands at once, each with variables of its own; return the lines that they print, sorted."""
    path = f"{folder}:{Path(python).parent}:{os.environ['PATH']}"
    running = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(PATH=path, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, variables in commands
    ]
    results = [process.communicate(timeout=100) for process in running]
    assert [process.returncode for process in running] == [0] * len(running), results
    return sorted(line for out, _ in results for line in out.splitlines())


def batch(number: int, folder: Path, script: str, python: str = sys.executable) -> list[str]:
    """Run a job file of the page as `sbatch` does, on simulated hosts; return what its ranks print, sorted."""
    job = texts("slurm", "bash")[number]
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", job, re.MULTILINE))
    hosts, tasks = int(asked["nodes"]), int(asked["ntasks-per-node"])
    (folder / "train.py").write_text(script)
    (folder / "job.sh").write_text(job.replace(":29400", f":{reserve_port()}"))
    program(folder / "srun", SRUN)
    program(folder / "scontrol", f"#!/bin/sh\nyes localhost | head -n {hosts}\n")
    subprocess.run(["sh", "-c", texts("slurm", "sh")[0]], env={**os.environ, "HOME": str(folder)}, check=True)
    variables = {
        **{"HOME": str(folder), "TASKS": str(tasks), "SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": "0"},
        **{"SLURM_JOB_NUM_NODES": str(hosts), "SLURM_NTASKS": str(hosts * tasks), "SLURM_JOB_NODELIST": "localhost"},
    }
    return run_all([(["bash", "job.sh"], variables)], folder, python)


def test_slurm_starts_the_script_with_torchs_variables_too(python_with_torch: str, tmp_path: Path) -> None:
    printed = batch(1, tmp_path, (HOW_TO / "train_anywhere.py").read_text(), python_with_torch)
    # What the page on MPI shows for two ranks: the same script, and the same numbers.
    assert printed == texts("mpi", "text")[0].splitlines()


@pytest.mark.parametrize(("number", "launched"), [(0, False), (2, True)], ids=["a task a rank", "a launcher a host"])
def test_slurm_starts_ranks_of_two_hosts(number: int, launched: bool, tmp_path: Path) -> None:
    ranks = [line.split() for line in batch(number, tmp_path, SHOW)]
    # Two hosts, two ranks on each; a port of Slurm's job, or of the attempt.
    assert [rank[:3] for rank in ranks] == [[str(r), "4", str(r % 2)] for r in range(4)]
    assert len({(address, port) for *_, address, port in ranks}) == 1
    assert launched or 20000 <= int(ranks[0][4]) < 30000


@pytest.mark.parametrize("launcher", ["MPICH", "OpenMPI"])
def test_variables_of_torch_under_mpiexec(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "torch_variables").write_text(texts("mpi", "bash")[0])
    shell = ["sh", "torch_variables", "sh", "-c", 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT"']
    assert run_all([(shell, STARTED[launcher])], tmp_path) == ["1 2 5 127.0.0.1 29500"]


def test_pods_of_a_kubernetes_job(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all(texts("kubernetes", "yaml")[0])
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    # The first pod has this name only if service, subdomain and selector belong together.
    assert variables["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["selector"] == {"job-name": name}
    assert spec["completions"] == spec["parallelism"] == int(variables["NNODES"])
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]

    (tmp_path / "train.py").write_text(SHOW)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "token").write_text("a token of more than sixteen bytes")
    *shell, text = container["command"]
    text = text.replace(f"{mount['mountPath']}/", f"{tmp_path}/secret/").replace("/tmp/token", "token-$MY_INDEX")
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
    pods = [
        ([*shell, text], {**variables, "JOB_COMPLETION_INDEX": str(index), "MY_INDEX": str(index)})
        for index in range(spec["completions"])
    ]
    ranks = [line.split() for line in run_all(pods, tmp_path)]
    assert [rank[:3] for rank in ranks] == [[str(r), "4", str(r % 2)] for r in range(4)]
