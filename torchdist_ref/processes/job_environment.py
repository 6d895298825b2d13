"""RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, derived from the variables of mpiexec or Slurm.

Only missing variables are derived. Rank and world size are derived both or not at all. The address is derived if it is
certain: the loopback address if all ranks are on one host, else the first host of Slurm's list. The port is between
20000 and 29999, the same for all ranks of a job, and probably another for another job. Do not read other variables of
torch's launcher here.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Variables = Mapping[str, str]
_FIRST_PORT, _PORTS, _USUAL_PORT = 20000, 10000, 29500
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_HEAD = re.compile(r"([^,\[]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?")


@dataclass(frozen=True)
class JobLauncher:
    """Names of the variables that one launcher of jobs sets.

    Attributes:
        rank: Variable of the rank.
        sizes: Variables of the world size; the first one that is set counts.
        local_rank: Variable of the rank among those of this host.
        local_size: Variable of the number of ranks on this host.
        hosts: Variable of the number of hosts, where there is none of the ranks on this one.
    """

    rank: str
    sizes: tuple[str, ...]
    local_rank: str
    local_size: str = ""
    hosts: str = ""


# In this order: ranks of mpiexec in a Slurm job inherit Slurm's variables, which describe mpiexec's own process.
LAUNCHERS = (
    *(
        JobLauncher(f"{name}_RANK", (f"{name}_SIZE",), f"{name}_LOCAL_RANK", f"{name}_LOCAL_SIZE")
        for name in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD")
    ),
    JobLauncher("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    JobLauncher(
        "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID", hosts="SLURM_STEP_NUM_NODES"
    ),
)


def derived(environment: Variables) -> dict[str, str]:
    """Return those of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT that are missing and can be derived.

    Args:
        environment: Variables of the process.

    Returns:
        Derived variables; empty if neither mpiexec nor Slurm started the process.

    >>> found = derived({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "MASTER_PORT": "7000"})
    >>> found
    {'RANK': '1', 'WORLD_SIZE': '4', 'MASTER_ADDR': '127.0.0.1'}
    """
    launcher = _launcher(environment)
    if launcher is None:
        return {}
    rank, size = environment[launcher.rank], _size(environment, launcher)
    unset = "RANK" not in environment and "WORLD_SIZE" not in environment
    found = {"RANK": rank, "WORLD_SIZE": size} if unset else {}
    found |= {"MASTER_ADDR": _address(environment, launcher, size), "MASTER_PORT": _port(environment)}
    return {name: value for name, value in found.items() if value and not environment.get(name)}


def ranks_on_this_host(environment: Variables) -> int:
    """Return the number of the job's ranks on this host as its launcher reports it; 0 if it does not.

    >>> ranks_on_this_host({"PMI_RANK": "1", "MPI_LOCALNRANKS": "4"}), ranks_on_this_host({"LOCAL_WORLD_SIZE": "2"})
    (4, 2)
    >>> ranks_on_this_host({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"})
    8
    """
    reported = (_local_size(environment, each) for each in LAUNCHERS if each.rank in environment)
    found = environment.get("LOCAL_WORLD_SIZE") or next(filter(None, reported), "")
    return int(found) if found.isdecimal() else 0


def local_rank(environment: Variables) -> str | None:
    """Return the rank among those of this host as mpiexec or Slurm reports it; None if neither started the process.

    >>> local_rank({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"})
    '1'
    """
    launcher = _launcher(environment)
    return (environment.get(launcher.local_rank) or None) if launcher else None


def _launcher(environment: Variables) -> JobLauncher | None:
    """Return the launcher that set both a rank and a world size."""
    return next((each for each in LAUNCHERS if each.rank in environment and _size(environment, each)), None)


def _size(environment: Variables, launcher: JobLauncher) -> str:
    return next((environment[name] for name in launcher.sizes if environment.get(name)), "")


def _local_size(environment: Variables, launcher: JobLauncher) -> str:
    """Return the number of ranks on this host as a launcher reports it; an empty string if it does not."""
    if found := environment.get(launcher.local_size):
        return found
    # Ranks of another launcher inherit Slurm's variables, and each part of a heterogeneous job has its own.
    is_step = launcher is _launcher(environment) and "SLURM_HET_SIZE" not in environment
    return _size(environment, launcher) if is_step and environment.get(launcher.hosts) == "1" else ""


def _address(environment: Variables, launcher: JobLauncher, size: str) -> str:
    """Return the host of rank 0; an empty string if it is not certain."""
    if _local_size(environment, launcher) == size:
        return "127.0.0.1"
    hosts = next((environment[name] for name in _NODE_LISTS if environment.get(name)), "")
    return first_host(hosts)


def first_host(hosts: str) -> str:
    """Return the first host of a list in Slurm's syntax.

    >>> first_host("gpu-[007-010,12]-ib,cpu3"), first_host("cpu3,cpu4"), first_host("")
    ('gpu-007-ib', 'cpu3', '')
    """
    found = _HEAD.match(hosts)
    return "".join(part or "" for part in found.groups()) if found else ""


def _port(environment: Variables) -> str:
    job = environment.get("PMIX_NAMESPACE") or "/".join(
        environment[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if environment.get(name)
    )
    job = job or _launcher_of_session()
    return str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS if job else _USUAL_PORT)


def _launcher_of_session() -> str:
    """Return the parent of the session leader: on one host, MPICH's mpiexec is that for all of its ranks."""
    try:
        after_name = Path(f"/proc/{os.getsid(0)}/stat").read_text().rpartition(")")[2]
    except OSError:
        return ""
    parent = after_name.split()[1]
    return "" if parent == "0" else parent
