"""Environment of the workers of one host: their variables, and the store at the address that the variables name.

The launcher serves the store (TORCHELASTIC_USE_AGENT_STORE announces that to torch and to this library): it exists
before the first rank and after the last one, and ranks cannot race for its port. Scripts written for torchrun find
every variable that torchrun sets, under the same name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchdist_ref.elastic.attempt import Assignment
from torchdist_ref.errors import ArgumentError
from torchdist_ref.membership.trust import SECRET
from torchdist_ref.stores.tcp.server import TCPServer

LOCALHOST = "localhost"


@dataclass(frozen=True, slots=True)
class Job:
    """Properties that all attempts of a job share.

    Attributes:
        run_id: Name of the job.
        role: Role of its workers.
        max_restarts: Largest number of restarts.
    """

    run_id: str = "none"
    role: str = "default"
    max_restarts: int = 0


_DEFAULT_JOB = Job()


def rank_environment(assignment: Assignment, local_rank: int, job: Job = _DEFAULT_JOB) -> dict[str, str]:
    """Return the variables of one worker that describe the job; `worker_environment` returns all.

    Args:
        assignment: Ranks of this host.
        local_rank: Rank of the worker among those of this host.
        job: Properties of the job.

    Example:
        >>> found = rank_environment(Assignment([2, 3], 4, "127.0.0.1", 29500, group_rank=1, group_world_size=2), 1)
        >>> found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["GROUP_RANK"]
        ('3', '1', '4', '1')
    """
    rank, local_size = assignment.global_ranks[local_rank], len(assignment.global_ranks)
    found = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "ROLE_RANK": assignment.role_ranks[local_rank] if assignment.role_ranks else rank,
        "WORLD_SIZE": assignment.world_size,
        "LOCAL_WORLD_SIZE": local_size,
        "ROLE_WORLD_SIZE": assignment.role_world_size or assignment.world_size,
        "GROUP_RANK": assignment.group_rank,
        "GROUP_WORLD_SIZE": assignment.group_world_size,
        "ROLE_NAME": job.role,
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": assignment.master_port,
        "TORCHELASTIC_USE_AGENT_STORE": assignment.use_agent_store,
        "TORCHELASTIC_RESTART_COUNT": assignment.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
        "TORCHELASTIC_RUN_ID": job.run_id,
    }
    secret = {SECRET: assignment.secret} if assignment.secret else {}
    return {name: str(value) for name, value in found.items()} | secret | dict(assignment.environment)


def worker_environment(
    base: Mapping[str, str], assignment: Assignment, local_rank: int, job: Job = _DEFAULT_JOB
) -> dict[str, str]:
    """Return the whole environment of one worker.

    Args:
        base: Environment of the launcher; the variables of the job override it.
        assignment: Ranks of this host.
        local_rank: Rank of the worker among those of this host.
        job: Properties of the job.
    """
    # Workers write to a pipe, which Python would buffer by blocks.
    defaults = {"PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if len(assignment.global_ranks) > 1:
        # Workers compete for the cores if each starts as many threads as the machine has cores.
        defaults["OMP_NUM_THREADS"] = "1"
    return defaults | dict(base) | rank_environment(assignment, local_rank, job)


def one_device(environment: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Return the variables by which a worker sees only its own GPU, as device 0.

    Args:
        environment: Environment of the launcher.
        local_rank: Rank of the worker among those of this host.

    Raises:
        ArgumentError: CUDA_VISIBLE_DEVICES lists fewer devices.

    >>> one_device({"CUDA_VISIBLE_DEVICES": "4,6"}, 1)
    {'LOCAL_RANK': '0', 'CUDA_VISIBLE_DEVICES': '6'}
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible is not None else None
    if devices is not None and local_rank >= len(devices):
        raise ArgumentError(
            f"--virtual-local-rank: local_rank {local_rank} exceeds available GPUs in CUDA_VISIBLE_DEVICES={visible}; "
            "start fewer workers by --nproc-per-node, or list more devices."
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[local_rank] if devices else str(local_rank)}


@contextlib.contextmanager
def job_store(port: int, host: str) -> Iterator[int]:
    """Serve the ranks' store until the end of the block; the launcher itself is not a client of it.

    Args:
        port: Port; 0 selects a free one.
        host: Address of this host that the ranks use.

    Yields:
        The port.
    """
    server = TCPServer(host, port)
    try:
        yield server.port
    finally:
        server.close()
