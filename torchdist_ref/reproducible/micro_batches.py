"""Gradients of a fixed number of micro-batches, summed along one tree, however many ranks share them.

The tree of all micro-batches is the one of the ranks, whose leaves are the trees of each rank's own micro-batches
(`schedules.reduction_tree`), if each rank has ``2^k`` consecutive ones. So a rank sums its own along a tree, and an
`all_reduce` does the rest. The sum of a rank is complete only after its last backward pass, in which DDP communicates.
A communication hook adds the other parts to the bucket before that.

Do not add here: what else changes bits (`conditions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.futures import Future

from torchdist_ref import groups
from torchdist_ref.algorithms.ddp_comm_hooks.hook_support import HookGroup, comm_hook, single_tensor
from torchdist_ref.errors import ArgumentError, explain

__all__ = ["MicroBatches"]

EXACT = (torch.float32, torch.float64)


class MicroBatches:
    """Average of the gradients of some micro-batches, with the same bits on any number of ranks.

    Ranks have equally many consecutive micro-batches each: a power of two. So 8 micro-batches run on 1, 2, 4 or 8
    ranks, and 12 on 3, 6 or 12. All micro-batches need the same number of samples.

    Args:
        count: Number of micro-batches of one step, on all ranks together.
        model: A `DistributedDataParallel`, ours or torch's, without a communication hook; this registers one.
        group: Group over which the model averages. Default: the default group.

    Attributes:
        mine: Numbers of this rank's micro-batches.

    Raises:
        ArgumentError: The micro-batches are not divided evenly, or by no power of two; or a parameter is neither
            float32 nor float64, since partial sums of 16-bit floats would be rounded on each rank.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.reproducible import MicroBatches
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     torch.manual_seed(0)
        ...     model = dist.DistributedDataParallel(torch.nn.Linear(5, 1))
        ...     optimizer, batches = torch.optim.SGD(model.parameters(), 0.1), MicroBatches(8, model)
        ...     for step in range(3):
        ...         optimizer.zero_grad()
        ...         for number in batches.step():
        ...             generator = torch.Generator().manual_seed(100 * step + number)
        ...             model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        ...         optimizer.step()
        ...     return model.module.weight.tolist()
        >>> weights = [run(program, size, ranks="processes")[-1] for size in (1, 2, 8)]
        >>> weights[0] == weights[1] == weights[2]
        True
    """

    def __init__(self, count: int, model: nn.Module, group: Any = None) -> None:
        size, rank = groups.get_world_size(group), groups.get_rank(group)
        each = count // size if count > 0 else 0
        if each * size != count or each & (each - 1) or not each:
            expected = f"{size} (the number of ranks) times a power of two"
            raise ArgumentError(explain("MicroBatches", "count", expected, count))
        self._module = cast(Any, model)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in self._parameters.items():
            if parameter.dtype not in EXACT:
                expected = f"float32 or float64 parameters, and {name!r} is {parameter.dtype}"
                raise ArgumentError(explain("MicroBatches", "model", expected, type(model).__name__))
        self.count, self.mine = count, range(rank * each, (rank + 1) * each)
        self._group = group
        # Partial sums of each parameter's gradients, of 2^k micro-batches each, the largest first.
        self._partial: dict[Tensor, list[tuple[int, Tensor]]] = {each: [] for each in self._parameters.values()}
        self._module.register_comm_hook(self, _sum_of_all)

    def step(self) -> Iterator[int]:
        """Yield the numbers of this rank's micro-batches; run forward and backward of one before the next.

        All but the last run under ``model.no_sync()``. After the last, the gradients are averages over all
        micro-batches. Set the gradients to zero before a step.

        Raises:
            ArgumentError: A parameter has no gradient in a micro-batch, so that the sums would have other leaves on
                another number of ranks.
        """
        for partial in self._partial.values():
            partial.clear()
        for parameter in self._parameters.values():
            parameter.grad = None
        for number in self.mine:
            last = number == self.mine[-1]
            with nullcontext() if last else self._module.no_sync():
                yield number
            if not last:
                self._keep(number)

    def _keep(self, number: int) -> None:
        """Add the gradients of a micro-batch to the partial sums, and remove them from the parameters."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                expected = f"a model whose parameters all get gradients, and {name!r} got none in micro-batch {number}"
                raise ArgumentError(explain("MicroBatches", "model", expected, type(self._module).__name__))
            self._join(parameter, parameter.grad.detach().clone())
            parameter.grad = None

    def _join(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Combine a gradient with partial sums of as many micro-batches, again and again, and keep the result."""
        partial, leaves = self._partial[parameter], 1
        while partial and partial[-1][0] == leaves:
            gradient = partial.pop()[1] + gradient
            leaves *= 2
        partial.append((leaves, gradient))
        return gradient

    def sum_of_rank(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum of this rank's micro-batches, of which the gradient is the last one's."""
        total = self._join(parameter, gradient)
        self._partial[parameter].clear()
        return total

    @property
    def group(self) -> Any:
        """Group over which the hook sums."""
        return self._group


@comm_hook
def _sum_of_all(state: MicroBatches, bucket: Any) -> Future[Tensor]:
    """Sum a bucket over the micro-batches of this rank, then over the ranks, and divide by their number."""
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        gradient.copy_(state.sum_of_rank(parameter, gradient.clone()))
    group, buffer = HookGroup(state.group, bucket), bucket.buffer()
    return group.start_sum(buffer).then(lambda future: single_tensor(future).div_(state.count))
