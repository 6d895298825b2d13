"""Executor: runs a plan on a link. Short dumb loops; everything was decided when the plan was made.

The first round of a call is its opening: every rank gives a token to every other and takes one from each,
so that all ranks have seen each other's announcement before anybody writes. If the announcements differ,
all ranks see the same difference and raise, nothing has been written, and the link is as before.

Rounds take turns on the stage (`turns`). Whoever still reads what lies where a round is to lay out is waited for, which
seldom takes any time, and no barrier is needed between rounds or calls.
One call at a time: the backend holds the lock. Don't add decisions here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from torchdist_ref.backends.ref.plan import Plan
from torchdist_ref.backends.ref.progress import OutOfTurnError
from torchdist_ref.backends.ref.turns import Places, Turns
from torchdist_ref.backends.ref.zero_copy import Lends
from torchdist_ref.errors import MismatchError
from torchdist_ref.numbers import Number
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.status_table import ANNOUNCEMENT_BYTES, COMPLETED, ZERO_COPY_BITS

CarryOut = Callable[[Sequence[Tensor], bool], None]
"""Does a plan on a call's operands; the other argument says whether the other ranks' calls are still unseen."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan that is ready to run on one link.

    Attributes:
        plan: What to do.
        carry_out: Does it.
        staged: Does it with staging, for when all ranks have seen that some lend their tensors and some don't.
    """

    plan: Plan
    carry_out: CarryOut
    staged: CarryOut


class SomeLendError(Exception):
    """Not for users: some ranks lend their tensors and some don't, so all stage."""


class Executor:
    """The state of a link between calls: the next call's number, and whose turn it is on the stage."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sequence = 0
        self._turns = Turns(link)
        self._announce, self._words = link.row.announce, link.row.fields
        self._said = [(link.row.compared[n], tuple(link.rows[p].compared[n] for p in link.peers)) for n in (0, 1)]

    def prepared(
        self, plan: Plan, lending: Lends | None = None, staging: Callable[[CarryOut], CarryOut] = lambda staged: staged
    ) -> Prepared:
        """A plan as functions of a call's operands, which have all that they need at hand.

        Args:
            plan: What to do, with staging.
            lending: What to do where all ranks lend their tensors, if that is any better.
            staging: Makes what stages these operands out of what stages tensors of the host.
        """
        meets = not plan.carries_data and len(plan.rounds) < 2
        staged = self._meeting(plan) if meets else staging(self.staged(plan))
        return Prepared(plan, self._lent(plan, lending, staged) if lending else staged, staged)

    def run(self, prepared: Prepared, tensors: Sequence[Tensor], number: Number) -> None:
        """Carry out a call, under its number, on operands that its plan `fits`.

        Raises:
            OutOfTurnError: Another call comes first, which another rank has begun. Nothing was written.
            MismatchError: Some rank announced another call. Nothing was written; the link can be used.
            DistBackendError: A rank died, gave up or did not come; the link cannot be used any more.
        """
        sequence, turns, plan = self.sequence, self._turns, prepared.plan
        head = turns.head
        self._announce(sequence, plan.record, number)
        try:
            try:
                prepared.carry_out(tensors, True)
            except SomeLendError:
                turns.head = head
                prepared.staged(tensors, False)
        except BaseException as error:
            turns.head = head
            self._failed(plan, error)
            raise
        self._words[COMPLETED] = sequence
        self.sequence = sequence + 1

    def _meeting(self, plan: Plan) -> CarryOut:
        """A call that moves no data is its opening: it is over when all ranks have seen each other begin it."""
        hear_all, compare = self._hearing(plan), self._comparing(plan)

        def carry_out(tensors: Sequence[Tensor], unseen: bool) -> None:
            hear_all()
            compare()

        return carry_out

    def _lent(self, plan: Plan, lending: Lends, staged: CarryOut) -> CarryOut:
        """Work on the peers' tensors where they lie; with staging where this rank does not lend its own."""
        row, rows, hear_all, compare = self.link.row, self.link.rows, self._hearing(plan), self._comparing(plan)

        def carry_out(tensors: Sequence[Tensor], unseen: bool) -> None:
            place = lending.place(tensors)
            if place is None:
                return staged(tensors, unseen)
            parity = self.sequence & 1
            row.announce_zero_copy(parity, lending.mark, place)
            hear_all()
            compare()
            for steps in lending.rounds(b"".join([each.handles[parity] for each in rows])):
                for step in steps:
                    step(tensors, 0)
                hear_all()

        return carry_out

    def _hearing(self, plan: Plan) -> Callable[[], None]:
        """What tells all peers that this rank is where it is in the call, and hears the same from them."""
        link = self.link
        posts = [
            link.make_signal("ready", peer, [(link.layout.status_row(link.rank), ANNOUNCEMENT_BYTES)])
            for peer in link.peers
        ]
        waits = [(link.ready_from[peer], peer) for peer in link.peers]

        def hear_all() -> None:
            for post in posts:
                post()
            for token, peer in waits:
                if not token.acquire(False):
                    link.acquire(token, peer, plan.doing)

        return hear_all

    def _comparing(self, plan: Plan) -> Callable[[], None]:
        """What raises where another rank, whose token this one has taken, is not at the same call."""
        said = self._said

        def compare() -> None:
            mine, theirs = said[self.sequence & 1]
            if theirs.count(mine) < len(theirs):
                raise self._difference(plan)

        return compare

    def staged(self, plan: Plan) -> CarryOut:
        """What does a plan by way of the stage.

        Lay out, tell the peers, wait for theirs, and read: round after round, and window after window.
        """
        wait, doing, room, turns, compare = self.link.acquire, plan.doing, plan.room, self._turns, self._comparing(plan)
        windows = [(begin, Places(partial(plan.code, begin))) for begin in plan.windows]

        def carry_out(tensors: Sequence[Tensor], unseen: bool) -> None:
            for begin, code in windows:
                place = turns.place(plan) if room else turns.number % turns.turns
                for stage, posts, waits, steps, frees, readers in code[place]:
                    if stage:
                        if turns.readers:
                            turns.make_room(turns.number, doing)
                        for lay in stage:
                            lay(tensors, begin)
                    for post in posts:
                        post()
                    for token, peer in waits:
                        if not token.acquire(False):
                            wait(token, peer, doing)
                    if unseen:
                        compare()
                        unseen = False
                    if readers:
                        turns.read_by(readers)
                    turns.number += 1
                    for step in steps:
                        step(tensors, begin)
                    for free in frees:
                        free()

        return carry_out

    def _failed(self, plan: Plan, error: BaseException) -> None:
        """After a difference the link goes on; after anything else it does not."""
        if isinstance(error, (MismatchError, OutOfTurnError)):
            self.link.row.completed, self.sequence = self.sequence, self.sequence + 1
        else:
            self.link.abort(error, plan.doing)

    def _difference(self, plan: Plan) -> MismatchError | OutOfTurnError | SomeLendError:
        """Ranks at different calls begin with the smallest number; at one call they must mean the same."""
        heads = [row.headers[self.sequence & 1] for row in self.link.rows]
        numbers = {(head[2], head[3]) for head in heads}
        if len(numbers) > 1:
            return OutOfTurnError(min(numbers))
        return SomeLendError() if len({head[1] | ZERO_COPY_BITS for head in heads}) == 1 else self._mismatch(plan)

    def _mismatch(self, plan: Plan) -> MismatchError:
        link = self.link
        calls = "; ".join(f"{link.rank_names([r])}: {link.rows[r].text(self.sequence)}" for r in range(link.size))
        return MismatchError(
            f"{link.context(plan.doing)}: the ranks made different calls as call {self.sequence} of this group. "
            f"{calls}. Nothing was written, and the group can be used."
        )
