"""Processes that do not outlive the one that needs them, and the words for how a process ended.

Whoever starts ranks (the launcher, `torchdist_ref.testing`, the notebook) uses these, so that no way of ending a
parent, ``kill -9`` included, leaves ranks behind. What to do about an ended rank is for the caller to decide.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: a child of a process with threads should do as little as possible.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process once the thread that started it ends (Linux; elsewhere nothing happens).

    Call it first thing in the child, or as ``preexec_fn``: the wish survives ``exec``. See prctl(2), PR_SET_PDEATHSIG.

    Args:
        parent: The process id of the parent. When it is gone already, this process exits at once.
        signum: The signal to get.
    """
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Hold back Ctrl-C until the block is done: the hooks that Python runs around a fork would swallow it.

    Only the main thread of a process gets interrupts; elsewhere nothing needs to be held back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    former = signal.signal(signal.SIGINT, lambda signum, frame: heard.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if heard:
        signal.raise_signal(signal.SIGINT)


def wait_without_reaping(pid: int) -> int:
    """Wait for a child's end and leave it a zombie, so that its number stays its own and may still be signalled.

    Args:
        pid: The child's process id.

    Returns:
        The exit code, or the negative number of the signal that killed it.
    """
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert info is not None  # only WNOHANG gives None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def how_it_ended(status: int) -> str:
    """Say in words what an exit status, as `subprocess` counts them, means.

    Args:
        status: The exit code, or the negative number of the signal that killed the process.

    Returns:
        A phrase that follows the name of the process.

    Example:
        >>> how_it_ended(3)
        'exited with code 3'
        >>> how_it_ended(-9)
        'was killed by SIGKILL'
    """
    return f"exited with code {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def signal_name(signum: int) -> str:
    """Return the name of a signal, also of one that Python has no name for.

    >>> signal_name(15), signal_name(40)
    ('SIGTERM', 'signal 40')
    """
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
