"""Presence: processes of the ranks that are about to form a group, as far as they have announced themselves in a store.

Until the group exists, nothing else watches them. Do not add the rounds in which ranks meet: see `membership.meeting`.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence

from torchdist_ref.errors import MismatchError
from torchdist_ref.membership.events import Failure
from torchdist_ref.membership.peer_processes import PeerProcesses
from torchdist_ref.membership.rounds import Attendee
from torchdist_ref.membership.words import backend_mismatch, error_of, size_mismatch
from torchdist_ref.processes.identity import host_identity
from torchdist_ref.processes.witness import own_witness
from torchdist_ref.stores import Store

_CHECKED_AT_ONCE = 8
"""Ranks that one check looks for, each of which costs a request."""


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
        """Look for these ranks too."""
        self._unknown.extend(other for other in ranks if other != self._rank)

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
        with contextlib.suppress(RuntimeError):
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
        with contextlib.closing(PeerProcesses({self._rank: found.pid})) as processes:
            return not processes.dead()

    def close(self) -> None:
        """Close the descriptors."""
        self._processes.close()
