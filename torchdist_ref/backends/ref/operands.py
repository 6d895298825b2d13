"""Which part of which tensor a slot of a schedule is: the one place that knows both words.

``data`` is the call's tensor in equal chunks (the last may be shorter or empty); ``in`` and ``out`` are
its lists, a block per index, or one tensor that has all blocks in a row (`base.RowBlocks`); ``tmp`` is scratch.
Sizes are elements, and every rank can compute the size of every slot of every rank, which is what lets a
receiver find a block in its sender's stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchdist_ref.schedules.schedule import Slot

IN_PLACE = frozenset(("all_reduce", "reduce", "broadcast"))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of every slot of one call.

    Attributes:
        op: The operation.
        blocks: In-place calls: one number, the tensor. Others: elements of block 0, 1, ... of the group.
        chunks: In-place calls: how many chunks the schedule cuts the tensor in.
        rows: Which of ``in`` and ``out`` are rows of one tensor.
        pairs: Of an uneven exchange: for each rank, what it gives each rank.
    """

    op: str
    blocks: tuple[int, ...]
    chunks: int
    rows: frozenset[str] = frozenset()
    pairs: tuple[tuple[int, ...], ...] = ()

    def of(self, rank: int, slot: Slot) -> int:
        """Elements of `slot` on `rank`."""
        buffer, index = slot
        if buffer == "tmp":
            return self.chunk(index % self.chunks) if self.op in IN_PLACE else self.largest
        if buffer == "data":
            return self.chunk(index)
        if self.pairs:
            return self.pairs[rank][index] if buffer == "in" else self.pairs[index][rank]
        whose = rank if self._own(buffer) else index
        return self.blocks[whose] if len(self.blocks) > 1 else self.blocks[0]

    def _own(self, buffer: str) -> bool:
        """Whether a buffer's one block belongs to the rank that holds it, as the input of a gather does."""
        gathers = self.op in ("all_gather", "gather")
        return gathers == (buffer == "in") and self.op != "all_to_all"

    def chunk(self, index: int) -> int:
        """Elements of one chunk of the tensor."""
        return max(0, min(self.stride, self.blocks[0] - index * self.stride))

    @property
    def stride(self) -> int:
        """Elements from one chunk to the next."""
        return -(-self.blocks[0] // max(1, self.chunks))

    @property
    def largest(self) -> int:
        """Elements of the largest slot."""
        return self.stride if self.op in IN_PLACE else max(self.blocks, default=0)

    def place(self, slot: Slot, inputs: int) -> tuple[int, int]:
        """Which of the call's operands a slot is part of, where `inputs` come first, and its first element there."""
        buffer, index = slot
        if buffer == "data":
            return 0, index * self.stride
        at = 0 if buffer == "in" else inputs
        return (at, index * self.blocks[0]) if buffer in self.rows else (at + index, 0)
