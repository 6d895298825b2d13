"""Ring buffer: where in the staging buffers a round writes, and when it may.

Every staging buffer is a ring of cells, besides a few small eager buffers for rounds of little data. All ranks count
the rounds alike, and what they take of the ring, so locations need not be announced. A round may reuse the memory of
the round `cells` rounds before it, once the readers of that one have released it: with several cells, a rank writes
the next window while its peers still read the last one, and almost never waits.

`StagedRounds` compiles a plan's rounds for one location: the semaphores are looked up, and the copies and reductions
are functions that know their addresses. Do not add here: what a schedule is, or which calls run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.backends.ref.plan import Plan
from torchdist_ref.backends.ref.steps import Operand, Part, Step, StepMaker
from torchdist_ref.schedules.schedule import Move, Slot
from torchdist_ref.transports.base import Range, Semaphore
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.segment import ANNOUNCEMENT_BYTES, ring_bytes

Semaphores = tuple[tuple[Semaphore, int], ...]
"""Semaphores to acquire, each with the peer that posts it."""


class RingBuffer:
    """State of a link's staging buffers between rounds.

    Attributes:
        round: Number of the next round.
        head: Offset in the ring at which the search for its location begins.
        cells: Number of rounds in a row that never overlap.
        readers: Rounds that are being read, each with the semaphores that its readers post. Semaphores carry
            no round number; they are posted in the order of the rounds.
    """

    def __init__(self, link: Link) -> None:
        self._link, self.cells = link, link.layout.cells
        self.round = self.head = 0
        self.readers: deque[tuple[int, Semaphores]] = deque()

    def take(self, nbytes: int, rounds: int) -> int:
        """Return the offset in every ring of the next window's first round: the same on all ranks."""
        location = self._link.layout.next_offset(self.head, nbytes)
        self.head = location + nbytes * rounds
        return location

    def wait_for_readers(self, number: int, operation: str) -> None:
        """Wait until nobody reads what was written `cells` rounds before round `number`, or earlier."""
        while self.readers and self.readers[0][0] <= number - self.cells:
            for semaphore, peer in self.readers.popleft()[1]:
                if not semaphore.acquire(False):
                    self._link.acquire(semaphore, peer, operation)

    def read_by(self, readers: Semaphores) -> None:
        """Announcement that peers read what the round under way writes."""
        self.readers.append((self.round, readers))


class CompiledRound(NamedTuple):
    """Functions that one round of one window calls.

    Attributes:
        writes: Copies to the staging buffer.
        signals: Functions that post the semaphores of the peers that read it.
        waits: Semaphores to acquire before reading.
        steps: Copies and reductions of this rank's slots.
        releases: Functions that post the semaphores of the peers that have been read from.
        readers: Semaphores to acquire before this memory is written again.
    """

    writes: tuple[Step, ...]
    signals: tuple[Callable[[], Any], ...]
    waits: Semaphores
    steps: tuple[Step, ...]
    releases: tuple[Callable[[], Any], ...]
    readers: Semaphores


CompiledWindow = tuple[CompiledRound, ...]


class StagedRounds:
    """Compiler of a plan's rounds by way of the staging buffers.

    Attributes:
        nbytes: Bytes of the ring that each round takes in every staging buffer; 0 if it uses an eager buffer.
    """

    def __init__(self, link: Link, plan: Plan) -> None:
        self.link, self.plan = link, plan
        self.nbytes = ring_bytes(plan.most_staged * plan.stride if plan.carries_data else 0)
        scratch = [slot for slot in plan.slots if slot[0] == "tmp"]
        self.scratch = {slot: torch.empty(plan.window, dtype=plan.dtype, device="cpu") for slot in scratch}
        self._maker = StepMaker(plan)
        self._smallest = min((plan.sizes.of(m.src, m.read) for moves in plan.rounds for m in moves), default=0)
        # With one round nobody needs to release: a rank that announces its next call has read this one's data, and the
        # next call is written elsewhere.
        self._flow_control = plan.carries_data and max(len(plan.rounds), len(plan.windows)) > 1
        self._compiled: dict[tuple[int, int], CompiledWindow] = {}

    def by_location(self, begin: int, repeated: bool = True) -> dict[int, CompiledWindow]:
        """Return the compiled rounds of a window by location; a lookup costs less than a call of `window`.

        Those for the eager buffers are compiled now if calls of this kind are repeated, since the next ones use these
        buffers in turn. Those for the ring buffer, which has many locations, are compiled when one is used for the
        first time.
        """
        found = _ByLocation(self, begin)
        if repeated and not self.nbytes:
            found.update((cell, self.window(begin, cell)) for cell in range(self.link.layout.cells))
        return found

    def window(self, begin: int, location: int) -> CompiledWindow:
        """Return the compiled rounds of a window; compile them at the first call with this location.

        Args:
            begin: Element of each slot with which the window begins.
            location: Location of the first round in the staging buffers, the same on every rank.
        """
        # Full windows after the first one differ in nothing but the element with which they begin.
        key = (-1 if 0 < begin <= self._smallest - self.plan.window else begin, location)
        found = self._compiled.get(key)
        if found is None:
            numbers = range(len(self.plan.rounds))
            # Tensors made under inference mode could not be changed after it.
            with torch.inference_mode(False):
                found = tuple(self._round(n, begin, self._after(location, n)) for n in numbers)
            self._compiled[key] = found
        return found

    def _after(self, first: int, number: int) -> int:
        """Return the location of round `number` of a window whose first round is at `first`."""
        layout = self.link.layout
        location = first + number * (self.nbytes or 1)
        return layout.next_offset(location, self.nbytes) if self.nbytes else location % layout.cells

    def _round(self, number: int, begin: int, location: int) -> CompiledRound:
        """Compile one round of the window that begins there, for one location."""
        link, plan = self.link, self.plan
        handshake = number == 0 and begin == 0
        sources, targets = plan.sources[number], plan.targets[number]
        slots = StagedSlots(self, location)
        moves = [move for move in plan.rounds[number] if move.dst == plan.rank] if plan.carries_data else []
        return CompiledRound(
            writes=tuple(self._writes(number, begin, slots)),
            signals=tuple(
                link.make_signal("ready", peer, slots.shown_to(number, peer, begin, handshake))
                for peer in (link.peers if handshake else targets)
            ),
            waits=tuple((link.ready_from[peer], peer) for peer in (link.peers if handshake else sources)),
            steps=(*self._maker.of_moves(number, moves, slots, begin), *self._divisions(number, begin, slots)),
            releases=tuple(link.make_signal("released", peer) for peer in sources if self._flow_control),
            readers=tuple((link.released_by[peer], peer) for peer in targets if self._flow_control),
        )

    def _writes(self, number: int, begin: int, slots: StagedSlots) -> list[Step]:
        """Return the copies of a round from this rank's tensors to its staging buffer."""
        plan = self.plan
        mine = plan.staged[number].get(plan.rank, ()) if plan.carries_data else ()
        return [
            self._maker.copy(slots.view(number, plan.rank, slot, begin), slots.target(plan.rank, slot, begin), count)
            for slot in mine
            if (count := plan.length(plan.rank, slot, begin))
        ]

    def _divisions(self, number: int, begin: int, slots: StagedSlots) -> list[Step]:
        """Return the divisions of AVG that follow the last round; empty for other reductions and earlier rounds.

        A window is divided while it is in the cache. With a single reducing round, its reductions divide instead.
        """
        plan = self.plan
        if not plan.divisor or plan.divides_at_once or number < len(plan.rounds) - 1:
            return []
        return [
            self._maker.divide(slots.target(plan.rank, slot, begin), count, plan.divisor)
            for slot in plan.results
            if (count := plan.length(plan.rank, slot, begin))
        ]


class _ByLocation(dict[int, CompiledWindow]):
    """Compiled rounds of one window, by location."""

    def __init__(self, rounds: StagedRounds, begin: int) -> None:
        super().__init__()
        self._rounds, self._begin = rounds, begin

    def __missing__(self, location: int) -> CompiledWindow:
        found = self[location] = self._rounds.window(self._begin, location)
        return found


class StagedSlots:
    """Addresses of slots in a round that is at one location of the staging buffers.

    Args:
        rounds: The plan's rounds.
        location: Offset in every ring, or number of the eager buffer.
    """

    def __init__(self, rounds: StagedRounds, location: int) -> None:
        self._rounds, self._plan, self._link, self._location = rounds, rounds.plan, rounds.link, location

    def count(self, rank: int, slot: Slot, begin: int) -> int:
        """See `steps.Addresses`."""
        return self._plan.length(rank, slot, begin)

    def target(self, rank: int, slot: Slot, begin: int) -> Operand:
        """See `steps.Addresses`."""
        if slot[0] == "tmp":
            return self._rounds.scratch[slot][: self._plan.length(rank, slot, begin)]
        return Part(*self._plan.address_of(slot))

    def source(self, number: int, move: Move, begin: int) -> Operand:
        """See `steps.Addresses`."""
        if move.src == self._plan.rank and move.read not in self._plan.staged[number].get(move.src, ()):
            return self.target(move.src, move.read, begin)
        return self.view(number, move.src, move.read, begin)

    def view(self, number: int, rank: int, slot: Slot, begin: int) -> Tensor:
        """Return a slot in a rank's staging buffer."""
        plan = self._plan
        offset = self._begin_of(rank) + plan.staging_offset(number, rank, slot)
        buffer, count = self._link.segment.buffer_of(rank), plan.length(rank, slot, begin)
        return torch.frombuffer(buffer, dtype=plan.dtype, count=count, offset=offset)

    def shown_to(self, number: int, peer: int, begin: int, handshake: bool) -> list[Range]:
        """Return the memory that a peer reads once it is signaled, in a handshake the announcement too."""
        first = self._begin_of(self._plan.rank)
        announcement = [(self._link.layout.status_row(self._link.rank), ANNOUNCEMENT_BYTES)] if handshake else []
        staged = self._plan.staged_for(number, peer, begin)
        return announcement + [(first + offset, nbytes) for offset, nbytes in staged]

    def _begin_of(self, rank: int) -> int:
        """Return the offset in the segment of this round's part of a rank's staging buffer."""
        layout = self._link.layout
        return layout.ring(rank, self._location) if self._rounds.nbytes else layout.eager_buffer(rank, self._location)
