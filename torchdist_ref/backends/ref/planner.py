"""Planner: makes the plan of a call on given tensors, and caches what the executor compiles from it.

Everything that all ranks must agree on becomes the plan's announcement (`calls.signature`): operation, reduction, root,
dtype and shapes. Ranks with equal announcements choose the same algorithm and divide their tensors alike, because
nothing else is used for either. Do not add anything that only one rank knows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from torchdist_ref.backends.base import RowBlocks, nbytes_of, refuse_unsupported
from torchdist_ref.backends.reductions import QUANTIZED, reduction
from torchdist_ref.backends.ref.handshake import announcement_of
from torchdist_ref.backends.ref.plan import Plan, Sizes
from torchdist_ref.calls import Call, Shape, signature
from torchdist_ref.errors import ArgumentError, UnsupportedError, on_rank
from torchdist_ref.schedules import catalogue
from torchdist_ref.schedules.schedule import Schedule
from torchdist_ref.transports.link import Link

# Programs repeat a few kinds of calls. One that keeps inventing shapes (objects of all sizes) must not fill the memory.
MOST_PLANS = 1024

Lists = tuple[Sequence[Tensor], Sequence[Tensor]]

# Properties of a tensor that a plan depends on.
_kind = attrgetter("dtype", "shape", "is_cpu", "requires_grad")

# Operations whose inputs are the blocks that every rank knows the sizes of; in the others the outputs are.
_BLOCKS_IN_INPUTS = ("reduce_scatter", "all_to_all", "gather")


class Executor(Protocol):
    """Executor, as the planner knows it.

    Attributes:
        name: Its name, which ranks compare with the call.
    """

    name: str

    def compile(self, plan: Plan) -> Any:
        """Return what the executor makes of a plan, to be cached with it."""


Planned = tuple[Plan, Any]
"""A plan, and what the executor has made of it."""


class Planner:
    """Plans of one link, by call, dtype and shapes."""

    def __init__(self, link: Link, executor: Executor) -> None:
        self._link, self._executor = link, executor
        self.plans: dict[Any, Planned] = {}
        self._forced = catalogue.overrides(os.environ.get("TORCHDIST_REF_ALGORITHM", ""))

    def plan(self, call: Call, tensors: Sequence[Tensor], inputs: int, lists: Lists) -> Planned:
        """Return the plan of a call on these operands, and what the executor has made of it.

        Args:
            call: The operation.
            tensors: The operands that the plan will run on (`base.flat_operands`).
            inputs: Number of operands that are inputs only.
            lists: The inputs and the outputs, block by block.

        Raises:
            ArgumentError: Tensors of different dtypes, or a reduction that makes no sense for the dtype.
        """
        if len(tensors) == 1:
            # Quicker than `_kind`, and most calls have one tensor.
            t = tensors[0]
            key: Any = (call, inputs, t.dtype, t.shape, t.is_cpu, t.requires_grad)
        else:
            key = (call, inputs, *map(_kind, tensors)) if tensors else call
        found = self.plans.get(key)
        if found is None:
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
            plan = self._make(call, tensors, inputs, lists)
            found = self.plans[key] = plan, self._executor.compile(plan)
        return found

    def _make(self, call: Call, tensors: Sequence[Tensor], inputs: int, lists: Lists) -> Plan:
        if len({t.dtype for t in tensors}) > 1:
            dtypes = sorted({str(t.dtype) for t in tensors})
            raise ArgumentError(f"{call.op}: all tensors need one dtype, got {dtypes}.")
        refuse_unsupported(call, tensors, "ref", ("cpu", "cuda"))
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
        text = f"{call} of {kind}" if uneven else signature(call, kind, shapes)
        schedule = self._schedule(call, sum(blocks) * dtype.itemsize, even=len(blocks) < 2 and not uneven)
        name = getattr(call, "reduction", None)
        if name is not None:
            # Raises if the reduction makes no sense for this dtype.
            reduction(name, dtype, call.op)
        return Plan(
            rank=self._link.rank,
            record=announcement_of(text, self._executor.name),
            schedule=schedule,
            sizes=Sizes(call.op, blocks or (0,), schedule.chunks, rows),
            dtype=dtype,
            inputs=inputs,
            nbytes=nbytes_of(*lists),
            shape=_shape_of_all(lists, flat=bool(rows)),
            capacity=self._link.layout.window,
            reduction=name,
            root=getattr(call, "root", 0),
            uneven=uneven,
            on_host=all(t.is_cpu for t in tensors),
            forced=call.op in self._forced,
            flat=not dtype.is_complex and not (dtype.is_floating_point and any(t.numel() == 1 for t in tensors)),
            requires_grad=any(t.requires_grad for t in tensors),
        )

    def _blocks(self, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Shape]:
        """Return the shapes of the call's blocks: one where they are all alike."""
        shapes = [tuple(t.shape) for t in (inputs if op in _BLOCKS_IN_INPUTS else outputs)]
        return shapes[:1] if len(set(shapes)) == 1 else shapes

    def _schedule(self, call: Call, nbytes: int, even: bool) -> Schedule:
        world, hosts = self._link.size, self._link.hosts
        algorithm = self._forced.get(call.op) or catalogue.choose(call.op, world, nbytes, hosts=hosts)
        # Other algorithms keep blocks of several ranks in scratch of one size.
        if not even:
            algorithm = "direct"
        return catalogue.build(call.op, algorithm, world, getattr(call, "root", 0), hosts=hosts)


def _shape_of_all(lists: Lists, flat: bool) -> Shape | None:
    """Return the shape of all blocks, if they have one; rows are taken out of their tensor flat."""
    shapes = {tuple(t.shape) for blocks in lists for t in blocks}
    shape = shapes.pop() if len(shapes) == 1 else None
    return None if flat and shape is not None and len(shape) != 1 else shape
