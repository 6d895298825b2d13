"""Processes that workers started and that left the worker's process group or session: found and ended with the job.

A command-line launcher is the subreaper of all its descendants (prctl(2), PR_SET_CHILD_SUBREAPER): an orphan becomes
its child, so none can hide, whatever it does to its session, group or environment. A program that calls the launcher's
API may have children of its own; there, the variable `MARK` in the initial environment of a process identifies it.

`Guard` covers ``kill -9`` of the launcher: a process that waits for that and then ends all marked processes and removes
the job's temporary folder. Do not add the end of the workers themselves here: their supervisor kills and reaps them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from torchdist_ref.processes.control import fork_without_garbage
from torchdist_ref.processes.failure_record import LAUNCH_ID
from torchdist_ref.processes.linux_calls import pidfd_open

MARK = LAUNCH_ID
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
# A process in an uninterruptible system call (state D) ends later; the launcher does not wait for it.
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.001
_GUARD_SCANS, _GUARD_SECONDS = 5, 0.02


def become_subreaper() -> bool:
    """Make this process the parent of every orphan among its descendants.

    Returns:
        Whether the kernel can (Linux).
    """
    if not sys.platform.startswith("linux"):
        return False
    failed: int = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return not failed


def children(pid: int) -> list[int]:
    """Return the process ids of the children of a process, zombies included; of an ended one, none."""
    found: list[int] = []
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except FileNotFoundError:
        if (_PROC / str(pid)).exists() and not (_PROC / "self/task" / str(os.getpid()) / "children").exists():
            return [other for other in _all() if _parent(other) == pid]
    except OSError:
        pass
    return found


def descendants(pid: int, spare: Collection[int] = ()) -> list[int]:
    """Return the process ids of all processes below one.

    Args:
        pid: Process id.
        spare: Process ids to leave out, with all below them.
    """
    found = [child for child in children(pid) if child not in spare]
    return found + [below for child in found for below in descendants(child, spare)]


def marked(mark: str) -> list[int]:
    """Return the process ids of all other processes whose initial environment has the value as `MARK`."""
    wanted = f"{MARK}={mark}".encode()
    own = os.getpid()
    return [pid for pid in _all() if pid != own and wanted in _environment(pid)]


def end_all(find: Callable[[], list[int]]) -> list[int]:
    """Kill the processes that a function finds, reap those that are children of this one, until it finds none.

    Args:
        find: Function that returns process ids; it is called again, since a process may have forked meanwhile.

    Returns:
        Process ids that still exist after some seconds, in an uninterruptible system call for instance.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while (found := find()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not [pid for pid in found if reap(pid)]:
            # Others are ending, or wait for another process to reap them.
            found = [pid for pid in found if not _is_zombie(pid)]
            if not found:
                break
            time.sleep(_POLL_SECONDS)
    return found


def reap(pid: int) -> bool:
    """Reap a child of this process if it has ended, and return whether it has been reaped."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return False


class Guard:
    """Process that ends marked processes and removes a folder if the launcher is killed.

    It is a fork in a session of its own, holds no descriptor of the launcher, and sleeps until the launcher ends.

    Args:
        mark: Value of `MARK` in the environments of the job's processes.
        folder: Folder to remove. Default: none.

    Attributes:
        pid: Process id.
    """

    def __init__(self, mark: str, folder: str = "") -> None:
        launcher = pidfd_open(os.getpid())
        try:
            self.pid = fork_without_garbage()
            if self.pid == 0:
                try:
                    _watch(launcher, mark, folder)
                finally:
                    os._exit(0)
        finally:
            os.close(launcher)

    def close(self) -> None:
        """End the guard, whose job is done by the launcher."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _watch(launcher: int, mark: str, folder: str) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    # First, since it may be one of the standard streams that the program has closed.
    os.dup2(launcher, 3)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    poll = select.poll()
    poll.register(3, select.POLLIN)
    poll.poll()
    # A process has no environment for the moment of its exec: look again.
    for _ in range(_GUARD_SCANS):
        end_all(lambda: marked(mark))
        time.sleep(_GUARD_SECONDS)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _all() -> Iterator[int]:
    # A sandbox may have no /proc.
    entries = os.listdir(_PROC) if _PROC.exists() else []
    return (int(entry) for entry in entries if entry.isdecimal())


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int((_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def _is_zombie(pid: int) -> bool:
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "environ").read_bytes()
    return b""
