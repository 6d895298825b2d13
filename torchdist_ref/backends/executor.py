"""Executor: runs a plan on a link. Short dumb loops; everything was decided when the plan was made.

The first round of a call is its opening: every rank gives a token to every other and takes one from each,
so that all ranks have seen each other's announcement before anybody writes. If the announcements differ,
all ranks see the same difference and raise, nothing has been written, and the link is as before.

Rounds take turns. What a round lays out lies elsewhere than what the round before laid out, and may lie where the one
before that did: so its readers have to have freed that. The wait is over before it begins, and no barrier is needed
between rounds or calls.
One call at a time: the engine holds the lock. Don't add decisions here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from torchdist_ref.backends.lent import Lending
from torchdist_ref.backends.plan import Code, Peer, Plan
from torchdist_ref.backends.progress import OutOfTurnError
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


class _First(dict[int, Code]):
    """A plan's code for the first window, by place: most calls have no other, and find it here soonest."""

    def __init__(self, code: Callable[[int, int], Code]) -> None:
        self._code = code

    def __missing__(self, place: int) -> Code:
        found = self[place] = self._code(0, place)
        return found


class Executor:
    """The state of a link between calls: the next call's number, the stage's turn and place, who still reads it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sequence = 0
        # All ranks count alike what rounds take, of turns and of the ring: a call that fails in its opening takes none.
        self._turn = self._head = 0
        self._readers: list[tuple[Peer, ...]] = [(), ()]
        self._staged_last = -1
        self._said = [(link.line.said[n], tuple(link.lines[p].said[n] for p in link.peers)) for n in (0, 1)]

    def prepared(self, plan: Plan, lending: Lending | None = None) -> Prepared:
        """A plan as one function of a call's operands and number, which has all that it needs at hand.

        Args:
            plan: What to do, with staging.
            lending: What to do where all ranks lend their tensors, if that is any better.

        The function raises:
            OutOfTurnError: Another call comes first, which another rank has begun. Nothing was written.
            MismatchError: Some rank announced another call. Nothing was written; the link can be used.
            DistBackendError: A rank died, gave up or did not come; the link cannot be used any more.
        """
        if not plan.carries_data and len(plan.rounds) < 2:
            return Prepared(self._meeting(plan), plan.fits, plan.inputs, plan.nbytes)
        staged = self._staged(plan)
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

    def _lent(self, plan: Plan, lending: Lending, staged: Callable[..., None]) -> Callable[..., None]:
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
        announce, record, windows, room = self.link.line.announce, plan.record, plan.windows, plan.room
        words, code, carry_out, first = self.link.line.words, plan.code, self._rounds(plan), _First(plan.code)

        def run(tensors: Sequence[Tensor], number: Number, unseen: bool = True) -> None:
            sequence = self.sequence
            before = self._turn, self._head
            if unseen:
                announce(sequence, record, number)
            try:
                for begin in windows:
                    place = self._place(plan) if room else self._turn
                    carry_out(code(begin, place) if begin else first[place], tensors, begin, unseen)
                    unseen = False
            except SomeLendError:
                self._turn, self._head = before
                # Not by its own name: a function that knows itself is garbage that keeps the group's memory.
                return self._staged(plan)(tensors, number, False)
            except BaseException as error:
                self._turn, self._head = before
                self._failed(plan, error)
                raise
            words[DONE] = sequence
            self.sequence = sequence + 1

        return run

    def _rounds(self, plan: Plan) -> Callable[[Code, Sequence[Tensor], int, bool], None]:
        """What carries out the rounds of a window. The first can be the opening, the others' calls being unseen."""
        wait, said = self.link.wait, self._said

        def carry_out(code: Code, tensors: Sequence[Tensor], begin: int, unseen: bool) -> None:
            for stage, posts, waits, steps, frees, readers in code:
                turn = self._turn
                self._turn = 1 - turn
                if stage:
                    if self._readers[0] or self._readers[1]:
                        self._make_room(turn, plan)
                    self._staged_last = turn
                    for lay in stage:
                        lay(tensors, begin)
                for post in posts:
                    post()
                for token, peer in waits:
                    if not token.acquire(False):
                        wait(token, peer, plan.doing)
                if unseen:
                    mine, theirs = said[self.sequence & 1]
                    if theirs.count(mine) < len(theirs):
                        raise self._difference(plan)
                    unseen = False
                if readers:
                    self._readers[turn] = readers
                for step in steps:
                    step(tensors, begin)
                for free in frees:
                    free()

        return carry_out

    def _place(self, plan: Plan) -> int:
        """The place on every ring for the next window's first round: the same on all ranks."""
        place = self.link.layout.next_place(self._head, plan.room)
        self._head = place + plan.room * len(plan.rounds)
        return place

    def _failed(self, plan: Plan, error: BaseException) -> None:
        """After a difference the link goes on; after anything else it does not."""
        if isinstance(error, (MismatchError, OutOfTurnError)):
            self.link.line.done, self.sequence = self.sequence, self.sequence + 1
        else:
            self.link.give_up(error, plan.doing)

    def _make_room(self, turn: int, plan: Plan) -> None:
        """Wait until nobody reads what was laid out in the turn before the last one.

        Free tokens don't say which turn they are for; they come in the order of the stagings. So where a
        round without staging made the turns uneven, the other turn's readers are waited for first.
        """
        if self._staged_last == turn:
            self._take(self._readers[1 - turn], plan)
            self._readers[1 - turn] = ()
        self._take(self._readers[turn], plan)
        self._readers[turn] = ()

    def _take(self, tokens: tuple[Peer, ...], plan: Plan) -> None:
        for token, peer in tokens:
            if not token.acquire(False):
                self.link.wait(token, peer, plan.doing)

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
