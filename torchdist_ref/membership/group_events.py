"""Events of a group in its store, for backends whose own connections tell neither who failed nor why.

A rank publishes why it aborts a group, and that it leaves it, in the group's store. The others read that while they
wait there, and once a call of theirs has failed. A rank that is killed publishes nothing; its process is looked for on
this host. `blame` chooses among what is found. Do not add the watch over ranks that create a group (`watch`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic, sleep

from torchdist_ref.errors import DistBackendError
from torchdist_ref.membership.blame import Wait, blame
from torchdist_ref.membership.events import Died, Failure, Left, MemberEvent, Published, decode, encode
from torchdist_ref.membership.peer_processes import PeerProcesses
from torchdist_ref.membership.watch import unwatched
from torchdist_ref.membership.words import error_of
from torchdist_ref.processes.identity import host_identity, parse_process
from torchdist_ref.stores import Store
from torchdist_ref.stores.base import limit_requests
from torchdist_ref.timeouts import END_SECONDS

_FAILURE_KEY, _LAST_LEFT_KEY = "failure in the group", "last that left"
_LOOK_SECONDS = 0.4
"""Longest look for the member that failed first. Nearly always it is known at once; a busy host is late."""


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


class GroupEvents:
    """Failures and leaves of a group's members, in the store that only the group uses.

    Nothing is done until a call fails, or waits by other means than the backend.

    Args:
        store: Store with a prefix that only the group uses.
        rank: This rank in the group.
        members: Global ranks of all members.

    Attributes:
        met: First error that `find` has returned, without its traceback; None before.

    >>> from torchdist_ref.stores import HashStore, PrefixStore
    >>> shared = PrefixStore("group/1", HashStore())
    >>> GroupEvents(shared, 1, [0, 4]).publish_leave()
    >>> GroupEvents(shared, 0, [0, 4]).known([1], "monitored_barrier", Wait.PART)
    GroupAbortedError('monitored_barrier: rank 1 (global 4) destroyed the group')
    >>> GroupEvents(shared, 1, [0, 4]).publish(Published(4, text="its program ended with ValueError: no data"))
    >>> GroupEvents(shared, 0, [0, 4]).find("barrier")
    GroupAbortedError('barrier: rank 4 failed: its program ended with ValueError: no data')
    """

    def __init__(self, store: Store, rank: int, members: Sequence[int]) -> None:
        self._store = unwatched(store)
        self._rank, self._members = rank, tuple(members)
        self._processes: dict[int, int] = {}
        self._witnesses: dict[int, int] = {}
        self._found: Failure | None = None
        self._leave: Left | Published = Left(self._members[rank])
        self._is_published, self._last, self._left = False, b"", dict[int, MemberEvent]()
        self.met: DistBackendError | None = None

    # This rank

    def watch(self, processes: Mapping[int, str]) -> None:
        """Look for these processes after a failure, by group rank, each as `process_identity` has described it."""
        for rank, (host, _, process) in ((rank, text.rpartition("|")) for rank, text in processes.items()):
            pid, witness = parse_process(process)
            if host == host_identity() and pid != os.getpid():
                self._processes[rank], self._witnesses[rank] = pid, witness

    def publish(self, event: Published) -> None:
        """Publish why this rank aborts the group, unless another rank's failure made it do so."""
        if self._found is None:
            use_briefly(lambda: self._publish_failure(event))
        if not event.continues:
            self._explain(event)

    def abort(self, reason: str) -> None:
        """Publish that this rank aborts the group, and why."""
        self.publish(Published(self._members[self._rank], text=reason))

    def explain_leave(self, after: str) -> None:
        """Set the failure after which this rank leaves, in words. The first explanation counts."""
        self._explain(Left(self._members[self._rank], after=after))

    def _explain(self, event: Left | Published) -> None:
        if self._leave == Left(self._members[self._rank]):
            self._leave = event

    def publish_leave(self) -> None:
        """Publish that this rank has left, once."""
        if not self._is_published:
            self._is_published = True
            use_briefly(self._publish_leave)

    def _publish_failure(self, event: MemberEvent) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_FAILURE_KEY, "", encode(event))

    def _publish_leave(self) -> None:
        with contextlib.suppress(RuntimeError):
            # In this order: a rank that reads who was the last to leave also finds how that one did.
            self._store.set(_left_key(self._rank), encode(self._leave))
            self._store.set(_LAST_LEFT_KEY, str(self._rank))

    # The others

    def find(self, operation: str) -> DistBackendError | None:
        """Return the error for the member that failed first, if that is known within 0.4 seconds.

        If none has, return that for members that have left the group; None without.

        Args:
            operation: Beginning of the message.
        """
        seen: list[Failure | None] = []
        if self._found is None:
            use_briefly(lambda: seen.append(self._look()), _LOOK_SECONDS)
        error = self._error(self._found or next(iter(seen), None), operation)
        self.met = self.met or error
        return error

    def published_failure(self, operation: str) -> DistBackendError | None:
        """Return the error for the member that has published a failure, or None. It takes one request.

        Args:
            operation: Beginning of the message.
        """
        return self._error(blame(self._published(), self._members, Wait.FAILED_CALL), operation)

    def known(self, ranks: Sequence[int], operation: str, wait: Wait) -> DistBackendError | None:
        """Return the error for the first of some group ranks that is known to have failed, or None.

        Args:
            ranks: Ranks for which this one waits by other means than the backend.
            operation: Beginning of the message.
            wait: `Wait.ELSEWHERE`, or `Wait.PART` if a rank that has left the group ends the wait too.
        """
        failure = self._failure_of(ranks, wait)
        if failure is None and wait is Wait.PART:
            failure = blame(self._leaves(), self._global(ranks), wait)
        return self._error(failure, operation)

    def _error(self, failure: Failure | None, operation: str) -> DistBackendError | None:
        error = failure and error_of(failure, operation, self._members)
        return error if isinstance(error, DistBackendError) else None

    def _global(self, ranks: Sequence[int]) -> list[int]:
        return [self._members[rank] for rank in ranks]

    def _look(self) -> Failure | None:
        """Return the failure of a call that has failed already, once it is known."""
        began, everyone = monotonic(), range(len(self._members))
        while (found := self._failure_of(everyone, Wait.FAILED_CALL)) is None and monotonic() < began + _LOOK_SECONDS:
            # The end of a process is known a little later than that of its connections.
            left = blame(self._leaves(), self._members, Wait.FAILED_CALL)
            if left is not None and monotonic() > began + END_SECONDS:
                return left
            sleep(0.002)
        return found

    def _failure_of(self, ranks: Sequence[int], wait: Wait) -> Failure | None:
        """Return the failure of some group ranks, leaves apart, or None; one that no rank has published is published.

        This process may end before others look. A rank that had left the group before its process ended has not
        failed: its leave is returned.
        """
        needed = self._global(ranks)
        if (found := blame(self._published(), needed, wait)) is None:
            if not (died := self._deaths(ranks)):
                return None
            found = blame([*self._leaves(), *died], [event.rank for event in died], Wait.ELSEWHERE)
            dead = [event for event in died if found and event.rank in found.ranks]
            if found is None or any(event.rank in self._left for event in dead):
                return found
            self._publish_failure(dead[0])
        self._found = found
        return found

    def _published(self) -> list[MemberEvent]:
        """Return the first failure that a member has published, if there is one."""
        with contextlib.suppress(RuntimeError):
            # If the store is gone, the wait itself reports that.
            event = decode(self._store.get_if_present(_FAILURE_KEY) or b"")
            return [event] if isinstance(event, Published | Died) else []
        return []

    def _deaths(self, ranks: Sequence[int]) -> list[Died]:
        watched = {rank: pid for rank, pid in self._processes.items() if rank in ranks}
        with contextlib.closing(PeerProcesses(watched, self._witnesses)) as processes:
            return [Died(self._members[rank], processes.ending(rank)) for rank in processes.dead()]

    def _leaves(self) -> list[MemberEvent]:
        """Return how members have left. It takes one request while nobody leaves."""
        try:
            last = self._store.get_if_present(_LAST_LEFT_KEY)
            if last is not None and last != self._last:
                self._read_leaves()
                self._last = last
        except RuntimeError:
            # The store is gone, with a rank that need not be one of those that have left. The wait itself reports that.
            return []
        return [self._left[member] for member in self._members if member in self._left]

    def _read_leaves(self) -> None:
        for rank, member in enumerate(self._members):
            if member not in self._left and (text := self._store.get_if_present(_left_key(rank))) is not None:
                event = decode(text)
                known = event if isinstance(event, Left | Published) else Left(member)
                self._left[member] = replace(known, rank=member)


def _left_key(rank: int) -> str:
    return f"left/{rank}"
