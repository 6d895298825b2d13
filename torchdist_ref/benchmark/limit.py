"""Limit: the copies and adds that no engine can avoid that stages data in shared memory, and nothing else.

What each rank must do is a formula (`work`), in blocks of one rank's part of the whole buffer. `bind` turns it into
the same tensor kernels that an engine would use, over a shared stage, in the engine's windows, without any waiting for
one another, so that the result is garbage and the time is a bound. It is timed in turn with the engines, as one more
contestant. Below some 64 KiB the bound shows what a call of torch from Python costs, and says nothing on memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.benchmark.operations import ROOT, Action, Buffers, Operation
from torchdist_ref.transports.layout import Layout

Work = tuple[tuple[str, int], ...]
# The default: what the engine lays out at once.
WINDOW = Layout(2).half


def _reduce(rank: int, n: int) -> Work:
    if n == 2:
        # One reads straight from the stage of the other.
        return (("add_each", 2),) if rank == ROOT else (("in", 2),)
    gathered = ("out", n - 1) if rank == ROOT else ("lay", 1)
    return ("in", n - 1), ("add", n - 1), gathered


_WORK: dict[str, Callable[[int, int], Work]] = {
    "all_reduce": lambda r, n: (("in", n - 1), ("add", n - 1), ("lay", 1), ("out", n - 1)),
    "reduce": _reduce,
    "broadcast": lambda r, n: (("in", n),) if r == ROOT else (("out", n),),
    "all_gather": lambda r, n: (("in", 1), ("out", n - 1), ("own", 1)),
    "reduce_scatter": lambda r, n: (("in", n - 1), ("sum", 1), ("add", n - 2)),
    "all_to_all": lambda r, n: (("in", n - 1), ("out", n - 1), ("own", 1)),
    "gather": lambda r, n: (("out", n - 1), ("own", 1)) if r == ROOT else (("in", 1),),
    "scatter": lambda r, n: (("in", n - 1), ("own", 1)) if r == ROOT else (("out", 1),),
    "sendrecv": lambda r, n: (("in", n), ("out", n)),
    "barrier": lambda r, n: (),
}


def work(op: str, rank: int, world: int) -> Work:
    """What a rank must do, in steps of so many blocks of 1/world of the whole buffer.

    Steps: ``in`` copies to the own stage, ``out`` from another's, ``own`` from one private tensor to another, ``lay``
    a result to the own stage; ``add`` adds from another's stage into one block, ``add_each`` into each in turn, ``sum``
    writes the sum of a private block and one of another's stage.

    >>> work("all_reduce", 0, 4)
    (('in', 3), ('add', 3), ('lay', 1), ('out', 3))
    """
    return tuple((kind, blocks) for kind, blocks in _WORK[op](rank, world) if blocks)


def cost(op: str, rank: int, world: int) -> tuple[float, float]:
    """Bytes copied and bytes added by a rank, as parts of the whole buffer.

    >>> cost("all_reduce", 0, 2), cost("broadcast", 1, 2)
    ((1.5, 0.5), (1.0, 0.0))
    """
    steps = work(op, rank, world)
    adds = sum(blocks for kind, blocks in steps if kind in _ADDS)
    return (sum(blocks for _, blocks in steps) - adds) / world, adds / world


_ADDS = ("add", "add_each", "sum")


class Stages:
    """A stage for every rank, in memory that all share: `world` times `window` bytes of it."""

    def __init__(self, memory: Any, window: int = WINDOW) -> None:
        self.window, self.memory = window, memory

    def slot(self, rank: int, number: int, size: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements of the stage of a rank, in its slot of this number, where slots have `size` elements."""
        offset = rank * self.window + number * size * dtype.itemsize
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)


def bind(operation: Operation, buffers: Buffers, stages: Stages) -> Action:
    """The bound as a call that can be timed."""
    todo = list(kernels(operation.name, buffers, stages))

    def run() -> None:
        for kernel, *operands in todo:
            kernel(*operands)

    return run


def _copy(target: Tensor, source: Tensor) -> Any:
    return target.copy_(source)


def _add(target: Tensor, source: Tensor) -> Any:
    return target.add_(source)


def _sum(target: Tensor, source: Tensor, own: Tensor) -> Any:
    return torch.add(own, source, out=target)


def kernels(op: str, b: Buffers, stages: Stages) -> Iterator[tuple[Any, ...]]:
    """The work on a rank's tensors, in order: (kernel, tensor written, tensors read)."""
    steps = work(op, b.rank, b.world)
    block = -(-b.whole // b.world)
    # All blocks that are laid out in one round share the window, as they share an engine's stage.
    laid = max((blocks for kind, blocks in steps if kind in ("in", "out", "add_each")), default=1)
    piece = max(1, min(block, stages.window // laid // b.result.dtype.itemsize))
    for begin in range(0, block, piece):
        for kind, blocks in steps:
            for number in range(blocks):
                yield from _kernel(kind, number, b, stages, (block, begin, piece))


def _kernel(kind: str, number: int, b: Buffers, stages: Stages, cut: tuple[int, int, int]) -> Iterator[tuple[Any, ...]]:
    source, result = _piece(b.source, number, cut), _piece(b.result, 0 if kind in ("add", "sum") else number, cut)
    private = source if kind == "in" else result
    if private.numel() == 0:
        return
    place = (number, cut[2], private.numel(), private.dtype)
    mine, other = stages.slot(b.rank, *place), stages.slot((b.rank + 1 + number) % b.world, *place)
    match kind:
        case "in" | "lay":
            yield _copy, mine, private
        case "out":
            yield _copy, result, other
        case "own":
            yield _copy, result, source
        case "add" | "add_each":
            yield _add, result, other
        case "sum":
            yield _sum, result, other, source


def _piece(tensor: Tensor, number: int, cut: tuple[int, int, int]) -> Tensor:
    """A window of one block of a private tensor; where it has fewer blocks, the numbers go round."""
    block, begin, piece = cut
    have = max(1, tensor.numel() // block)
    start = number % have * block + begin
    return tensor[start : min(start + piece, number % have * block + block, tensor.numel())]
