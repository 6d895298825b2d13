"""Watch over the ranks that meet in one operation, and that must all succeed or all fail.

While ranks create a group or meet in a barrier, every wait of theirs checks at intervals of `CHECK_SECONDS` whether a
rank that it depends on has failed, and raises what it finds. A rank has failed if its process has ended, or if it left
the meeting with an error, which it publishes for the others.

Once a group exists, its `Link` watches the members, or `group_events` if the backend is one of torch's. Do not add
waits here, nor messages between ranks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torchdist_ref.errors import (
    ArgumentError,
    DistError,
    DistNetworkError,
    UnsupportedError,
    at_limit,
    of_operation,
    rank_names,
)
from torchdist_ref.membership import events
from torchdist_ref.membership.blame import Wait, blame
from torchdist_ref.membership.words import error_of
from torchdist_ref.processes.identity import own_place
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.stores.prefix import WatchedStore
from torchdist_ref.timeouts import LongWait, found_soon

log = logging.getLogger("torchdist_ref.groups")
_FAILURE_KEY = "failure"


FindFailure = Callable[[Sequence[int], str, Wait], BaseException | None]
"""Function of ranks in the meeting, the operation and the kind of its wait, such as `Backend.failure`."""


def _no_failure(ranks: Sequence[int], description: str, wait: Wait) -> BaseException | None:
    return None


class MemberWatch:
    """Watch over the ranks that meet in one operation, and that must all succeed or all fail.

    Args:
        store: Store with a prefix that only this meeting uses.
        rank: This rank in the group.
        members: Global ranks of all members.
        operation: The operation, for messages.
        find_failure: Function that finds members that have ended, or that have left a group of theirs and so cannot
            do their part.
        find_absent: Function that finds members that have not come yet, for the log; None where that is not known.

    Attributes:
        store: The same store; its waits fail with the first failure of a member.
        operation: The operation.

    >>> from torchdist_ref.errors import GroupAbortedError
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
        find_absent: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self._rank, self._members = rank, tuple(members)
        self._find_failure, self._store, self._is_complete = find_failure, store, False
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
        self._is_complete = True

    def failure(self, ranks: Sequence[int] | None = None) -> BaseException | None:
        """Return the error for the first failure of a member, or None.

        Args:
            ranks: Members whose end counts; None: all others. A published error counts in any case.
        """
        concerned = self._others if ranks is None else ranks
        if self._wait.is_due():
            self._log_wait(concerned)
        # Members that are named have yet to do their part in this wait, and may have done it in the meeting: one that
        # has may leave. Without names, all wait for the same keys, of which none is missing then.
        wait = Wait.ELSEWHERE if ranks is not None or self._is_complete else Wait.PART
        ended = self._find_failure(concerned, self.operation, wait)
        # A member publishes its failure before it ends, and others end because of that. So what is published is read
        # after the ends, and counts before them.
        return self._published() or ended

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
        return read_failure(self._store, self._place)

    def publish(self, error: BaseException) -> None:
        """Publish the error for which this rank leaves. The first one published in a meeting counts for all."""
        with contextlib.suppress(RuntimeError):
            published = events.published(self._members[self._rank], error)
            self._store.compare_set(_FAILURE_KEY, "", events.encode(published))

    def on_disconnect(self) -> tuple[str, str]:
        """Return the key and the value that the store's server is to set if it sees the end of this process."""
        host, pid = own_place()
        lost = events.Ending(events.LOST, pid, host)
        return _FAILURE_KEY, events.encode(events.Published(self._members[self._rank], events.DIED, ending=lost))

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
        if not isinstance(error, DistNetworkError) or error.operation:
            return None
        return of_operation(self._place, error)

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


def read_failure(store: Store, operation: str) -> BaseException | None:
    """Return the error that a member of a meeting has published in its store, or None.

    Args:
        store: Store of the meeting.
        operation: Beginning of the message.
    """
    try:
        found = events.decode(store.get_if_present(_FAILURE_KEY) or b"")
    except RuntimeError:
        # The store is gone, which the wait itself reports.
        return None
    failure = None if found is None else blame([found], (), Wait.MEETING)
    return None if failure is None else error_of(failure, operation)


def unwatched(store: Store) -> Store:
    """Return a store without the watch over the creation of its group, which has ended when the group exists."""
    return PrefixStore(store.prefix, store.underlying_store) if isinstance(store, WatchedStore) else store
