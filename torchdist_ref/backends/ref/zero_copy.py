"""Lent: a call on registered tensors. Ranks work on each other's tensors where they lie; nothing is staged.

Each rank says in its announcement where its tensor is (`registered_memory`). If all do, the call runs here; if
some don't, all begin anew with staging (`executor`). A schedule's move is then one read, or one write, of a peer's
memory, and after every round, the last one included, each rank hears from each other that it is done: nobody gets a
tensor back while it is still worked on.

The rules of rounds hold without a stage because of what the schedules are: in no round does anybody write what
another reads (`DIVIDED` says who works on what). Don't add schedules for which that is not so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from torchdist_ref.backends.ref.operands import IN_PLACE
from torchdist_ref.backends.ref.plan import Plan
from torchdist_ref.backends.ref.steps import Part, Step
from torchdist_ref.schedules import direct
from torchdist_ref.schedules.measured import ONE_ROUND_BYTES
from torchdist_ref.schedules.schedule import Move, Schedule, Slot
from torchdist_ref.transports import registered_memory
from torchdist_ref.transports.registered_memory import MemoryHandle, PeerMemory
from torchdist_ref.transports.status_table import REGISTERED_MEMORY

KIB = 1024
MIB = 1024 * KIB
# Up to here a staged call of two ranks is over as soon; with more, where they don't have a core each, up to more.
WORTH = 64 * KIB
# Bytes that are worked on before the next round: two ranks' windows fit in a core's second-level cache.
WINDOW = 512 * KIB
# Sets of tensors that a plan remembers. Programs call again and again with the same ones.
MOST = 16

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "all_reduce": lambda world, root: direct.two_shot_all_reduce(world),
    "reduce": direct.shared_reduce,
    "broadcast": direct.shared_broadcast,
    "all_gather": lambda world, root: direct.all_gather(world),
    "gather": direct.gather,
    "reduce_scatter": lambda world, root: direct.reduce_scatter(world),
    "all_to_all": lambda world, root: direct.all_to_all(world),
}
# Calls in which the number of a chunk says who works on it. In the others that is the rank that gets the result.
DIVIDED = ("reduce", "broadcast")
Rounds = tuple[tuple[Step, ...], ...]


class Lends(Protocol):
    """A way to run a call without staging, where all ranks' tensors are fit for it.

    Attributes:
        mark: The bits that say which way it is (`status_table.ZERO_COPY_BITS`).
    """

    mark: int

    def place(self, tensors: Sequence[Tensor]) -> bytes | None:
        """What to announce besides, in 32 bytes; None where these tensors are not fit."""

    def rounds(self, places: bytes) -> Iterable[Iterable[Step]]:
        """What this rank does, where the ranks announced that; after each round all hear from all."""


def lending(plan: Plan, root: int, neighbours: Sequence[PeerMemory]) -> Lending | None:
    """How this call runs on lent tensors; None where staging is as good, or the only way."""
    op, link, blocks = plan.sizes.op, plan.link, plan.sizes.blocks
    if op not in SCHEDULES or link.hosts is not None or link.size == 1 or len(blocks) > 1:
        return None
    nbytes = blocks[0] * plan.dtype.itemsize * (1 if op in IN_PLACE else link.size)
    # Between its rounds and at its end every rank hears from every other one.
    worth = WORTH * (link.size - 1) ** 2
    least = max(worth, _one_round(link.size)) if op == "all_reduce" else worth
    return Lending(plan, SCHEDULES[op](link.size, root), neighbours) if nbytes > least else None


def _one_round(size: int) -> float:
    """Up to how many bytes an all_reduce stays as it is: one round of staging.

    Sums of more than two must not depend on where tensors lie, and with one round they are added in another order.
    Two ranks gain only where the tensors leave a core's cache (measured), since here each sum changes cores.
    """
    return MIB if size == 2 else ONE_ROUND_BYTES


class Lending:
    """How a plan runs where all ranks lend their tensors.

    Args:
        plan: The same call with staging.
        schedule: What to do in place of it.
        neighbours: The memory of every rank, this one's too.
    """

    mark = REGISTERED_MEMORY

    def __init__(self, plan: Plan, schedule: Schedule, neighbours: Sequence[PeerMemory]) -> None:
        self._plan, self._schedule, self._neighbours = plan, schedule, neighbours
        self._op, size, block = plan.sizes.op, plan.link.size, plan.sizes.blocks[0]
        # Elements of a slot: a chunk of the one tensor, or a block of the list; and how many slots are lent.
        self._stride = -(-block // size) if self._op in IN_PLACE else block
        self._slots = size if self._op in ("reduce_scatter", "all_to_all") else 1
        self._count = self._slots * block
        self._places: dict[tuple[int, ...], bytes | None] = {}
        self._changes = 0
        self._rounds: dict[bytes, Rounds] = {}

    def place(self, tensors: Sequence[Tensor]) -> bytes | None:
        """Where this rank's tensors lie, to be announced, if others can work on them; else None."""
        changes = registered_memory.changes()
        if changes != self._changes or len(self._places) > MOST:
            self._places.clear()
            self._changes = changes
        if not changes:
            return None
        addresses = tuple(map(Tensor.data_ptr, tensors))
        if addresses not in self._places:
            place = self._find(tensors[0], addresses)
            self._places[addresses] = None if place is None else place.pack()
        return self._places[addresses]

    def _find(self, first: Tensor, addresses: Sequence[int]) -> MemoryHandle | None:
        """They lie one after the other in one region, and nothing is written there that others read."""
        begin, block, place = addresses[0], self._stride * self._plan.dtype.itemsize, registered_memory.handle_of(first)
        end = begin + self._count * self._plan.dtype.itemsize
        lent = [self._address(("in", i), addresses) for i in range(self._slots)] if self._slots > 1 else [begin]
        in_a_row = all(address == begin + i * block for i, address in enumerate(lent))
        if place is None or not in_a_row or place.position + end - begin > place.end:
            return None
        outputs = [slot for slot in self._plan.slots if slot[0] == "out"]
        return place if all(self._apart(slot, addresses, lent, end) for slot in outputs) else None

    def _address(self, slot: Slot, addresses: Sequence[int]) -> int:
        at, first = self._plan.sizes.place(slot, self._plan.inputs)
        return addresses[at] + first * self._plan.dtype.itemsize

    def _apart(self, slot: Slot, addresses: Sequence[int], lent: Sequence[int], end: int) -> bool:
        """Whether an output lies elsewhere, or just where only this rank reads: its own block, for itself."""
        at, rank = self._address(slot, addresses), self._plan.link.rank
        own, nbytes = lent[rank if self._slots > 1 else 0], self._stride * self._plan.dtype.itemsize
        alone = self._op == "reduce_scatter" or slot[1] == rank
        return at >= end or at + nbytes <= lent[0] or (at == own and alone)

    def rounds(self, places: bytes) -> Rounds:
        """What this rank does where the ranks' tensors lie there: all ranks' announcements in a row."""
        found = self._rounds.get(places)
        if found is None:
            if len(self._rounds) >= MOST:
                self._rounds.clear()
            found = self._rounds[places] = self._compile(places)
        return found

    def _compile(self, places: bytes) -> Rounds:
        """Window after window, while what one round has written is in the cache for the next one.

        A window's second round goes with the next window's first: windows have nothing to do with each other, so one
        exchange of tokens stands for both. Where there is one round, windows need no tokens between them.
        """
        there = zip(self._neighbours, MemoryHandle.unpack_all(places), strict=True)
        tensors = [neighbour.view(place, self._plan.dtype, self._count) for neighbour, place in there]
        rounds = self._schedule.rounds
        window = max(1, WINDOW // self._plan.dtype.itemsize)
        windows = range(0, self._stride, window)
        phases: list[list[Step]] = [[] for _ in range(len(windows) + 1 if len(rounds) > 1 else 1)]
        for number, begin in enumerate(windows):
            for later, moves in enumerate(rounds):
                todo = self._steps(moves, tensors, begin, begin + window)
                phases[number + later if len(rounds) > 1 else 0].extend(todo)
        return tuple(map(tuple, phases))

    def _steps(self, moves: Sequence[Move], tensors: Sequence[Tensor], begin: int, end: int) -> Iterator[Step]:
        """This rank's part of a round in a window. What arrives in one slot is listed together, in order."""
        arriving: dict[tuple[int, Slot], list[Move]] = {}
        for move in moves:
            if self._plan.link.rank == (move.write[1] if self._op in DIVIDED else move.dst):
                arriving.setdefault((move.dst, move.write), []).append(move)
        for (rank, slot), found in arriving.items():
            sources = [self._part(tensors[move.src], move.read, begin, end) for move in found]
            if count := len(sources[0]):
                out = slot[0] == "out"
                into = self._out(slot, begin) if out else self._part(tensors[rank], slot, begin, end)
                yield from self._plan.arrivals.steps(into, count, found, sources, self._plan.divide)

    def _out(self, slot: Slot, begin: int) -> Part:
        at, first = self._plan.sizes.place(slot, self._plan.inputs)
        return Part(at, first + begin)

    def _part(self, tensor: Tensor, slot: Slot, begin: int, end: int) -> Tensor:
        first = slot[1] * self._stride if self._count > self._stride else 0
        return tensor[first : first + self._stride][begin:end]
