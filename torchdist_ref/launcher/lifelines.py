"""Processes that do not outlive the one that needs them, and the words for how a process ended.

Whoever starts ranks (the launcher, `torchdist_ref.testing`, the notebook) uses these two, so that no way of ending a
parent, ``kill -9`` included, leaves ranks behind. What to do about an ended rank is for the caller to decide.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process once the thread that started it ends (Linux; elsewhere nothing happens).

    Call it first thing in the child, or as ``preexec_fn``: the wish survives ``exec``. See prctl(2), PR_SET_PDEATHSIG.

    Args:
        parent: The process id of the parent. When it is gone already, this process exits at once.
        signum: The signal to get.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


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
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
