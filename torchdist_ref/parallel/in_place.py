"""The last bucket, averaged where its gradients lie: where ranks share memory, and nobody has to be shown a buffer.

Buckets travel while backward still computes, at the price of a copy in and a copy out. The last one is full when
backward is over: there is nothing left to hide its way. And between ranks that share memory the copies are what costs:
to add up takes about as long as one of them. So it has no buffer, and its gradients are averaged in place, at the end
of backward; in half precision if a hook has them travel so, piece by piece too. Hooks that do anything but average
see all buckets. Which parameters the last one has is decided in `reducer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.parallel.bucket import dense_strides, split
from torchdist_ref.parallel.exchange import Exchange
from torchdist_ref.parallel.options import Options

# Bytes from which on a gradient is worth calls of its own; smaller ones are laid together.
LARGE = 512 * 1024
# Bytes that are divided, and then added up while they are in a core's cache.
PIECE = 2 * 1024 * 1024


def suits(exchange: Exchange, options: Options, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether that can be done: gradients are not to be views of a buffer, and none is to be left as it is."""
    asked = options.pointing or options.find_unused or options.static_graph
    # Complex numbers would have to be taken apart before they are rounded.
    plain = all(each.is_cpu and not (exchange.dtype and each.is_complex()) for each in parameters)
    return plain and not asked and exchange.over is not None and bool(exchange.over.backend.shares_memory)


def agreed(exchange: Exchange, options: Options, parameters: Sequence[torch.Tensor], group: Any) -> bool:
    """Whether that can be done on all ranks: on some, a function of the user's may stand around the same hook."""
    vote = torch.tensor([suits(exchange, options, parameters)], dtype=torch.int32, device=parameters[0].device)
    groups.all_reduce(vote, groups.ReduceOp.MIN, group=group)
    return bool(vote.item())


class InPlace:
    """The gradients of some parameters, all of them dense, of one dtype and on the CPU.

    Args:
        parameters: In an order that is the same on all ranks.
        group: Who averages.
        dtype: In which values are divided and added up, if not in their own.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: Any, dtype: torch.dtype | None = None) -> None:
        self.parameters = parameters
        self.group = group
        self._dtype = dtype or (parameters[0].dtype if parameters else torch.float32)
        self._length = PIECE // self._dtype.itemsize
        self._large = [parameter for parameter in parameters if parameter.nbytes >= LARGE]
        small = [parameter for parameter in parameters if parameter.nbytes < LARGE]
        self._small = [_Pack(small, self._dtype)] if small else []
        rounds = any(parameter.dtype is not self._dtype for parameter in self._large)
        self._room = groups.empty_registered(self._length, dtype=self._dtype, group=group) if rounds else None

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
                self._sum_pack(_Pack([parameter], self._dtype), divisor)
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
        for piece in row.split(self._length):
            travelling = piece
            if self._room is not None and piece.dtype is not self._dtype:
                travelling = self._room[: len(piece)].copy_(piece)
            # Divided first, so that sums of half-precision gradients stay in range.
            groups.all_reduce(travelling.mul_(1.0 / divisor), group=self.group)
            if travelling is not piece:
                piece.copy_(travelling)


class _Pack:
    """A row of values, one parameter's gradient after the other, in the order in which the parameters' own lie."""

    def __init__(self, parameters: list[torch.Tensor], dtype: torch.dtype) -> None:
        self.parameters = parameters
        self.row = parameters[0].new_empty(sum(parameter.numel() for parameter in parameters), dtype=dtype)
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
