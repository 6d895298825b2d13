"""Environment of the ranks of one job: their variables, and the store at the address that the variables name.

The launcher serves the store (TORCHELASTIC_USE_AGENT_STORE announces that to torch and to this library): it exists
before the first rank and after the last one, and ranks cannot race for its port. Scripts written for torchrun find
every variable that torchrun sets, under the same name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torchdist_ref.authentication import SECRET
from torchdist_ref.stores import TCPStore

STORE_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Job:
    """Properties that all ranks of a job share.

    Attributes:
        run_id: Name of the job.
        role: Role of its ranks.
        restarts: Number of times that all ranks have been restarted.
        max_restarts: Limit of `restarts`.
        secret: Secret by which its ranks authenticate each other; empty for none.
    """

    run_id: str = "none"
    role: str = "default"
    restarts: int = 0
    max_restarts: int = 0
    secret: str = field(default="", repr=False)


_DEFAULT_JOB = Job()


def rank_environment(rank: int, world_size: int, address: str, port: int, job: Job = _DEFAULT_JOB) -> dict[str, str]:
    """Return the variables of one rank of a job on one machine.

    Args:
        rank: Rank, from 0.
        world_size: Number of ranks.
        address: Host of the store that the launcher serves.
        port: Port of the store.
        job: Properties of the job.

    Returns:
        Only the variables that describe the job; `worker_environment` returns all.

    Example:
        >>> found = rank_environment(2, 4, "127.0.0.1", 29500)
        >>> found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]
        ('2', '4', '29500')
    """
    per_rank = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    per_job = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world_size))
    node = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": job.role}
    store = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    elastic = {
        "TORCHELASTIC_RESTART_COUNT": str(job.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": job.run_id,
    }
    return per_rank | per_job | node | store | elastic | ({SECRET: job.secret} if job.secret else {})


def worker_environment(
    base: Mapping[str, str], world_size: int, rank: int, address: str, port: int, job: Job = _DEFAULT_JOB
) -> dict[str, str]:
    """Return the whole environment of one rank.

    Args:
        base: Environment of the launcher; the variables of the job override it.
        world_size: Number of ranks.
        rank: Rank, from 0.
        address: Host of the store.
        port: Port of the store.
        job: Properties of the job.

    Returns:
        The environment for starting the rank.
    """
    # Ranks write to a pipe, which Python would buffer by blocks.
    defaults = {"PYTHONUNBUFFERED": "1"}
    if world_size > 1:
        # Ranks compete for the cores if each starts as many threads as the machine has cores.
        defaults["OMP_NUM_THREADS"] = "1"
    return defaults | dict(base) | rank_environment(rank, world_size, address, port, job)


@contextlib.contextmanager
def job_store(port: int) -> Iterator[int]:
    """Serve the ranks' store until the end of the block.

    Args:
        port: Port; 0 selects a free one.

    Yields:
        The port.
    """
    store = TCPStore(STORE_ADDRESS, port, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        store.close()
