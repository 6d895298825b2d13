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
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.errors import (
    GroupAbortedError,
    RankDiedError,
    RankStalledError,
    add_note,
    advice_on_limit,
    rank_names,
    text_of,
)
from torchdist_ref.membership.liveness import Liveness, MemberWatch, NoPeerProcesses, is_stopped
from torchdist_ref.timeouts import CHECK_SECONDS, LONG_WAIT_SECONDS
from torchdist_ref.transports.base import Range, Segment, Semaphore
from torchdist_ref.transports.segment import (
    ABORTED,
    ABSENT,
    ANNOUNCEMENT_BYTES,
    JOINED,
    LEFT,
    PRESENT,
    ROW_BYTES,
    SegmentLayout,
    StatusRow,
)

# A waiting rank renews its entry in the status table at every poll. An older entry belongs to a stopped process.
_WAITING_EXPIRES_SECONDS = 10 * CHECK_SECONDS
_MAIN_THREAD = threading.main_thread().ident
_ABORTED = " aborted: "
log = logging.getLogger("torchdist_ref.transports")
_ADVICE = "The call may have completed on some ranks. Destroy the group and start again from a checkpoint."


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
        ready_from: Semaphore by peer: its data of this round is ready.
        released_by: Semaphore by peer: it has read this rank's data.
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
        self.rows = tuple(StatusRow(segment.bytes_of(r), layout.status_row(r)) for r in range(self.size))
        self.row = self.rows[rank]
        self.peers = tuple(r for r in range(self.size) if r != rank)
        self._posted_semaphores: dict[tuple[str, int], Semaphore] = {}
        self.ready_from = {p: segment.semaphore(layout, "ready", p, rank) for p in self.peers}
        self.released_by = {p: segment.semaphore(layout, "released", p, rank) for p in self.peers}
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
        while not semaphore.acquire(True, max(0.0, min(CHECK_SECONDS, deadline - monotonic()))):
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
            return GroupAbortedError(f"{self.context(description)}: this rank destroyed the group meanwhile.")
        if self._joining:
            return self._failure_to_join(ended, description)
        concerned = [r for r in self.peers if (self._is_needed(r) if ranks is None else r in ranks)]
        # The process of a rank that aborted or left may have ended since: its own reason counts.
        dead = [r for r in ended if r in concerned and not (self.rows[r].closed or self.rows[r].status == ABORTED)]
        aborted = [r for r in concerned if self.rows[r].status == ABORTED]
        # Until it has closed its end, a rank that has left may still send messages.
        left = [r for r in concerned if self.rows[r].status == LEFT and (ranks is None or self.rows[r].closed)]
        if dead:
            return self._death(dead, description)
        if aborted:
            first = min(aborted, key=lambda r: self.rows[r].aborted_at)
            return self._abort_of(first, description)
        if left:
            return self._departure(left, description)
        return None

    def process_failure(self, ranks: Sequence[int], description: str) -> BaseException | None:
        """Return the error for those of `ranks` whose processes have ended, or None. For waits on other channels."""
        ended = [rank for rank in self.liveness.dead() if rank in ranks]
        # One that has left may have ended because of another's death, which counts then.
        dead = [rank for rank in ended if not self.rows[rank].closed]
        if not dead:
            return self._closing(ended, description) if ended else None
        return self._death(dead, description)

    def departure(self, ranks: Sequence[int], description: str) -> BaseException | None:
        """Return the error for those of `ranks` that have closed their ends of the group, or None."""
        # Checking for deaths receives the news of other hosts.
        self.liveness.dead()
        closed = [rank for rank in ranks if self.rows[rank].closed]
        return self._closing(closed, description) if closed else None

    def _closing(self, closed: Sequence[int], description: str) -> BaseException:
        """Return the error for ranks that have closed their ends of the group: the first abort, if there is one."""
        aborted = [rank for rank in closed if self.rows[rank].status == ABORTED]
        if not aborted:
            return self._departure(closed, description)
        return self._abort_of(min(aborted, key=lambda rank: self.rows[rank].aborted_at), description)

    def _failure_to_join(self, ended: Sequence[int], description: str) -> BaseException | None:
        """Return the error for a rank that will not join. One that has joined and ended concerns the next call."""
        if self._watch is not None and (failure := self._watch.failure([*self._joining])) is not None:
            return failure
        gone = [rank for rank in ended if rank in self._joining]
        return self._death(gone, description) if gone else None

    def _death(self, dead: Sequence[int], description: str) -> RankDiedError:
        ranks = (self.members[rank] for rank in dead)
        return RankDiedError(f"{self.context(description)}: {self._endings(dead)}. {_ADVICE}").naming(ranks)

    def _endings(self, dead: Sequence[int]) -> str:
        endings = "; ".join(filter(None, (self.liveness.ending(rank) for rank in dead)))
        return f"{self.rank_names(dead)} died{endings and f' ({endings})'}"

    def _abort_of(self, rank: int, description: str) -> GroupAbortedError:
        """Return the error for an abort; a rank that passed on the abort of another is not the culprit."""
        culprit, aborted, reason = self.rows[rank].reason.partition(_ABORTED)
        if not (aborted and culprit.startswith("rank ")):
            culprit, reason = self.rank_names([rank]), self.rows[rank].reason
        error = GroupAbortedError(f"{self.context(description)}: {culprit}{_ABORTED}{reason}")
        error.culprit, error.reason = culprit, reason
        return error

    def _departure(self, left: Sequence[int], description: str) -> GroupAbortedError:
        """Return the error for ranks that have left the group in good order, or whose programs have ended in it."""
        ended = [rank for rank in left if self.rows[rank].program_ended]
        names, last = self.rank_names(ended or left), self.rows[(ended or left)[0]].describe()
        what = f"{names} destroyed the group; it {last}."
        if ended:
            # The kernel knows the exit code only once Python has ended too, half a second later with torch.
            endings = "; ".join(filter(None, map(self.liveness.ending, ended)))
            reason = f"ended without destroying the group{endings and f' ({endings})'}"
            what = f"the program of {names} {reason}; it {last}. See the output and the exit code of that rank."
        if cause := self.rows[(ended or left)[0]].reason:
            what += f" It left after: {cause}"
        error = GroupAbortedError(f"{self.context(description)}: {what}").naming(self.members[r] for r in ended or left)
        if ended:
            error.culprit, error.reason = names, f"its program {reason}"
        return error

    def _is_needed(self, rank: int) -> bool:
        """Return whether `rank` has yet to complete this rank's call. A rank that has completed it may exit."""
        return self.rows[rank].completed < self.row.announced

    def stall_error(self, peer: int, description: str, seconds: float) -> BaseException:
        """Return the error for a live rank that did not arrive, with the last known call of every rank."""
        others = "; ".join(f"{self.rank_names([r])} {self._state(r)}" for r in self.peers)
        chain = self._waiting_chain(peer)
        through = "".join(f", for which {self.rank_names([r])} waits" for r in reversed(chain[:-1]))
        return RankStalledError(
            f"{self.context(description)}: {self.rank_names(chain[-1:])} did not arrive within {seconds:g} s{through}. "
            f"{self._stop_of(chain[-1])}Other ranks: {others}. "
            f"Inspect that rank, or pass a longer timeout to init_process_group or new_group."
            f"{self.deaths()}"
        ).naming(self.members[rank] for rank in chain[-1:])

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
            self._stop_of(rank),
            os.getpid(),
        )

    def awaited(self, peer: int | None = None) -> tuple[str, list[int]]:
        """Return the rank that a call waits for, as a sentence and as global ranks; both empty if none.

        Args:
            peer: The other side of a message. None: the rank that the running collective waits for.
        """
        if peer is None and (peer := self.row.waiting_for(None)) is None:
            return "", []
        rank = self._waiting_chain(peer)[-1]
        text = f"It waits for {self.rank_names([rank])} of group {self.name!r}. {self._stop_of(rank)}"
        return text.rstrip(), [self.members[rank]]

    def _stop_of(self, rank: int) -> str:
        """Return that the process of a rank of this host is stopped, as a sentence; empty if it runs."""
        pid = self.rows[rank].pid
        if not self._is_on_this_host(rank) or not is_stopped(pid):
            return ""
        return f"Its process (pid {pid} on {os.uname().nodename}) is stopped: continue it with 'kill -CONT {pid}'. "

    def _is_on_this_host(self, rank: int) -> bool:
        return self.hosts is None or self.hosts[rank] == self.hosts[self.rank]

    def deaths(self) -> str:
        """Return the ranks that have died, as a sentence for the error of a stalled call; else an empty text."""
        dead = [rank for rank in self.liveness.dead() if not self.rows[rank].closed]
        return f" Meanwhile {self._endings(dead)}." if dead else ""

    def _waiting_chain(self, peer: int) -> list[int]:
        """Return the ranks from `peer` to the one at the end of the waits, as far as they are visible here."""
        chain = [peer]
        while (following := self._awaited_by(chain[-1])) is not None and following not in (self.rank, *chain):
            chain.append(following)
        return chain

    def _awaited_by(self, rank: int) -> int | None:
        # A rank of another host has another clock: its entry does not expire.
        return self.rows[rank].waiting_for(_WAITING_EXPIRES_SECONDS if self._is_on_this_host(rank) else None)

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
        reason = f"{type(error).__name__} in {description}: {text_of(error)}" if description else text_of(error)
        if (advice := advice_on_limit(error)) and advice not in reason:
            add_note(error, advice)
            reason += f". {advice}"
        if isinstance(error, GroupAbortedError) and error.culprit:
            # A rank that sees only this one learns who was first, and why.
            reason = f"{error.culprit}{_ABORTED}{error.reason}"
        self.row.abort(reason)
        self.publish_row()
        # Receives that wait for this rank look at once.
        for peer in self.peers:
            self.make_signal("doorbell", peer)()

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
        for peer in self.peers:
            self.make_signal("status", peer, [(self.layout.status_row(self.rank), ROW_BYTES)])()

    def handshake(self, watch: MemberWatch | None = None) -> None:
        """Wait until all ranks have joined, and exchange status rows.

        Args:
            watch: Watch over the ranks until they have joined; None to wait for the time-out.
        """
        self._watch, self._joining = watch, set(self.peers)
        for peer in self.peers:
            self.make_signal("ready", peer, [(self.layout.status_row(self.rank), ROW_BYTES)])()
        for peer in self.peers:
            self.acquire(self.ready_from[peer], peer, "init_process_group" if watch is None else watch.operation)
            self._joining.discard(peer)
        self._watch = None
        self.row.completed = JOINED

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
        self.broken = GroupAbortedError(f"group {self.name!r} was destroyed on {self.rank_names([self.rank])}")
        self.liveness.close()
