"""Witness of the program that a process runs.

A process that calls `exec` keeps its number, and lives: its pidfd does not report it, though the rank that it was is
gone. So each process opens an anonymous file that an `exec` closes, and publishes the file's descriptor and inode. The
others look for it under /proc, if they have the same user and pid namespace; else they know nothing of it. This is the
program's *witness*. Do not add ends of processes here (`membership.peer_processes`).
"""

from __future__ import annotations

import os
import sys
from functools import cache

from torchdist_ref.processes.linux_calls import memfd_create

_BITS = 32
_PF_EXITING = 4
_STAT_FLAGS = 6
"""Index of the flags in /proc/PID/stat, counted from the state, which follows the name."""


@cache
def own_witness() -> int:
    """Return descriptor and inode of this process's witness in one number; 0 where the platform has none.

    A forked child inherits the descriptor, which is as good a witness of the child.

    Raises:
        OSError: This process has no free descriptor.

    >>> is_gone(os.getpid(), own_witness())
    False
    """
    if sys.platform != "linux":
        return 0
    fd = memfd_create("torchdist_ref witness")
    witness = fd << _BITS | _low(os.fstat(fd).st_ino)
    if is_gone(os.getpid(), witness):
        # There is no /proc, or it shows other numbers.
        os.close(fd)
        return 0
    return witness


def is_gone(pid: int, witness: int) -> bool:
    """Return whether a process lives and has lost its witness: it has called `exec`, or closed its descriptors.

    Args:
        pid: Process id. If another process may have got it meanwhile, the caller checks that after this call.
        witness: Value of `own_witness` in that process; 0 if it has none.
    """
    fd, inode = witness >> _BITS, _low(witness)
    try:
        return witness != 0 and _low(os.stat(f"/proc/{pid}/fd/{fd}").st_ino) != inode
    except FileNotFoundError:
        return not _is_ending(pid)
    except OSError:
        # This process may not look at that one.
        return False


def _is_ending(pid: int) -> bool:
    """Return whether a process is about to end: it closes its descriptors first, and then counts as ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return bool(int(file.read().rpartition(")")[2].split()[_STAT_FLAGS]) & _PF_EXITING)
    except OSError:
        return True


def _low(number: int) -> int:
    return number & (1 << _BITS) - 1
