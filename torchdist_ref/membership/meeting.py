"""Meeting: how the ranks of one initialization find each other, on a store that other initializations may use too.

`rounds` describes what ranks publish and decides, as values and without any wait. Here a `Meeting` does it on a store:
it opens or looks for a round, announces this rank, waits, and finds out why ranks will not come. Its `Presence` finds
the processes of the ranks that have announced themselves. Until the group exists, nothing else watches these.

Two processes with the same rank overwrite each other's announcement, or each other's round. The one that finds this out
publishes it. Such checks are made only by ranks that wait, so they cost an undisturbed initialization nothing.

Each step is one request: the announcement goes with the wait for the list of those who have met, and what ranks need to
know of each other next (`published` and `awaited`) goes with both.

`ref` inside torch meets here as well, for its world and for groups beside worlds of other backends. Do not add the
creation of groups (`groups.creation`) or the ways to a store (`membership.initialization`) here.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from math import inf
from time import monotonic, sleep
from typing import NamedTuple

from torchdist_ref.errors import (
    MismatchError,
    RankStalledError,
    RendezvousError,
    StoreTimeoutError,
    rank_names,
)
from torchdist_ref.membership.events import ENDED, Ending, Failure
from torchdist_ref.membership.peer_processes import PeerProcesses
from torchdist_ref.membership.rounds import (
    CLOSED,
    DOUBT_UNDER_AGENT,
    LEAVE_SECONDS,
    OPEN,
    Attendance,
    Attendee,
    Round,
)
from torchdist_ref.membership.watch import MemberWatch, read_failure
from torchdist_ref.membership.words import backend_mismatch, error_of, size_mismatch
from torchdist_ref.processes.identity import host_identity, own_place
from torchdist_ref.processes.witness import own_witness
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.stores.prefix import KeyRange, WatchedStore
from torchdist_ref.stores.tcp.store import advice_on_loopback
from torchdist_ref.timeouts import CHECK_SECONDS, Deadline, LongWait

log = logging.getLogger("torchdist_ref.groups")
_FIRST_PAUSE_SECONDS = 0.0002
OPERATION = "init_process_group"
_WORLDS = "world"
_ROUND, _MET, _LAST_MET = "round", "met", "last"
_CHECKED_AT_ONCE = 8
"""Announcements that one check looks for, each of which costs a request."""
_own_nonces: deque[tuple[str, int]] = deque(maxlen=1024)
"""Rounds that this process was in, and its ranks there."""
os.register_at_fork(after_in_child=_own_nonces.clear)


class _RoundReplaced(Exception):
    """End of a wait: rank 0 has opened another round."""


class _Exchange(NamedTuple):
    """Entries that ranks exchange with the requests of their meeting; see `Meeting.watched`."""

    published: Mapping[str, str | bytes]
    awaited: Sequence[str]
    backend: str
    on_round: Callable[[str], None]


class Presence:
    """Processes of the ranks that are about to form a world, as far as they have announced themselves in the store.

    Only the processes of this host are watched. A store server reports the others: see `Store.set_on_disconnect`.

    Args:
        store: Store of the meeting, in which every rank announces its process.
        rank: This rank.
        size: Number of ranks.
        others: Ranks to look for; all by default.
        nonce: Text that tells this announcement from others of the rank.
        backend: Backend that the ranks are to agree on; empty if they need not.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        others: Sequence[int] | None = None,
        nonce: str = "",
        backend: str = "",
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._nonce, self._backend = nonce, backend
        self._other_size: MismatchError | None = None
        self._unknown = deque[int]()
        self._sought: list[Sequence[int]] = []
        self.look_for(range(size) if others is None else others)
        self._processes = PeerProcesses({})

    def announcement(self) -> dict[str, str]:
        """Return key and value that announce the process of this rank."""
        own = Attendee(host_identity(), os.getpid(), own_witness(), self._size, self._backend, self._nonce)
        return {f"present/{self._rank}": own.encode()}

    def is_announced(self) -> bool:
        """Return whether the store has the announcement of this process, and no later one of the same rank."""
        [(key, value)] = self.announcement().items()
        return self._store.get_if_present(key) == value.encode()

    def look_for(self, ranks: Sequence[int]) -> None:
        """Look for these ranks too, from the next check on: most initializations succeed without one."""
        self._sought.append(ranks)

    def nonce_in(self, rank: int, announcement: bytes) -> str:
        """Return the nonce in the announcement of a rank.

        Raises:
            MismatchError: The rank has another world size or another backend.
        """
        other = Attendee.parse(announcement)
        self._compare_size(rank, other.size)
        if self._other_size is not None:
            raise self._other_size
        if other.backend != self._backend:
            raise backend_mismatch("init_process_group", (rank, other.backend), (self._rank, self._backend))
        return other.nonce

    def _compare_size(self, rank: int, size: int) -> None:
        if size != self._size:
            self._other_size = size_mismatch({self._rank: self._size, rank: size})

    def failure(self, ranks: Sequence[int], description: str) -> BaseException | None:
        """Return the error for the first of some ranks whose process has ended or whose world size differs, or None."""
        with suppress(RuntimeError):
            self._find()
        if self._other_size is not None:
            return self._other_size
        for rank in self._processes.dead():
            if rank in ranks:
                died = Failure.of_death(rank, self._processes.ending(rank))
                return error_of(died, f"{description} on rank {self._rank}", advice="start again")
        return None

    def _find(self) -> None:
        """Look for the next announcements; a few at a time, since each costs a request."""
        while self._sought:
            self._unknown.extend(other for other in self._sought.pop(0) if other != self._rank)
        for _ in range(min(_CHECKED_AT_ONCE, len(self._unknown))):
            rank = self._unknown.popleft()
            if (found := self._announced(rank)) is None:
                self._unknown.append(rank)
                continue
            self._compare_size(rank, found.size)
            if found.host == host_identity():
                self._processes.watch(rank, found.pid, found.witness)

    def _announced(self, rank: int) -> Attendee | None:
        """Return what a rank has announced; None if it has not yet."""
        found = self._store.get_if_present(f"present/{rank}")
        return None if found is None else Attendee.parse(found)

    def is_another_process(self) -> bool:
        """Return whether another living process of this host has announced itself as this rank."""
        found = self._announced(self._rank)
        if found is None or found.host != host_identity() or found.pid == os.getpid():
            return False
        with closing(PeerProcesses({self._rank: found.pid})) as processes:
            return not processes.dead()

    def close(self) -> None:
        """Close the descriptors."""
        self._processes.close()


class Meeting:
    """Initialization of one rank on a store that the ranks share.

    Args:
        store: Store that the ranks share.
        rank: This rank.
        size: Number of ranks.
        outlives_worlds: Whether the store is still used when the world has been destroyed.
        has_agent: Whether an agent serves the store, and ends the ranks of a failed attempt.
        began: Time at which the initialization began; now by default.
        operation: The operation, for messages.
        members: Global ranks of those who meet; from 0 to `size` - 1 by default.
        nonce: Random number of this rank; a new one by default.

    Attributes:
        store: The part of the store for this world, once `watched` has yielded; the whole store before.
        seat: State of this rank: its number, its nonce, and the round in which it is.
        values: Values of the awaited keys, once `watched` has yielded; None if it waits for no other rank.
        store_is_new: Whether the store had no round when this rank first looked: no earlier world has used it. None
            before it has looked.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        outlives_worlds: bool = True,
        has_agent: bool = False,
        began: float | None = None,
        operation: str = OPERATION,
        members: Sequence[int] | None = None,
        nonce: str = "",
    ) -> None:
        self.store: Store = store
        self.seat = Attendance(rank, size, nonce or secrets.token_hex(16))
        if has_agent:
            self.seat.doubt_seconds = DOUBT_UNDER_AGENT
        self.values: list[bytes] | None = None
        self.store_is_new: bool | None = None
        self._whole, self._outlives_worlds = store, outlives_worlds
        self._operation, self._members = operation, range(size) if members is None else members
        self._began = monotonic() if began is None else began
        self._next: Round | None = None

    @property
    def _worlds(self) -> PrefixStore:
        return PrefixStore(_WORLDS, self._whole)

    @contextmanager
    def watched(
        self,
        seconds: float,
        alone: bool = False,
        published: Mapping[str, str | bytes] | None = None,
        awaited: Sequence[str] = (),
        backend: str = "",
        on_round: Callable[[str], None] = lambda nonce: None,
    ) -> Iterator[MemberWatch]:
        """Meet the other ranks, and yield a watch over all of them.

        Args:
            seconds: Longest wait for the other ranks.
            alone: Whether to wait for no other rank.
            published: Keys of this world and values to set when this rank announces itself.
            awaited: Keys of this world that all ranks or rank 0 publish, whose values this rank needs.
            backend: Name of the backend, which has to be the same on all ranks.
            on_round: Function that gets the nonce of a round that rank 0 has opened, before this rank announces itself
                there.
        """
        exchange = _Exchange(published or {}, awaited, backend, on_round)
        rank = self.seat.rank
        if alone:
            part = self.store = self._part(self._new_round())
            for key, value in exchange.published.items():
                part.set(key, value)
            yield MemberWatch(part, rank, self._members, self._operation)
            return
        deadline = Deadline(seconds)
        while True:
            opened = self._new_round() if rank == 0 else self._find_round(deadline)
            meet = self._collect if rank == 0 else self._greet
            with self._entered(opened, backend) as (watch, presence):
                with watch.published():
                    met = meet(opened, watch, presence, exchange, deadline)
                if met:
                    self.store = self._part(opened)
                    yield watch
                    return
            self.seat.leave()

    def _part(self, opened: Round) -> PrefixStore:
        return PrefixStore(f"{_WORLDS}/{opened.nonce}", self._whole)

    @contextmanager
    def _entered(self, opened: Round, backend: str) -> Iterator[tuple[MemberWatch, Presence]]:
        """Prepare the announcement of this rank in a round; at the end, withdraw what the server publishes for it."""
        seat, part = self.seat, self._part(opened)
        seat.enter(opened)
        _own_nonces.append((opened.nonce, seat.rank))
        # What rank 0 finds out about the others it publishes. An old round has old announcements.
        others = range(1, seat.size) if seat.rank == 0 else range(1)
        presence = Presence(part, seat.rank, seat.size, others, seat.nonce, backend)
        watch = MemberWatch(
            part,
            seat.rank,
            self._members,
            self._operation,
            # No member can leave a group that does not exist yet.
            lambda ranks, description, wait: self._failure(opened, presence, ranks, description),
            find_absent=partial(self._absent, opened),
        )
        with closing(presence):
            yield watch, presence
            watch.withdraw("" if self._outlives_worlds else _left(seat.rank))

    def _announce(
        self,
        opened: Round,
        watch: MemberWatch,
        announcement: Mapping[str, str | bytes],
        store: WatchedStore,
        keys: Sequence[str],
        deadline: Deadline,
    ) -> list[bytes]:
        """Announce this rank, publish the round if this is rank 0, and wait for keys of the round."""
        announced = {f"{opened.nonce}/{key}": value for key, value in announcement.items()}
        if self.seat.rank == 0:
            announced[_ROUND] = opened.encode()
        key, text = watch.on_disconnect()
        awaited, remaining = [f"{opened.nonce}/{key}" for key in keys], timedelta(seconds=deadline.remaining())
        try:
            return store.wait_get(awaited, remaining, announced, (f"{opened.nonce}/{key}", text))
        except StoreTimeoutError as error:
            raise self._stalled(self._absent(opened) or [0]) from error

    def _absent(self, opened: Round) -> list[int]:
        worlds = self._worlds
        return [rank for rank in range(self.seat.size) if not worlds.check([f"{opened.nonce}/present/{rank}"])]

    def _log_if_due(self, wait: LongWait) -> None:
        """Log that there is no round yet, when this rank has waited long. In a round, its watch does that."""
        if wait.is_due():
            text = "%s on rank %d has waited %g s for %s. Each of its %d ranks has to call it."
            rank_0, here = rank_names([0], self._members), self._members[self.seat.rank]
            log.warning(text, self._operation, here, wait.seconds, rank_0, self.seat.size)

    def _stalled(self, absent: Sequence[int] = (0,)) -> RankStalledError:
        return RankStalledError(
            f"{self._operation} on rank {self._members[self.seat.rank]}: {rank_names(absent, self._members)} of "
            f"{self.seat.size} did not join in time. Every rank has to call it."
            f"{advice_on_loopback(self._whole)}"
        )

    # Rank 0

    def _new_round(self) -> Round:
        return Round(self.seat.nonce, OPEN, self.seat.size, os.getpid(), host_identity())

    def _collect(
        self, opened: Round, watch: MemberWatch, presence: Presence, exchange: _Exchange, deadline: Deadline
    ) -> bool:
        """Wait for the announcements, publish the list of them, and close the round."""
        others = range(1, self.seat.size)
        store = WatchedStore(_WORLDS, self._whole, watch.failure)
        keys = [*(f"present/{rank}" for rank in others), *exchange.awaited]
        own = {**presence.announcement(), **exchange.published}
        values = self._announce(opened, watch, own, store, keys, deadline)
        self.values = values[len(others) :]
        nonces = [self.seat.nonce, *(presence.nonce_in(rank, values[rank - 1]) for rank in others)]
        closed = opened._replace(state=CLOSED).encode()
        published: dict[str, str | bytes] = {f"{opened.nonce}/{_MET}": " ".join(nonces), _LAST_MET: closed}
        if self._worlds.set_and_compare_set(published, _ROUND, opened.encode(), closed) != closed:
            raise self._claimed_twice()
        return self.seat.listed(nonces)

    # Other ranks

    def _find_round(self, deadline: Deadline) -> Round:
        """Wait for an open round that has not missed this rank."""
        pause, wait = _FIRST_PAUSE_SECONDS, LongWait()
        while True:
            opened, self._next = self._next or self._read_round(deadline, wait), None
            if self.seat.accepts(opened):
                return opened
            if (error := self.find_claimant(opened)) is not None:
                raise error
            if deadline.passed():
                raise self._stalled()
            self._log_if_due(wait)
            sleep(pause)
            pause = min(2 * pause, CHECK_SECONDS)

    def _read_round(self, deadline: Deadline, wait: LongWait) -> Round:
        if self.store_is_new is None:
            found = self._worlds.get_if_present(_ROUND)
            self.store_is_new = found is None
            if found is not None:
                opened = Round.parse(found)
                # A server of rank 0 has no older round.
                self.seat.found(opened, self._outlives_worlds and not _is_of_living_process(opened))
                return opened
        worlds = WatchedStore(_WORLDS, self._whole, lambda: self._log_if_due(wait))
        try:
            return Round.parse(worlds.wait_get([_ROUND], timedelta(seconds=deadline.remaining()))[0])
        except StoreTimeoutError as error:
            raise self._stalled() from error

    def _greet(
        self, opened: Round, watch: MemberWatch, presence: Presence, exchange: _Exchange, deadline: Deadline
    ) -> bool:
        """Wait for the list of those who have met; return whether this rank's nonce is in it."""
        store = WatchedStore(_WORLDS, self._whole, partial(self._failure_or_new_round, watch))
        exchange.on_round(opened.nonce)
        own = {**presence.announcement(), **exchange.published}
        try:
            found, *self.values = self._announce(opened, watch, own, store, [_MET, *exchange.awaited], deadline)
        except _RoundReplaced:
            return False
        presence.look_for(range(1, self.seat.size))
        return self.seat.listed(found.decode().split())

    def _failure_or_new_round(self, watch: MemberWatch) -> BaseException | None:
        """Return why this rank need not wait for the list any more; None while it has to."""
        with suppress(RuntimeError):
            if self.seat.is_replaced_by(Round.parse(self._worlds.get(_ROUND))):
                return _RoundReplaced()
        failure = watch.failure()
        while not self.seat.believes(failure is not None, monotonic()):
            if self.seat.believes_at == inf:
                return None
            # What is in doubt is decided by the time alone, not by a key that this rank could wait for.
            sleep(max(0.0, min(CHECK_SECONDS, (self.seat.believes_at or 0.0) - monotonic())))
            failure = watch.failure()
        return failure

    # Failures

    def _failure(
        self, opened: Round, presence: Presence, ranks: Sequence[int], description: str
    ) -> BaseException | None:
        """Return the error for a rank that was claimed twice, has another world size, or has died; None without."""
        rank = self.seat.rank
        with suppress(RuntimeError):
            if not self.seat.met and (error := self._second_claim(opened, presence)) is not None:
                return error
        if (failure := presence.failure(ranks, description)) is not None or rank == 0:
            return failure
        # The store may end with rank 0 before this rank has read its announcement.
        if opened.host != host_identity() or _is_of_living_process(opened):
            return None
        died = Failure.of_death(0, Ending(ENDED, opened.pid, os.uname().nodename))
        return error_of(died, f"{description} on rank {rank}", advice="start again")

    def _second_claim(self, opened: Round, presence: Presence) -> Exception | None:
        """Return the error for another process with this rank in the round; None without."""
        if self.seat.rank != 0:
            return None if presence.is_announced() else self._claimed_twice()
        if (found := self._worlds.get(_ROUND)) == opened.encode():
            last = self._worlds.get_if_present(_LAST_MET)
            return None if last is None else self.find_claimant(Round.parse(last))
        # The ranks that have seen the other round learn of it there.
        error = self._claimed_twice()
        MemberWatch(self._part(Round.parse(found)), 0, self._members, self._operation).publish(error)
        return error

    def find_claimant(self, opened: Round) -> Exception | None:
        """Return the error for a closed round of other processes of this host that stay; None without.

        Either another process has this rank in it, or rank 0 has another world size.
        """
        rank, size = self.seat.rank, self.seat.size
        if self.seat.accepts(opened):
            return None
        earlier = self._part(opened)
        if isinstance(known := read_failure(earlier, self._operation), RendezvousError):
            return known
        # A process that is about to end or to leave needs a moment.
        if monotonic() < self._began + LEAVE_SECONDS:
            return None
        if not earlier.check([_left(rank)]) and Presence(earlier, rank, size).is_another_process():
            return self._claimed_twice()
        if opened.size == size or earlier.check([_left(0)]):
            return None
        of_rank_0 = Presence(earlier, 0, opened.size)
        return size_mismatch({0: opened.size, rank: size}) if of_rank_0.is_another_process() else None

    def _claimed_twice(self) -> RendezvousError:
        host, pid = own_place()
        return RendezvousError(
            f"{self._operation}: two processes claim rank {self.seat.rank} of {self.seat.size}; one of them is pid "
            f"{pid} on {host}. "
            f"Give each process a rank of its own: RANK, or the argument 'rank'."
        )

    # Stores that other initializations use

    def finds_new_round(self, deadline: Deadline) -> bool:
        """Wait for the round on a store that serves one world; return False if it is that of the world before.

        Raises:
            RendezvousError: It is that of other processes of this host that stay.
        """
        opened = self._read_round(deadline, LongWait())
        is_old = opened.state == CLOSED or (opened.nonce, self.seat.rank) in _own_nonces
        if is_old and not deadline.passed():
            if (claimant := self.find_claimant(opened)) is not None:
                raise claimant
            return False
        self._next = opened
        return True

    def claim(self) -> None:
        """Replace an open round on the store of another rank 0, which then finds out that there are two."""
        found = self._worlds.get(_ROUND)
        if Round.parse(found).state == OPEN:
            self._worlds.compare_set(_ROUND, found, self._new_round().encode())

    @property
    def leave(self) -> Callable[[], None] | None:
        """Function that deletes this rank's presence and releases the keys of the world; None if the store ends too."""
        return self._leave if self._outlives_worlds else None

    def _leave(self) -> None:
        if isinstance(self.store, PrefixStore):
            with suppress(RuntimeError, OSError):
                self.store.delete_key(f"present/{self.seat.rank}")
            KeyRange(self._whole, self.store.prefix, self.seat.size).release()


def _is_of_living_process(opened: Round) -> bool:
    """Return whether the process of rank 0 runs on this host. False for one of another host."""
    if opened.host != host_identity():
        return False
    with closing(PeerProcesses({0: opened.pid})) as rank_0:
        return not rank_0.dead()


def _left(rank: int) -> str:
    return f"left/{rank}"
