"""The last bucket, averaged where its gradients lie: where ranks share memory, and no hook has to be shown a buffer.

Buckets travel while backward still computes, at the price of a copy in and a copy out. The last one is full when
backward is over: there is nothing left to hide its way. And between ranks that share memory the copies are what costs:
to add up takes about as long as one of them. So it has no buffer, and its gradients are averaged in place, at the end
of backward. Which parameters it has is decided in `reducer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.parallel.bucket import dense_strides, split
from torchdist_ref.parallel.options import Options

# Bytes from which on a gradient is worth calls of its own; smaller ones are laid together.
LARGE = 512 * 1024
# Bytes that are divided, and then added up while they are in a core's cache.
PIECE = 2 * 1024 * 1024


def suits(options: Options, parameters: Sequence[torch.Tensor], group: Any) -> bool:
    """Whether that can be done: gradients are not to be views of a buffer, and none is to be left as it is."""
    asked = options.pointing or options.find_unused or options.static_graph
    return not asked and all(parameter.is_cpu for parameter in parameters) and bool(group.backend.shares_memory)


class InPlace:
    """The gradients of some parameters, all of them dense, of one dtype and on the CPU.

    Args:
        parameters: In an order that is the same on all ranks.
        group: Who averages.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: Any) -> None:
        self.parameters = parameters
        self.group = group
        self._large = [parameter for parameter in parameters if parameter.nbytes >= LARGE]
        small = [parameter for parameter in parameters if parameter.nbytes < LARGE]
        self._small = [_Pack(small)] if small else []

    def average(self, divisor: float) -> None:
        """Every gradient becomes the sum of all ranks' over ``divisor``; where there is none it counts as zeros."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for parameter in self._large:
            row = _row(parameter)
            if row is not None:
                self._sum(row, divisor)
            else:
                self._sum_pack(_Pack([parameter]), divisor)
        for pack in self._small:
            self._sum_pack(pack, divisor)

    def shadow(self) -> None:
        """What a rank without inputs adds: zeros. Its own gradients stay as they are."""
        for parameter in self._large:
            self._sum(parameter.new_zeros(parameter.numel()), 1.0)
        for pack in self._small:
            self._sum(pack.row.zero_(), 1.0)

    def _sum_pack(self, pack: _Pack, divisor: float) -> None:
        pack.load()
        self._sum(pack.row, divisor)
        pack.store()

    def _sum(self, row: torch.Tensor, divisor: float) -> None:
        # Divided first, so that sums of half-precision gradients stay in range.
        for piece in row.split(PIECE // row.element_size()):
            groups.all_reduce(piece.mul_(1.0 / divisor), group=self.group)


class _Pack:
    """A row of values, one parameter's gradient after the other, in the order in which the parameters' own lie."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.row = parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))
        self._views = split(self.row, parameters)

    def load(self) -> None:
        torch._foreach_copy_(self._views, self._gradients())

    def store(self) -> None:
        torch._foreach_copy_(self._gradients(), self._views)

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad.detach() for parameter in self.parameters if parameter.grad is not None]


def _row(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter as a row, if it has that dtype and its values lie in memory as the parameter's do."""
    gradient = parameter.grad
    if gradient is None or gradient.dtype is not parameter.dtype or gradient.is_sparse:
        return None
    rows = gradient.is_contiguous() and parameter.is_contiguous()
    alike = rows or gradient.stride() == dense_strides(parameter)
    return gradient.detach().as_strided((parameter.numel(),), (1,)) if alike else None
