"""Plan: one rank's part of a collective on tensors of one dtype and shape, as a value.

A plan lists which slots a rank writes into its staging buffer and where, which peers read them, which slots it then
copies or reduces, and from whose staging buffer. Large tensors pass through the staging buffer in windows: the whole
schedule runs for one window after the other, so that a window is still in the cache when the peers read it.

It is made from the moves that touch the rank (`schedules.schedule.Own`), and from the slots that its peers stage, never
from the rounds of all ranks: those have a number of moves that grows with the square of the ranks.

Rounds follow one rule (`schedules.schedule`): all reads come before all writes. Whatever a peer reads is staged before
anything is written; whatever a rank reads of its own and overwrites in the same round is staged too.

Everything that all ranks must agree on becomes the plan's announcement (`announcement_of`): operation, reduction, root,
dtype and shapes, and the algorithm if the user chose it. Ranks with equal announcements choose the same algorithm and
divide their tensors alike, because nothing else is used for either (`Planner`).

Two executors run plans: `execute`, to be read, and `fast`. Do not add here: functions to run, memory, or anything that
only one rank knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.backends.operands import RowBlocks, operand_kind, refuse_unsupported
from torchdist_ref.backends.reductions import QUANTIZED, WIDENED, reduction
from torchdist_ref.calls import IN_PLACE, Call, Shape, fingerprint, signature
from torchdist_ref.errors import ArgumentError, UnsupportedError, on_rank
from torchdist_ref.recorder import Operands
from torchdist_ref.schedules import catalogue
from torchdist_ref.schedules.schedule import Move, Own, Round, Run, Schedule, Slot, single
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.segment import ZERO_COPY_BITS, Announcement

# Slots begin at multiples of so many bytes in a staging buffer.
ALIGNMENT = 64
Pairs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of elements of every slot of one call, on every rank.

    ``data`` is the call's tensor in equal chunks (the last may be shorter or empty); ``in`` and ``out`` are its
    lists, a block per index, or one tensor with all blocks in a row (`operands.RowBlocks`); ``tmp`` is scratch memory.

    Attributes:
        op: The operation.
        blocks: In-place calls: one number, the tensor. Others: elements of block 0, 1, ... of the group.
        chunks: In-place calls: number of chunks into which the schedule divides the tensor.
        rows: Those of ``in`` and ``out`` that are one tensor.
        pairs: Uneven exchanges: for each rank, the elements that it sends to each rank.
        stride: Elements from one chunk to the next.
    """

    op: str
    blocks: tuple[int, ...]
    chunks: int
    rows: frozenset[str] = frozenset()
    pairs: Pairs = ()
    stride: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Looked up several times for each move.
        object.__setattr__(self, "stride", -(-self.blocks[0] // max(1, self.chunks)) if self.blocks else 0)

    def of(self, rank: int, slot: Slot) -> int:
        """Return the number of elements of `slot` on `rank`."""
        buffer, index = slot
        if buffer == "tmp":
            return self.chunk(index % self.chunks) if self.op in IN_PLACE else self.largest
        if buffer == "data":
            return self.chunk(index)
        if self.pairs:
            return self.pairs[rank][index] if buffer == "in" else self.pairs[index][rank]
        owner = rank if self._holds_own_block(buffer) else index
        return self.blocks[owner] if len(self.blocks) > 1 else self.blocks[0]

    def _holds_own_block(self, buffer: str) -> bool:
        """Return whether a buffer's one block belongs to the rank that holds it, as the input of a gather does."""
        gathers = self.op in ("all_gather", "gather")
        return gathers == (buffer == "in") and self.op != "all_to_all"

    def chunk(self, index: int) -> int:
        """Return the number of elements of one chunk of the tensor."""
        return max(0, min(self.stride, self.blocks[0] - index * self.stride))

    @property
    def smallest(self) -> int:
        """Elements of the smallest slot, where ranks need not exchange the sizes."""
        return self.chunk(self.chunks - 1) if self.op in IN_PLACE else min(self.blocks, default=0)

    @property
    def largest(self) -> int:
        """Elements of the largest slot."""
        return self.stride if self.op in IN_PLACE else max(self.blocks, default=0)


@dataclass(frozen=True, eq=False)
class Plan:
    """A call on tensors of one kind, planned for one rank of a group.

    Attributes:
        rank: This rank.
        record: The announcement that peers compare with theirs.
        schedule: The algorithm.
        sizes: Elements of every slot.
        dtype: The dtype of all tensors.
        inputs: Number of operands that are inputs only; the others are outputs.
        operands: Dtypes and shapes of the operands, for the recorder.
        capacity: Most bytes that a rank stages at once.
        reduction: Name of the reduction; None where nothing is reduced.
        root: The root of a rooted operation.
        uneven: Whether ranks learn each other's block sizes in the course of the call.
        on_host: Whether all tensors are in host memory.
        forced: Whether the user chose the algorithm.
        flat: Whether a contiguous tensor of this kind is a row of values in memory; else `is_flat` checks more.
    """

    rank: int
    record: Announcement
    schedule: Schedule
    sizes: Sizes
    dtype: torch.dtype
    inputs: int
    operands: Operands
    capacity: int
    reduction: str | None = None
    root: int = 0
    uneven: bool = False
    on_host: bool = True
    forced: bool = False
    flat: bool = True

    @cached_property
    def apart(self) -> set[tuple[int, ...]]:
        """Addresses of operands of this plan's kind that were found to be in memory, and to share none."""
        return set()

    @cached_property
    def text(self) -> str:
        """The call in words, for messages."""
        return self.record.text.decode(errors="replace")

    @property
    def op(self) -> str:
        """The operation."""
        return self.sizes.op

    @property
    def divisor(self) -> int:
        """Divisor that makes a sum an average; 0 where nothing is divided."""
        return self.schedule.world if self.reduction == "avg" else 0

    @cached_property
    def divides_at_once(self) -> bool:
        """Whether everything that is reduced into a slot arrives in one round, which then divides as well."""
        into, alike = self.schedule.own.into, self.schedule.own.alike
        items = ((item for rank in alike(n) for item in into(n, rank)) for n in self.rounds)
        return sum(any((m if isinstance(m, Move) else m.first).reduce for m in moves) for moves in items) <= 1

    @cached_property
    def is_flat(self) -> Callable[[Tensor], bool]:
        """Test for a tensor of the plan's kind: a plain row of values in memory. Others are copied first.

        A contiguous tensor can be read through a conjugation or a minus sign (`Tensor.conj`): complex ones, and
        single elements of the imaginary parts of such tensors.
        """
        if self.flat:
            return Tensor.is_contiguous
        return _is_not_conjugate if self.dtype.is_complex else _is_not_negative

    @property
    def rounds(self) -> range:
        """Numbers of the schedule's rounds."""
        return range(len(self.schedule.rounds))

    @property
    def carries_data(self) -> bool:
        """Whether there is anything to move; else the call only synchronizes the ranks."""
        return self.schedule.chunks > 0

    @cached_property
    def _all_carry(self) -> bool:
        """Whether each move carries some bytes, as far as that is known without a look at the moves."""
        sizes = self.sizes
        if not self.carries_data:
            return True
        return (
            not sizes.pairs
            and min(sizes.blocks) > 0
            and (sizes.op not in IN_PLACE or sizes.chunk(sizes.chunks - 1) > 0)
        )

    @cached_property
    def _own(self) -> tuple[OwnRound, ...]:
        """The moves of this rank in each round, without those that carry nothing for tensors of this size."""
        own = self.schedule.own
        return tuple(
            OwnRound(self._carrying(own.into(n, self.rank)), self._by_target(own.out_of(n, self.rank)))
            for n in self.rounds
        )

    def _carrying(self, runs: Iterable[Move | Run]) -> Round:
        moves = single(runs)
        return moves if self._all_carry else tuple(m for m in moves if self.sizes.of(m.src, m.read) > 0)

    def _by_target(self, runs: Iterable[Move | Run]) -> dict[int, list[Move]]:
        found: dict[int, list[Move]] = {}
        for move in self._carrying(runs):
            found.setdefault(move.dst, []).append(move)
        return found

    def moves_into(self, number: int) -> Sequence[Move]:
        """Return the moves of a round that end on this rank, in listed order."""
        return self._own[number].into

    @cached_property
    def smallest(self) -> int:
        """Elements of the smallest slot that a move to or from this rank reads."""
        if self._all_carry:
            return self.sizes.smallest if self.carries_data else 0
        sent = (m for each in self._own for moves in each.out_of.values() for m in moves)
        own = (m for each in self._own for m in each.into)
        return min((self.sizes.of(move.src, move.read) for move in (*own, *sent)), default=0)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of this rank that the schedule touches, in order."""
        touched: set[Slot] = set()
        for moves in self._own:
            touched.update(move.write for move in moves.into)
            touched.update(move.read for sent in moves.out_of.values() for move in sent)
        return tuple(sorted(touched))

    @cached_property
    def results(self) -> tuple[Slot, ...]:
        """The slots of this rank that are in the caller's outputs."""
        return tuple(slot for slot in self.slots if slot[0] in ("data", "out"))

    def staged(self, number: int, rank: int) -> Mapping[Slot, int]:
        """Return the slots that a rank writes into its staging buffer in a round, each with its position there."""
        if self._all_carry:
            return _staged(self.schedule, number, rank)
        found = self._carried.get((number, rank))
        if found is None:
            carrying = (slot for slot in _staged(self.schedule, number, rank) if self.sizes.of(rank, slot) > 0)
            found = self._carried[number, rank] = {slot: position for position, slot in enumerate(carrying)}
        return found

    @cached_property
    def _carried(self) -> dict[tuple[int, int], Mapping[Slot, int]]:
        return {}

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each round: the peers from which this rank reads."""
        return tuple(self._unique(m.src for m in moves.into if m.src != self.rank) for moves in self._own)

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """For each round: the peers that read from this rank."""
        return tuple(tuple(peer for peer in moves.out_of if peer != self.rank) for moves in self._own)

    @cached_property
    def arrivals(self) -> tuple[tuple[tuple[Slot, list[Move]], ...], ...]:
        """For each round: the slots of this rank that change, each with the moves that end there, in order."""
        return tuple(tuple(arrivals_by_slot(moves.into)) for moves in self._own)

    @cached_property
    def most_staged(self) -> int:
        """Most slots that a rank stages in one round."""
        # All ranks divide their tensors alike. Where some moves carry nothing, no rank represents the others.
        everyone, alike = range(self.schedule.world), self.schedule.own.alike
        return (
            max(
                (
                    len(self.staged(n, rank))
                    for n in self.rounds
                    for rank in (alike(n) if self._all_carry else everyone)
                ),
                default=1,
            )
            or 1
        )

    @cached_property
    def stride(self) -> int:
        """Bytes from one staged slot to the next."""
        return -(-self.window * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    @cached_property
    def window(self) -> int:
        """Elements of a slot that pass through the staging buffer at once."""
        fitting = self.capacity // self.most_staged // ALIGNMENT * ALIGNMENT // self.dtype.itemsize
        return max(1, min(fitting, self.sizes.largest))

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The element of a slot with which each window begins."""
        return tuple(range(0, self.sizes.largest, self.window)) or (0,)

    def length(self, rank: int, slot: Slot, begin: int) -> int:
        """Return the number of elements of `slot` on `rank` in the window that begins at `begin`."""
        return max(0, min(self.window, self.sizes.of(rank, slot) - begin))

    def address_of(self, slot: Slot) -> tuple[int, int]:
        """Return the operand that a slot of this rank is part of, and the slot's first element there."""
        buffer, index = slot
        if buffer == "data":
            return 0, index * self.sizes.stride
        first = 0 if buffer == "in" else self.inputs
        return (first, index * self.sizes.blocks[0]) if buffer in self.sizes.rows else (first + index, 0)

    def staging_offset(self, number: int, rank: int, slot: Slot) -> int:
        """Return the offset in bytes of a slot in the part of a rank's staging buffer that round `number` uses."""
        return self.staged(number, rank)[slot] * self.stride

    def staged_for(self, number: int, peer: int, begin: int) -> list[tuple[int, int]]:
        """Return (offset, bytes) of the staged slots that a peer reads in a round of a window."""
        moves = self._own[number].out_of.get(peer, ()) if self.carries_data else ()
        size = self.dtype.itemsize
        return [
            (self.staging_offset(number, self.rank, slot), self.length(self.rank, slot, begin) * size)
            for slot in self._unique(m.read for m in moves)
        ]

    @staticmethod
    def _unique(items: Iterable[Any]) -> tuple[Any, ...]:
        """Return each item once, in the order in which it came first."""
        return tuple(dict.fromkeys(items))


def arrivals_by_slot(moves: Iterable[Move]) -> Iterable[tuple[Slot, list[Move]]]:
    """Return the slots of one rank that moves end in, each with its moves in listed order."""
    found: dict[Slot, list[Move]] = {}
    for move in moves:
        found.setdefault(move.write, []).append(move)
    return found.items()


def operands_of(moves: Sequence[Move]) -> list[int | None]:
    """Return what is combined in a slot in one round: indices of the moves that end there, and None for its own value.

    They are in the order of the ranks that they come from, along which the `reduction_tree` combines them. The last
    copy replaces all that arrives before it.

    >>> slot = ("data", 0)
    >>> operands_of([Move(3, 1, slot, slot, True), Move(0, 1, slot, slot, True)])
    [1, None, 0]
    """
    last = max((i for i, move in enumerate(moves) if not move.reduce), default=-1)
    found: list[tuple[int, int | None]] = [(moves[0].dst, None)] if last < 0 else []
    found += [(moves[i].src, i) for i in range(max(0, last), len(moves))]
    return [operand for _, operand in sorted(found, key=lambda each: each[0])]


class OwnRound(NamedTuple):
    """Moves of one rank in one round.

    Attributes:
        into: Moves that end on the rank, in listed order.
        out_of: Moves that begin on the rank, by the rank on which they end.
    """

    into: Round
    out_of: dict[int, list[Move]]


def _staged(schedule: Schedule, number: int, rank: int) -> Mapping[Slot, int]:
    """Return what `Plan.staged` does, for tensors of which all moves carry some bytes.

    These are the slots that a peer reads, and own slots that are both read and overwritten in the round. Ranks that are
    threads of one process share the schedule, and what is found here.
    """
    found = schedule.staged.get((number, rank))
    if found is None:
        own = schedule.own
        slots = own.reads(number, rank) if own.reads else _read_of(own, number, rank)
        found = {slot: position for position, slot in enumerate(dict.fromkeys(slots))}
        schedule.staged[number, rank] = found
    return found


def _read_of(own: Own, number: int, rank: int) -> list[Slot]:
    moves = single(own.out_of(number, rank))
    if all(m.dst != rank for m in moves):
        return [m.read for m in moves]
    written = {m.write for m in single(own.into(number, rank))}
    return [m.read for m in moves if m.dst != rank or m.read in written]


def _is_not_conjugate(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj()


def _is_not_negative(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg()


def with_schedule(plan: Plan, schedule: Schedule) -> Plan:
    """Return the plan of the same call by another schedule."""
    return replace(plan, schedule=schedule, sizes=replace(plan.sizes, chunks=schedule.chunks))


def exchange_of_sizes(plan: Plan) -> Plan:
    """Return the plan of the all_gather with which ranks learn the block sizes of an uneven exchange.

    Each rank contributes the elements that it sends to each rank, and those that it expects from each.
    """
    world = plan.schedule.world
    schedule = catalogue.build("all_gather", "direct", world, 0)
    sizes = Sizes("all_gather", (2 * world,), schedule.chunks, frozenset(("out",)))
    return replace(plan, schedule=schedule, sizes=sizes, dtype=torch.int64, inputs=1)


def with_sizes(plan: Plan, pairs: Pairs) -> Plan:
    """Return the plan of an uneven exchange whose block sizes are known."""
    return replace(plan, sizes=replace(plan.sizes, blocks=(max(map(max, pairs)),), pairs=pairs))


# ---- making a plan

Lists = tuple[Sequence[Tensor], Sequence[Tensor]]

# Operations whose inputs are the blocks that every rank knows the sizes of; in the others the outputs are.
_BLOCKS_IN_INPUTS = ("reduce_scatter", "all_to_all", "gather")

EXECUTORS = ("fast", "reference")
EXECUTOR_VARIABLE = "TORCHDIST_REF_EXECUTOR"
REFERENCE_BIT = 4
ALGORITHM_BITS = 0xFFF8


def executor_name(environment: str) -> str:
    """Return the name of the executor that `TORCHDIST_REF_EXECUTOR` asks for.

    Raises:
        ArgumentError: No executor has this name.

    >>> executor_name(""), executor_name("reference")
    ('fast', 'reference')
    """
    if environment not in ("", *EXECUTORS):
        raise ArgumentError(f"{EXECUTOR_VARIABLE}: expected 'fast' or 'reference', got {environment!r}.")
    return environment or EXECUTORS[0]


def announcement_of(text: str, executor: str, chosen: str = "") -> Announcement:
    """Return the announcement of a call.

    Three parts of the fingerprint have a meaning of their own, so that a difference can be explained without reading
    the text of another rank: a bit for the executor, thirteen for the algorithm (all zero if the user chose none), and
    two that ranks with registered tensors set later (`segment.ZERO_COPY_BITS`).

    Args:
        text: The call.
        executor: Name of the executor.
        chosen: The part of the text that names the algorithm which the user chose. Default "": none.
    """
    common = fingerprint(text) & ~(ZERO_COPY_BITS | REFERENCE_BIT | ALGORITHM_BITS)
    algorithm = fingerprint(chosen) & ALGORITHM_BITS if chosen else 0
    return Announcement(common | algorithm | (REFERENCE_BIT if executor == EXECUTORS[1] else 0), text.encode())


class Planner:
    """Maker of the plans of one link.

    Args:
        link: This rank's end of the group.
        executor: Name of the executor that runs the plans.
        algorithms: Value of ``TORCHDIST_REF_ALGORITHM``; empty for none.
    """

    def __init__(self, link: Link, executor: str, algorithms: str = "") -> None:
        self._link, self._executor = link, executor
        self._forced = catalogue.overrides(algorithms)

    def make(self, call: Call, tensors: Sequence[Tensor], inputs: int, lists: Lists) -> Plan:
        """Return the plan of a call on these operands.

        Args:
            call: The operation.
            tensors: The operands that the plan will run on (`operands.flat_operands`).
            inputs: Number of operands that are inputs only.
            lists: The inputs and the outputs, block by block.

        Raises:
            ArgumentError: Tensors of different dtypes, or a reduction that makes no sense for the dtype.
            UnsupportedError: A tensor that the backend cannot use.
        """
        if len({t.dtype for t in tensors}) > 1:
            dtypes = sorted({str(t.dtype) for t in tensors})
            raise ArgumentError(f"{call.op}: all tensors need one dtype, got {dtypes}.")
        if any(not t.is_cpu or t.is_quantized for t in tensors):
            refuse_unsupported(call, *lists, "ref")
        dtype = tensors[0].dtype if tensors else torch.uint8
        if dtype in QUANTIZED:
            # `.view(torch.qint32)` of a plain tensor is not quantized, and torch crashes when it makes another one.
            raise UnsupportedError(
                f"{call.op}: backend 'ref' has no collectives of {dtype}{on_rank()}. Pass .view(torch.uint8)."
            )
        shapes = self._blocks(call.op, *lists)
        rows = frozenset(name for name, blocks in zip(("in", "out"), lists, strict=True) if type(blocks) is RowBlocks)
        blocks = tuple(torch.Size(shape).numel() for shape in shapes)
        uneven = getattr(call, "uneven", False)
        kind = str(dtype).removeprefix("torch.")
        # Ranks learn the sizes of an uneven exchange in the course of the call.
        even = len(blocks) < 2 and not uneven
        schedule, chosen = self._schedule(call, sum(blocks) * dtype.itemsize, even, dtype in WIDENED)
        text = f"{call}{chosen} of {kind}" if uneven else signature(f"{call}{chosen}", kind, shapes)
        name = getattr(call, "reduction", None)
        if name is not None:
            # Raises if the reduction makes no sense for this dtype.
            reduction(name, dtype, call.op, True)
        return Plan(
            rank=self._link.rank,
            record=announcement_of(text, self._executor, chosen),
            schedule=schedule,
            sizes=Sizes(call.op, blocks or (0,), schedule.chunks, rows),
            dtype=dtype,
            inputs=inputs,
            operands=(tuple(map(operand_kind, tensors[:inputs])), tuple(map(operand_kind, tensors[inputs:]))),
            capacity=self._link.layout.window,
            reduction=name,
            root=getattr(call, "root", 0),
            uneven=uneven,
            on_host=all(t.is_cpu for t in tensors),
            forced=call.op in self._forced,
            flat=not dtype.is_complex and not (dtype.is_floating_point and any(t.numel() == 1 for t in tensors)),
        )

    def _blocks(self, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Shape]:
        """Return the shapes of the call's blocks: one where they are all alike."""
        shapes = [tuple(t.shape) for t in (inputs if op in _BLOCKS_IN_INPUTS else outputs)]
        return shapes[:1] if len(set(shapes)) == 1 else shapes

    def _schedule(self, call: Call, nbytes: int, even: bool, rounded: bool) -> tuple[Schedule, str]:
        """Return the schedule, and the user's choice of it as text: other ranks may have made another one."""
        world, hosts = self._link.size, self._link.hosts
        algorithm = self._forced.get(call.op)
        algorithm = algorithm or catalogue.choose(call.op, world, nbytes, hosts=hosts, rounded=rounded)
        # Other algorithms keep blocks of several ranks in scratch of one size.
        if not even:
            algorithm = "direct"
        schedule = catalogue.build(call.op, algorithm, world, getattr(call, "root", 0), hosts=hosts)
        return schedule, f" by {catalogue.named(call.op, algorithm, schedule)}" if call.op in self._forced else ""
