"""Who a process is in its job where nobody set RANK and the rest: as mpiexec or Slurm say it in variables of their own.

What is set is taken as it is; only what is missing is derived. A rank and a size belong together, so they are derived
both or not at all. An address is derived where it is sure: the loopback where all ranks are on one host, else the first
host of Slurm's list. A port is a number between 20000 and 29999 that all ranks of one job get alike, and those of
another most likely not. Don't read variables of torch's launcher here: those are the ones that are derived.
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
class Starter:
    """The variables in which one starter of jobs says who a process is.

    Attributes:
        rank: The process's number.
        sizes: How many there are; the first of these that is set.
        local_size: How many there are on this host.
    """

    rank: str
    sizes: tuple[str, ...]
    local_size: str = ""


# In this order: mpiexec in a Slurm job finds Slurm's variables as well, and they are those of its own one process.
STARTERS = (
    Starter("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Starter("MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_LOCAL_SIZE"),
    Starter("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALNRANKS"),
    Starter("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)


def derived(environment: Variables) -> dict[str, str]:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as far as they are missing and can be told.

    Args:
        environment: The process's variables.

    Returns:
        Those that could be derived; empty where neither mpiexec nor Slurm started the process.

    >>> found = derived({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "MASTER_PORT": "7000"})
    >>> found
    {'RANK': '1', 'WORLD_SIZE': '4', 'MASTER_ADDR': '127.0.0.1'}
    """
    starter = next((each for each in STARTERS if each.rank in environment and _size(environment, each)), None)
    if starter is None:
        return {}
    rank, size = environment[starter.rank], _size(environment, starter)
    alone = "RANK" not in environment and "WORLD_SIZE" not in environment
    found = {"RANK": rank, "WORLD_SIZE": size} if alone else {}
    found |= {"MASTER_ADDR": _address(environment, starter, size), "MASTER_PORT": _port(environment)}
    return {name: value for name, value in found.items() if value and not environment.get(name)}


def _size(environment: Variables, starter: Starter) -> str:
    return next((environment[name] for name in starter.sizes if environment.get(name)), "")


def _address(environment: Variables, starter: Starter, size: str) -> str:
    """Return the host of rank 0; empty where that can't be known."""
    if environment.get(starter.local_size) == size:
        return "127.0.0.1"
    hosts = next((environment[name] for name in _NODE_LISTS if environment.get(name)), "")
    return first_host(hosts)


def first_host(hosts: str) -> str:
    """Return the first of a list as Slurm writes it.

    >>> first_host("gpu-[007-010,12]-ib,cpu3"), first_host("cpu3,cpu4"), first_host("")
    ('gpu-007-ib', 'cpu3', '')
    """
    found = _HEAD.match(hosts)
    return "".join(part or "" for part in found.groups()) if found else ""


def _port(environment: Variables) -> str:
    job = environment.get("PMIX_NAMESPACE") or "/".join(
        environment[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if environment.get(name)
    )
    job = job or _starter_of_session()
    return str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS if job else _USUAL_PORT)


def _starter_of_session() -> str:
    """Return the process that started this one's session: on one host, MPICH's mpiexec has one for all of its ranks."""
    try:
        after_name = Path(f"/proc/{os.getsid(0)}/stat").read_text().rpartition(")")[2]
    except OSError:
        return ""
    parent = after_name.split()[1]
    return "" if parent == "0" else parent
