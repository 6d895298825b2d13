"""Members of a group that have failed or left it, for backends whose own connections tell neither who nor why.

A rank publishes why it aborts a group, and that it leaves it, in the group's store. The others read that while they
wait there, and once a call of theirs has failed. A rank that is killed publishes nothing; its process is looked for on
this host. Do not add the watch over ranks that create a group (`membership.liveness`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic, sleep

from torchdist_ref.errors import DistBackendError, GroupAbortedError, RankDiedError, rank_names
from torchdist_ref.membership.events import ENDED, Ending
from torchdist_ref.membership.liveness import (
    GROUP_FAILURE_KEY,
    PeerProcesses,
    host_identity,
    parse_process,
    read_failure,
    unwatched,
)
from torchdist_ref.membership.words import ending_text
from torchdist_ref.stores import Store
from torchdist_ref.stores.base import limit_requests
from torchdist_ref.timeouts import END_SECONDS

_LAST_LEFT_KEY = "last that left"
_DESTROYED, _CONTINUES = "destroyed the group", "it continues in another group: "
_LOOK_SECONDS = 0.4
"""Longest look for the member that failed first. Nearly always it is known at once; a busy host is late."""
_MemberFailure = tuple[type[DistBackendError], str, tuple[int, ...]]
"""Type and text of an error, and the global ranks that have failed or left."""


def use_briefly(use_store: Callable[[], None], seconds: float = END_SECONDS) -> None:
    """Call a function that uses a store, and return after a short time in any case: its host may be gone."""
    thread = threading.Thread(target=use_store, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # No thread starts while Python ends.
        with limit_requests(seconds):
            use_store()
        return
    thread.join(seconds)


class Departures:
    """Members that have left a group, for a backend whose connections do not tell why they end.

    A rank that leaves publishes it in the group's store. The others read that while they wait in the store, or once a
    call has failed. A rank may leave when it has done its part, so that alone ends no wait: see `Backend.departure`.

    Args:
        store: Store with a prefix that only the group uses.
        rank: This rank in the group.
        members: Global ranks of all members.

    >>> from torchdist_ref.stores import HashStore, PrefixStore
    >>> shared = PrefixStore("group/1", HashStore())
    >>> Departures(shared, 1, [0, 4]).publish()
    >>> Departures(shared, 0, [0, 4]).known([1], "monitored_barrier")
    GroupAbortedError('monitored_barrier: rank 1 (global 4) destroyed the group')
    """

    def __init__(self, store: Store, rank: int, members: Sequence[int]) -> None:
        self._store = unwatched(store)
        self._rank, self._members = rank, tuple(members)
        self._how = _DESTROYED
        self._is_published, self._last = False, b""
        self._left: dict[int, str] = {}

    def explain(self, how: str) -> None:
        """Set how this rank leaves, as the end of a sentence about it. The first explanation counts."""
        if self._how == _DESTROYED:
            self._how = how

    def publish(self) -> None:
        """Publish that this rank has left, once."""
        if not self._is_published:
            self._is_published = True
            use_briefly(self._publish)

    def _publish(self) -> None:
        with contextlib.suppress(RuntimeError):
            # In this order: a rank that reads who was the last to leave also finds how that one did.
            self._store.set(_left_key(self._rank), self._how.encode(errors="backslashreplace"))
            self._store.set(_LAST_LEFT_KEY, str(self._rank))

    def known(self, ranks: Sequence[int], operation: str) -> DistBackendError | None:
        """Return the error for those of some group ranks that have left, or None.

        Args:
            ranks: Ranks that have yet to do their part.
            operation: Beginning of the message.
        """
        return _error_for(self.among(ranks), operation)

    def among(self, ranks: Iterable[int]) -> _MemberFailure | None:
        """Return how some of these group ranks have left, or None. It takes one request while nobody leaves."""
        try:
            last = self._store.get_if_present(_LAST_LEFT_KEY)
            if last is not None and last != self._last:
                self._read_all()
                self._last = last
        except RuntimeError:
            # The store is gone, with a rank that need not be one of these. The wait itself reports that.
            return None
        left = [rank for rank in ranks if rank in self._left]
        if not left:
            return None
        # A rank that had a reason may be why the others have left.
        how = next((self._left[rank] for rank in left if self._left[rank] != _DESTROYED), _DESTROYED)
        same = [rank for rank in left if self._left[rank] == how]
        return GroupAbortedError, f"{rank_names(same, self._members)} {how}", tuple(self._members[r] for r in same)

    def has_left(self, rank: int) -> bool:
        """Return whether `among` has found that a group rank has left."""
        return rank in self._left

    def _read_all(self) -> None:
        for rank in range(len(self._members)):
            if rank not in self._left and (how := self._store.get_if_present(_left_key(rank))) is not None:
                self._left[rank] = how.decode()


def _left_key(rank: int) -> str:
    return f"left/{rank}"


def _error_for(found: _MemberFailure | None, operation: str) -> DistBackendError | None:
    """Return the error for what was found about members, or None if nothing was."""
    if found is None:
        return None
    kind, text, ranks = found
    return kind(f"{operation}: {text}").naming(ranks)


class MemberFailures:
    """Failures of a group's members, for a backend whose own errors name no rank.

    A rank that aborts the group publishes why in the group's store. A rank that is killed cannot; its process is looked
    for on this host. Nothing is done until a call fails, or waits by other means than the backend.

    Args:
        store: Store with a prefix that only the group uses.
        rank: This rank in the group.
        members: Global ranks of all members.

    Attributes:
        departures: Members that have left the group in good order, who count where no failure is known.
        met: First error that `find` has returned, without its traceback; None before.

    >>> from torchdist_ref.stores import HashStore, PrefixStore
    >>> shared = PrefixStore("group/1", HashStore())
    >>> MemberFailures(shared, 1, [0, 4]).publish("its program ended with ValueError: no data")
    >>> MemberFailures(shared, 0, [0, 4]).find("barrier")
    GroupAbortedError('barrier: rank 4 failed: its program ended with ValueError: no data')
    """

    def __init__(self, store: Store, rank: int, members: Sequence[int]) -> None:
        self._store = unwatched(store)
        self._rank, self._members = rank, tuple(members)
        self._processes: dict[int, int] = {}
        self._witnesses: dict[int, int] = {}
        self._found: _MemberFailure | None = None
        self.departures = Departures(store, rank, members)
        self.met: DistBackendError | None = None

    def watch(self, processes: Mapping[int, str]) -> None:
        """Look for these processes after a failure, by group rank, each as `process_identity` has described it."""
        for rank, (host, _, process) in ((rank, text.rpartition("|")) for rank, text in processes.items()):
            pid, witness = parse_process(process)
            if host == host_identity() and pid != os.getpid():
                self._processes[rank], self._witnesses[rank] = pid, witness

    def publish(self, reason: str, continues: bool = False) -> None:
        """Publish why this rank aborts the group, unless another rank's failure made it do so.

        Args:
            reason: The reason.
            continues: Whether this rank will meet others of the group again: they need not give it up.
        """
        if self._found is None:
            text = f"{_CONTINUES}{reason}" if continues else reason
            use_briefly(lambda: self._publish(self._rank, GroupAbortedError, text))

    def find(self, operation: str) -> DistBackendError | None:
        """Return the error for the member that failed first, if that is known within 0.4 seconds.

        If none has, return that for members that have left the group; None without.

        Args:
            operation: Beginning of the message.
        """
        seen: list[_MemberFailure | None] = []
        if self._found is None:
            use_briefly(lambda: seen.append(self._look()), _LOOK_SECONDS)
        found = self._found or next(iter(seen), None)
        self.met = self.met or _error_for(found, operation)
        return _error_for(found, operation)

    def known(self, ranks: Sequence[int], operation: str) -> DistBackendError | None:
        """Return the error for the first of some group ranks that is known to have failed, or None.

        Args:
            ranks: Ranks that have yet to do their part: another one may have ended after its own.
            operation: Beginning of the message.
        """
        return _error_for(self._failure_of(ranks, _CONTINUES), operation)

    def _publish(self, rank: int, kind: type[DistBackendError], text: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(GROUP_FAILURE_KEY, "", f"{rank}|{kind.__name__}|{text}")

    def _look(self) -> _MemberFailure | None:
        began, everyone = monotonic(), range(len(self._members))
        while (found := self._failure_of(everyone)) is None and monotonic() < began + _LOOK_SECONDS:
            # The end of a process is known a little later than that of its connections.
            left = self.departures.among(everyone)
            if left is not None and monotonic() > began + END_SECONDS:
                return left
            sleep(0.002)
        return found

    def _failure_of(self, ranks: Sequence[int], ignored: str | None = None) -> _MemberFailure | None:
        """Return the first published failure if it is of one of these ranks, else their deaths, or None.

        Args:
            ranks: Group ranks.
            ignored: Words of a published failure that does not count.
        """
        published = read_failure(self._store, "", self._members, GROUP_FAILURE_KEY)
        concerns = isinstance(published, DistBackendError) and any(self._members[r] in published.ranks for r in ranks)
        if isinstance(published, DistBackendError) and concerns and not (ignored and ignored in str(published)):
            self._found = type(published), str(published).removeprefix(": "), published.ranks
            return self._found
        return self._end_of(ranks)

    def _end_of(self, ranks: Sequence[int]) -> _MemberFailure | None:
        """Return the failure of those of some ranks whose processes have ended, after publishing it.

        This process may end before others look. A rank that had left the group has not failed: its leave is returned.
        """
        watched = {rank: pid for rank, pid in self._processes.items() if rank in ranks}
        with contextlib.closing(PeerProcesses(watched, self._witnesses)) as processes:
            if not (ended := processes.dead()):
                return None
            left = self.departures.among(ended)
            dead = [rank for rank in ended if not self.departures.has_left(rank)]
            known = {rank: processes.ending(rank) or Ending(ENDED) for rank in dead}
            endings = [f"rank {self._members[rank]} died ({ending_text(known[rank])})" for rank in dead]
        if not dead:
            return left
        self._publish(dead[0], RankDiedError, text := "; ".join(endings))
        self._found = RankDiedError, text, tuple(self._members[rank] for rank in dead)
        return self._found
