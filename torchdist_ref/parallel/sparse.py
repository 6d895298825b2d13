"""Sparse gradients, averaged over the ranks without ever becoming dense.

Ranks touch different rows, so a flat buffer does not fit them: they bypass the buckets and the
hook. Every rank gathers all ranks' indices and values (padded to the longest, since collectives move equal
shapes) and adds them up locally.
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
    mine = _sparse_gradient(parameter, name)
    counts = _counts(mine, group)
    indices = _gathered(mine.indices().t().contiguous(), counts, group)
    values = _gathered(mine.values().contiguous(), counts, group)
    parts = torch.cat(indices).t(), torch.cat(values) / divisor
    return torch.sparse_coo_tensor(*parts, parameter.shape, check_invariants=False).coalesce()


def _sparse_gradient(parameter: torch.Tensor, name: str) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, layout=torch.sparse_coo).coalesce()
    if not gradient.is_sparse:
        raise DistError(
            f"DistributedDataParallel: parameter {name!r} of an embedding with sparse=True got a dense gradient. "
            "Use it in that embedding only, or build the embedding with sparse=False."
        )
    return gradient.detach().coalesce()


def _counts(mine: torch.Tensor, group: Any) -> list[int]:
    counts = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(groups.get_world_size(group))]
    groups.all_gather(counts, torch.tensor([mine._nnz()], device=mine.device), group=group)
    return [int(count) for count in counts]


def _gathered(rows: torch.Tensor, counts: list[int], group: Any) -> list[torch.Tensor]:
    """Every rank's rows; all ranks send as many as the longest has."""
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    everyone = [torch.empty_like(padded) for _ in counts]
    if max(counts):
        groups.all_gather(everyone, padded, group=group)
    return [rows[:count] for rows, count in zip(everyone, counts, strict=True)]
