"""Collectives that only move and add are linear maps, and the gradient of a linear map is its transpose.

The transpose of a collective is a collective again: what was broadcast comes back as a sum, what was gathered is
scattered. So each class here says two things, how to run it and what its transpose is, and one autograd function
serves all of them, as often as one likes to differentiate. Anything that is not linear belongs into `functional`.

The loss that is differentiated is the sum of the losses of all ranks, as if they were one program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdist_ref import groups
from torchdist_ref.groups import ProcessGroup

Tensors = tuple[Tensor, ...]


class Transposable(ABC):
    """A collective as a linear map from the tensors of all ranks to the tensors of all ranks."""

    @abstractmethod
    def run(self, tensors: Tensors) -> Tensors:
        """Communicate, and return this rank's results."""

    @abstractmethod
    def transposed(self) -> Transposable:
        """The map that takes gradients of the results to gradients of the inputs."""


class _Apply(torch.autograd.Function):
    """Runs a map forwards, and its transpose backwards."""

    @staticmethod
    def forward(ctx: Any, operation: Transposable, *tensors: Tensor) -> Tensors:
        ctx.operation = operation
        return operation.run(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *apply(ctx.operation.transposed(), *grads))


def apply(operation: Transposable, *tensors: Tensor) -> Tensors:
    """Run a map on tensors, so that gradients come back through it.

    Args:
        operation: The map.
        *tensors: This rank's inputs; none of them is changed.

    Returns:
        This rank's results, new tensors unless the map was given memory to write to.
    """
    results: Tensors = _Apply.apply(operation, *tensors)  # type: ignore[no-untyped-call]
    return results


def _memory(given: Sequence[Tensor] | None, like: Sequence[Tensor]) -> list[Tensor]:
    # Detached: what is written here gets its history from the map, not from what the memory was before.
    return [t.detach() for t in given] if given is not None else [torch.empty_like(t) for t in like]


@dataclass(frozen=True)
class AllReduce(Transposable):
    """Every rank gets the sum or average of all, so every rank's gradient counts for every rank. Its own transpose."""

    group: ProcessGroup
    op: Any

    def run(self, tensors: Tensors) -> Tensors:
        result = tensors[0].clone()
        groups.all_reduce(result, self.op, self.group)
        return (result,)

    def transposed(self) -> AllReduce:
        return self


@dataclass(frozen=True)
class Broadcast(Transposable):
    """All ranks get one rank's tensor; backwards, that rank gets the sum and the others nothing."""

    group: ProcessGroup
    root: int

    def run(self, tensors: Tensors) -> Tensors:
        result = tensors[0].clone()
        groups.broadcast(result, group=self.group, group_src=self.root)
        return (result,)

    def transposed(self) -> Reduce:
        return Reduce(self.group, self.root, groups.ReduceOp.SUM)


@dataclass(frozen=True)
class Reduce(Transposable):
    """One rank gets the sum, the others zeros; backwards, all get that rank's gradient."""

    group: ProcessGroup
    root: int
    op: Any

    def run(self, tensors: Tensors) -> Tensors:
        result = tensors[0].clone()
        groups.reduce(result, op=self.op, group=self.group, group_dst=self.root)
        return (result if self.group.rank() == self.root else result.zero_(),)

    def transposed(self) -> Transposable:
        if self.op == groups.ReduceOp.AVG:
            return Scaled(Broadcast(self.group, self.root), 1 / self.group.size())
        return Broadcast(self.group, self.root)


@dataclass(frozen=True)
class Scaled(Transposable):
    """A map whose results are multiplied by a number: the transposes of averages."""

    operation: Transposable
    factor: float

    def run(self, tensors: Tensors) -> Tensors:
        return tuple(t * self.factor for t in self.operation.run(tensors))

    def transposed(self) -> Scaled:
        return Scaled(self.operation.transposed(), self.factor)


@dataclass(frozen=True)
class Gather(Transposable):
    """One rank gets the tensors of all, the others zeros; backwards, each gets its part of that rank's gradients."""

    group: ProcessGroup
    root: int

    def run(self, tensors: Tensors) -> Tensors:
        results = [torch.zeros_like(tensors[0]) for _ in range(self.group.size())]
        mine = results if self.group.rank() == self.root else None
        groups.gather(tensors[0], mine, group=self.group, group_dst=self.root)
        return tuple(results)

    def transposed(self) -> Scatter:
        return Scatter(self.group, self.root)


@dataclass(frozen=True)
class Scatter(Transposable):
    """Each rank gets its part of one rank's tensors; backwards, that rank gets them back and the others zeros."""

    group: ProcessGroup
    root: int

    def run(self, tensors: Tensors) -> Tensors:
        result = torch.empty_like(tensors[0])
        mine = list(tensors) if self.group.rank() == self.root else None
        groups.scatter(result, mine, group=self.group, group_src=self.root)
        return (result,)

    def transposed(self) -> Gather:
        return Gather(self.group, self.root)


@dataclass(frozen=True)
class AllGather(Transposable):
    """Every rank gets the tensors of all; backwards, each gets the sum of what the ranks have for its own."""

    group: ProcessGroup

    def run(self, tensors: Tensors) -> Tensors:
        results = [torch.empty_like(tensors[0]) for _ in range(self.group.size())]
        groups.all_gather(results, tensors[0], self.group)
        return tuple(results)

    def transposed(self) -> ReduceScatter:
        return ReduceScatter(self.group, groups.ReduceOp.SUM)


@dataclass(frozen=True)
class ReduceScatter(Transposable):
    """Each rank gets the sum of the tensors that the ranks have for it; backwards, all get all gradients."""

    group: ProcessGroup
    op: Any
    output: Tensor | None = None

    def run(self, tensors: Tensors) -> Tensors:
        (result,) = _memory(None if self.output is None else [self.output], tensors[:1])
        groups.reduce_scatter(result, list(tensors), self.op, self.group)
        return (result,)

    def transposed(self) -> Transposable:
        if self.op == groups.ReduceOp.AVG:
            return Scaled(AllGather(self.group), 1 / self.group.size())
        return AllGather(self.group)


@dataclass(frozen=True)
class AllToAll(Transposable):
    """Each rank has a tensor for each. Backwards, the gradients of what came from a rank go back to it."""

    group: ProcessGroup
    shapes: tuple[torch.Size, ...]
    come_back: tuple[torch.Size, ...]
    outputs: tuple[Tensor, ...] | None = None

    def run(self, tensors: Tensors) -> Tensors:
        results = _memory(self.outputs, [tensors[0].new_empty(shape) for shape in self.shapes])
        groups.all_to_all(results, list(tensors), self.group)
        return tuple(results)

    def transposed(self) -> AllToAll:
        return AllToAll(self.group, self.come_back, self.shapes)


@dataclass(frozen=True)
class AllToAllSingle(Transposable):
    """`AllToAll` on the rows of one tensor: backwards, the numbers of rows sent and received change places."""

    group: ProcessGroup
    shape: torch.Size
    come_back: torch.Size
    receive: list[int] | None
    send: list[int] | None
    output: Tensor | None = None

    def run(self, tensors: Tensors) -> Tensors:
        (result,) = _memory(None if self.output is None else [self.output], [tensors[0].new_empty(self.shape)])
        groups.all_to_all_single(result, tensors[0].contiguous(), self.receive, self.send, self.group)
        return (result,)

    def transposed(self) -> AllToAllSingle:
        return AllToAllSingle(self.group, self.come_back, self.shape, self.send, self.receive)
