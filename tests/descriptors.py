"""Descriptors and shared memory: limits for forks of a test that find few to open, and names that may be left."""

from __future__ import annotations

import contextlib
import os
import resource
import time


def use_all_descriptors(free: int = 0) -> None:
    """Lower this process's limit and open files until so many descriptors are free, whatever it has open already."""
    end = 1 + max(int(name) for name in os.listdir("/proc/self/fd"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (end, hard))
    with contextlib.suppress(OSError):
        while True:
            os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (end + free, hard))


def left_shared_files(before: set[str]) -> set[str]:
    """Names of shared memory beside those of before that stay: another worker's tests may just create and unlink."""
    deadline = time.monotonic() + 5
    while (left := shared_files() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def shared_files() -> set[str]:
    """Names of shared memory, except those of MPI: another worker may be running its tests."""
    of_mpi = ("mpi", "vader", "sm_segment")
    return {name for name in os.listdir("/dev/shm") if not any(part in name for part in of_mpi)}
