"""Link: how the ranks of one group reach each other's memory, whatever that memory is.

A link gives the backend a stage of its own to lay data out on, views of its peers' stages, and tokens
that say when to look. `shared_memory` and `threads` make links of the same kind over different memory;
the backend does not know which it has. One collective is on a link at a time (the backend holds the lock).

What a link guarantees in every wait: it ends. With the token; or with an error that names the rank that
died, gave up, left or did not come before the deadline. Waits spin first where there is a core for each rank,
else yield, then block in slices (see `liveness`). Don't add algorithms here: they are schedules.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from torchdist_ref.errors import GroupAbortedError, RankDiedError, RankStalledError
from torchdist_ref.timeouts import CHECK_SECONDS
from torchdist_ref.transports.board import ABSENT, GAVE_UP, LEFT, MET, PRESENT, Line
from torchdist_ref.transports.layout import BOARD_LINE, Layout
from torchdist_ref.transports.memory import Liveness, Memory, Range, Token

_MAIN = threading.main_thread().ident
# A rank that waits says so in every slice. Who has not said it for so many seconds does not wait, or is stopped.
FRESH = 10 * CHECK_SECONDS


class Link:
    """One rank's end of a group.

    Attributes:
        rank: This rank in the group.
        size: Ranks in the group.
        name: The group's name, for messages.
        members: The global ranks of the group's members, for messages.
        hosts: The host of each rank, numbered from 0; None where all share one.
        broken: The error that ended the group, once there is one.
    """

    hosts: tuple[int, ...] | None = None

    def __init__(
        self, memory: Memory, layout: Layout, rank: int, members: Sequence[int], name: str, timeout: float
    ) -> None:
        self.memory, self.layout, self.rank, self.members, self.name = memory, layout, rank, tuple(members), name
        self.size = layout.size
        self.timeout = timeout
        self.lines = tuple(Line(memory.bytes_of(r), layout, r) for r in range(self.size))
        self.line = self.lines[rank]
        self.peers = tuple(r for r in range(self.size) if r != rank)
        self._given: dict[tuple[str, int], Token] = {}
        self.full_from = {p: memory.token(layout, "full", p, rank) for p in self.peers}
        self.free_from = {p: memory.token(layout, "free", p, rank) for p in self.peers}
        # Some hundred microseconds, which is how far apart ranks in step are. Where ranks share a core they can't spin:
        # they let each other go first, which costs half of what it costs to sleep and be woken, and then sleep.
        roomy = self.size <= len(os.sched_getaffinity(0))
        self.spins, self.yields = (2000, 0) if roomy else (0, 100)
        self.alive: Liveness
        self.broken: BaseException | None = None

    def giver(self, kind: str, peer: int, ranges: Sequence[Range] = (), owner: int | None = None) -> Callable[[], Any]:
        """What to call so that `peer` gets a token of this kind, and sees these ranges: this rank's, if not said."""
        token = self._given.get((kind, peer))
        if token is None:
            # A rank has one bell, whoever rings it.
            source = peer if kind == "bell" else self.rank
            token = self._given[kind, peer] = self.memory.token(self.layout, kind, source, peer)
        return self.memory.giver(token, kind, peer, self.rank if owner is None else owner, ranges)

    def wait(self, token: Token, peer: int, doing: str, timeout: float | None = None, alone: bool = False) -> None:
        """Take a token from `peer`, or raise the reason why it will not come.

        Args:
            token: What to take.
            peer: The group rank that gives it.
            doing: This rank's call, for messages.
            timeout: Seconds at most; None: the group's.
            alone: Only `peer` matters (point-to-point), not whether the other members are well.
        """
        if self.soon(token):
            return
        self._wait_long(token, peer, doing, self.timeout if timeout is None else timeout, alone)

    def soon(self, token: Token) -> bool:
        """Take a token if it comes while it is good to stay awake.

        Only the main thread does: it holds the interpreter lock meanwhile, which others would keep from it.
        """
        if threading.get_ident() != _MAIN:
            return False
        take = token.acquire
        for _ in range(self.spins):
            if take(False):
                return True
        for _ in range(self.yields):
            os.sched_yield()
            if take(False):
                return True
        return False

    def _wait_long(self, token: Token, peer: int, doing: str, seconds: float, alone: bool) -> None:
        deadline, told = monotonic() + seconds, False
        while not token.acquire(True, max(0.0, min(CHECK_SECONDS, deadline - monotonic()))):
            self.line.wait_for(peer)
            if self.hosts is not None and not told and monotonic() > deadline - seconds / 2:
                # Ranks of other hosts can't look here; at the deadline they will want to know.
                self.show_line()
                told = True
            at = doing if alone else self._numbered(doing)
            trouble = self.trouble(peer if alone else None, at)
            if trouble is None and monotonic() >= deadline:
                trouble = self.stalled(peer, at, seconds)
            if trouble is not None:
                # The peer may have given the token and ended since we last looked.
                if token.acquire(False):
                    break
                raise trouble
        self.line.waits_no_more()
        if told:
            self.show_line()

    def _numbered(self, doing: str) -> str:
        return f"call {self.line.announced}, {doing}" if self.line.announced >= 0 else doing

    def trouble(self, only: int | None, doing: str) -> BaseException | None:
        """Why this group (or this one peer) cannot go on, as far as anybody knows; None where it can."""
        # First who is gone: asking may bring news of what they had finished before.
        gone = self.alive.dead()
        concerned = [r for r in self.peers if (self._owes(r) if only is None else r == only)]
        # A rank that said why it went is not a victim, even if its process has ended since.
        dead = [r for r in gone if r in concerned and self.lines[r].status == PRESENT]
        gave_up = [r for r in concerned if self.lines[r].status == GAVE_UP]
        left = [r for r in concerned if self.lines[r].status == LEFT]
        if dead:
            return RankDiedError(f"{self.here(doing)}: {self.who(dead)} died. {self._advice}")
        if gave_up:
            first = min(gave_up, key=lambda r: self.lines[r].gave_up_at)
            return GroupAbortedError(f"{self.here(doing)}: {self.who([first])} gave up: {self.lines[first].reason}")
        if left:
            last = self.lines[left[0]].doing()
            return GroupAbortedError(f"{self.here(doing)}: {self.who(left)} destroyed the group; it {last}.")
        return None

    def ended(self, ranks: Sequence[int], doing: str) -> BaseException | None:
        """An error if the process of one of these ranks has ended, for who waits for them by other means; else None."""
        gone = [rank for rank in self.alive.dead() if rank in ranks]
        text = f"{self.here(doing)}: {self.who(gone)} will not come any more: the process has ended. {self._advice}"
        return RankDiedError(text) if gone else None

    def _owes(self, rank: int) -> bool:
        """Whether a rank has not finished the call that this rank is in. Who has may end as it likes."""
        return self.lines[rank].done < self.line.announced

    _advice = "The call may have happened on some ranks. Destroy the group and start again from a checkpoint."

    def stalled(self, peer: int, doing: str, seconds: float) -> BaseException:
        """The error for a rank that is there but did not come: says what everybody was last seen at."""
        others = "; ".join(f"{self.who([r])} {self._state(r)}" for r in self.peers)
        chain = self._chain(peer)
        through = "".join(f", for which {self.who([r])} waits" for r in reversed(chain[:-1]))
        return RankStalledError(
            f"{self.here(doing)}: {self.who(chain[-1:])} did not come within {seconds:g} s{through}. What the others "
            f"do: {others}. Look at that rank, or pass a longer timeout to init_process_group or new_group."
        )

    def _chain(self, peer: int) -> list[int]:
        """From the rank that is waited for to the one that it is all about, as far as can be seen from here."""
        chain = [peer]
        while (after := self._awaited(chain[-1])) is not None and after not in (self.rank, *chain):
            chain.append(after)
        return chain

    def _awaited(self, rank: int) -> int | None:
        """Whom a rank waits for. A rank of another host has said so itself, by a clock that is not ours."""
        here = self.hosts is None or self.hosts[rank] == self.hosts[self.rank]
        return self.lines[rank].waits_for(FRESH if here else None)

    def _state(self, rank: int) -> str:
        return "has not joined" if self.lines[rank].status == ABSENT else self.lines[rank].doing()

    def here(self, doing: str) -> str:
        """Where an error happened: the call, this rank and the group."""
        return f"{doing} on {self.who([self.rank])} of group {self.name!r}"

    def who(self, ranks: Sequence[int]) -> str:
        """Ranks in words: the group rank, and the global one where it differs."""
        names = [f"{r}" if self.members[r] == r else f"{r} (global {self.members[r]})" for r in ranks]
        return ("rank " if len(names) == 1 else "ranks ") + ", ".join(names)

    def give_up(self, error: BaseException, doing: str) -> None:
        """This rank stops in the middle of a call: nobody can use the group any more. The others learn why."""
        if self.broken is None:
            self.broken = error
            self.line.give_up(f"{type(error).__name__} in {doing}: {error}")
            self.show_line()

    def show_line(self) -> None:
        """Let the peers that can't look for themselves see this rank's board line."""
        for peer in self.peers:
            self.giver("line", peer, [(self.layout.board(self.rank), BOARD_LINE)])()

    def meet(self, doing: str) -> None:
        """Wait until all ranks are here, and see their board lines."""
        for peer in self.peers:
            self.giver("full", peer, [(self.layout.board(self.rank), BOARD_LINE)])()
        for peer in self.peers:
            self.wait(self.full_from[peer], peer, doing)
        self.line.done = MET

    def be_patient(self, number: tuple[int, int], waited: float) -> None:
        """Another rank has begun a call that this one has not made: wait for it, but not for ever, nor in vain."""
        doing = f"call number {number[0]}.{number[1]}, which another rank has begun and this one has not made"
        error = self.trouble(None, doing)
        if error is None and waited > self.timeout:
            error = RankStalledError(
                f"{self.here(doing)}: this rank did not make it within {self.timeout:g} s. Do all ranks make the same "
                f"calls in their callbacks?"
            )
        if error is not None:
            self.give_up(error, doing)
            raise error

    def check_usable(self, doing: str) -> None:
        """Raise if an earlier call ended this group."""
        if self.broken is not None:
            raise GroupAbortedError(
                f"{self.here(doing)}: the group ended with an earlier failure ({self.broken!r}). "
                f"Destroy it and make a new one."
            ) from self.broken

    def close(self) -> None:
        """Leave the group. The memory goes with the last tensor that lies in it."""
        if self.line.status != GAVE_UP:
            self.line.status = LEFT
            self.show_line()
        self.broken = GroupAbortedError(f"group {self.name!r} was destroyed on {self.who([self.rank])}")
        self.alive.close()
