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
from itertools import product
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.benchmark.operations import ROOT, Buffers, Make, MeasuredOperation
from torchdist_ref.benchmark.rounds import LINE_BYTES, Action

# Contestants that are bounds: the least cost with staging, and the least with direct reads of peers' tensors.
LIMIT, DIRECT = BOUNDS = ("limit", "direct")
Work = tuple[tuple[str, int], ...]
# Elements of a block, where in it a window begins, and how many it has.
Cut = tuple[int, int, int]
# A block of the own source, one of the own result, another rank, and the slot or block there.
Blocks = tuple[int, int, int, int]


_WORK: dict[str, Callable[[int, int], Work]] = {
    "all_reduce": lambda r, n: (("in", n - 1), ("add", n - 1), ("publish", 1), ("out", n - 1)),
    "reduce": lambda r, n: (("in", n - 1), ("add", n - 1), ("out", n - 1) if r == ROOT else ("publish", 1)),
    "broadcast": lambda r, n: (("in", n),) if r == ROOT else (("out", n),),
    "all_gather": lambda r, n: (("in", 1), ("out", n - 1), ("own", 1)),
    "reduce_scatter": lambda r, n: (("in", n - 1), ("sum", 1), ("add", n - 2)),
    "all_to_all": lambda r, n: (("in", n - 1), ("out", n - 1), ("own", 1)),
    "gather": lambda r, n: (("out", n - 1), ("own", 1)) if r == ROOT else (("in", 1),),
    "scatter": lambda r, n: (("in", n - 1), ("own", 1)) if r == ROOT else (("out", 1),),
    "sendrecv": lambda r, n: (("in", n), ("out", n)),
    "barrier": lambda r, n: (),
}
# With direct access nothing is copied to a staging buffer, and these need not leave the work to the root.
_STAGING = ("in", "publish")
_DIRECT: dict[str, Callable[[int, int], Work]] = {
    "reduce": lambda r, n: (("add", n - 1),),
    "gather": lambda r, n: (("put", 1),),
    "scatter": lambda r, n: (("out", 1),),
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
    steps = _DIRECT.get(op, _WORK[op]) if direct else _WORK[op]
    if op == "reduce" and not direct and min(world, processors or world) <= 2:
        return (("add_each", world * (world - 1)),) if rank == ROOT else (("in", world),)
    return tuple(step for step in steps(rank, world) if step[1] and not (direct and step[0] in _STAGING))


class Stages:
    """Bound with staging buffers, one for each rank, in shared memory: `world` times `window` bytes of it.

    `processors` is the number that the ranks share, if they do not have one each.
    """

    name = LIMIT

    def __init__(self, memory: Any, window: int, processors: int | None = None) -> None:
        self.window, self.memory, self.processors = window, memory, processors

    @property
    def make(self) -> Make | None:
        """Function that allocates the tensors, if not just any will do."""
        return None

    def bind(self, operation: MeasuredOperation, buffers: Buffers) -> Action:
        """Return the bound as a call that can be timed."""
        todo = list(kernels(operation.name, buffers, self))

        def run() -> None:
            for kernel, *operands in todo:
                kernel(*operands)

        return run

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
    """Bound with all ranks' tensors in shared memory: `world` times `capacity` bytes of it."""

    name = DIRECT

    def __init__(self, memory: Any, capacity: int, window: int, rank: int) -> None:
        super().__init__(memory, window)
        self.capacity, self.rank = capacity, rank

    @property
    def make(self) -> Make:
        """Function that allocates new tensors of the rank here; those that others read come first."""
        free = [self.rank * self.capacity]

        def make(count: int, dtype: torch.dtype) -> Tensor:
            offset = free[0]
            free[0] += count * dtype.itemsize
            return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset) if count else torch.empty(0)

        return make

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


def _sum(target: Tensor, source: Tensor, own: Tensor) -> Any:
    return torch.add(own, source, out=target)


def kernels(op: str, b: Buffers, stages: Stages) -> Iterator[tuple[Any, ...]]:
    """Yield the work on a rank's tensors, in order: (kernel, tensor written, tensors read)."""
    steps, parts = work(op, b.rank, b.world, stages.name == DIRECT, stages.processors), b.world
    if not any(blocks % parts for _, blocks in steps):
        # A step of all blocks takes the whole buffer, by one call of a kernel.
        steps, parts = tuple((kind.removesuffix("_each"), blocks // parts) for kind, blocks in steps), 1
    block = -(-b.whole // parts)
    # All blocks of one round share the window, as they share a backend's staging buffer. Slots begin at cache lines, as
    # a backend's do, for faster copies.
    share = stages.window // max((blocks for kind, blocks in steps if kind in ("in", "out")), default=1)
    piece = max(1, min(block, (share // LINE_BYTES * LINE_BYTES or share) // b.result.dtype.itemsize))

    def window(tensor: Tensor, number: int, begin: int) -> Tensor:
        """Return a window of one block of a private tensor; numbers wrap where it has fewer blocks."""
        start = number % max(1, tensor.numel() // block) * block
        return tensor[start + begin : min(start + begin + piece, start + block, tensor.numel())]

    for begin, (kind, blocks) in product(range(0, block, piece), steps):
        for number in range(blocks):
            first, second, peer, slot = stages.blocks(op, kind, number, b)
            source, result = window(b.source, first, begin), window(b.result, second, begin)
            private = source if kind in ("in", "put") else result
            if private.numel():
                where = slot % parts, (block, begin, piece), private.numel(), private.dtype
                mine, other = stages.slot(b.rank, *where), stages.slot(peer, *where)
                yield {
                    "in": (Tensor.copy_, mine, source),
                    "publish": (Tensor.copy_, mine, result),
                    "put": (Tensor.copy_, other, source),
                    "out": (Tensor.copy_, result, other),
                    "own": (Tensor.copy_, result, source),
                    "add": (Tensor.add_, result, other),
                    "sum": (_sum, result, other, source),
                }[kind]
