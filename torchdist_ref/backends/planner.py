"""Planner: from a call and its tensors to a plan, through a cache.

What all ranks must agree on becomes the plan's announcement (`calls.signature`): operation, reduction, root,
dtype and shapes. Two ranks with the same announcement make the same choice of algorithm and cut their
tensors alike, because nothing else goes into either. Don't add anything that only one rank knows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.backends.operands import IN_PLACE, Sizes
from torchdist_ref.backends.plan import Plan
from torchdist_ref.backends.reductions import reduction
from torchdist_ref.calls import Call, Shape, fingerprint, signature
from torchdist_ref.errors import ArgumentError
from torchdist_ref.schedules import catalogue
from torchdist_ref.schedules.choose import choose, overrides
from torchdist_ref.schedules.schedule import Schedule
from torchdist_ref.transports.base import Link
from torchdist_ref.transports.board import Record

# Programs repeat a few kinds of calls. One that keeps inventing shapes (objects of all sizes) must not fill the memory.
MOST = 1024

# Which list carries the blocks that every rank knows the sizes of.
_BLOCKS_IN_INPUTS = ("reduce_scatter", "all_to_all", "gather")


class Planner:
    """Plans of one link, by call, dtype and shapes."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._plans: dict[Any, Plan] = {}
        self._forced = overrides(os.environ.get("TORCHDIST_REF_ALGORITHM", ""))

    def plan(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Plan:
        """The plan for a call on these tensors; made on first use.

        Raises:
            ArgumentError: Tensors of different dtypes, or a reduction that makes no sense for the dtype.
        """
        if call.op in IN_PLACE:
            key: Any = (call, outputs[0].dtype, outputs[0].shape)
        else:
            key = (call, *((t.dtype, t.shape) for t in inputs), None, *((t.dtype, t.shape) for t in outputs))
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST:
                self._plans.clear()
            plan = self._plans[key] = self._make(call, inputs, outputs)
        return plan

    def _make(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Plan:
        if call.op == "barrier":
            return self._assemble(call, None, [], False)
        tensors = [*inputs, *outputs]
        if len({t.dtype for t in tensors}) > 1:
            dtypes = sorted({str(t.dtype) for t in tensors})
            raise ArgumentError(f"{call.op}: all tensors need one dtype, got {dtypes}.")
        alike = len({t.shape for t in tensors}) == 1
        return self._assemble(call, tensors[0], self._blocks(call.op, inputs, outputs), alike)

    def _blocks(self, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Shape]:
        """Shapes of the call's blocks: one where they are all alike."""
        shapes = [tuple(t.shape) for t in (inputs if op in _BLOCKS_IN_INPUTS else outputs)]
        return shapes[:1] if len(set(shapes)) == 1 else shapes

    def _assemble(self, call: Call, like: Tensor | None, shapes: list[Shape], alike: bool) -> Plan:
        dtype = torch.uint8 if like is None else like.dtype
        blocks = tuple(torch.Size(shape).numel() for shape in shapes)
        text = signature(call, str(dtype).removeprefix("torch."), shapes)
        schedule = self._schedule(call, sum(blocks) * dtype.itemsize, even=len(blocks) < 2)
        name = getattr(call, "reduction", None)
        return Plan(
            link=self._link,
            record=Record(fingerprint(text), text.encode()),
            schedule=schedule,
            sizes=Sizes(call.op, blocks or (0,), schedule.chunks),
            dtype=dtype,
            shape=shapes[0] if alike else None,
            reduction=None if name is None else reduction(name, dtype, call.op),
            divide=self._link.size if name == "avg" else 0,
        )

    def _schedule(self, call: Call, nbytes: int, even: bool) -> Schedule:
        world, hosts = self._link.size, self._link.hosts
        algorithm = self._forced.get(call.op) or choose(call.op, world, nbytes, hosts=hosts)
        # Others keep blocks of several ranks in scratch of one size.
        if not even:
            algorithm = "direct"
        return catalogue.build(call.op, algorithm, world, getattr(call, "root", 0), hosts=hosts)
