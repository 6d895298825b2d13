"""The order of a backward pass, where the graph leaves it open: an edge without data.

`depend` makes the backward pass of one tensor begin only after that of another has ended. Between them goes a
*phony*, a tensor of no elements, from a fork in front of the first to a join behind the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["depend"]


class _Fork(torch.autograd.Function):
    """A tensor, and a phony that comes from it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return tensor.detach(), torch.empty(0, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Join(torch.autograd.Function):
    """A tensor that a phony leads to."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, phony: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def depend(later: Tensor, sooner: Tensor) -> tuple[Tensor, Tensor]:
    """Order two backward passes.

    Args:
        later: The gradient of this one is passed on only when that of the other has been.
        sooner: The other.

    Returns:
        The same two, to be used in place of them. Without gradients nothing changes.
    """
    if not (torch.is_grad_enabled() and later.requires_grad and sooner.requires_grad):
        return later, sooner
    later, phony = _Fork.apply(later)  # type: ignore[no-untyped-call]
    joined: Tensor = _Join.apply(sooner, phony)  # type: ignore[no-untyped-call]
    return later, joined
