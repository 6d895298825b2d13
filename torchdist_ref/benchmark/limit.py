"""Limit: the copies and additions that no backend can avoid, through staging buffers or straight from peers' tensors.

The work of each rank is a formula (`work`), in blocks of one rank's part of the whole buffer. `bind` turns it into
the same tensor kernels that a backend would use, in the backend's windows, over a shared staging buffer (`Stages`) or
over tensors in shared memory (`Tensors`: registered buffers). Ranks do not wait for one another, so the result is
garbage and the time is a bound. It is one more contestant; where ranks outnumber processors, its time is the processor
time of all ranks (see `rounds.shared_out`). Below some 64 KiB the bound is the cost of calling torch from Python, not
of memory.

Ranks of an older library load this file too: use the library's public API alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.benchmark.operations import ROOT, Buffers, Make, MeasuredOperation
from torchdist_ref.benchmark.rounds import LINE_BYTES, Action

Work = tuple[tuple[str, int], ...]
# Elements of a block, where in it a window begins, and how many it has.
Cut = tuple[int, int, int]
# A block of the own source, one of the own result, another rank, and the slot or block there.
Blocks = tuple[int, int, int, int]


def _reduce(rank: int, n: int) -> Work:
    gathered = ("out", n - 1) if rank == ROOT else ("publish", 1)
    return ("in", n - 1), ("add", n - 1), gathered


def _reduce_by_root(rank: int, n: int) -> Work:
    return (("add_each", n * (n - 1)),) if rank == ROOT else (("in", n),)


_WORK: dict[str, Callable[[int, int], Work]] = {
    "all_reduce": lambda r, n: (("in", n - 1), ("add", n - 1), ("publish", 1), ("out", n - 1)),
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
_DIRECT: dict[str, Callable[[int, int], Work]] = {
    "all_reduce": lambda r, n: (("add", n - 1), ("out", n - 1)),
    "reduce": lambda r, n: (("add", n - 1),),
    "broadcast": lambda r, n: () if r == ROOT else (("out", n),),
    "all_gather": lambda r, n: (("out", n - 1), ("own", 1)),
    "reduce_scatter": lambda r, n: (("sum", 1), ("add", n - 2)),
    "all_to_all": lambda r, n: (("out", n - 1), ("own", 1)),
    "gather": lambda r, n: (("put", 1),),
    "scatter": lambda r, n: (("out", 1),),
    "sendrecv": lambda r, n: (("out", n),),
    "barrier": lambda r, n: (),
}


def work(op: str, rank: int, world: int, direct: bool = False, processors: int | None = None) -> Work:
    """Return the work of a rank, in steps of so many blocks of 1/world of the whole buffer.

    It depends on how many `processors` there are, by default one for each rank, where one way has the least work and
    another the shortest longest rank: a reduction that the root does alone while the others copy keeps two processors
    busy, and needs no second round of copies; more processors gain from one in which each rank reduces a part.

    Steps: ``in`` copies to the own staging buffer, ``out`` from another's, ``own`` from one private tensor to
    another, ``publish`` copies a result to the own staging buffer; ``add`` adds from others' buffers into one block,
    ``add_each`` into each, ``sum`` writes the sum of a private block and one of another's. If `direct`, another's
    tensor takes the place of its staging buffer, and ``put`` copies to it.

    >>> work("all_reduce", 0, 4)
    (('in', 3), ('add', 3), ('publish', 1), ('out', 3))
    >>> work("all_reduce", 0, 4, direct=True)
    (('add', 3), ('out', 3))
    """
    steps = (_DIRECT if direct else _WORK)[op]
    if steps is _reduce and min(world, processors or world) <= 2:
        steps = _reduce_by_root
    return tuple((kind, blocks) for kind, blocks in steps(rank, world) if blocks)


class Stages:
    """Staging buffers, one for each rank, in shared memory: `world` times `window` bytes of it.

    `processors` is the number that the ranks share, if they do not have one each.
    """

    def __init__(self, memory: Any, window: int, processors: int | None = None) -> None:
        self.window, self.memory, self.processors = window, memory, processors

    direct = False

    def slot(self, rank: int, number: int, cut: Cut, count: int, dtype: torch.dtype) -> Tensor:
        """Return `count` elements of a rank's staging buffer, in its slot of this number."""
        offset = rank * self.window + number * cut[2] * dtype.itemsize
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def blocks(self, op: str, kind: str, number: int, b: Buffers) -> Blocks:
        """Return the blocks of the step of this number."""
        # A rank reads bytes that another processor wrote: never its own buffer.
        peer = (b.rank + 1 + number % (b.world - 1)) % b.world
        return number, 0 if kind in ("add", "sum") else number, peer, number


class Tensors(Stages):
    """All ranks' tensors in shared memory: `world` times `capacity` bytes of it."""

    direct = True

    def __init__(self, memory: Any, capacity: int, window: int) -> None:
        super().__init__(memory, window)
        self.capacity = capacity

    def slot(self, rank: int, number: int, cut: Cut, count: int, dtype: torch.dtype) -> Tensor:
        """Return `count` elements of a rank's tensors that others read: a window of the block of this number."""
        offset = rank * self.capacity + (number * cut[0] + cut[1]) * dtype.itemsize
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def blocks(self, op: str, kind: str, number: int, b: Buffers) -> Blocks:
        """Return the blocks of the step of this number: each rank works on its own ones, which another wrote last."""
        if op in ("broadcast", "sendrecv"):
            return number, number, ROOT if op == "broadcast" else min(b.rank ^ 1, b.world - 1), number
        if op in ("gather", "scatter"):
            return b.rank, 0, ROOT, b.rank
        peer = (b.rank + 1 + number) % b.world
        theirs = {"all_reduce": peer, "all_gather": 0}.get(op, b.rank) if kind == "out" else b.rank
        return b.rank, peer if kind == "out" else b.rank, peer, theirs

    def maker(self, rank: int) -> Make:
        """Return a function that allocates the tensors of a rank here; those that others read come first."""
        free = [rank * self.capacity]

        def make(count: int, dtype: torch.dtype) -> Tensor:
            offset = free[0]
            free[0] += count * dtype.itemsize
            return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset) if count else torch.empty(0)

        return make


def bind(operation: MeasuredOperation, buffers: Buffers, stages: Stages) -> Action:
    """Return the bound as a call that can be timed."""
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
    """Yield the work on a rank's tensors, in order: (kernel, tensor written, tensors read)."""
    steps, parts = _merged(work(op, b.rank, b.world, stages.direct, stages.processors), b.world)
    block = -(-b.whole // parts)
    # All blocks of one round share the window, as they share a backend's staging buffer.
    staged = max((blocks for kind, blocks in steps if kind in ("in", "out")), default=1)
    piece = max(1, min(block, _whole_lines(stages.window // staged) // b.result.dtype.itemsize))
    for begin in range(0, block, piece):
        for kind, blocks in steps:
            for number in range(blocks):
                first, second, peer, slot = stages.blocks(op, kind, number, b)
                yield from _kernel(kind, (first, second, peer, slot % parts), b, stages, (block, begin, piece))


def _whole_lines(nbytes: int) -> int:
    """Round down to whole cache lines: slots begin at lines, as a backend's do, for faster copies."""
    return nbytes // LINE_BYTES * LINE_BYTES or nbytes


def _merged(steps: Work, world: int) -> tuple[Work, int]:
    """Return the steps in parts of the whole buffer. A step of all blocks takes the buffer, by one call of a kernel."""
    if any(blocks % world for _, blocks in steps):
        return steps, world
    return tuple(("add" if kind == "add_each" else kind, blocks // world) for kind, blocks in steps), 1


def _kernel(kind: str, blocks: Blocks, b: Buffers, stages: Stages, cut: Cut) -> Iterator[tuple[Any, ...]]:
    first, second, peer, number = blocks
    source, result = _piece(b.source, first, cut), _piece(b.result, second, cut)
    private = source if kind in ("in", "put") else result
    if private.numel() == 0:
        return
    where = (number, cut, private.numel(), private.dtype)
    mine, other = stages.slot(b.rank, *where), stages.slot(peer, *where)
    match kind:
        case "in" | "publish":
            yield _copy, mine, private
        case "put":
            yield _copy, other, private
        case "out":
            yield _copy, result, other
        case "own":
            yield _copy, result, source
        case "add":
            yield _add, result, other
        case "sum":
            yield _sum, result, other, source


def _piece(tensor: Tensor, number: int, cut: Cut) -> Tensor:
    """Return a window of one block of a private tensor; numbers wrap where it has fewer blocks."""
    block, begin, piece = cut
    have = max(1, tensor.numel() // block)
    start = number % have * block + begin
    return tensor[start : min(start + piece, number % have * block + block, tensor.numel())]
