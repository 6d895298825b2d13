"""Planner: from a call and its tensors to a plan, through a cache.

What all ranks must agree on becomes the plan's announcement (`calls.signature`): operation, reduction, root,
dtype and shapes. Two ranks with the same announcement make the same choice of algorithm and cut their
tensors alike, because nothing else goes into either. Don't add anything that only one rank knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.backends.base import RowBlocks, nbytes_of, refuse_unsupported
from torchdist_ref.backends.reductions import reduction
from torchdist_ref.backends.ref.executor import Executor, Prepared
from torchdist_ref.backends.ref.one_gpu import on_one_gpu
from torchdist_ref.backends.ref.operands import Sizes
from torchdist_ref.backends.ref.plan import Plan
from torchdist_ref.backends.ref.stages_on_device import Stages
from torchdist_ref.backends.ref.staging import through_host
from torchdist_ref.backends.ref.uneven import Uneven
from torchdist_ref.backends.ref.zero_copy import lending
from torchdist_ref.calls import Call, Shape, fingerprint, signature
from torchdist_ref.errors import ArgumentError
from torchdist_ref.schedules import catalogue
from torchdist_ref.schedules.choose import choose, overrides
from torchdist_ref.schedules.schedule import Schedule
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.registered_memory import PeerMemory
from torchdist_ref.transports.status_table import ZERO_COPY_BITS, Announcement

# Programs repeat a few kinds of calls. One that keeps inventing shapes (objects of all sizes) must not fill the memory.
MOST = 1024

Lists = tuple[Sequence[Tensor], Sequence[Tensor]]

# What of a tensor a plan depends on.
_kind = attrgetter("dtype", "shape", "is_cpu", "requires_grad")

# Which list carries the blocks that every rank knows the sizes of.
_BLOCKS_IN_INPUTS = ("reduce_scatter", "all_to_all", "gather")


class Planner:
    """Plans of one link, by call, dtype and shapes."""

    def __init__(self, link: Link, executor: Executor) -> None:
        self._link, self._executor = link, executor
        self._plans: dict[Any, Prepared] = {}
        self._neighbours = tuple(PeerMemory(row.pid) for row in link.rows)
        self._stages = Stages(link, self._neighbours)
        self._uneven = Uneven(link, executor)
        self._forced = overrides(os.environ.get("TORCHDIST_REF_ALGORITHM", ""))

    def plan(self, call: Call, tensors: Sequence[Tensor], inputs: int, lists: Lists) -> Prepared:
        """The plan for a call on these operands; made on first use.

        Args:
            call: What to do.
            tensors: What the plan will run on (`base.flat_operands`).
            inputs: How many of them are inputs only.
            lists: The inputs and the outputs, block by block.

        Raises:
            ArgumentError: Tensors of different dtypes, or a reduction that makes no sense for the dtype.
        """
        if len(tensors) == 1:
            # By hand it is quicker, and most calls have one tensor.
            t = tensors[0]
            key: Any = (call, inputs, t.dtype, t.shape, t.is_cpu, t.requires_grad)
        else:
            key = (call, inputs, *map(_kind, tensors)) if tensors else call
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST:
                self._plans.clear()
            plan = self._plans[key] = self._make(call, tensors, inputs, lists)
        return plan

    def _make(self, call: Call, tensors: Sequence[Tensor], inputs: int, lists: Lists) -> Prepared:
        if len({t.dtype for t in tensors}) > 1:
            dtypes = sorted({str(t.dtype) for t in tensors})
            raise ArgumentError(f"{call.op}: all tensors need one dtype, got {dtypes}.")
        refuse_unsupported(call, tensors, "ref", ("cpu", "cuda"))
        dtype = tensors[0].dtype if tensors else torch.uint8
        shapes = self._blocks(call.op, *lists)
        rows = frozenset(name for name, blocks in zip(("in", "out"), lists, strict=True) if type(blocks) is RowBlocks)
        blocks = tuple(torch.Size(shape).numel() for shape in shapes)
        uneven = getattr(call, "uneven", False)
        kind = str(dtype).removeprefix("torch.")
        # Of an uneven exchange, ranks hear the sizes in the course of the call.
        text = f"{call} of {kind}" if uneven else signature(call, kind, shapes)
        schedule = self._schedule(call, sum(blocks) * dtype.itemsize, even=len(blocks) < 2 and not uneven)
        name = getattr(call, "reduction", None)
        plan = Plan(
            link=self._link,
            record=Announcement(fingerprint(text) & ~ZERO_COPY_BITS, text.encode()),
            schedule=schedule,
            sizes=Sizes(call.op, blocks or (0,), schedule.chunks, rows),
            dtype=dtype,
            inputs=inputs,
            nbytes=nbytes_of(*lists),
            shape=_shape_of_all(lists, flat=bool(rows)),
            reduction=None if name is None else reduction(name, dtype, call.op),
            divide=self._link.size if name == "avg" else 0,
            fits=_fits(dtype, tensors),
        )
        on_host, through = all(t.is_cpu for t in tensors), partial(through_host, call=call, inputs=inputs)
        if uneven:
            return self._uneven.prepared(plan, None if on_host else through)
        root = getattr(call, "root", 0)
        if not on_host:
            shared = None if call.op in self._forced else on_one_gpu(plan, root, self._stages)
            return self._executor.prepared(plan, shared, through)
        lent = None if call.op in self._forced else lending(plan, root, self._neighbours)
        return self._executor.prepared(plan, lent)

    def _blocks(self, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Shape]:
        """Shapes of the call's blocks: one where they are all alike."""
        shapes = [tuple(t.shape) for t in (inputs if op in _BLOCKS_IN_INPUTS else outputs)]
        return shapes[:1] if len(set(shapes)) == 1 else shapes

    def _schedule(self, call: Call, nbytes: int, even: bool) -> Schedule:
        world, hosts = self._link.size, self._link.hosts
        algorithm = self._forced.get(call.op) or choose(call.op, world, nbytes, hosts=hosts)
        # Others keep blocks of several ranks in scratch of one size.
        if not even:
            algorithm = "direct"
        return catalogue.build(call.op, algorithm, world, getattr(call, "root", 0), hosts=hosts)


def _shape_of_all(lists: Lists, flat: bool) -> Shape | None:
    """The shape of all blocks, if they have one; rows are taken out of their tensor flat."""
    shapes = {tuple(t.shape) for blocks in lists for t in blocks}
    shape = shapes.pop() if len(shapes) == 1 else None
    return None if flat and shape is not None and len(shape) != 1 else shape


def _fits(dtype: torch.dtype, tensors: Sequence[Tensor]) -> Callable[[Tensor], bool]:
    """What tells of tensors of this kind, one by one, whether they are plain rows of values.

    A contiguous tensor can be read through a conjugation or a minus sign (`Tensor.conj`): complex ones, and of the
    imaginary parts of such tensors single elements.
    """
    if any(t.requires_grad for t in tensors):
        return lambda tensor: False
    if dtype.is_complex:
        return lambda tensor: tensor.is_contiguous() and not tensor.is_conj()
    if dtype.is_floating_point and any(t.numel() == 1 for t in tensors):
        return lambda tensor: tensor.is_contiguous() and not tensor.is_neg()
    return Tensor.is_contiguous
