"""Steps: the copies and reductions of a round, each made into one function when a plan is compiled.

A step takes the tensors of a call and the first element of a window, and changes one slot. Its operands are parts of
the call's tensors, which are other tensors in every call (`Part`), or memory that stays where it is: a view of a
staging buffer, a peer's registered tensor, or scratch. All choices are made once, so that the executor only calls.

Host tensors are copied by address, which costs less than a tensor operation, and reduced through views of their memory
that are made by address (`Views`). So neither autograd nor the version counter of a tensor learns of a step, as with
torch's collectives. Do not add waits: steps know no peer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchdist_ref.backends import reductions
from torchdist_ref.backends.reductions import WIDENED, Reduction
from torchdist_ref.backends.ref.plan import Plan
from torchdist_ref.schedules.schedule import Move, Slot
from torchdist_ref.transports.segment import memmove_for

Tensors = Sequence[Tensor]
Step = Callable[[Tensors, int], Any]
# Bytes that are copied in the time that it takes to make a view (1 us, measured).
CHEAP_COPY_BYTES = 64 * 1024
# Views that are kept. Programs call again and again with the same tensors.
MOST_VIEWS = 64


class Part(NamedTuple):
    """Slot as part of the tensors of a call.

    Attributes:
        operand: Index of the tensor.
        first: The slot's first element there.
    """

    operand: int
    first: int


Operand = Part | Tensor


class Views(dict[int, Tensor]):
    """Views of a number of elements in the host's memory, by address. They are valid while a tensor is there.

    >>> tensor = torch.zeros(2, 2, requires_grad=True)
    >>> view = Views(torch.float32, 3)[tensor.data_ptr() + 4]
    >>> tensor, view.fill_(1), tensor._version
    (tensor([[0., 1.],
            [1., 1.]], requires_grad=True), tensor([1., 1., 1.]), 0)
    """

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        super().__init__()
        self._dtype, self._memory = dtype, ctypes.c_char * (count * dtype.itemsize)

    def __missing__(self, address: int) -> Tensor:
        if len(self) >= MOST_VIEWS:
            self.clear()
        # A view that is made under inference mode could not be changed after it. `Ref` has left the other modes.
        with torch.inference_mode(False):
            view = self[address] = torch.frombuffer(self._memory.from_address(address), dtype=self._dtype)
        return view


class Addresses(Protocol):
    """Strategy that finds slots: staged, in registered tensors, or in the memory of a device."""

    def count(self, rank: int, slot: Slot, begin: int) -> int:
        """Return the number of elements of a rank's slot in the window that begins at `begin`."""

    def target(self, rank: int, slot: Slot, begin: int) -> Operand:
        """Return a rank's slot, to be changed."""

    def source(self, number: int, move: Move, begin: int) -> Operand:
        """Return the values that a move of round `number` reads."""


class StepMaker:
    """Compiler of the copies and reductions of one plan.

    Sums of 16-bit floats are made in float32 and rounded once, and an average is divided before that: the sum of two
    numbers may be too large for a type that their average fits in.

    Args:
        plan: The call.
        on_device: Whether operands are in the memory of a device, where the host cannot copy by address.

    Attributes:
        itemsize: Bytes of an element.
    """

    def __init__(self, plan: Plan, on_device: bool = False) -> None:
        self._dtype: torch.dtype = plan.dtype
        self.itemsize = plan.dtype.itemsize
        self._views: dict[int, Views] = {}
        self._reduction = reductions.reduction(plan.reduction, plan.dtype, plan.op, True) if plan.reduction else None
        self._divisor = plan.divisor if plan.divides_at_once else 0
        self._on_device = on_device
        # A short slot takes longer to cut out of its tensor than to copy.
        largest = plan.sizes.largest * plan.dtype.itemsize
        self._copies_first = bool(plan.sizes.rows) and largest <= CHEAP_COPY_BYTES

    def of_moves(self, number: int, moves: Iterable[Move], addresses: Addresses, begin: int) -> Iterator[Step]:
        """Yield the steps of the moves of one round that this rank makes, in one window.

        Args:
            number: The round.
            moves: Its moves that this rank makes; those that end in one slot apply in listed order.
            addresses: Finds slots.
            begin: The window's first element in each slot.
        """
        arriving: dict[tuple[int, Slot], list[Move]] = {}
        for move in moves:
            arriving.setdefault((move.dst, move.write), []).append(move)
        for (rank, slot), found in arriving.items():
            if count := addresses.count(rank, slot, begin):
                sources = [addresses.source(number, move, begin) for move in found]
                yield from self._of_slot(addresses.target(rank, slot, begin), count, found, sources)

    def _of_slot(
        self, target: Operand, count: int, moves: Sequence[Move], sources: Sequence[Operand]
    ) -> Iterator[Step]:
        """Yield the steps of the moves that end in one slot."""
        # The last copy overwrites all that arrives before it.
        last = max((i for i, m in enumerate(moves) if not m.reduce), default=-1)
        moves, sources = moves[max(0, last) :], sources[max(0, last) :]
        reduces = sum(m.reduce for m in moves)
        if self._reduction is None or not reduces:
            yield from (self.copy(target, source, count) for source in sources)
        elif (reduces > 1 or self._divisor) and self._dtype in WIDENED:
            start = [] if last >= 0 else [target]
            yield self._widened(target, [*start, *sources], count, self._reduction)
        else:
            yield from self._reduced(self._reduction, target, count, sources, afresh=last >= 0)
            if self._divisor:
                yield self.divide(target, count, self._divisor)

    def _reduced(
        self, reduction: Reduction, target: Operand, count: int, sources: Sequence[Operand], afresh: bool
    ) -> Iterator[Step]:
        """Yield steps that reduce sources into the target, or if `afresh`, that replace it by their reduction."""
        rest = sources
        if afresh and self._copies_first:
            yield self.copy(target, sources[0], count)
            rest = sources[1:]
        elif afresh:
            yield self._combine(target, sources[0], sources[1], count, reduction)
            rest = sources[2:]
        yield from (self._reduce(target, source, count, reduction) for source in rest)

    def copy(self, target: Operand, source: Operand, count: int) -> Step:
        """Return a step that copies the source to the target."""
        if self._on_device:
            to, of = self._tensor(target, count), self._tensor(source, count)
            return lambda tensors, begin: to(tensors, begin).copy_(of(tensors, begin))
        return copy(target, source, count * self._dtype.itemsize, self._dtype.itemsize)

    def _tensor(self, operand: Operand, count: int) -> Callable[[Tensors, int], Tensor]:
        """Return a function that makes an operand of so many elements a tensor of one dimension."""
        if isinstance(operand, Tensor):
            return lambda tensors, begin: operand
        index, first = operand
        if self._on_device:
            size, stride = (count,), (1,)

            def cut(tensors: Tensors, begin: int) -> Tensor:
                # The tensor is a row of values: this takes half as long as to view it flat and to slice that.
                tensor = tensors[index]
                return tensor.as_strided(size, stride, tensor.storage_offset() + first + begin)

            return cut
        views, itemsize = self._views_of(count), self._dtype.itemsize
        return lambda tensors, begin: views[tensors[index].data_ptr() + (first + begin) * itemsize]

    def _views_of(self, count: int) -> Views:
        found = self._views.get(count)
        if found is None:
            found = self._views[count] = Views(self._dtype, count)
        return found

    def _reduce(self, target: Operand, source: Operand, count: int, reduction: Reduction) -> Step:
        """Return a step that reduces the source into the target."""
        into = reduction.into
        if isinstance(target, Part) and target.first == 0 and isinstance(source, Tensor) and not self._on_device:
            # As below, but two calls of functions shorter.
            index, views, itemsize = target.operand, self._views_of(count), self._dtype.itemsize
            return lambda tensors, begin: into(views[tensors[index].data_ptr() + begin * itemsize], source)
        to, of = self._tensor(target, count), self._tensor(source, count)
        return lambda tensors, begin: into(to(tensors, begin), of(tensors, begin))

    def _combine(self, target: Operand, first: Operand, second: Operand, count: int, reduction: Reduction) -> Step:
        """Return a step that copies the first source and reduces the second into it, in one pass over memory."""
        together = reduction.combine
        to, one, two = (self._tensor(operand, count) for operand in (target, first, second))
        return lambda tensors, begin: together(one(tensors, begin), two(tensors, begin), out=to(tensors, begin))

    def _widened(self, target: Operand, sources: Sequence[Operand], count: int, reduction: Reduction) -> Step:
        """Return a step that reduces 16-bit floats in float32, divides there for an average, and rounds once."""
        to, of = self._tensor(target, count), [self._tensor(source, count) for source in sources]
        by = self._divisor

        def step(tensors: Tensors, begin: int) -> None:
            total = of[0](tensors, begin).to(torch.float32)
            for source in of[1:]:
                reduction.into(total, source(tensors, begin).to(torch.float32))
            if by:
                total.div_(by)
            to(tensors, begin).copy_(total)

        return step

    def divide(self, target: Operand, count: int, by: int) -> Step:
        """Return a step that divides the target, which makes a sum an average."""
        to = self._tensor(target, count)
        return lambda tensors, begin: reductions.divide(to(tensors, begin), by)


def copy(target: Operand, source: Operand, nbytes: int, itemsize: int) -> Step:
    """Return a step that copies bytes of the host's memory by address."""
    move = memmove_for(nbytes)
    match target, source:
        case Part(operand=operand, first=first), Tensor():
            address = source.data_ptr()
            return lambda tensors, begin: move(
                tensors[operand].data_ptr() + (first + begin) * itemsize, address, nbytes
            )
        case Tensor(), Part(operand=operand, first=first):
            address = target.data_ptr()
            return lambda tensors, begin: move(
                address, tensors[operand].data_ptr() + (first + begin) * itemsize, nbytes
            )
    to, of = _address(target, itemsize), _address(source, itemsize)
    return lambda tensors, begin: move(to(tensors, begin), of(tensors, begin), nbytes)


def _address(operand: Operand, itemsize: int) -> Callable[[Tensors, int], int]:
    if isinstance(operand, Tensor):
        address = operand.data_ptr()
        return lambda tensors, begin: address
    index, first = operand
    return lambda tensors, begin: tensors[index].data_ptr() + (first + begin) * itemsize
