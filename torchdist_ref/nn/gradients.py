"""Linear collectives and their transposes, by which gradients flow back through them.

Collectives that only move and add are linear maps, and the gradient of a linear map is its transpose, a collective
again: a broadcast becomes a sum, a gather becomes a scatter. So each class here defines two things, how to run it and
its transpose, and one autograd function serves all of them, for derivatives of any order.

The loss that is differentiated is the sum of the losses of all ranks, as if they were one program. Do not add anything
that is not linear here: it belongs in `functional`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdist_ref import groups
from torchdist_ref.errors import DistBackendError, add_note
from torchdist_ref.groups import ProcessGroup

Tensors = tuple[Tensor, ...]


class LinearMap(ABC):
    """Linear map from the tensors of all ranks to the tensors of all ranks, run as a collective."""

    @abstractmethod
    def run(self, tensors: Tensors) -> Tensors:
        """Communicate, and return this rank's results."""

    @abstractmethod
    def transposed(self) -> LinearMap:
        """Return the map from gradients of the results to gradients of the inputs."""


class _Apply(torch.autograd.Function):
    """Autograd function that runs a map forward, and its transpose backward."""

    @staticmethod
    def forward(ctx: Any, operation: LinearMap, *tensors: Tensor) -> Tensors:
        """Run the map."""
        ctx.operation = operation
        return operation.run(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run the transpose."""
        try:
            return (None, *apply(ctx.operation.transposed(), *grads))
        except DistBackendError as error:
            name = type(ctx.operation).__name__.removesuffix("Map")
            add_note(
                error,
                f"The call failed in the backward pass of nn.functional's {name}: every rank must run backward through "
                "the same collectives. A rank whose input requires no gradient does not make this call.",
            )
            raise


def apply(operation: LinearMap, *tensors: Tensor) -> Tensors:
    """Run a map on tensors, so that gradients flow back through it.

    Args:
        operation: The map.
        *tensors: This rank's inputs; none of them is changed.

    Returns:
        This rank's results, new tensors unless the map has output tensors.
    """
    results: Tensors = _Apply.apply(operation, *tensors)  # type: ignore[no-untyped-call]
    return results


def _allocated(outputs: Sequence[Tensor] | None, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the output tensors if there are any, else new ones."""
    # Detached: the results get their history from the map, not from the former values of the memory.
    return [t.detach() for t in outputs] if outputs is not None else [torch.empty_like(t) for t in like]


@dataclass(frozen=True)
class AllReduceMap(LinearMap):
    """Sum or average of all ranks' tensors on every rank. It is its own transpose."""

    group: ProcessGroup
    op: Any

    def run(self, tensors: Tensors) -> Tensors:
        """See `LinearMap.run`."""
        result = tensors[0].clone()
        groups.all_reduce(result, self.op, self.group)
        return (result,)

    def transposed(self) -> AllReduceMap:
        """See `LinearMap.transposed`."""
        return self


@dataclass(frozen=True)
class BroadcastMap(LinearMap):
    """Copy of one rank's tensor on all ranks. Backward, that rank gets the sum and the others zeros."""

    group: ProcessGroup
    root: int

    def run(self, tensors: Tensors) -> Tensors:
        """See `LinearMap.run`."""
        result = tensors[0].clone()
        groups.broadcast(result, group=self.group, group_src=self.root)
        return (result,)

    def transposed(self) -> ReduceMap:
        """See `LinearMap.transposed`."""
        return ReduceMap(self.group, self.root, groups.ReduceOp.SUM)


@dataclass(frozen=True)
class ReduceMap(LinearMap):
    """Sum on one rank, zeros on the others. Backward, all get that rank's gradient."""

    group: ProcessGroup
    root: int
    op: Any

    def run(self, tensors: Tensors) -> Tensors:
        """See `LinearMap.run`."""
        result = tensors[0].clone()
        groups.reduce(result, op=self.op, group=self.group, group_dst=self.root)
        return (result if self.group.rank() == self.root else result.zero_(),)

    def transposed(self) -> LinearMap:
        """See `LinearMap.transposed`."""
        if self.op == groups.ReduceOp.AVG:
            return ScaledMap(BroadcastMap(self.group, self.root), 1 / self.group.size())
        return BroadcastMap(self.group, self.root)


@dataclass(frozen=True)
class ScaledMap(LinearMap):
    """Map whose results are multiplied by a number: the transpose of an average."""

    operation: LinearMap
    factor: float

    def run(self, tensors: Tensors) -> Tensors:
        """See `LinearMap.run`."""
        return tuple(t * self.factor for t in self.operation.run(tensors))

    def transposed(self) -> ScaledMap:
        """See `LinearMap.transposed`."""
        return ScaledMap(self.operation.transposed(), self.factor)


@dataclass(frozen=True)
class GatherMap(LinearMap):
    """Tensors of all ranks on one, zeros on the others. Backward, each gets its part of that rank's gradients."""

    group: ProcessGroup
    root: int

    def run(self, tensors: Tensors) -> Tensors:
        """See `LinearMap.run`."""
        results = [torch.zeros_like(tensors[0]) for _ in range(self.group.size())]
        mine = results if self.group.rank() == self.root else None
        groups.gather(tensors[0], mine, group=self.group, group_dst=self.root)
        return tuple(results)

    def transposed(self) -> ScatterMap:
        """See `LinearMap.transposed`."""
        return ScatterMap(self.group, self.root)


@dataclass(frozen=True)
class ScatterMap(LinearMap):
    """One part of one rank's tensors on each rank. Backward, that rank gets the gradients and the others zeros."""

    group: ProcessGroup
    root: int

    def run(self, tensors: Tensors) -> Tensors:
        """See `LinearMap.run`."""
        result = torch.empty_like(tensors[0])
        mine = list(tensors) if self.group.rank() == self.root else None
        groups.scatter(result, mine, group=self.group, group_src=self.root)
        return (result,)

    def transposed(self) -> GatherMap:
        """See `LinearMap.transposed`."""
        return GatherMap(self.group, self.root)


@dataclass(frozen=True)
class AllGatherMap(LinearMap):
    """Tensors of all ranks on all. Backward, each gets the sum of all ranks' gradients for its tensor."""

    group: ProcessGroup

    def run(self, tensors: Tensors) -> Tensors:
        """See `LinearMap.run`."""
        results = [torch.empty_like(tensors[0]) for _ in range(self.group.size())]
        groups.all_gather(results, tensors[0], self.group)
        return tuple(results)

    def transposed(self) -> ReduceScatterMap:
        """See `LinearMap.transposed`."""
        return ReduceScatterMap(self.group, groups.ReduceOp.SUM)


@dataclass(frozen=True)
class ReduceScatterMap(LinearMap):
    """Sum, on each rank, of the tensors that the ranks have for it. Backward, all get all gradients."""

    group: ProcessGroup
    op: Any
    output: Tensor | None = None

    def run(self, tensors: Tensors) -> Tensors:
        """See `LinearMap.run`."""
        (result,) = _allocated(None if self.output is None else [self.output], tensors[:1])
        groups.reduce_scatter(result, list(tensors), self.op, self.group)
        return (result,)

    def transposed(self) -> LinearMap:
        """See `LinearMap.transposed`."""
        if self.op == groups.ReduceOp.AVG:
            return ScaledMap(AllGatherMap(self.group), 1 / self.group.size())
        return AllGatherMap(self.group)


@dataclass(frozen=True)
class AllToAllMap(LinearMap):
    """Tensor from each rank to each rank. Backward, each gradient returns to the rank that sent the tensor."""

    group: ProcessGroup
    shapes: tuple[torch.Size, ...]
    input_shapes: tuple[torch.Size, ...]
    outputs: tuple[Tensor, ...] | None = None

    def run(self, tensors: Tensors) -> Tensors:
        """See `LinearMap.run`."""
        results = _allocated(self.outputs, [tensors[0].new_empty(shape) for shape in self.shapes])
        groups.all_to_all(results, list(tensors), self.group)
        return tuple(results)

    def transposed(self) -> AllToAllMap:
        """See `LinearMap.transposed`."""
        return AllToAllMap(self.group, self.input_shapes, self.shapes)


@dataclass(frozen=True)
class AllToAllSingleMap(LinearMap):
    """`AllToAllMap` on the rows of one tensor. Backward, the numbers of rows sent and received are exchanged."""

    group: ProcessGroup
    shape: torch.Size
    input_shapes: torch.Size
    receive: list[int] | None
    send: list[int] | None
    output: Tensor | None = None

    def run(self, tensors: Tensors) -> Tensors:
        """See `LinearMap.run`."""
        (result,) = _allocated(None if self.output is None else [self.output], [tensors[0].new_empty(self.shape)])
        groups.all_to_all_single(result, tensors[0].contiguous(), self.receive, self.send, self.group)
        return (result,)

    def transposed(self) -> AllToAllSingleMap:
        """See `LinearMap.transposed`."""
        return AllToAllSingleMap(self.group, self.input_shapes, self.shape, self.send, self.receive)
