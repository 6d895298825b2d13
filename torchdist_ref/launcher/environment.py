"""What a rank finds in its environment: who it is, and where the store is.

The store is held by the launcher (TORCHELASTIC_USE_AGENT_STORE says so to torch as to us): it is there before the
first rank and after the last, and no rank has to win a race for its port. Names are torchrun's, and all of them are
there, so that scripts written for torchrun find what they look for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from torchdist_ref.launcher.options import Options


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks of a job have in common besides their number.

    Attributes:
        run_id: Its name.
        role: What its ranks are.
        restarts: How often all ranks have been started anew.
        max_restarts: How often they may be.
    """

    run_id: str = "none"
    role: str = "default"
    restarts: int = 0
    max_restarts: int = 0


_PLAIN = Job()


def rank_environment(rank: int, world_size: int, address: str, port: int, job: Job = _PLAIN) -> dict[str, str]:
    """Make the variables of one rank of a job on one machine.

    Args:
        rank: The rank, from 0.
        world_size: How many ranks there are.
        address: The host of the store that the launcher holds.
        port: Its port.
        job: What else there is to say.

    Returns:
        Only the variables that describe the job; see `worker_environment` for the whole.

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
    return per_rank | per_job | node | store | elastic


def worker_environment(
    surroundings: Mapping[str, str], world_size: int, rank: int, address: str, port: int, job: Job = _PLAIN
) -> dict[str, str]:
    """Make the whole environment of one rank.

    Args:
        surroundings: The launcher's own environment; what the job needs overrides it.
        world_size: How many ranks there are.
        rank: The rank, from 0.
        address: The host of the store.
        port: Its port.
        job: What else there is to say.

    Returns:
        The environment to start the rank with.
    """
    # Lines should come when they are written, though the ranks write to a pipe.
    wishes = {"PYTHONUNBUFFERED": "1"}
    if world_size > 1:
        # As many threads in each rank as the machine has cores would slow all of them down.
        wishes["OMP_NUM_THREADS"] = "1"
    return wishes | dict(surroundings) | rank_environment(rank, world_size, address, port, job)


def command(options: Options) -> list[str]:
    """Make the command line of a rank, the same for all."""
    return [sys.executable, *(["-m"] if options.module else []), options.target, *options.args]
