"""Executor: runs a plan on a link. Short dumb loops; everything was decided when the plan was made.

The first round of a call is its opening: every rank gives a token to every other and takes one from each,
so that all ranks have seen each other's announcement before anybody writes. If the announcements differ,
all ranks see the same difference and raise, nothing has been written, and the link is as before.

Rounds take turns on the stage (`turns`). Whoever still reads what lies where a round is to lay out is waited for, which
seldom takes any time, and no barrier is needed between rounds or calls.
One call at a time: the engine holds the lock. Don't add decisions here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from torchdist_ref.backends.lent import Lends
from torchdist_ref.backends.plan import Plan
from torchdist_ref.backends.progress import OutOfTurnError
from torchdist_ref.backends.turns import Places, Turns
from torchdist_ref.errors import MismatchError
from torchdist_ref.numbers import Number
from torchdist_ref.transports.base import Link
from torchdist_ref.transports.board import LENT
from torchdist_ref.transports.layout import ANNOUNCEMENT
from torchdist_ref.transports.layout import DONE as DONE_BYTE
from torchdist_ref.transports.memory import Range

DONE = DONE_BYTE // 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan that is ready to run on one link.

    Attributes:
        run: Carries it out on a call's operands, under the call's number.
        fits: Whether an operand is a plain row of values in memory, as `run` needs it.
        inputs: How many of the operands are inputs only.
        nbytes: Bytes of the call's whole buffer, for the recorder.
    """

    run: Callable[[Sequence[Tensor], Number], None]
    fits: Callable[[Tensor], bool]
    inputs: int
    nbytes: int


class SomeLendError(Exception):
    """Not for users: some ranks lend their tensors and some don't, so all stage."""


CarryOut = Callable[[Sequence[Tensor], bool], None]
Staging = Callable[[Callable[..., None]], Callable[..., None]]


class Executor:
    """The state of a link between calls: the next call's number, and whose turn it is on the stage."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sequence = 0
        self._turns = Turns(link)
        self._said = [(link.line.said[n], tuple(link.lines[p].said[n] for p in link.peers)) for n in (0, 1)]

    def prepared(self, plan: Plan, lending: Lends | None = None, staging: Staging = lambda staged: staged) -> Prepared:
        """A plan as one function of a call's operands and number, which has all that it needs at hand.

        Args:
            plan: What to do, with staging.
            lending: What to do where all ranks lend their tensors, if that is any better.
            staging: Makes what stages these operands out of what stages tensors of the host.

        The function raises:
            OutOfTurnError: Another call comes first, which another rank has begun. Nothing was written.
            MismatchError: Some rank announced another call. Nothing was written; the link can be used.
            DistBackendError: A rank died, gave up or did not come; the link cannot be used any more.
        """
        if not plan.carries_data and len(plan.rounds) < 2:
            return Prepared(self._meeting(plan), plan.fits, plan.inputs, plan.nbytes)
        staged = staging(self._staged(plan))
        return Prepared(self._lent(plan, lending, staged) if lending else staged, plan.fits, plan.inputs, plan.nbytes)

    def _meeting(self, plan: Plan) -> Callable[..., None]:
        """A call that moves no data is its opening: it is over when all ranks have seen each other begin it."""
        link, said, record = self.link, self._said, plan.record
        announce, words = link.line.announce, link.line.words
        hear_all = self._hearing(plan, [(link.layout.board(link.rank), ANNOUNCEMENT)])

        def run(tensors: Sequence[Tensor], number: Number) -> None:
            sequence = self.sequence
            announce(sequence, record, number)
            try:
                hear_all()
                mine, theirs = said[sequence & 1]
                for other in theirs:
                    if other != mine:
                        raise self._difference(plan)
            except BaseException as error:
                self._failed(plan, error)
                raise
            words[DONE] = sequence
            self.sequence = sequence + 1

        return run

    def _lent(self, plan: Plan, lending: Lends, staged: Callable[..., None]) -> Callable[..., None]:
        """Work on the peers' tensors where they lie; with staging after all where some rank does not lend its own."""
        line, lines, said, hear_all = self.link.line, self.link.lines, self._said, self._hearing(plan)

        def run(tensors: Sequence[Tensor], number: Number) -> None:
            place = lending.place(tensors)
            if place is None:
                return staged(tensors, number)
            sequence = self.sequence
            parity = sequence & 1
            line.announce(sequence, lending.record, number)
            line.lent[parity][:] = place
            try:
                hear_all()
                mine, theirs = said[parity]
                if theirs.count(mine) < len(theirs):
                    raise self._difference(plan)
                for steps in lending.rounds(b"".join([each.lent[parity] for each in lines])):
                    for step in steps:
                        step(tensors, 0)
                    hear_all()
            except SomeLendError:
                return staged(tensors, number, False)
            except BaseException as error:
                self._failed(plan, error)
                raise
            line.done = sequence
            self.sequence = sequence + 1

        return run

    def _hearing(self, plan: Plan, shown: Sequence[Range] = ()) -> Callable[[], None]:
        """What tells all peers that this rank is where it is in the call, and hears the same from them.

        Args:
            plan: The call.
            shown: What of this rank's memory peers on other hosts get to see with it.
        """
        link = self.link
        posts = [link.giver("full", peer, shown) for peer in link.peers]
        waits = [(link.full_from[peer], peer) for peer in link.peers]

        def hear_all() -> None:
            for post in posts:
                post()
            for token, peer in waits:
                if not token.acquire(False):
                    link.wait(token, peer, plan.doing)

        return hear_all

    def _staged(self, plan: Plan) -> Callable[..., None]:
        announce, record, words = self.link.line.announce, plan.record, self.link.line.words
        one = len(plan.rounds) == len(plan.windows) == 1
        carry_out = self._one_round(plan) if one else self._rounds(plan)

        def run(tensors: Sequence[Tensor], number: Number, unseen: bool = True) -> None:
            sequence, head = self.sequence, self._turns.head
            if unseen:
                announce(sequence, record, number)
            try:
                carry_out(tensors, unseen)
            except SomeLendError:
                self._turns.head = head
                # Not by its own name: a function that knows itself is garbage that keeps the group's memory.
                return self._staged(plan)(tensors, number, False)
            except BaseException as error:
                self._turns.head = head
                self._failed(plan, error)
                raise
            words[DONE] = sequence
            self.sequence = sequence + 1

        return run

    def _one_round(self, plan: Plan) -> CarryOut:
        """What carries out a call of one round, which most are: it is the opening, if the others' calls are unseen."""
        wait, said, code, room, turns = self.link.wait, self._said, Places(plan.code), plan.room, self._turns

        def carry_out(tensors: Sequence[Tensor], unseen: bool) -> None:
            number = turns.number
            ((stage, posts, waits, steps, _, _),) = code[turns.place(plan) if room else number % turns.turns]
            if stage:
                if turns.readers:
                    turns.make_room(number, plan.doing)
                for lay in stage:
                    lay(tensors, 0)
            for post in posts:
                post()
            for token, peer in waits:
                if not token.acquire(False):
                    wait(token, peer, plan.doing)
            if unseen:
                mine, theirs = said[self.sequence & 1]
                if theirs.count(mine) < len(theirs):
                    raise self._difference(plan)
            for step in steps:
                step(tensors, 0)
            turns.number = number + 1

        return carry_out

    def _rounds(self, plan: Plan) -> CarryOut:
        """What carries out several rounds, window after window."""
        said, turns, doing = self._said, self._turns, plan.doing

        def carry_out(tensors: Sequence[Tensor], unseen: bool) -> None:
            for begin in plan.windows:
                place = turns.place(plan) if plan.room else turns.number % turns.turns
                for stage, posts, waits, steps, frees, readers in plan.code(begin, place):
                    if stage:
                        turns.make_room(turns.number, doing)
                        for lay in stage:
                            lay(tensors, begin)
                    for post in posts:
                        post()
                    turns.take(waits, doing)
                    if unseen:
                        mine, theirs = said[self.sequence & 1]
                        if theirs.count(mine) < len(theirs):
                            raise self._difference(plan)
                        unseen = False
                    turns.read_by(readers)
                    for step in steps:
                        step(tensors, begin)
                    for free in frees:
                        free()

        return carry_out

    def _failed(self, plan: Plan, error: BaseException) -> None:
        """After a difference the link goes on; after anything else it does not."""
        if isinstance(error, (MismatchError, OutOfTurnError)):
            self.link.line.done, self.sequence = self.sequence, self.sequence + 1
        else:
            self.link.give_up(error, plan.doing)

    def _difference(self, plan: Plan) -> MismatchError | OutOfTurnError | SomeLendError:
        """Ranks at different calls begin with the smallest number; at one call they must mean the same."""
        heads = [line.heads[self.sequence & 1] for line in self.link.lines]
        numbers = {(head[2], head[3]) for head in heads}
        if len(numbers) > 1:
            return OutOfTurnError(min(numbers))
        return SomeLendError() if len({head[1] | LENT for head in heads}) == 1 else self._mismatch(plan)

    def _mismatch(self, plan: Plan) -> MismatchError:
        link = self.link
        calls = "; ".join(f"{link.who([r])}: {link.lines[r].text(self.sequence)}" for r in range(link.size))
        return MismatchError(
            f"{link.here(plan.doing)}: the ranks made different calls as call {self.sequence} of this group. "
            f"{calls}. Nothing was written, and the group can be used."
        )
