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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchdist_ref.backends import reductions
from torchdist_ref.backends.reductions import WIDENED, Reduction
from torchdist_ref.backends.ref.plan import Plan, operands_of
from torchdist_ref.schedules.reduction_tree import combined
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


class Scratch:
    """Memory for partial results. All plans of a group share it, since one call runs at a time."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, torch.device, bool], Tensor] = {}

    def part(self, depth: int, count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Return so many elements where another tensor is; those of different depths are apart."""
        nbytes, key = count * dtype.itemsize, (depth, like.device, like.is_cpu)
        found = self._memory.get(key)
        if found is None or found.numel() < nbytes:
            # A power of two: few different ones are made, and plans keep those that they use.
            found = self._memory[key] = like.new_empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)
        return found[:nbytes].view(dtype)


Tree = Any
"""Operands by their indices: a pair of trees, or an index."""


def _pair(a: Tree, b: Tree) -> Tree:
    return (a, b)


def _joining(tree: Tree, leaf: int) -> list[Tree]:
    """Return what is combined with a leaf on its way to the root of a tree.

    >>> _joining(((0, 1), (2, 3)), 2)
    [3, (0, 1)]
    """
    if isinstance(tree, int):
        return []
    a, b = tree
    return [*_joining(a, leaf), b] if leaf in _leaves(a) else [*_joining(b, leaf), a]


def _leaves(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else _leaves(tree[0]) + _leaves(tree[1])


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
        scratch: Memory for partial results.
        on_device: Whether operands are in the memory of a device, where the host cannot copy by address.

    Attributes:
        itemsize: Bytes of an element.
    """

    def __init__(self, plan: Plan, scratch: Scratch, on_device: bool = False) -> None:
        self._scratch = scratch
        self._dtype: torch.dtype = plan.dtype
        self.itemsize = plan.dtype.itemsize
        self._views: dict[int, Views] = {}
        self._reduction = reductions.reduction(plan.reduction, plan.dtype, plan.op, True) if plan.reduction else None
        self._divisor = plan.divisor if plan.divides_at_once else 0
        self._rounds = self._dtype in WIDENED and self._reduction is not None and not self._reduction.is_exact
        self._on_device = on_device
        # A short slot takes longer to cut out of its tensor than to copy.
        largest = plan.sizes.largest * plan.dtype.itemsize
        self._copies_first = bool(plan.sizes.rows) and largest <= CHEAP_COPY_BYTES

    def of_moves(self, number: int, moves: Iterable[Move], addresses: Addresses, begin: int) -> Iterator[Step]:
        """Yield the steps of the moves of one round that this rank makes, in one window.

        Args:
            number: The round.
            moves: Its moves that this rank makes.
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
        if self._reduction is None or not any(m.reduce for m in moves):
            # The last copy overwrites all that arrives before it.
            yield self.copy(target, sources[-1], count)
            return
        order = operands_of(moves)
        operands = [target if index is None else sources[index] for index in order]
        if len(operands) == 1:
            yield self.copy(target, operands[0], count)
        elif self._rounds and (len(operands) > 2 or self._divisor):
            yield self._widened(target, operands, count, self._reduction)
        else:
            # A rank's own operand is read first: the caller may have passed one tensor as input and output.
            own = (place for place, i in enumerate(order) if i is None or moves[i].src == moves[i].dst)
            yield from self._reduced(self._reduction, target, operands, count, next(own, 0), in_place=None in order)
            if self._divisor:
                yield self.divide(target, count, self._divisor)

    def _reduced(
        self, reduction: Reduction, target: Operand, operands: Sequence[Operand], count: int, leaf: int, in_place: bool
    ) -> Iterator[Step]:
        """Yield steps that combine operands along the tree, in the target.

        The target takes the values on the path from one leaf of the tree to its root; if `in_place`, that leaf is its
        own value. What joins the path is an operand, or is made in scratch memory before.
        """
        tree: Tree = combined(range(len(operands)), _pair)
        for joins in _joining(tree, leaf):
            other = yield from self._subtree(joins, operands, count, reduction)
            if in_place:
                yield self._reduce(target, other, count, reduction)
            elif self._copies_first:
                yield self.copy(target, operands[leaf], count)
                yield self._reduce(target, other, count, reduction)
            else:
                yield self._combine(target, operands[leaf], other, count, reduction)
            in_place = True

    def _subtree(
        self, tree: Tree, operands: Sequence[Operand], count: int, reduction: Reduction, depth: int = 0
    ) -> Generator[Step, None, Operand]:
        """Yield steps that combine some operands in scratch memory; return where the result will be."""
        if isinstance(tree, int):
            return operands[tree]
        # The larger part first: it may use the same scratch memory as the result.
        large, small = sorted(tree, key=lambda part: isinstance(part, int))
        first = yield from self._subtree(large, operands, count, reduction, depth)
        second = yield from self._subtree(small, operands, count, reduction, depth + 1)
        # The memory of peers is known. If there are no peers, it is that of the host.
        peers = next(
            (each for each in operands if isinstance(each, Tensor)), torch.empty(0, dtype=self._dtype, device="cpu")
        )
        result = self._scratch.part(depth, count, self._dtype, peers)
        if isinstance(large, int):
            yield self._combine(result, first, second, count, reduction)
        else:
            yield self._reduce(result, second, count, reduction)
        return result

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
        if isinstance(target, Tensor) and isinstance(source, Tensor):
            return lambda tensors, begin: into(target, source)
        if isinstance(target, Part) and target.first == 0 and isinstance(source, Tensor) and not self._on_device:
            # As below, but two calls of functions shorter.
            index, views, itemsize = target.operand, self._views_of(count), self._dtype.itemsize
            return lambda tensors, begin: into(views[tensors[index].data_ptr() + begin * itemsize], source)
        to, of = self._tensor(target, count), self._tensor(source, count)
        return lambda tensors, begin: into(to(tensors, begin), of(tensors, begin))

    def _combine(self, target: Operand, first: Operand, second: Operand, count: int, reduction: Reduction) -> Step:
        """Return a step that copies the first source and reduces the second into it, in one pass over memory."""
        together = reduction.combine
        if isinstance(target, Tensor) and isinstance(first, Tensor) and isinstance(second, Tensor):
            return lambda tensors, begin: together(first, second, out=target)
        to, one, two = (self._tensor(operand, count) for operand in (target, first, second))
        return lambda tensors, begin: together(one(tensors, begin), two(tensors, begin), out=to(tensors, begin))

    def _widened(self, target: Operand, operands: Sequence[Operand], count: int, reduction: Reduction) -> Step:
        """Return a step that reduces 16-bit floats in float32, divides there for an average, and rounds once."""
        to, by, into = self._tensor(target, count), self._divisor, reduction.into

        def wide(of: Callable[[Tensors, int], Tensor]) -> Callable[[Tensors, int], Tensor]:
            return lambda tensors, begin: of(tensors, begin).to(torch.float32)

        def both(a: Callable[[Tensors, int], Tensor], b: Callable[[Tensors, int], Tensor]) -> Any:
            def sum_of_both(tensors: Tensors, begin: int) -> Tensor:
                total = a(tensors, begin)
                into(total, b(tensors, begin))
                return total

            return sum_of_both

        value = combined([wide(self._tensor(operand, count)) for operand in operands], both)

        def step(tensors: Tensors, begin: int) -> None:
            total = value(tensors, begin)
            if by:
                reductions.divide(total, by)
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
