"""Steps: what a rank does with what it reads in a round, each made into one function when the plan is made.

A step takes the tensors of the call and the first element of the window, and changes one slot. An operand is part of
one of the call's tensors, which is another tensor in every call (`Part`), or memory that is known for good: a view of
somebody's stage, or scratch. Copies need no tensor operations: the bytes are moved. All choices are made here, once, so
that the executor only calls. Don't add waits: steps know of no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, float32

from torchdist_ref.backends import reductions
from torchdist_ref.backends.reductions import Reduction
from torchdist_ref.transports.registered_memory import memmove_for

Tensors = Sequence[Tensor]
Step = Callable[[Tensors, int], Any]


class Part(NamedTuple):
    """A slot as it lies in the tensors of a call.

    Attributes:
        at: Which of the tensors.
        first: The slot's first element there.
        whole: The slot is the tensor, and passes in one window: nothing needs to be cut out.
    """

    at: int
    first: int
    whole: bool = False


Operand = Part | Tensor


def copy(target: Operand, source: Operand, nbytes: int, itemsize: int) -> Step:
    """The target becomes the source."""
    move = memmove_for(nbytes)
    match target, source:
        case Tensor(is_cuda=True), Tensor():
            # The host can't reach that memory.
            return lambda tensors, begin: target.copy_(source)
        case Part(at=at, first=first), Tensor():
            address = source.data_ptr()
            return lambda tensors, begin: move(tensors[at].data_ptr() + (first + begin) * itemsize, address, nbytes)
        case Tensor(), Part(at=at, first=first):
            address = target.data_ptr()
            return lambda tensors, begin: move(address, tensors[at].data_ptr() + (first + begin) * itemsize, nbytes)
    to, of = _address(target, itemsize), _address(source, itemsize)
    return lambda tensors, begin: move(to(tensors, begin), of(tensors, begin), nbytes)


def _address(operand: Operand, itemsize: int) -> Callable[[Tensors, int], int]:
    if isinstance(operand, Tensor):
        address = operand.data_ptr()
        return lambda tensors, begin: address
    at, first, _ = operand
    return lambda tensors, begin: tensors[at].data_ptr() + (first + begin) * itemsize


def _tensor(operand: Operand, count: int) -> Callable[[Tensors, int], Tensor]:
    """How to come by an operand of so many elements as a tensor."""
    if isinstance(operand, Tensor):
        return lambda tensors, begin: operand
    at, first, whole = operand
    if whole:
        return lambda tensors, begin: tensors[at]
    flat, step = (count,), (1,)

    def cut(tensors: Tensors, begin: int) -> Tensor:
        # Plain rows of values: this takes half as long as to view it flat and to slice that.
        tensor = tensors[at]
        return tensor.as_strided(flat, step, tensor.storage_offset() + first + begin)

    return cut


def reduce(target: Operand, source: Operand, count: int, reduction: Reduction) -> Step:
    """The source is reduced into the target."""
    into = reduction.into
    if isinstance(target, Part) and target.whole and isinstance(source, Tensor):
        at = target.at
        return lambda tensors, begin: into(tensors[at], source)
    to, of = _tensor(target, count), _tensor(source, count)
    return lambda tensors, begin: into(to(tensors, begin), of(tensors, begin))


def combine(target: Operand, first: Operand, second: Operand, count: int, reduction: Reduction) -> Step:
    """The target becomes the reduction of two sources: a copy and a reduction in one pass over memory."""
    together = reduction.combine
    to, one, two = (_tensor(operand, count) for operand in (target, first, second))
    return lambda tensors, begin: together(one(tensors, begin), two(tensors, begin), out=to(tensors, begin))


def widened(target: Operand, sources: Sequence[Operand], count: int, reduction: Reduction, by: int = 0) -> Step:
    """The target becomes the reduction of halves, made in float32, divided there if not by 0, and rounded once."""
    to, of = _tensor(target, count), [_tensor(source, count) for source in sources]

    def step(tensors: Tensors, begin: int) -> None:
        total = of[0](tensors, begin).to(float32)
        for source in of[1:]:
            reduction.into(total, source(tensors, begin).to(float32))
        if by:
            total.div_(by)
        to(tensors, begin).copy_(total)

    return step


def divide(target: Operand, count: int, by: int) -> Step:
    """The target is divided: what makes a sum an average."""
    to = _tensor(target, count)
    return lambda tensors, begin: reductions.divide(to(tensors, begin), by)
