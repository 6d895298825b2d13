"""Zero-copy collectives: ranks read and reduce directly in each other's registered tensors; nothing is staged.

Each rank announces where its tensor is (`registered_memory`). If all ranks do, the call runs here; if only some do, all
start over with staging. A move of a schedule is then one read, or one write, of a peer's memory. After every round,
the last one included, each rank waits for each other: no rank gets a tensor back while a peer still works on it.

Rounds need no staging because of what the schedules are: in no round does a rank write what another one reads
(`DIVIDED` lists those in which the rank that makes a move is not the one that it ends on). Do not add schedules for
which that does not hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from torchdist_ref.backends.ref.plan import Plan, with_schedule
from torchdist_ref.backends.ref.steps import Part, Scratch, Step, StepMaker
from torchdist_ref.calls import IN_PLACE
from torchdist_ref.schedules import direct
from torchdist_ref.schedules.measured import ONE_ROUND_BYTES
from torchdist_ref.schedules.schedule import Move, Schedule, Slot
from torchdist_ref.transports import registered_memory
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.registered_memory import MemoryHandle, PeerMemory
from torchdist_ref.transports.segment import REGISTERED_MEMORY

KIB = 1024
MIB = 1024 * KIB
# Up to here a staged call of two ranks takes as long; with more ranks, which may share cores, up to more bytes.
MIN_BYTES = 64 * KIB
# Bytes that are worked on before the next round: two ranks' windows fit in a core's second-level cache.
WINDOW_BYTES = 512 * KIB
# Sets of tensors that a plan remembers. Programs call again and again with the same ones.
MOST_LOCATIONS = 16

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "all_reduce": lambda world, root: direct.two_shot_all_reduce(world),
    "reduce": direct.shared_reduce,
    "broadcast": direct.shared_broadcast,
    "all_gather": lambda world, root: direct.all_gather(world),
    "gather": direct.gather,
    "reduce_scatter": lambda world, root: direct.reduce_scatter(world),
    "all_to_all": lambda world, root: direct.all_to_all(world),
}
# Operations in which the number of a chunk is the rank that works on it; in the others the rank with the result does.
DIVIDED = ("reduce", "broadcast")
Phases = tuple[tuple[Step, ...], ...]


class ZeroCopyPath(ABC):
    """Way to run a call on memory that peers access in place, where all ranks' tensors are in such memory.

    Attributes:
        mark: The bits of the announcement of this path (`segment.ZERO_COPY_BITS`).
    """

    mark: int

    def __init__(self) -> None:
        self._compiled: dict[bytes, Phases] = {}

    @abstractmethod
    def location(self, tensors: Sequence[Tensor]) -> bytes | None:
        """Return 32 bytes to announce; None where peers cannot access these tensors."""

    @abstractmethod
    def compile(self, locations: bytes) -> Phases:
        """Return what this rank does where the ranks announced these locations."""

    def phases(self, locations: bytes) -> Iterable[Sequence[Step]]:
        """Return what this rank does; after each phase all ranks wait for all."""
        found = self._compiled.get(locations)
        if found is None:
            if len(self._compiled) >= MOST_LOCATIONS:
                self._compiled.clear()
            # Tensors made under inference mode could not be changed after it.
            with torch.inference_mode(False):
                found = self._compiled[locations] = self.compile(locations)
        return found


def memory_of_ranks(link: Link) -> tuple[PeerMemory, ...]:
    """Return the registered memory of every rank, including this one."""
    return tuple(PeerMemory(row.pid) for row in link.rows)


def registered_path(plan: Plan, neighbors: Sequence[PeerMemory], scratch: Scratch) -> RegisteredPath | None:
    """Return how a call runs on registered tensors; None where staging is as good, or the only way."""
    op, world, blocks = plan.op, plan.schedule.world, plan.sizes.blocks
    if op not in SCHEDULES or len(blocks) > 1:
        return None
    nbytes = blocks[0] * plan.dtype.itemsize * (1 if op in IN_PLACE else world)
    # Between its rounds and at its end every rank waits for every other one.
    worthwhile = MIN_BYTES * (world - 1) ** 2
    least = max(worthwhile, _one_round(world)) if op == "all_reduce" else worthwhile
    if nbytes <= least:
        return None
    return RegisteredPath(with_schedule(plan, SCHEDULES[op](world, plan.root)), neighbors, scratch)


def _one_round(world: int) -> float:
    """Return up to how many bytes an all_reduce remains one round of staging, which is faster (measured).

    Two ranks gain only where the tensors exceed a core's cache, since here each sum moves between cores.
    """
    return MIB if world == 2 else ONE_ROUND_BYTES


class RegisteredPath(ZeroCopyPath):
    """Way to run a plan where all ranks' tensors are registered.

    Args:
        plan: The call, with one of `SCHEDULES`.
        neighbors: The registered memory of every rank, including this one.
        scratch: Memory for partial results.
    """

    mark = REGISTERED_MEMORY

    def __init__(self, plan: Plan, neighbors: Sequence[PeerMemory], scratch: Scratch) -> None:
        super().__init__()
        self.plan, self._neighbors, self._scratch = plan, neighbors, scratch
        # Elements of a slot: a chunk of the one tensor, or a block of the list; and the number of slots peers access.
        self.stride = plan.sizes.largest
        self._slots = plan.schedule.world if plan.op in ("reduce_scatter", "all_to_all") else 1
        self.elements = self._slots * plan.sizes.blocks[0]
        self._locations: dict[tuple[int, ...], bytes | None] = {}
        self._changes = 0

    def location(self, tensors: Sequence[Tensor]) -> bytes | None:
        """See `ZeroCopyPath.location`."""
        changes = registered_memory.changes()
        if changes != self._changes or len(self._locations) > MOST_LOCATIONS:
            self._locations.clear()
            self._changes = changes
        if not changes:
            return None
        addresses = tuple(map(Tensor.data_ptr, tensors))
        if addresses not in self._locations:
            place = self._find(tensors[0], addresses)
            self._locations[addresses] = None if place is None else place.pack()
        return self._locations[addresses]

    def _find(self, first: Tensor, addresses: Sequence[int]) -> MemoryHandle | None:
        """Return the location of tensors that are consecutive in one region; else None."""
        begin, block, place = addresses[0], self.stride * self.plan.dtype.itemsize, registered_memory.handle_of(first)
        end = begin + self.elements * self.plan.dtype.itemsize
        read = [self._address(("in", i), addresses) for i in range(self._slots)] if self._slots > 1 else [begin]
        in_a_row = all(address == begin + i * block for i, address in enumerate(read))
        return place if place is not None and in_a_row and place.position + end - begin <= place.end else None

    def _address(self, slot: Slot, addresses: Sequence[int]) -> int:
        operand, first = self.plan.address_of(slot)
        return addresses[operand] + first * self.plan.dtype.itemsize

    def compile(self, locations: bytes) -> Phases:
        """See `ZeroCopyPath.compile`. Windows run one after the other, while the last round's values are in the cache.

        A window's second round is in one phase with the next window's first: windows are independent, so one exchange
        of signals serves both. With one round, all windows are in one phase.
        """
        there = zip(self._neighbors, MemoryHandle.unpack_all(locations), strict=True)
        tensors = [neighbor.view(place, self.plan.dtype, self.elements) for neighbor, place in there]
        rounds, maker = self.plan.schedule.rounds, StepMaker(self.plan, self._scratch)
        window = max(1, WINDOW_BYTES // self.plan.dtype.itemsize)
        slots, windows = RegisteredSlots(self, tensors, window), range(0, self.stride, window)
        phases: list[list[Step]] = [[] for _ in range(len(windows) + 1 if len(rounds) > 1 else 1)]
        for index, begin in enumerate(windows):
            for number, moves in enumerate(rounds):
                mine = [m for m in moves if self.plan.rank == (m.write[1] if self.plan.op in DIVIDED else m.dst)]
                phases[index + number if len(rounds) > 1 else 0].extend(maker.of_moves(number, mine, slots, begin))
        return tuple(map(tuple, phases))


class RegisteredSlots:
    """Addresses of slots in the ranks' registered tensors; outputs may be in any memory.

    Args:
        path: The call.
        tensors: The registered tensor of every rank.
        window: Elements of a slot that pass at once.
    """

    def __init__(self, path: RegisteredPath, tensors: Sequence[Tensor], window: int) -> None:
        self._path, self._tensors, self._window = path, tensors, window

    def count(self, rank: int, slot: Slot, begin: int) -> int:
        """See `steps.Addresses`."""
        return min(self._window, self._path.stride - begin) if slot[0] == "out" else len(self._part(rank, slot, begin))

    def target(self, rank: int, slot: Slot, begin: int) -> Part | Tensor:
        """See `steps.Addresses`."""
        if slot[0] != "out":
            return self._part(rank, slot, begin)
        operand, first = self._path.plan.address_of(slot)
        return Part(operand, first + begin)

    def source(self, number: int, move: Move, begin: int) -> Tensor:
        """See `steps.Addresses`."""
        return self._part(move.src, move.read, begin)

    def _part(self, rank: int, slot: Slot, begin: int) -> Tensor:
        stride, tensor = self._path.stride, self._tensors[rank]
        first = slot[1] * stride if self._path.elements > stride else 0
        return tensor[first : first + stride][begin : begin + self._window]
