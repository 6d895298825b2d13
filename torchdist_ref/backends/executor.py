"""Executor: runs a plan on a link. Short dumb loops; everything was decided when the plan was made.

The first round of a call is its opening: every rank gives a token to every other and takes one from each,
so that all ranks have seen each other's announcement before anybody writes. If the announcements differ,
all ranks see the same difference and raise, nothing has been written, and the link is as before.

A half of the stage is laid out again only when all readers of its last content have freed it. With two
halves in turn that wait is over before it begins, and no barrier is needed between rounds or calls.
One call at a time: the engine holds the lock. Don't add decisions here.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchdist_ref.backends.operands import tensors_of
from torchdist_ref.backends.plan import Peer, Plan, RoundCode
from torchdist_ref.backends.progress import OutOfTurnError
from torchdist_ref.errors import MismatchError
from torchdist_ref.numbers import Number
from torchdist_ref.schedules.schedule import Slot
from torchdist_ref.transports.base import Link


class Executor:
    """The state of a link between calls: the next call's number, the stage's turn, who still reads it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sequence = 0
        self._number: Number = (0, 0)
        self._half = 0
        self._readers: list[tuple[Peer, ...]] = [(), ()]
        self._staged_last = -1
        self._heads = tuple(tuple(link.lines[p].heads[parity] for p in link.peers) for parity in (0, 1))

    def run(self, plan: Plan, inputs: Sequence[Tensor], outputs: Sequence[Tensor], number: Number) -> None:
        """Carry out a call on tensors that are contiguous and of the plan's kind.

        Raises:
            OutOfTurnError: Another call comes first, which another rank has begun. Nothing was written.
            MismatchError: Some rank announced another call. Nothing was written; the link can be used.
            DistBackendError: A rank died, gave up or did not come; the link cannot be used any more.
        """
        self._number = number
        self.link.line.announce(self.sequence, plan.record, number)
        try:
            self._windows(plan, inputs, outputs)
        except (MismatchError, OutOfTurnError):
            self._end()
            raise
        except BaseException as error:
            self.link.give_up(error, plan.doing)
            raise
        self._end()

    def _end(self) -> None:
        self.link.line.done = self.sequence
        self.sequence += 1

    def _windows(self, plan: Plan, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if plan.whole:
            self._rounds(plan, 0, outputs if plan.in_place else tensors_of(plan.picks, inputs, outputs))
            return
        rows = _rows(plan, inputs, outputs)
        for begin in plan.windows:
            self._rounds(plan, begin, _cut(plan, rows, begin))

    def _rounds(self, plan: Plan, begin: int, bound: Sequence[Tensor]) -> None:
        opening = begin == 0
        for code in plan.code(begin, self._half):
            self._round(plan, code, bound, opening)
            opening = False

    def _round(self, plan: Plan, code: RoundCode, bound: Sequence[Tensor], opening: bool) -> None:
        half = self._half
        self._half = 1 - half
        if code.stage:
            if self._readers[0] or self._readers[1]:
                self._make_room(half, plan)
            self._staged_last = half
            for view, position in code.stage:
                view.copy_(bound[position])
        for post in code.posts:
            post()
        for token, peer in code.waits:
            if not token.acquire(False):
                self.link.wait(token, peer, plan.doing)
        if opening:
            self._compare(plan)
        if code.readers:
            self._readers[half] = code.readers
        for step in code.steps:
            step(bound)
        for free in code.frees:
            free()

    def _make_room(self, half: int, plan: Plan) -> None:
        """Wait until nobody reads this half any more.

        Free tokens don't say which half they are for; they come in the order of the stagings. So where a
        round without staging made the turns uneven, the other half's readers are waited for first.
        """
        if self._staged_last == half:
            self._take(self._readers[1 - half], plan)
            self._readers[1 - half] = ()
        self._take(self._readers[half], plan)
        self._readers[half] = ()

    def _take(self, tokens: tuple[Peer, ...], plan: Plan) -> None:
        for token, peer in tokens:
            if not token.acquire(False):
                self.link.wait(token, peer, plan.doing)

    def _compare(self, plan: Plan) -> None:
        (main, path), mine = self._number, plan.record.fingerprint
        for head in self._heads[self.sequence & 1]:
            if head[1] != mine or head[2] != main or head[3] != path:
                raise self._difference(plan)

    def _difference(self, plan: Plan) -> MismatchError | OutOfTurnError:
        """Ranks at different calls begin with the smallest number; at one call they must mean the same."""
        heads = [line.heads[self.sequence & 1] for line in self.link.lines]
        numbers = {(head[2], head[3]) for head in heads}
        return self._mismatch(plan) if len(numbers) == 1 else OutOfTurnError(min(numbers))

    def _mismatch(self, plan: Plan) -> MismatchError:
        link = self.link
        calls = "; ".join(f"{link.who([r])}: {link.lines[r].text(self.sequence)}" for r in range(link.size))
        return MismatchError(
            f"{link.here(plan.doing)}: the ranks made different calls as call {self.sequence} of this group. "
            f"{calls}. Nothing was written, and the group can be used."
        )


def _rows(plan: Plan, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """For every slot of this rank, all its elements in one row; scratch has a row of one window."""
    tensors = iter(tensors_of(plan.picks, inputs, outputs))
    return [plan.scratch[s] if s[0] == "tmp" else _row(plan, s, next(tensors)) for s in plan.slots]


def _row(plan: Plan, slot: Slot, tensor: Tensor) -> Tensor:
    begin = slot[1] * plan.sizes.stride if slot[0] == "data" else 0
    return tensor.view(-1)[begin : begin + plan.sizes.of(plan.link.rank, slot)]


def _cut(plan: Plan, rows: Sequence[Tensor], begin: int) -> list[Tensor]:
    """The part of every row that lies in the window; scratch is as long as what passes through it."""
    rank = plan.link.rank
    ends = [plan.length(rank, slot, begin) for slot in plan.slots]
    starts = [0 if slot[0] == "tmp" else begin for slot in plan.slots]
    return [row[start : start + end] for row, start, end in zip(rows, starts, ends, strict=True)]
