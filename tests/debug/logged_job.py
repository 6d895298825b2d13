"""Program whose output, by a launcher on three ranks, the files in `logs` are; its argument is the failure.

For ``torchrun_raise.log``: ``torchrun --nproc-per-node 3 logged_job.py raise``; for ``ours_raise.log`` the launcher of
this library, with ``OURS=1``. The names of paths and hosts in the files were replaced.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

import torchdist_ref

OURS = "OURS" in os.environ
dist: Any = torchdist_ref if OURS else torch.distributed


def step(rank: int, failure: str) -> None:
    """Make three calls; rank 1 fails before the second one."""
    tensor = torch.ones(4) * rank
    dist.all_reduce(tensor)
    if failure == "barrier" and rank != 1:
        dist.monitored_barrier(timeout=timedelta(seconds=3), wait_all_ranks=True)
    if failure == "raise" and rank == 1:
        raise ValueError("bad batch 7")
    if failure == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if failure == "late" and rank == 1:
        time.sleep(12)
    if failure == "mismatch" and rank == 1:
        dist.broadcast(torch.ones(3), 0)
    dist.all_reduce(tensor)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("ref" if OURS else "gloo", timeout=timedelta(seconds=6))
    step(dist.get_rank(), sys.argv[1])
    dist.destroy_process_group()
