"""Data parallelism in its simplest form: one all_reduce per gradient, as soon as autograd has accumulated it.

The first step of the tutorial on DDP, and the oracle of its tests. `DistributedDataParallel` adds buckets, overlap with
backward, hooks and unused parameters. Do not add any of them here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchdist_ref import groups
from torchdist_ref.algorithms.division import Divisor, average

__all__ = ["NaiveDataParallel"]


class NaiveDataParallel(nn.Module):
    """A module whose gradients are averaged over the ranks of a group, one by one.

    Every parameter that requires a gradient has to take part in every backward pass, in the same order on all ranks.

    Args:
        module: The model of this rank; the same on every rank.
        process_group: The group. Default None: the default group.

    Example:
        >>> import torch
        >>> from torchdist_ref.parallel.naive import NaiveDataParallel
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     model = NaiveDataParallel(torch.nn.Linear(2, 1, bias=False))
        ...     model(torch.tensor([[1.0, 10.0 * rank]])).sum().backward()
        ...     return model.module.weight.grad.tolist()
        >>> run(program, 2)
        [[[1.0, 5.0]], [[1.0, 5.0]]]
    """

    def __init__(self, module: nn.Module, process_group: Any = None) -> None:
        super().__init__()
        self.module, self.process_group = module, process_group
        self.divisor = Divisor(groups.get_world_size(process_group))
        self._broadcast(module.parameters())
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Receive rank 0's buffers, and run the module."""
        self._broadcast(self.module.buffers())
        return self.module(*inputs, **kwargs)

    def _broadcast(self, tensors: Any) -> None:
        for tensor in tensors:
            groups.broadcast(tensor.detach(), group=self.process_group, group_src=0)

    def _average(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            groups.all_reduce(average(parameter.grad, self.divisor), group=self.process_group)
