"""Meeting: how the ranks of one initialization find each other, on a store that other initializations may use too.

Each rank counts its initializations in the store, per attempt of the launcher. The count is part of the meeting's key
prefix, so ranks need not be in step: those with equal counts meet. The store may outlive worlds and restarted ranks.

Two processes with the same rank would wait in different meetings, each for the other's ranks. A rank that waits sees
that somebody else has counted, which only a second claimant of its rank does. The second claimant sees that the first
one is present in the meeting before. World sizes that differ are found by `liveness.Presence`. All of this is looked at
only by ranks that wait, so it costs an undisturbed initialization nothing.

Do not add the creation of groups (`creation`) or rendezvous methods (`rendezvous`) here.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from torchdist_ref.errors import (
    ArgumentTypeError,
    BackendArgumentError,
    DistError,
    DistNetworkError,
    RendezvousError,
    UsageError,
    explain,
)
from torchdist_ref.liveness import MemberWatch, Presence, read_failure
from torchdist_ref.rendezvous import rendezvous
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.stores.prefix import KeyRange
from torchdist_ref.timeouts import STORE_TIMEOUT, Deadline

_RECONNECT_SECONDS = 0.001
_LEAVE_SECONDS = 0.3
"""Time that the last process with this rank has to end, or to destroy its world."""
_HOLDER_TIMEOUT = timedelta(seconds=1)
_MAX_CLAIMANTS = 16
"""Claimants of one rank that are notified. Anybody can count in the store."""
_OPERATION = "init_process_group"


class Meeting:
    """Part of a store for one initialization, and this rank's place in it.

    Args:
        store: Store that the ranks share.
        rank: This rank.
        size: Number of ranks.
        outlives_worlds: Whether the store is still used when the world has been destroyed.
        began: Time at which the initialization began; now by default.

    Attributes:
        store: The part of the store.
        rank: This rank.
        size: Number of ranks.
        number: How many initializations this rank has begun on the store in this attempt.
    """

    def __init__(
        self, store: Store, rank: int, size: int, outlives_worlds: bool = True, began: float | None = None
    ) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._whole, self._attempt, self._outlives_worlds = store, attempt, outlives_worlds
        self._claims = f"worlds/{attempt}/{rank}"
        self.rank, self.size, self._began = rank, size, monotonic() if began is None else began
        self.number = store.add(self._claims, 1)
        self.store = self._part(self.number)
        self._presence = Presence(self.store, rank, size)

    def _part(self, number: int) -> PrefixStore:
        return PrefixStore(f"world/{self._attempt}/{number}", self._whole)

    @contextmanager
    def watched(self) -> Iterator[MemberWatch]:
        """Announce this rank, and yield a watch over all ranks while they meet."""
        watch = MemberWatch(self.store, self.rank, range(self.size), _OPERATION, self.failure)
        then = "" if self._outlives_worlds else self._left()
        with closing(self._presence), watch.published_on_disconnect(then, self._presence.announcement()):
            yield watch

    def failure(self, ranks: Sequence[int], description: str) -> BaseException | None:
        """Return the error for a rank that was claimed twice, has another world size, or has died; None without."""
        with contextlib.suppress(RuntimeError):
            if (latest := self._whole.add(self._claims, 0)) != self.number:
                error = self._claimed_twice()
                for number in range(max(self.number, latest - _MAX_CLAIMANTS) + 1, latest + 1):
                    MemberWatch(self._part(number), self.rank, range(self.size), _OPERATION).publish(error)
                return error
            if self.number > 1 and (earlier := self.find_claimant(self.number - 1)) is not None:
                return earlier
        return self._presence.failure(ranks, description)

    def find_claimant(self, number: int) -> RendezvousError | None:
        """Return the error for another process of this host that has this rank in an earlier meeting, and stays."""
        earlier = self._part(number)
        if earlier.check([self._left()]):
            return None
        if isinstance(known := read_failure(earlier, _OPERATION), RendezvousError):
            return known
        # A process that is about to end or to leave needs a moment.
        if monotonic() < self._began + _LEAVE_SECONDS:
            return None
        stays = Presence(earlier, self.rank, self.size).is_another_process()
        return self._claimed_twice() if stays else None

    def _left(self) -> str:
        return f"left/{self.rank}"

    def _claimed_twice(self) -> RendezvousError:
        return RendezvousError(
            f"{_OPERATION}: two processes claim rank {self.rank} of {self.size}; one of them is pid {os.getpid()} on "
            f"{os.uname().nodename}. Give each process a rank of its own: RANK, or the argument 'rank'."
        )

    def leave(self) -> None:
        """Delete this rank's presence, and release the keys of the world."""
        if self._outlives_worlds:
            with contextlib.suppress(RuntimeError, OSError):
                self.store.delete_key(f"present/{self.rank}")
            KeyRange(self._whole, self.store.prefix, self.size).release()


def meet(init_method: str | None, rank: int, world_size: int, seconds: float) -> Meeting:
    """Find the other ranks by a URL, as `init_process_group` does; `env://` by default."""
    if init_method is not None and not isinstance(init_method, str):
        raise ArgumentTypeError(explain(_OPERATION, "init_method", "a URL, as text", init_method))
    url, timeout = init_method or "env://", min(timedelta(seconds=seconds), STORE_TIMEOUT)
    if not url.startswith(("env://", "tcp://")):
        store, rank, world_size = next(iter(rendezvous(url, rank, world_size, timeout=timeout)))
        return meet_on(store, rank, world_size)
    try:
        # The wait for the other ranks comes later, under watch.
        found = next(iter(rendezvous(url, rank, world_size, timeout=timeout, wait_for_workers=False)))
    except DistNetworkError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            _claim_at_holder(url, rank, world_size)
        raise
    outlives_worlds = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if found[1] == 0 or outlives_worlds:
        return Meeting(*found, outlives_worlds)
    return _meet_at_rank_0(url, found, timeout, seconds)


def _meet_at_rank_0(url: str, found: tuple[Store, int, int], timeout: timedelta, seconds: float) -> Meeting:
    """Meet on the store that rank 0 serves for this world: the first initialization on it."""
    began, deadline = monotonic(), Deadline(seconds)
    store, rank, world_size = found
    while True:
        try:
            meeting = Meeting(store, rank, world_size, False, began)
            if meeting.number == 1 or deadline.passed():
                return meeting
            # The server that rank 0 ran for the last world, which has not ended yet.
            if (claimant := meeting.find_claimant(1)) is not None:
                raise claimant
        except DistNetworkError:
            # It ended just now.
            if deadline.passed():
                raise
        _close_store(store)
        sleep(_RECONNECT_SECONDS)
        store, _, _ = next(iter(rendezvous(url, rank, world_size, timeout=timeout, wait_for_workers=False)))


def _claim_at_holder(url: str, rank: int, world_size: int) -> None:
    """Claim rank 0 on the store that holds the port, where another process may wait for its ranks as rank 0."""
    options: dict[str, Any] = {"timeout": _HOLDER_TIMEOUT, "wait_for_workers": False, "serve": False}
    with contextlib.suppress(DistError):
        store, rank, world_size = next(iter(rendezvous(url, rank, world_size, **options)))
        Meeting(store, rank, world_size, outlives_worlds=False)
        _close_store(store)


def _close_store(store: Store) -> None:
    close = getattr(store, "close", None)
    if close is not None:
        close()


def meet_on(store: Store, rank: int, world_size: int) -> Meeting:
    """Meet the other ranks on a store.

    Raises:
        ArgumentTypeError: The rank or the world size is no integer.
        BackendArgumentError: The rank is too large.
        UsageError: The rank is negative, or the world has no rank.
    """
    for argument, value in (("rank", rank), ("world_size", world_size)):
        if not hasattr(value, "__index__"):
            hint = "Convert text from the environment with int()."
            raise ArgumentTypeError(explain(_OPERATION, argument, "an int", value, hint=hint))
    if world_size < 1:
        raise UsageError(explain(_OPERATION, "world_size", "at least 1 when a store is given", world_size))
    if not 0 <= rank < world_size:
        # torch asserts that it is not negative, and its backends that it is not too large.
        kind = UsageError if rank < 0 else BackendArgumentError
        raise kind(explain(_OPERATION, "rank", f"from 0 to {world_size - 1}", rank))
    return Meeting(store, rank, world_size)
