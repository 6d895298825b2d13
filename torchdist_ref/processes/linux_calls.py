"""System calls and numbers of Linux that some builds of Python leave out.

Portable builds of Python are compiled with the headers of an old Linux, so their `os`, `signal` and `socket` have no
pidfd, no memfd and no mark of unsent bytes, on whatever system they run. The calls then go through the C library. If
Python has them, the names here are Python's own. Do not add calls that `os` always has.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from functools import cache
from typing import Any

# The numbers are the same on all architectures of torch's wheels; C libraries have functions only since 2022.
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434
_MFD_CLOEXEC = 1

TCP_NOTSENT_LOWAT: int = getattr(socket, "TCP_NOTSENT_LOWAT", 25)


def _pidfd_open(pid: int) -> int:
    """Return a descriptor of a process, which becomes readable once the process has ended.

    Raises:
        ProcessLookupError: There is no such process.
    """
    return _checked(_libc().syscall(_PIDFD_OPEN, pid, 0))


def _pidfd_send_signal(pidfd: int, signum: int) -> None:
    """Send a signal to the process of a descriptor.

    Raises:
        ProcessLookupError: The process has ended.
    """
    _checked(_libc().syscall(_PIDFD_SEND_SIGNAL, pidfd, signum, None, 0))


def _memfd_create(name: str) -> int:
    """Return a descriptor of a new anonymous file in memory, which is closed on `exec`."""
    return _checked(_libc().memfd_create(name.encode(), _MFD_CLOEXEC))


@cache
def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        import ctypes

        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


pidfd_open: Callable[[int], int] = getattr(os, "pidfd_open", _pidfd_open)
pidfd_send_signal: Callable[[int, int], None] = getattr(signal, "pidfd_send_signal", _pidfd_send_signal)
memfd_create: Callable[[str], int] = getattr(os, "memfd_create", _memfd_create)
