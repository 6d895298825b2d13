"""Link: one rank's end of a group's shared (or replicated) segment, and the semaphores that order access to it.

The transports (threads, shared memory, `tcp`) differ in the primitives below a link: a `Segment`, its semaphores
and `Liveness`. `Link` itself is the same for all of them, so that backends run the same code on each.

A round of a collective uses six operations, which mean the same on every transport::

    link.write(offset, values)                 # into this rank's ring buffer
    link.signal(peer, [(offset, nbytes)])      # peer may read these bytes
    link.wait_for_signal(peer, description)    # returns when peer has signaled; raises if it cannot
    link.read(peer, offset, dtype, count)      # from the ring buffer of peer
    link.release(peer)                         # peer may overwrite what it signaled last
    link.wait_for_release(peer, description)   # returns when peer has released what this rank signaled

Signals and releases are counted: each wait consumes one. Fast executors use `make_signal` and `acquire` directly.

Every wait ends: with the semaphore, or with an error that names the rank that died, aborted, destroyed the group or did
not arrive before the deadline. A wait first spins if every rank has a core, else yields, then blocks in short intervals
and checks for failures between them. One collective uses a link at a time: the backend holds the lock.

Do not add algorithms here: they are schedules.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.errors import (
    GroupAbortedError,
    RankStalledError,
    ReportedFailure,
    add_note,
    lacking_advice,
    rank_names,
)
from torchdist_ref.membership import events, words
from torchdist_ref.membership.blame import Wait, blame
from torchdist_ref.membership.peer_processes import Liveness, NoPeerProcesses, is_stopped
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.timeouts import CHECK_SECONDS, LONG_WAIT_SECONDS
from torchdist_ref.transports.base import Range, Segment, Semaphore
from torchdist_ref.transports.segment import (
    ABORTED,
    ABSENT,
    ANNOUNCEMENT_BYTES,
    JOINED,
    LEFT,
    PRESENT,
    REASON_BYTES,
    ROW_BYTES,
    SegmentLayout,
    StatusRow,
    StatusRows,
)

# A waiting rank renews its entry in the status table at every poll. An older entry belongs to a stopped process.
_WAITING_EXPIRES_SECONDS = 10 * CHECK_SECONDS
_MAIN_THREAD = threading.main_thread().ident
_ADVICE = "start from a checkpoint"
log = logging.getLogger("torchdist_ref.transports")
# Ranks that look for failures at intervals of `CHECK_SECONDS`, and the longest interval of more, in these intervals.
_OFTEN, _SLOWEST = 16, 10.0


MOST_MEETING_WITHIN_A_HOST, MOST_MEETING_BETWEEN_HOSTS = 64, 16
"""Ranks of a group up to which each of them signals every other one to meet it.

Two ranks of a host exchange a signal in 0.1 us, and a step in which all of them wait for one another takes 5 to 20 us,
more with many ranks on few cores. Between hosts a signal is a message of some 10 us.
"""


class _Semaphores(dict[int, Semaphore]):
    """Semaphores by peer, each made when it is used first."""

    def __init__(self, make: Callable[[int], Semaphore]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, peer: int) -> Semaphore:
        found = self[peer] = self._make(peer)
        return found


class Link:
    """One rank's end of a group.

    Attributes:
        segment: The group's memory.
        layout: Offsets in the segment.
        rank: This rank in the group.
        size: Number of ranks in the group.
        name: Name of the group, for messages.
        members: Global ranks of the members, for messages.
        timeout: Longest duration of a wait in seconds.
        hosts: Host of each rank, numbered from 0; None where all share one.
        rows: Rows of the status table, by rank.
        row: Row of this rank.
        peers: All other ranks.
        ready_from: Semaphore by peer: its data of this round is ready. Each is made when it is used first.
        released_by: Semaphore by peer: it has read this rank's data. Each is made when it is used first.
        liveness: Detector of ended processes.
        broken: Error that ended the group; None while it is usable.
        leaving: Whether this rank is destroying the group, which ends its waits.
        on_timeout: Function that gets each new time-out, if the segment waits by itself; else None.
    """

    hosts: tuple[int, ...] | None = None
    on_timeout: Callable[[float], None] | None = None

    def __init__(
        self, segment: Segment, layout: SegmentLayout, rank: int, members: Sequence[int], name: str, timeout: float
    ) -> None:
        self.segment, self.layout, self.rank, self.members, self.name = segment, layout, rank, tuple(members), name
        self.size = layout.size
        self.timeout = timeout
        self.rows = StatusRows(self.size, lambda r: StatusRow(segment.bytes_of(r), layout.status_row(r)))
        self.row = self.rows[rank]
        self.peers = tuple(r for r in range(self.size) if r != rank)
        # A look at the peers takes time for each of them. With 128 thread ranks, looks at the usual interval took all
        # of it, and ten calls took 20 s; at this one they take 3 s.
        self._pace = pace(self.size)
        self._posted_semaphores: dict[tuple[str, int], Semaphore] = {}
        self.ready_from = _Semaphores(lambda p: segment.semaphore(layout, "ready", p, rank))
        self.released_by = _Semaphores(lambda p: segment.semaphore(layout, "released", p, rank))
        # Ranks in step are some hundred microseconds apart: spin for that long. Ranks that share a core cannot spin:
        # yielding to each other first costs half of what sleeping and being woken costs.
        enough_cores = self.size <= len(os.sched_getaffinity(0))
        self.spins, self.yields = (2000, 0) if enough_cores else (0, 100)
        self.liveness: Liveness = NoPeerProcesses()
        self.broken: BaseException | None = None
        self.leaving = False
        # Peers that have yet to join, and the watch over them.
        self._joining: set[int] = set()
        self._has_logged_wait = False
        self._watch: MemberWatch | None = None

    def set_timeout(self, seconds: float) -> None:
        """Set the longest duration of the waits that begin from now on, in seconds."""
        self.timeout = seconds
        if self.on_timeout is not None:
            self.on_timeout(seconds)

    def write(self, offset: int, values: Tensor) -> None:
        """Copy contiguous values to an offset of this rank's ring buffer."""
        self.read(self.rank, offset, values.dtype, values.numel()).copy_(values)

    def read(self, rank: int, offset: int, dtype: torch.dtype, count: int) -> Tensor:
        """Return `count` elements at an offset of a rank's ring buffer, in place.

        Those of a peer are valid between `wait_for_signal` and `release`.
        """
        begin = self.layout.ring(rank, offset)
        return torch.frombuffer(self.segment.buffer_of(rank), dtype=dtype, count=count, offset=begin)

    def signal(self, peer: int, ranges: Sequence[Range], announce: bool = False) -> None:
        """Make ranges of this rank's ring buffer visible to `peer`, then post its semaphore.

        Args:
            peer: Group rank.
            ranges: (offset, size) in bytes, in the ring buffer.
            announce: Make this rank's announcement visible too.
        """
        begin = self.layout.ring(self.rank, 0)
        announcement = [(self.layout.status_row(self.rank), ANNOUNCEMENT_BYTES)] if announce else []
        self.make_signal("ready", peer, [*announcement, *((begin + offset, nbytes) for offset, nbytes in ranges)])()

    def wait_for_signal(self, peer: int, description: str) -> None:
        """Wait until `peer` has signaled once more. Raises the errors of `acquire`."""
        self.acquire(self.ready_from[peer], peer, description)

    def release(self, peer: int) -> None:
        """Allow `peer` to overwrite the ranges of its last signal."""
        self.make_signal("released", peer)()

    def wait_for_release(self, peer: int, description: str) -> None:
        """Wait until `peer` has released the ranges of one more signal. Raises the errors of `acquire`."""
        self.acquire(self.released_by[peer], peer, description)

    def make_signal(
        self, kind: str, peer: int, ranges: Sequence[Range] = (), owner: int | None = None
    ) -> Callable[[], Any]:
        """Return a function that posts a semaphore of this kind to `peer`; executors look it up once.

        Args:
            kind: One of `segment.SEMAPHORE_KINDS`.
            peer: Rank that acquires the semaphore.
            ranges: Parts of the segment that are visible to `peer` once it has acquired it.
            owner: Rank that the ranges belong to; None: this rank.
        """
        semaphore = self._posted_semaphores.get((kind, peer))
        if semaphore is None:
            # A rank has a single doorbell, which all peers post.
            source = peer if kind == "doorbell" else self.rank
            semaphore = self.segment.semaphore(self.layout, kind, source, peer)
            self._posted_semaphores[kind, peer] = semaphore
        return self.segment.make_signal(semaphore, kind, peer, self.rank if owner is None else owner, ranges)

    def acquire(
        self,
        semaphore: Semaphore,
        peer: int,
        description: str,
        timeout: float | None = None,
        only_peer: bool = False,
    ) -> None:
        """Acquire a semaphore that `peer` posts.

        Args:
            semaphore: The semaphore.
            peer: Group rank that posts it.
            description: This rank's call, for messages.
            timeout: Longest duration in seconds; None: the group's.
            only_peer: Ignore failures of the other members (point-to-point).

        Raises:
            RankDiedError: A process has ended.
            GroupAbortedError: A rank aborted or destroyed the group.
            RankStalledError: The peer did not post before the time-out.
        """
        if self.spin(semaphore):
            return
        self._acquire_blocking(semaphore, peer, description, self.timeout if timeout is None else timeout, only_peer)

    def spin(self, semaphore: Semaphore) -> bool:
        """Try to acquire a semaphore without sleeping, for as long as that is cheaper; return whether it succeeded.

        Only the main thread spins: it holds the interpreter lock meanwhile, which other threads may need.
        """
        if threading.get_ident() != _MAIN_THREAD:
            return False
        acquire = semaphore.acquire
        for _ in range(self.spins):
            if acquire(False):
                return True
        for _ in range(self.yields):
            os.sched_yield()
            if acquire(False):
                return True
        return False

    def _acquire_blocking(
        self, semaphore: Semaphore, peer: int, description: str, seconds: float, only_peer: bool
    ) -> None:
        """Sleep until the semaphore is posted; raise if a peer has failed, or at the deadline."""
        deadline, published = monotonic() + seconds, False
        while not semaphore.acquire(True, max(0.0, min(CHECK_SECONDS * self._pace, deadline - monotonic()))):
            self.row.set_waiting_for(peer)
            if self.hosts is not None and not published and monotonic() > deadline - seconds / 2:
                # Ranks of other hosts have only a copy of this row, and need it for their messages at the deadline.
                self.publish_row()
                published = True
            call = description if only_peer else self._numbered(description)
            error = self.failure([peer] if only_peer else None, call)
            if not (only_peer or self._has_logged_wait) and monotonic() > deadline - seconds + LONG_WAIT_SECONDS:
                self._log_wait(peer, call)
            if error is None and monotonic() >= deadline:
                error = self.stall_error(peer, call, seconds)
            if error is not None:
                # The peer may have posted and exited since the last poll.
                if semaphore.acquire(False):
                    break
                raise error
        self.row.clear_waiting_for()
        if published:
            self.publish_row()

    def _numbered(self, description: str) -> str:
        return f"call {self.row.announced}, {description}" if self.row.announced >= 0 else description

    def failure(self, ranks: Sequence[int] | None, description: str) -> BaseException | None:
        """Return the error for the first of `ranks` known to have failed, or None.

        Args:
            ranks: Ranks to check; None: all peers that have not completed the call that this rank is in.
            description: This rank's call, for the message.
        """
        # Liveness first: checking it may receive news of calls that the rank completed before it exited.
        ended = self.liveness.dead()
        if self.leaving:
            return self.left_meanwhile(description)
        if self._joining:
            # One that has joined and ended concerns the next call.
            joining = [rank for rank in self._joining if self.rows[rank].completed != JOINED]
            failure = None if self._watch is None else self._watch.failure(joining)
            died = [self._death_of(rank) for rank in ended if rank in joining]
            return failure or self._error(blame(died, self._global(joining), Wait.MEETING), description)
        needed = [rank for rank in self.peers if (self._is_needed(rank) if ranks is None else rank in ranks)]
        return self._blamed(needed, Wait.COLLECTIVE if ranks is None else Wait.MESSAGE, ended, description)

    def failure_elsewhere(self, ranks: Sequence[int], description: str, wait: Wait) -> BaseException | None:
        """Return the error that a wait on another channel has to report of some ranks, or None.

        Args:
            ranks: Ranks for which this one waits.
            description: The operation that waits, for the message.
            wait: `Wait.ELSEWHERE` or `Wait.PART`.
        """
        return self._blamed(ranks, wait, self.liveness.dead(), description)

    def _blamed(self, ranks: Sequence[int], wait: Wait, ended: Sequence[int], description: str) -> BaseException | None:
        """Return the error for the culprit among some ranks, as `blame` chooses it."""
        found = blame(self._events(ranks, ended), self._global(ranks), wait)
        return self._error(found, description)

    def _error(self, failure: events.Failure | None, description: str) -> BaseException | None:
        if failure is None:
            return None
        return words.error_of(failure, self.context(description), self.members, _ADVICE)

    def _events(self, ranks: Sequence[int], ended: Sequence[int]) -> Iterator[events.MemberEvent]:
        """Yield what the status table and the processes show of some ranks."""
        for rank in ranks:
            row = self.rows[rank]
            if rank in ended:
                yield self._death_of(rank)
            if row.status == ABORTED:
                written = events.decode(row.reason)
                known = written if isinstance(written, events.Aborted) else events.Aborted(self.members[rank])
                yield replace(known, rank=self.members[rank], at=row.aborted_at)
            if row.closed or row.status == LEFT:
                yield self._leave_of(rank)

    def _death_of(self, rank: int) -> events.Died:
        return events.Died(self.members[rank], self.liveness.ending(rank))

    def _leave_of(self, rank: int) -> events.Left:
        row, written = self.rows[rank], events.decode(self.rows[rank].reason)
        after = written.after if isinstance(written, events.Left) else ""
        # The kernel knows the exit code only once Python has ended too, half a second later with torch.
        ending = self.liveness.ending(rank) if row.program_ended else None
        return events.Left(self.members[rank], row.closed, row.program_ended, row.describe(), after, ending)

    def _global(self, ranks: Sequence[int]) -> list[int]:
        return [self.members[rank] for rank in ranks]

    def left_meanwhile(self, description: str) -> GroupAbortedError:
        """Return the error for a call of this rank that had not ended when it destroyed the group."""
        return GroupAbortedError(f"{self.context(description)}: {words.say('this rank left')}")

    def _is_needed(self, rank: int) -> bool:
        """Return whether `rank` has yet to complete this rank's call. A rank that has completed it may exit."""
        return self.rows[rank].completed < self.row.announced

    def stall_error(self, peer: int, description: str, seconds: float) -> BaseException:
        """Return the error for a live rank that did not arrive, with the last known call of every rank."""
        others = "; ".join(f"{self.rank_names([r])} {self._state(r)}" for r in self.peers)
        *through, last = self._waiting_chain(peer)
        chain = self._global(through[::-1])
        context, stalled = self.context(description), self._stalled(last)
        return words.stalled(stalled, context, self.members, seconds, chain, others, self.deaths())

    def _log_wait(self, peer: int, description: str) -> None:
        """Log for whom a collective waits: until the time-out, half an hour by default, nothing else would be seen."""
        self._has_logged_wait = True
        *_, rank = self._waiting_chain(peer)
        log.warning(
            "%s has waited %g s for %s, which %s. %sTo see where all ranks are: "
            "python -m torchdist_ref.debug --request PID ... with their pids (this one is %d). Logged once a group.",
            self.context(description),
            LONG_WAIT_SECONDS,
            self.rank_names([rank]),
            self._state(rank),
            words.stop_text(self._stalled(rank)),
            os.getpid(),
        )

    def awaited(self, peer: int | None = None) -> tuple[str, ReportedFailure | None]:
        """Return the rank that a call waits for, as a sentence and as a value; empty and None if there is none.

        Args:
            peer: The other side of a message. None: the rank that the running collective waits for.
        """
        if peer is None and (peer := self.row.waiting_for(None)) is None:
            return "", None
        stalled = self._stalled(self._waiting_chain(peer)[-1])
        text = words.say("waits for", ranks=words.names(stalled.ranks, self.members), group=self.name)
        return f"{text} {words.stop_text(stalled)}".rstrip(), stalled

    def _stalled(self, rank: int) -> events.Failure:
        """Return that a rank did not arrive, and that its process is stopped if that is so and on this host."""
        pid = self.rows[rank].pid
        is_here = self._is_on_this_host(rank) and is_stopped(pid)
        endings = (events.Ending(events.STOPPED, pid, os.uname().nodename),) if is_here else ()
        return events.Failure(events.STALLED, (self.members[rank],), endings)

    def _is_on_this_host(self, rank: int) -> bool:
        return self.hosts is None or self.hosts[rank] == self.hosts[self.rank]

    def deaths(self) -> str:
        """Return the ranks that have died, as a sentence for the error of a stalled call; else an empty text."""
        dead = [self._death_of(rank) for rank in self.liveness.dead() if not self.rows[rank].closed]
        found = blame(dead, self.members, Wait.MESSAGE)
        return words.deaths(found, self.members)

    def _waiting_chain(self, peer: int) -> list[int]:
        """Return the ranks from `peer` to the one at the end of the waits, as far as they are visible here."""
        chain = [peer]
        while (following := self._awaited_by(chain[-1])) is not None and following not in (self.rank, *chain):
            chain.append(following)
        return chain

    def _awaited_by(self, rank: int) -> int | None:
        # A rank of another host has another clock: its entry does not expire.
        expires = _WAITING_EXPIRES_SECONDS * self._pace if self._is_on_this_host(rank) else None
        return self.rows[rank].waiting_for(expires)

    def _state(self, rank: int) -> str:
        return "has not joined" if self.rows[rank].status == ABSENT else self.rows[rank].describe()

    def context(self, description: str) -> str:
        """Return the beginning of an error message: the call, this rank and the group."""
        return f"{description} on {self.rank_names([self.rank])} of group {self.name!r}"

    def rank_names(self, ranks: Sequence[int]) -> str:
        """Return group ranks as text, with the global rank where it differs."""
        return rank_names(ranks, self.members)

    def abort(self, error: BaseException, description: str) -> None:
        """End the group for all ranks, because this one fails in the middle of a call; publish the reason."""
        if self.broken is not None:
            return
        self.broken = error
        if advice := lacking_advice(error):
            add_note(error, advice)
        own = events.aborted(self.members[self.rank], error, description, advice)
        self.row.abort(events.encode(own, REASON_BYTES))
        self.publish_row()
        # Receives that wait for this rank look at once.
        for peer in self.peers:
            self.make_signal("doorbell", peer)()

    def abort_because(self, reason: str) -> None:
        """End the group for all ranks, for a reason that the caller has in words."""
        self.abort(GroupAbortedError(reason), "")

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Abort the group if this rank fails in the block: ranks that have joined already do not look at the watch."""
        try:
            yield
        except BaseException as error:
            self.abort(error, "the creation of the group")
            raise

    def abort_unless_definite(self, error: BaseException, description: str) -> None:
        """End the group as `abort` does, unless the call failed in the same way on all ranks, or on none of them."""
        if not getattr(error, "definite", False):
            self.abort(error, description)

    def publish_row(self) -> None:
        """Copy this rank's status row to the peers on other hosts."""
        self.segment.publish_row(self.layout, self.rank)

    @property
    def hops(self) -> list[tuple[int, int]]:
        """Peers that this rank signals, and those for which it waits, one after the other, to meet all ranks.

        After the last wait every rank has, directly or not, a signal of every other one. Few ranks signal each other,
        which takes one round. Of many, each signals one at a distance that doubles, as in the dissemination barrier of
        Hensgen, Finkel and Manber (see `schedules.bruck`). Empty for few ranks.
        """
        if self.size <= (MOST_MEETING_WITHIN_A_HOST if self.hosts is None else MOST_MEETING_BETWEEN_HOSTS):
            return []
        distances = (1 << step for step in range((self.size - 1).bit_length()))
        return [((self.rank + d) % self.size, (self.rank - d) % self.size) for d in distances]

    def handshake(self, watch: MemberWatch | None = None) -> None:
        """Wait until all ranks have joined, and exchange status rows.

        Args:
            watch: Watch over the ranks until they have joined; None to wait for the time-out.
        """
        self._watch, self._joining = watch, set(self.peers)
        operation, hops = "init_process_group" if watch is None else watch.operation, self.hops
        row = [(self.layout.status_row(self.rank), ROW_BYTES)]
        if hops and self.segment.rows_are_common:
            self.publish_row()
            for to, source in hops:
                self.make_signal("ready", to, row)()
                self.acquire(self.ready_from[source], source, operation)
        else:
            for peer in self.peers:
                self.make_signal("ready", peer, row)()
            for peer in self.peers:
                self.acquire(self.ready_from[peer], peer, operation)
                self._joining.discard(peer)
        self._joining.clear()
        self._watch = None
        self.row.completed = JOINED
        if hops and self.segment.rows_are_common:
            self.publish_row()

    def check_awaited_call(self, number: tuple[int, int], waited: float) -> None:
        """Raise if waiting for this rank to issue a call that a peer is already in has failed or timed out.

        Args:
            number: Identity of the call (see `calls`).
            waited: Duration of the wait so far in seconds.
        """
        description = f"call number {number[0]}.{number[1]}, which a peer has issued and this rank has not"
        error = self.failure(None, description)
        if error is None and waited > self.timeout:
            error = RankStalledError(
                f"{self.context(description)}: this rank did not issue it within {self.timeout:g} s. Do all ranks make "
                f"the same calls in their callbacks?"
            )
        if error is not None:
            self.abort(error, description)
            raise error

    def check_usable(self, description: str) -> None:
        """Raise if an earlier call ended this group."""
        if self.broken is not None:
            raise GroupAbortedError(
                f"{self.context(description)}: the group ended with an earlier failure ({self.broken!r}). "
                f"Destroy it and make a new one."
            ) from self.broken

    def explain_leave(self, reason: str) -> None:
        """Write the failure after which this rank is about to leave, for the members that miss it."""
        left = events.Left(self.members[self.rank], after=reason)
        self.row.explain_leave(events.encode(left, REASON_BYTES))

    def announce_program_end(self) -> None:
        """Note that this rank leaves because its program ends; the others learn it with the next status row."""
        if not self.row.closed:
            self.row.end_program()

    def announce_leave(self) -> None:
        """Announce that this rank issues no further collective; its pending messages may still be delivered."""
        if self.row.status == PRESENT:
            self.row.status = LEFT
            self.publish_row()

    def leave(self) -> None:
        """End the waits of this rank's pending calls; they raise at their next check."""
        self.leaving = True
        self.announce_leave()

    def announce_close(self, process: int | None = None) -> None:
        """Announce that this rank does not use its end of the group any more; one that has aborted remains so.

        Args:
            process: Process of the rank; None for this one. A forked child, which has a copy, announces nothing.
        """
        if process in (None, os.getpid()):
            self.row.close()
            self.publish_row()

    def close(self) -> None:
        """Leave the group. The memory is freed with the last tensor that uses it."""
        self.announce_close()
        self.broken = RuntimeError(f"group {self.name!r} was destroyed on rank {self.members[self.rank]}")
        self.liveness.close()


def pace(ranks: int) -> float:
    """Return the time between two looks of a waiting rank at its peers, in intervals of `CHECK_SECONDS`.

    >>> pace(2), pace(64), pace(1024)
    (1.0, 4.0, 10.0)
    """
    return min(max(1.0, ranks / _OFTEN), _SLOWEST)
