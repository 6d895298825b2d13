"""Limit: the copies and adds that no backend can avoid, and nothing else: by staging, and straight from peers' tensors.

What each rank must do is a formula (`work`), in blocks of one rank's part of the whole buffer. `bind` turns it into
the same tensor kernels that a backend would use, in the backend's windows, over a shared stage (`Stages`) or over
tensors in shared memory (`Tensors`: what registered buffers allow), without any waiting for one another, so that the
result is garbage and the time is a bound. It is timed in turn with the backends, as one more contestant, and where
ranks outnumber processors by the processor time that they take (see `timing.shared_out`). Below some 64 KiB the bound
shows what a call of torch from Python costs, and says nothing on memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.benchmark.operations import ROOT, Action, Buffers, Make, Operation
from torchdist_ref.transports.segment_layout import CACHE_LINE, window_for

Work = tuple[tuple[str, int], ...]
# Elements of a block, where in it a window begins, and how many it has.
Cut = tuple[int, int, int]
# A block of the own source, one of the own result, another rank, and the slot or block there.
Blocks = tuple[int, int, int, int]
# What the backend lays out at once between two ranks.
WINDOW = window_for(2)


def _reduce(rank: int, n: int) -> Work:
    gathered = ("out", n - 1) if rank == ROOT else ("lay", 1)
    return ("in", n - 1), ("add", n - 1), gathered


def _reduce_by_root(rank: int, n: int) -> Work:
    return (("add_each", n * (n - 1)),) if rank == ROOT else (("in", n),)


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
    """What a rank must do, in steps of so many blocks of 1/world of the whole buffer.

    It depends on how many `processors` there are, by default one for each rank, where one way has the least work and
    another the shortest: a reduction that the root does alone while the others copy keeps two processors busy, and
    needs no second round of copies; more processors gain from one in which each rank reduces a part.

    Steps: ``in`` copies to the own stage, ``out`` from another's, ``own`` from one private tensor to another, ``lay``
    a result to the own stage; ``add`` adds from others' stages into one block, ``add_each`` into each in turn, ``sum``
    writes the sum of a private block and one of another's stage. If `direct`, another's tensor stands for its stage,
    and ``put`` copies to it.

    >>> work("all_reduce", 0, 4)
    (('in', 3), ('add', 3), ('lay', 1), ('out', 3))
    >>> work("all_reduce", 0, 4, direct=True)
    (('add', 3), ('out', 3))
    """
    steps = (_DIRECT if direct else _WORK)[op]
    if steps is _reduce and min(world, processors or world) <= 2:
        steps = _reduce_by_root
    return tuple((kind, blocks) for kind, blocks in steps(rank, world) if blocks)


def cost(op: str, rank: int, world: int, direct: bool = False, processors: int | None = None) -> tuple[float, float]:
    """Bytes copied and bytes added by a rank, as parts of the whole buffer.

    >>> cost("all_reduce", 0, 2), cost("reduce", 0, 4), cost("reduce", 0, 4, processors=2)
    ((1.5, 0.5), (1.5, 0.75), (0.0, 3.0))
    """
    steps = work(op, rank, world, direct, processors)
    adds = sum(blocks for kind, blocks in steps if kind in _ADDS)
    return (sum(blocks for _, blocks in steps) - adds) / world, adds / world


_ADDS = ("add", "add_each", "sum")


class Stages:
    """A stage for every rank, in memory that all share: `world` times `window` bytes of it.

    `processors` is how many the ranks share, if they do not have one each.
    """

    def __init__(self, memory: Any, window: int = WINDOW, processors: int | None = None) -> None:
        self.window, self.memory, self.processors = window, memory, processors

    direct = False

    def slot(self, rank: int, number: int, cut: Cut, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements of the stage of a rank, in its slot of this number."""
        offset = rank * self.window + number * cut[2] * dtype.itemsize
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def blocks(self, op: str, kind: str, number: int, b: Buffers) -> Blocks:
        """Which blocks the step of this number works on."""
        # What a rank reads was written on another processor: never its own stage.
        peer = (b.rank + 1 + number % (b.world - 1)) % b.world
        return number, 0 if kind in ("add", "sum") else number, peer, number


class Tensors(Stages):
    """All ranks' tensors in memory that all share: `world` times `room` bytes of it."""

    direct = True

    def __init__(self, memory: Any, room: int, window: int = WINDOW) -> None:
        super().__init__(memory, window)
        self.room = room

    def slot(self, rank: int, number: int, cut: Cut, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements of what others read of a rank's tensors: a window of the block of this number."""
        offset = rank * self.room + (number * cut[0] + cut[1]) * dtype.itemsize
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def blocks(self, op: str, kind: str, number: int, b: Buffers) -> Blocks:
        """As it must be: each rank works on what nobody else does, and so on memory that another has written last."""
        if op in ("broadcast", "sendrecv"):
            return number, number, ROOT if op == "broadcast" else min(b.rank ^ 1, b.world - 1), number
        if op in ("gather", "scatter"):
            return b.rank, 0, ROOT, b.rank
        peer = (b.rank + 1 + number) % b.world
        theirs = {"all_reduce": peer, "all_gather": 0}.get(op, b.rank) if kind == "out" else b.rank
        return b.rank, peer if kind == "out" else b.rank, peer, theirs

    def maker(self, rank: int) -> Make:
        """What makes the tensors of a rank here, one after the other: what others read comes first."""
        free = [rank * self.room]

        def make(count: int, dtype: torch.dtype) -> Tensor:
            offset = free[0]
            free[0] += count * dtype.itemsize
            return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset) if count else torch.empty(0)

        return make


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
    steps, parts = _merged(work(op, b.rank, b.world, stages.direct, stages.processors), b.world)
    block = -(-b.whole // parts)
    # All blocks that are laid out in one round share the window, as they share a backend's stage.
    laid = max((blocks for kind, blocks in steps if kind in ("in", "out")), default=1)
    piece = max(1, min(block, _whole_lines(stages.window // laid) // b.result.dtype.itemsize))
    for begin in range(0, block, piece):
        for kind, blocks in steps:
            for number in range(blocks):
                first, second, peer, slot = stages.blocks(op, kind, number, b)
                yield from _kernel(kind, (first, second, peer, slot % parts), b, stages, (block, begin, piece))


def _whole_lines(nbytes: int) -> int:
    """What lies across cache lines is copied slower, so slots begin where lines do, as a backend's do."""
    return nbytes // CACHE_LINE * CACHE_LINE or nbytes


def _merged(steps: Work, world: int) -> tuple[Work, int]:
    """The steps, in parts of the whole buffer. One that takes all blocks takes the buffer, by one call of a kernel."""
    if any(blocks % world for _, blocks in steps):
        return steps, world
    return tuple(("add" if kind == "add_each" else kind, blocks // world) for kind, blocks in steps), 1


def _kernel(kind: str, blocks: Blocks, b: Buffers, stages: Stages, cut: Cut) -> Iterator[tuple[Any, ...]]:
    first, second, peer, number = blocks
    source, result = _piece(b.source, first, cut), _piece(b.result, second, cut)
    private = source if kind in ("in", "put") else result
    if private.numel() == 0:
        return
    place = (number, cut, private.numel(), private.dtype)
    mine, other = stages.slot(b.rank, *place), stages.slot(peer, *place)
    match kind:
        case "in" | "lay":
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
    """A window of one block of a private tensor; where it has fewer blocks, the numbers go round."""
    block, begin, piece = cut
    have = max(1, tensor.numel() // block)
    start = number % have * block + begin
    return tensor[start : min(start + piece, number % have * block + block, tensor.numel())]
