"""Sparse gradients, averaged over the ranks without ever becoming dense.

Ranks touch different rows, so a flat buffer does not fit them: they bypass the buckets and the hook. How sparse tensors
are summed is `groups.sparse`; here is what a gradient has to be for it.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.errors import DistError


def average(parameter: torch.Tensor, name: str, group: Any, divisor: float) -> torch.Tensor:
    """The average of the ranks' gradients of one parameter, as a coalesced sparse tensor.

    Args:
        parameter: Its ``.grad`` is sparse, or None for a rank that has nothing to add.
        name: For the error message.
        group: The ranks that take part.
        divisor: What the sum is divided by.

    Raises:
        DistError: The gradient is dense, though a sparse one was announced.
    """
    total = _sparse_gradient(parameter, name) / divisor
    groups.all_reduce(total, group=group)
    return total.coalesce()


def _sparse_gradient(parameter: torch.Tensor, name: str) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        # Like those of the other ranks: whole rows.
        nowhere = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        rows = parameter.new_empty((0, *parameter.shape[1:]))
        return torch.sparse_coo_tensor(nowhere, rows, parameter.shape, is_coalesced=True, check_invariants=False)
    if not gradient.is_sparse:
        raise DistError(
            f"DistributedDataParallel: parameter {name!r} of an embedding with sparse=True got a dense gradient. "
            "Use it in that embedding only, or build the embedding with sparse=False."
        )
    return gradient.detach().coalesce()
