"""Limits on the descriptors of a process: for forks of a test that find none, or few, to open."""

from __future__ import annotations

import contextlib
import os
import resource


def use_all_descriptors(free: int = 0) -> None:
    """Lower this process's limit and open files until so many descriptors are free, whatever it has open already."""
    end = 1 + max(int(name) for name in os.listdir("/proc/self/fd"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (end, hard))
    with contextlib.suppress(OSError):
        while True:
            os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (end + free, hard))
