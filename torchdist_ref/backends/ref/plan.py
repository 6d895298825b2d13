"""Plan: one rank's part of a schedule, made ready for tensors of one dtype and shape. Made once, run often.

All the thinking is here: which slots a rank lays out on its stage and where, whom it tells, whom it waits
for, what it then copies or reduces from whose stage. What is left for the executor is a few short loops
over functions that already exist. Large tensors go through the stage in windows: the whole schedule runs for
one window after the other, so that a window is still in the cache when the peers read it.

Round rules (`schedules.schedule`): reads come before writes. Whatever a peer reads is on the stage before
anything is written; whatever a rank reads of its own and overwrites in the same round is staged too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.backends.reductions import Reduction
from torchdist_ref.backends.ref import steps
from torchdist_ref.backends.ref.arrivals import Arrivals
from torchdist_ref.backends.ref.operands import IN_PLACE, Sizes
from torchdist_ref.backends.ref.steps import Operand, Part, Step
from torchdist_ref.schedules.schedule import Move, Schedule, Slot
from torchdist_ref.transports.link import Link, Range, Semaphore
from torchdist_ref.transports.segment_layout import ring_bytes
from torchdist_ref.transports.status_table import ANNOUNCEMENT_BYTES, Announcement

ALIGN = 64
# Bytes that are copied in the time that it takes to make a view (measured: about 1 us).
SHORT = 64 * 1024
Peer = tuple[Semaphore, int]


class RoundCode(NamedTuple):
    """What a rank does in one round of one window.

    Attributes:
        stage: Copies that lay out on the stage what peers read.
        posts: Tokens to give once that is done.
        waits: (token, peer) to take before reading.
        steps: What to do then with the slots of this rank.
        frees: Tokens to give once everything is read.
        readers: (token, peer) to take before anything is laid out in this turn again.
    """

    stage: tuple[Step, ...]
    posts: tuple[Callable[[], Any], ...]
    waits: tuple[Peer, ...]
    steps: tuple[Step, ...]
    frees: tuple[Callable[[], Any], ...]
    readers: tuple[Peer, ...]


Code = tuple[RoundCode, ...]
"""All rounds of one window."""


@dataclass(eq=False)
class Plan:
    """A call on tensors of one kind, planned for one rank of one link.

    Attributes:
        link: Where it runs.
        record: What is announced to the peers.
        schedule: The algorithm.
        sizes: Elements of every slot.
        dtype: Of all tensors.
        inputs: How many of the call's operands are inputs only; the others are outputs.
        nbytes: Of the largest operand, for the recorder.
        shape: Of every tensor of the call, or None where they differ.
        reduction: How to reduce; None where nothing is.
        divide: Divide the result by this (an average); 0 for not at all.
        fits: Whether a tensor of the plan's kind is a plain row of values in memory; others get such copies.
    """

    link: Link
    record: Announcement
    schedule: Schedule
    sizes: Sizes
    dtype: torch.dtype
    inputs: int
    nbytes: int
    shape: tuple[int, ...] | None
    reduction: Reduction | None
    divide: int = 0
    fits: Callable[[Tensor], bool] = Tensor.is_contiguous
    _code: dict[Any, Code] = field(default_factory=dict)

    @cached_property
    def doing(self) -> str:
        """The call in words, for messages."""
        return self.record.text.decode(errors="replace")

    @cached_property
    def rounds(self) -> tuple[tuple[Move, ...], ...]:
        """The schedule's rounds, without the moves that carry nothing for tensors of this size."""
        return tuple(tuple(m for m in moves if self._carries(m)) for moves in self.schedule.rounds)

    @property
    def carries_data(self) -> bool:
        """Whether there is anything to move; else the call only says that every rank has come to it."""
        return self.schedule.chunks > 0

    def _carries(self, move: Move) -> bool:
        return not self.carries_data or self.sizes.of(move.src, move.read) > 0

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of this rank that the schedule touches."""
        mine = {slot for moves in self.rounds for move in moves for slot in self._mine(move)}
        return tuple(sorted(mine))

    def _mine(self, move: Move) -> Iterable[Slot]:
        rank = self.link.rank
        return [s for r, s in ((move.src, move.read), (move.dst, move.write)) if r == rank]

    @cached_property
    def whole(self) -> bool:
        """Whether every slot is a whole tensor that goes through the stage at once: nothing is sliced then."""
        flat_operands = self.sizes.op not in IN_PLACE or self.sizes.chunks == 1
        return flat_operands and self.shape is not None and len(self.windows) == 1 and not self.scratch

    @cached_property
    def arrivals(self) -> Arrivals:
        """How what arrives is brought into slots."""
        # Short blocks take longer to cut out of their tensor than to copy.
        short = bool(self.sizes.rows) and self.sizes.largest * self.dtype.itemsize <= SHORT
        return Arrivals(self.dtype, self.reduction, short)

    @cached_property
    def staged(self) -> tuple[dict[int, tuple[Slot, ...]], ...]:
        """For each round and rank: the slots that are laid out on its stage, in order."""
        return tuple(_staged(moves) for moves in self.rounds)

    @cached_property
    def _most(self) -> int:
        return max((len(slots) for by_rank in self.staged for slots in by_rank.values()), default=1)

    @cached_property
    def _stride(self) -> int:
        return -(-self.window * self.dtype.itemsize // ALIGN) * ALIGN

    @cached_property
    def room(self) -> int:
        """Bytes of the ring that each round takes on every stage; 0 if it has a pocket."""
        return ring_bytes(self._most * self._stride if self.carries_data else 0)

    @cached_property
    def window(self) -> int:
        """Elements of a slot that go through the stage at once."""
        room = self.link.layout.window // self._most // ALIGN * ALIGN // self.dtype.itemsize
        return max(1, min(room, self.sizes.largest))

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Where in a slot each window begins."""
        return tuple(range(0, self.sizes.largest, self.window)) or (0,)

    @cached_property
    def scratch(self) -> dict[Slot, Tensor]:
        """Memory for the schedule's `tmp` slots, one window each."""
        return {s: torch.empty(self.window, dtype=self.dtype) for s in self.slots if s[0] == "tmp"}

    def length(self, rank: int, slot: Slot, begin: int) -> int:
        """Elements of `slot` on `rank` that lie in the window that begins there."""
        return max(0, min(self.window, self.sizes.of(rank, slot) - begin))

    def code(self, begin: int, place: int) -> Code:
        """What to do for the window that begins there, if its first round has that place on every ring, or pocket."""
        key = (-1 if 0 < begin <= self._smallest - self.window else begin, place)
        code = self._code.get(key)
        if code is None:
            numbers = range(len(self.rounds))
            code = self._code[key] = tuple(self._round(n, begin, self._place(place, n)) for n in numbers)
        return code

    def _place(self, first: int, number: int) -> int:
        layout = self.link.layout
        after = first + number * (self.room or 1)
        return layout.next_offset(after, self.room) if self.room else after % layout.cells

    @cached_property
    def _frees(self) -> bool:
        """Whether readers must say that they are done.

        In one round they need not: who opens the next call has finished this one, and that lies elsewhere on the stage.
        """
        return self.carries_data and max(len(self.rounds), len(self.windows)) > 1

    @cached_property
    def _smallest(self) -> int:
        return min((self.sizes.of(m.src, m.read) for moves in self.rounds for m in moves), default=0)

    def _round(self, number: int, begin: int, place: int) -> RoundCode:
        link, rank, moves = self.link, self.link.rank, self.rounds[number]
        opening = number == 0 and begin == 0
        sources = _unique(m.src for m in moves if m.dst == rank and m.src != rank)
        targets = _unique(m.dst for m in moves if m.src == rank and m.dst != rank)
        told = link.peers if opening else targets
        mine = [s for s in self.staged[number].get(rank, ()) if self.length(rank, s, begin) and self.carries_data]
        return RoundCode(
            stage=tuple(
                self._copy(self._view(number, rank, s, begin, place), self._own(s, begin), s, begin) for s in mine
            ),
            posts=tuple(link.make_signal("ready", p, self._shown(number, p, begin, place, opening)) for p in told),
            waits=tuple((link.ready_from[p], p) for p in (link.peers if opening else sources)),
            steps=(*self._steps(number, begin, place), *self._last_steps(number, begin)),
            frees=tuple(link.make_signal("released", p) for p in sources if self._frees),
            readers=tuple((link.released_by[p], p) for p in targets if self._frees),
        )

    def _shown(self, number: int, peer: int, begin: int, place: int, opening: bool) -> list[Range]:
        """What a peer gets to see with its token: the slots that it reads, and in an opening the announcement."""
        link = self.link
        line = [(link.layout.status_row(link.rank), ANNOUNCEMENT_BYTES)] if opening else []
        moves = [m for m in self.rounds[number] if (m.src, m.dst) == (link.rank, peer) and self.carries_data]
        return line + [self._range(number, link.rank, slot, begin, place) for slot in _unique(m.read for m in moves)]

    def _range(self, number: int, rank: int, slot: Slot, begin: int, place: int) -> Range:
        """Where a slot of some rank lies on that rank's stage in this round, and how many bytes it has there."""
        layout = self.link.layout
        first = layout.ring(rank, place) if self.room else layout.eager_buffer(rank, place)
        offset = first + self.staged[number][rank].index(slot) * self._stride
        return offset, self.length(rank, slot, begin) * self.dtype.itemsize

    def _view(self, number: int, rank: int, slot: Slot, begin: int, place: int) -> Tensor:
        """A slot of some rank as it lies on that rank's stage in this round."""
        offset, nbytes = self._range(number, rank, slot, begin, place)
        count = nbytes // self.dtype.itemsize
        view = torch.frombuffer(self.link.segment.buffer_of(rank), dtype=self.dtype, count=count, offset=offset)
        return view.view(self.shape) if self.whole and self.shape is not None else view

    def _own(self, slot: Slot, begin: int) -> Operand:
        """A slot of this rank: part of a tensor of the call, or as much of its scratch as passes in this window."""
        if slot[0] == "tmp":
            return self.scratch[slot][: self.length(self.link.rank, slot, begin)]
        return Part(*self.sizes.place(slot, self.inputs), self.whole and slot[0] not in self.sizes.rows)

    def _copy(self, target: Operand, source: Operand, slot: Slot, begin: int) -> Step:
        size = self.dtype.itemsize
        return steps.copy(target, source, self.length(self.link.rank, slot, begin) * size, size)

    def _steps(self, number: int, begin: int, place: int) -> Iterable[Step]:
        mine = [m for m in self.rounds[number] if m.dst == self.link.rank]
        for slot in _unique(m.write for m in mine):
            arriving = [m for m in mine if m.write == slot]
            count = self.length(self.link.rank, slot, begin)
            if self.carries_data and count:
                sources = [self._source(number, m, begin, place) for m in arriving]
                divide = self.divide if self._at_once else 0
                yield from self.arrivals.steps(self._own(slot, begin), count, arriving, sources, divide)

    def _last_steps(self, number: int, begin: int) -> Iterable[Step]:
        """A sum that several rounds make is divided where the call ends, while its window is in the cache."""
        if self.divide and not self._at_once and number == len(self.rounds) - 1:
            for slot in self.slots:
                count = self.length(self.link.rank, slot, begin)
                if slot[0] in ("data", "out") and count:
                    yield steps.divide(self._own(slot, begin), count, self.divide)

    def _source(self, number: int, move: Move, begin: int, place: int) -> Operand:
        if move.src == self.link.rank and move.read not in self.staged[number].get(move.src, ()):
            return self._own(move.read, begin)
        return self._view(number, move.src, move.read, begin, place)

    @cached_property
    def _at_once(self) -> bool:
        """Whether all that is reduced into a slot arrives there in one round."""
        return sum(any(move.reduce for move in moves) for moves in self.schedule.rounds) <= 1


def _staged(moves: Sequence[Move]) -> dict[int, tuple[Slot, ...]]:
    """Slots that a peer reads, and own slots that are both read and overwritten in the round."""
    written = {(m.dst, m.write) for m in moves}
    staged: dict[int, dict[Slot, None]] = {}
    for move in moves:
        if move.src != move.dst or (move.src, move.read) in written:
            staged.setdefault(move.src, {})[move.read] = None
    return {rank: tuple(slots) for rank, slots in staged.items()}


def _unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))
