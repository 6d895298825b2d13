"""Operations: for each its buffers, the call through the public functions, the right result, and the bus factor.

Sizes are those of nccl-tests: the whole buffer of one rank, that is, of its result in an all_gather, and of
its input in a reduce_scatter. The bus factors are nccl-tests' too (its document PERFORMANCE.md): the algorithm
bandwidth (size by time) times the factor can be compared with a link's peak, whatever the number of ranks.

One row of the table at the end is one operation. Its least cost is in `limit`.

Ranks of an older library run this file too: use the library's public API alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.testing import fill

ROOT = 0
# A prime, so that no two chunks of a repeated pattern are alike.
_PERIOD = 65_521

Action = Callable[[], Any]
# From a number of elements and `dtype` to a tensor.
Make = Callable[..., Tensor]


@dataclass(frozen=True)
class Buffers:
    """One rank's tensors for one operation.

    Attributes:
        rank: This rank.
        world: Number of ranks.
        whole: Elements of the whole buffer.
        source: Tensor that is read. In calls that work in place, the same tensor as `result`.
        result: Tensor that is written.
    """

    rank: int
    world: int
    whole: int
    source: Tensor
    result: Tensor

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Split a whole buffer into one view a rank; an empty one into none."""
        return list(tensor.view(self.world, -1).unbind()) if tensor.numel() else []


Bind = Callable[[Any, Any, Buffers], Action]
Expected = Callable[[list[Tensor], int, int], Tensor | None]


@dataclass(frozen=True)
class MeasuredOperation:
    """Operation of the benchmark.

    Attributes:
        name: Name in schedules and reports.
        factor: Bus bandwidth over algorithm bandwidth, for a number of ranks.
        blocks: Blocks of the whole buffer, of one a rank, that a rank has in (source, result): ``"none"``, ``"one"``,
            ``"all"`` or ``"root's"``: all on the root. Without a source the operation works in place.
        bind: Function of an API (ours or torch's), a group and buffers that returns the call to time.
        expected: Function of all ranks' sources that returns the right result on a rank; None if it has none.
        splits: Whether the whole buffer consists of one block a rank.
        messages: Number of repetitions of the operation in one timed call.
    """

    name: str
    factor: Callable[[int], float]
    blocks: tuple[str, str]
    bind: Bind
    expected: Expected
    splits: bool = False
    messages: int = 1

    @property
    def in_place(self) -> bool:
        """Whether source and result are one tensor."""
        return self.blocks[0] == "none"

    @property
    def sized(self) -> bool:
        """Whether the operation moves bytes."""
        return self.name != "barrier"

    def whole(self, nbytes: int, world: int, dtype: torch.dtype) -> int:
        """Return the elements of the whole buffer: as many as fit in the bytes, but at least one for each block.

        >>> [OPERATIONS[name].whole(1030, 3, torch.float32) for name in ("all_reduce", "all_gather", "barrier")]
        [257, 255, 0]
        """
        if not self.sized:
            return 0
        grain = world if self.splits else 1
        return max(1, nbytes // dtype.itemsize // grain) * grain

    def buffers(self, rank: int, world: int, nbytes: int, dtype: torch.dtype, make: Make = torch.empty) -> Buffers:
        """Return new tensors of zeros for one rank; `make` allocates them (default: anywhere)."""
        whole = self.whole(nbytes, world, dtype)
        reads, writes = (make(_elements(side, rank, world, whole), dtype=dtype).zero_() for side in self.blocks)
        return Buffers(rank, world, whole, writes if self.in_place else reads, writes)

    def load(self, buffers: Buffers) -> None:
        """Write this rank's data to the source, and wrong values to a result that is only written."""
        buffers.result.fill_(99)
        buffers.source.copy_(pattern(buffers.rank, buffers.source.numel(), buffers.source.dtype))

    def answer(self, buffers: Buffers) -> Tensor | None:
        """Return the right result on this rank."""
        world, side = buffers.world, self.blocks[1 if self.in_place else 0]
        counts = [_elements(side, rank, world, buffers.whole) for rank in range(world)]
        data = [pattern(r, count, buffers.result.dtype) for r, count in enumerate(counts)]
        return self.expected(data, buffers.rank, world) if buffers.result.numel() else None


def _elements(side: str, rank: int, world: int, whole: int) -> int:
    return whole * {"none": 0, "one": 1, "all": world, "root's": world * (rank == ROOT)}[side] // world


def pattern(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return data of `torchdist_ref.testing.fill`, repeated after a prime number of elements, so that it is fast."""
    base = fill(rank, (min(count, _PERIOD),), dtype)
    return base if count <= _PERIOD else base.repeat(-(-count // _PERIOD))[:count]


def _sum(data: list[Tensor], rank: int, world: int) -> Tensor:
    return sum(data[1:], data[0])


def _sum_on_root(data: list[Tensor], rank: int, world: int) -> Tensor | None:
    return _sum(data, rank, world) if rank == ROOT else None


def _of_root(data: list[Tensor], rank: int, world: int) -> Tensor:
    return data[ROOT]


def _joined(data: list[Tensor], rank: int, world: int) -> Tensor:
    return torch.cat(data)


def _transposed(data: list[Tensor], rank: int, world: int) -> Tensor:
    return torch.cat([tensor.view(world, -1)[rank] for tensor in data])


def _part_of(whole: Callable[[list[Tensor], int, int], Tensor]) -> Expected:
    return lambda data, rank, world: whole(data, rank, world).view(world, -1)[rank]


def _in_place(name: str, *root: int) -> Bind:
    return lambda api, group, b: partial(getattr(api, name), b.result, *root, group=group)


def _barrier(api: Any, group: Any, b: Buffers) -> Action:
    return partial(api.barrier, group=group)


def _newest(api: Any, *names: str) -> Any:
    """Return the first of several names that an API has: torch renames functions and warns of the old names."""
    return next(getattr(api, name) for name in names if hasattr(api, name))


def _whole(*names: str) -> Bind:
    return lambda api, group, b: partial(_newest(api, *names), b.result, b.source, group=group)


def _all_to_all(api: Any, group: Any, b: Buffers) -> Action:
    return partial(api.all_to_all, b.parts(b.result), b.parts(b.source), group=group)


def _gather(api: Any, group: Any, b: Buffers) -> Action:
    return partial(api.gather, b.source, b.parts(b.result) or None, dst=ROOT, group=group)


def _scatter(api: Any, group: Any, b: Buffers) -> Action:
    return partial(api.scatter, b.result, b.parts(b.source) or None, src=ROOT, group=group)


def partner(rank: int, world: int) -> int | None:
    """Return the peer in send and receive: the next rank of even ones; None for the last of an odd number.

    >>> [partner(rank, 3) for rank in range(3)]
    [1, 0, None]
    """
    other = rank ^ 1
    return other if other < world else None


def _sendrecv(api: Any, group: Any, b: Buffers) -> Action:
    other = partner(b.rank, b.world)
    if other is None:
        return lambda: None
    send, recv = partial(api.send, b.source, other, group=group), partial(api.recv, b.result, other, group=group)
    first, second = (send, recv) if b.rank < other else (recv, send)

    return lambda: (first(), second())


def _received(data: list[Tensor], rank: int, world: int) -> Tensor | None:
    other = partner(rank, world)
    return None if other is None else data[other]


def _share(world: int) -> float:
    return (world - 1) / world


def _one(world: int) -> float:
    return 1.0


_ALL_GATHER = _whole("all_gather_single", "all_gather_into_tensor")
_REDUCE_SCATTER = _whole("reduce_scatter_single", "reduce_scatter_tensor")
_TABLE = (
    MeasuredOperation("all_reduce", lambda n: 2 * _share(n), ("none", "all"), _in_place("all_reduce"), _sum),
    MeasuredOperation("reduce", _one, ("none", "all"), _in_place("reduce", ROOT), _sum_on_root),
    MeasuredOperation("broadcast", _one, ("none", "all"), _in_place("broadcast", ROOT), _of_root),
    MeasuredOperation("all_gather", _share, ("one", "all"), _ALL_GATHER, _joined, splits=True),
    MeasuredOperation("reduce_scatter", _share, ("all", "one"), _REDUCE_SCATTER, _part_of(_sum), splits=True),
    MeasuredOperation("all_to_all", _share, ("all", "all"), _all_to_all, _transposed, splits=True),
    MeasuredOperation("gather", _share, ("one", "root's"), _gather, _joined, splits=True),
    MeasuredOperation("scatter", _share, ("root's", "one"), _scatter, _part_of(_of_root), splits=True),
    MeasuredOperation("sendrecv", _one, ("all", "all"), _sendrecv, _received, messages=2),
    MeasuredOperation("barrier", lambda n: 0.0, ("none", "none"), _barrier, lambda data, rank, world: None),
)
OPERATIONS = {operation.name: operation for operation in _TABLE}
