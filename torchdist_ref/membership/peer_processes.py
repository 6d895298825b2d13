"""Sources of endings: the processes of other ranks on this host.

A pidfd of each process becomes readable when it ends; its witness disappears when it starts another program. Nothing
is concluded here: `blame` does that. Ranks of other hosts are known by their connections (`transports.tcp`) and by the
server of the store (`Store.set_on_disconnect`).
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Mapping
from time import monotonic
from types import MappingProxyType
from typing import Protocol

from torchdist_ref.membership.events import ENDED, EXITED, KILLED, REPLACED, Ending
from torchdist_ref.processes.linux_calls import pidfd_open
from torchdist_ref.processes.witness import is_gone

_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)
"""System errors for a number that is no process's: that of a thread, or of none."""
_STAT_EXIT_CODE = 49
"""Index of the exit code in /proc/PID/stat, counted from the state, which follows the name."""
_WITNESS_SECONDS = 0.04
"""Interval of looks at the witnesses of all ranks, each of which is a system call."""


# ---- pidfds
#
# All groups of this process share one for each peer, so that a group uses no descriptor of its own.

# Reentrant: a finalizer may release a descriptor while its thread shares another one.
_sharing = threading.RLock()
_descriptors: dict[int, int] = {}
_users: dict[int, int] = {}


def share_pidfd(pid: int) -> int:
    """Return a pidfd of a process, the same for all users of this process; release it by `release_pidfd`.

    Raises:
        OSError: There is no such process, or this process has no free descriptor.

    >>> both = share_pidfd(os.getpid()), share_pidfd(os.getpid())
    >>> both[0] == both[1], [release_pidfd(each) for each in both]
    (True, [None, None])
    """
    with _sharing:
        shared = _descriptors.get(pid)
        # Once a process has ended, its number may be another's.
        if shared is None or _has_ended(shared):
            shared = _descriptors[pid] = pidfd_open(pid)
            _users[shared] = 0
        _users[shared] += 1
        return shared


def release_pidfd(descriptor: int) -> None:
    """Release a pidfd of `share_pidfd`; the last user's release closes it."""
    with _sharing:
        _users[descriptor] -= 1
        if not _users[descriptor]:
            del _users[descriptor]
            for pid in [pid for pid, shared in _descriptors.items() if shared == descriptor]:
                del _descriptors[pid]
            os.close(descriptor)


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _renew_lock() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it."""
    global _sharing
    _sharing = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


# ---- processes of ranks


class Liveness(Protocol):
    """Detector of ended processes."""

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""

    def ending(self, rank: int) -> Ending | None:
        """Return the process of a dead rank and how it ended, as far as that is known; None if nothing is."""

    def close(self) -> None:
        """Release the resources."""


class NoPeerProcesses:
    """`Liveness` of ranks that share this process, or whose processes are not known: none ever ends."""

    def dead(self) -> list[int]:
        """See `Liveness.dead`."""
        return []

    def ending(self, rank: int) -> Ending | None:
        """See `Liveness.ending`."""
        return None

    def close(self) -> None:
        """See `Liveness.close`."""


class PeerProcesses:
    """Liveness of the processes behind the ranks of a group. One that has called `exec` counts as ended.

    Args:
        pids: Process ids, by rank.
        witnesses: Their witnesses, by rank, as far as they are known (see `processes.witness`).

    >>> import os
    >>> peers = PeerProcesses({0: os.getpid()})
    >>> peers.dead(), peers.close()
    ([], None)
    """

    def __init__(self, pids: Mapping[int, int], witnesses: Mapping[int, int] = MappingProxyType({})) -> None:
        self._pids: dict[int, int] = {}
        self._witnesses: dict[int, int] = {}
        self._next_look = 0.0
        self._fds: list[int] = []
        self._ranks: dict[int, list[int]] = {}
        self._endings: dict[int, Ending] = {}
        self._poll = select.poll()
        self._polling, self._closed = threading.Lock(), False
        try:
            for rank, pid in pids.items():
                self.watch(rank, pid, witnesses.get(rank, 0))
        except BaseException:
            self.close()
            raise

    def watch(self, rank: int, pid: int, witness: int = 0) -> None:
        """Watch the process of one more rank, and its witness if that is known."""
        self._pids[rank], self._witnesses[rank] = pid, witness
        try:
            fd = share_pidfd(pid)
        except OSError as error:
            if error.errno not in _NO_PROCESS:
                raise
            self._endings[rank] = ending_of(pid)
            return
        self._fds.append(fd)
        self._ranks.setdefault(fd, []).append(rank)
        self._poll.register(fd, select.POLLIN)

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended, in order."""
        # The poll object allows one thread at a time; others get the last known result.
        if self._polling.acquire(False):
            try:
                replaced = self._replaced()
                # An end counts first: the witness goes with the process, and its number may be another's by now.
                for fd, _ in self._poll.poll(0):
                    for rank in self._ranks[fd]:
                        if rank not in self._endings:
                            self._endings[rank] = ending_of(self._pids[rank])
                for rank in replaced:
                    self._endings.setdefault(rank, Ending(REPLACED, self._pids[rank], os.uname().nodename))
            finally:
                self._polling.release()
                if self._closed:
                    self._release()
        return sorted(self._endings)

    def ending(self, rank: int) -> Ending | None:
        """See `Liveness.ending`."""
        return self._endings.get(rank)

    def _replaced(self) -> list[int]:
        """Return the ranks whose processes have lost their witnesses, if it is time to look again."""
        if (now := monotonic()) < self._next_look:
            return []
        self._next_look = now + _WITNESS_SECONDS
        return [rank for rank, witness in self._witnesses.items() if is_gone(self._pids[rank], witness)]

    def close(self) -> None:
        """Close the descriptors. While a call of `dead` is using them, it closes them when it returns."""
        # Nothing is waited for: a signal handler that destroys the group may have interrupted that call.
        self._closed = True
        self._release()

    def _release(self) -> None:
        """Close the descriptors unless they are in use."""
        if self._polling.acquire(False):
            try:
                for fd in self._fds:
                    release_pidfd(fd)
                self._fds.clear()
                self._ranks.clear()
                self._poll = select.poll()
            finally:
                self._polling.release()


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty ones if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return [""]


def is_stopped(pid: int) -> bool:
    """Return whether a process of this host is stopped, by SIGSTOP or a terminal, or held by a debugger.

    >>> is_stopped(os.getpid())
    False
    """
    return _stat_of(pid)[0] in ("T", "t")


def ending_of(pid: int) -> Ending:
    """Return how a process of this host ended, as far as is known once its parent has collected its exit status."""
    host, fields = os.uname().nodename, _stat_of(pid)
    if fields[0] not in ("Z", "X"):
        return Ending(ENDED, pid, host)
    status = int(fields[_STAT_EXIT_CODE])
    if os.WIFSIGNALED(status):
        return Ending(KILLED, pid, host, os.WTERMSIG(status))
    return Ending(EXITED, pid, host, os.WEXITSTATUS(status))
