"""Liveness: which ranks have failed, and the one rule for all waits in which ranks meet.

`PeerProcesses` watches processes of this host. `MemberWatch` holds the rule: while ranks create a group or meet in a
barrier, every wait of theirs checks at intervals of `CHECK_SECONDS` whether a rank that it depends on has failed, and
raises what it finds. A rank has failed if its process has ended, or if it left the meeting with an error, which it
publishes for the others. `Presence` finds the processes of ranks that are about to form the world, and so have no
group yet.

Once a group exists, its `Link` watches the members, and `transports.link.Link.failure` makes an error of a death. Do
not add waits here, nor messages between ranks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from time import monotonic
from types import MappingProxyType
from typing import Protocol

from torchdist_ref.errors import (
    ArgumentError,
    DistBackendError,
    DistError,
    DistNetworkError,
    GroupAbortedError,
    MismatchError,
    RankDiedError,
    RankStalledError,
    RendezvousError,
    UnsupportedError,
    at_limit,
    in_context,
    rank_names,
    text_of,
)
from torchdist_ref.membership.events import ENDED, EXITED, KILLED, REPLACED, Ending
from torchdist_ref.processes.witness import is_gone, own_witness, release_pidfd, share_pidfd
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.stores.prefix import WatchedStore
from torchdist_ref.timeouts import LongWait, found_soon

log = logging.getLogger("torchdist_ref.groups")
_FAILURE_KEY, GROUP_FAILURE_KEY = "failure", "failure in the group"
_SAME_TYPE = {kind.__name__: kind for kind in (RankDiedError, RankStalledError)}
_OF_ALL_RANKS = {kind.__name__: kind for kind in (MismatchError, RendezvousError)}
"""Errors whose message is the same on all ranks."""
_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)
"""System errors for a number that is no process's: that of a thread, or of none."""
_STAT_EXIT_CODE = 49
"""Index of the exit code in /proc/PID/stat, counted from the state, which follows the name."""
_NO_PROC = "no-proc"
_WITNESS_SECONDS = 0.04
"""Interval of looks at the witnesses of all ranks, each of which is a system call."""


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


FindFailure = Callable[[Sequence[int], str], BaseException | None]
"""Function of group ranks and a description that returns the error for the first of them known to have ended."""


def _no_failure(ranks: Sequence[int], description: str) -> BaseException | None:
    return None


class MemberWatch:
    """Watch over the ranks that meet in one operation, and that must all succeed or all fail.

    Args:
        store: Store with a prefix that only this meeting uses.
        rank: This rank in the group.
        members: Global ranks of all members.
        operation: The operation, for messages.
        find_failure: Function that finds ended processes among the members.
        find_departure: Function that finds members that have left a group of theirs, and so cannot do their part.
        find_absent: Function that finds members that have not come yet, for the log; None where that is not known.

    Attributes:
        store: The same store; its waits fail with the first failure of a member.
        operation: The operation.

    >>> from torchdist_ref.stores import HashStore
    >>> shared = PrefixStore("group/1", HashStore())
    >>> watches = [MemberWatch(shared, rank, [0, 1], "new_group") for rank in range(2)]
    >>> watches[1].publish(OSError(24, "Too many open files"))
    >>> try:
    ...     watches[0].store.get("address of rank 1")
    ... except GroupAbortedError as error:
    ...     print(error)
    new_group on rank 0: rank 1 failed: OSError: [Errno 24] Too many open files
    """

    def __init__(
        self,
        store: PrefixStore,
        rank: int,
        members: Sequence[int],
        operation: str,
        find_failure: FindFailure = _no_failure,
        find_departure: FindFailure = _no_failure,
        find_absent: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self._rank, self._members = rank, tuple(members)
        self._find_failure, self._find_departure = find_failure, find_departure
        self._store = store
        self._others = [other for other in range(len(self._members)) if other != rank]
        self.operation = operation
        self._place = f"{operation} on rank {self._members[rank]}"
        self._find_absent, self._wait = find_absent, LongWait()
        self.store = self.over(store)

    def over(self, store: PrefixStore, awaited: Callable[[], Sequence[int]] | None = None) -> WatchedStore:
        """Return a store with the same keys as this one, and with waits that the watch ends.

        Args:
            store: The store.
            awaited: Function that returns the members that have yet to do their part: the others may have ended or left
                by then. By default all members have to.
        """
        find = self.failure if awaited is None else lambda: self.failure(awaited())
        return WatchedStore(store.prefix, store.underlying_store, find)

    def complete(self) -> None:
        """Allow members to leave from now on: the meeting is over. Those that end still end the waits of its store."""
        self._find_departure = _no_failure

    def failure(self, ranks: Sequence[int] | None = None) -> BaseException | None:
        """Return the error for the first failure of a member, or None.

        Args:
            ranks: Members whose end counts; None: all others. A published error counts in any case.
        """
        concerned = self._others if ranks is None else ranks
        if self._wait.is_due():
            self._log_wait(concerned)
        # Ranks that have raised the first failure may have ended since: what they published is the cause.
        if (published := self._published()) is not None:
            return published
        failure = self._find_failure(concerned, self.operation)
        if failure is None and ranks is None:
            # A member that has done its part may leave. It waits for the same keys: none is missing then.
            failure = self._find_departure(concerned, self.operation)
        return None if failure is None else self._published() or failure

    def _log_wait(self, ranks: Sequence[int]) -> None:
        """Log for whom this rank has waited long: nothing else is seen until the time-out, half an hour by default."""
        with contextlib.suppress(RuntimeError):
            absent = ranks if self._find_absent is None else self._find_absent()
            some = "some of " if self._find_absent is None and len(absent) > 1 else ""
            if absent:
                names = rank_names(absent, self._members)
                text = "%s has waited %g s for %s%s. Each of its %d ranks has to call it."
                log.warning(text, self._place, self._wait.seconds, some, names, len(self._members))

    def _published(self) -> BaseException | None:
        return read_failure(self._store, self._place, self._members)

    def publish(self, error: BaseException) -> None:
        """Publish the error for which this rank leaves. The first one published in a meeting counts for all."""
        kind, text = type(error).__name__, text_of(error)
        restored = isinstance(error, DistBackendError) or kind in _OF_ALL_RANKS
        described = text if restored else f"{kind}: {text}".removesuffix(": ")
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_FAILURE_KEY, "", f"{self._rank}|{kind}|{described}")

    def on_disconnect(self) -> tuple[str, str]:
        """Return the key and the value that the store's server is to set if it sees the end of this process."""
        text = (
            f"its process (pid {os.getpid()} on {os.uname().nodename}) has ended, or lost its connection to the store"
        )
        return _FAILURE_KEY, f"{self._rank}|{RankDiedError.__name__}|{text}"

    def withdraw(self, then: str = "") -> None:
        """Have the server set another key if it sees the end of this process from now on; none by default."""
        # All members have what they need: the one that serves the store may have left already.
        with contextlib.suppress(RuntimeError):
            self._store.set_on_disconnect(then or _FAILURE_KEY, then)

    @contextmanager
    def published(self) -> Iterator[None]:
        """Publish an error that is raised in the block; if it follows from the end of a rank, name that rank."""
        try:
            yield
        except Exception as error:
            failure = at_limit(self._place, error)
            if failure is None and isinstance(error, DistNetworkError | UnsupportedError | OSError):
                failure = self._cause(error)
            # A member that needs nothing more from the dead one waits for this rank.
            self.publish(failure or error)
            if failure is None:
                raise
            raise failure from error
        except BaseException as error:
            self.publish(error)
            raise

    def _cause(self, error: BaseException) -> BaseException | None:
        """Return the failure of a member that caused an error; else an error of the network with the operation."""
        if (failure := found_soon(self.failure)) is not None:
            return failure
        if not isinstance(error, DistNetworkError) or self.operation in (text := text_of(error)):
            return None
        return in_context(f"{self._place}: {text}", error)

    @contextmanager
    def interruption_published(self) -> Iterator[None]:
        """Publish an error that is raised in the block, unless it is one of communication or of wrong arguments.

        Those are published where they are found, or leave the store with no way to publish them.
        """
        try:
            yield
        except (DistError, ArgumentError):
            raise
        except BaseException as error:
            self.publish(error)
            raise


def read_failure(
    store: Store, operation: str, members: Sequence[int] | None = None, key: str = _FAILURE_KEY
) -> BaseException | None:
    """Return the error that a member of a meeting has published in its store, or None.

    Args:
        store: Store of the meeting.
        operation: Beginning of the message.
        members: Global ranks of all members; None if they are numbered from 0.
        key: Key of the error.
    """
    try:
        published = store.get_if_present(key)
    except RuntimeError:
        # The store is gone, which the wait itself reports.
        return None
    if published is None:
        return None
    rank, kind, text = published.decode(errors="backslashreplace").split("|", 2)
    if kind in _OF_ALL_RANKS:
        return _OF_ALL_RANKS[kind](text)
    global_rank = int(rank) if members is None else members[int(rank)]
    error = _SAME_TYPE.get(kind, GroupAbortedError)(f"{operation}: rank {global_rank} failed: {text}")
    # In a meeting, a rank publishes the death of another one.
    return error.naming([global_rank] if key == GROUP_FAILURE_KEY else ())


def unwatched(store: Store) -> Store:
    """Return a store without the watch over the creation of its group, which has ended when the group exists."""
    return PrefixStore(store.prefix, store.underlying_store) if isinstance(store, WatchedStore) else store


def process_identity() -> str:
    """Return a text that names this process among those of all hosts."""
    return f"{host_identity()}|{_own_process()}"


def _own_process() -> str:
    """Return the number and the witness of this process, as `parse_process` reads them."""
    return f"{os.getpid()}:{own_witness()}"


def parse_process(text: str) -> tuple[int, int]:
    """Return the number and the witness of a process, as `process_identity` ends with them."""
    pid, _, witness = text.partition(":")
    return int(pid), int(witness or 0)


def size_mismatch(sizes: Mapping[int, int]) -> MismatchError:
    """Return the error for ranks whose world sizes differ."""
    text = ", ".join(f"rank {rank} has {size}" for rank, size in sorted(sizes.items()))
    return MismatchError(f"init_process_group: world sizes differ: {text}. Give all ranks the same WORLD_SIZE.")


def backend_mismatch(operation: str, one: tuple[int, str], other: tuple[int, str]) -> MismatchError:
    """Return the error for two ranks whose backends differ; a backend without a name is the default."""
    (rank, name), (second, its_name) = sorted((one, other))
    sides = f"rank {rank} uses backend {name!r}, rank {second} uses {its_name!r}"
    return MismatchError(f"{operation}: {sides}. All ranks must use the same backend.")


def both_sides(one: tuple[int, str], other: tuple[int, str]) -> str:
    """Return what two ranks pass to an operation, as a text that does not depend on which of them came first.

    >>> both_sides((1, "members [0,1]"), (0, "members [1,0]"))
    'rank 0 passes members [1,0], rank 1 passes members [0,1]'
    """
    return ", ".join(f"rank {rank} passes {what}" for rank, what in sorted((one, other)))


def host_identity() -> str:
    """Return a text that is equal for two ranks if and only if they can share memory: same host, same namespaces.

    Processes find each other's memory under /proc. One that has no /proc, or that of another pid namespace, shares
    memory with no other: its text is its own (see `has_no_proc`). ``TORCHDIST_REF_HOST_ID`` overrides the text, which
    lets one machine play several hosts.
    """
    override = os.environ.get("TORCHDIST_REF_HOST_ID")
    if override is not None:
        return override
    try:
        if os.readlink("/proc/self") == str(os.getpid()):
            return "/".join([_boot_id(), *(os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "ipc", "user"))])
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES):
            raise
    return f"{os.uname().nodename}/{_NO_PROC}/{_random_identity(os.getpid())}"


def has_no_proc(identity: str) -> bool:
    """Return whether a text of `host_identity` is that of a process without a /proc of its pid namespace."""
    return f"/{_NO_PROC}/" in identity


@cache
def _random_identity(pid: int) -> str:
    """Return a text of this process alone; a forked child has another one."""
    return os.urandom(16).hex()


@cache
def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
