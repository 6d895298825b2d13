"""The sum of sparse tensors on any backend: every rank gathers all entries and adds up those of one place.

Ranks have entries at different places, so there is nothing to reduce on the way: what travels are coordinates and
values, as tensors whose first dimension differs from rank to rank. Don't add other operations on sparse tensors;
torch's backends have none either.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend
from torchdist_ref.calls import AllGather
from torchdist_ref.work import Work

_ALL_GATHER = AllGather()


def start_sum(backend: Backend, size: int, tensor: Tensor) -> tuple[list[Work], Callable[[], None]]:
    """Begin to add up tensors in coordinate format.

    How many entries the others have has to be known before any of them can be received: so it waits for all ranks.

    Args:
        backend: That of the group.
        size: Its number of ranks.
        tensor: This rank's; becomes the sum.

    Returns:
        Works to wait for, and a function that then puts the sum into ``tensor``.
    """
    mine = tensor.detach().coalesce()
    parts = mine.indices().t().contiguous(), mine.values().contiguous()
    counts = _counts(backend, size, mine)
    gathered = [[part.new_empty((count, *part.shape[1:])) for count in counts] for part in parts]
    works = [backend.submit(_ALL_GATHER, (part,), room, False) for part, room in zip(parts, gathered, strict=True)]

    @torch.no_grad()
    def add_up() -> None:
        places, values = (torch.cat(room) for room in gathered)
        total = torch.sparse_coo_tensor(places.t(), values, tensor.shape, check_invariants=False)
        tensor.copy_(total.coalesce())

    return works, add_up


def _counts(backend: Backend, size: int, mine: Tensor) -> list[int]:
    """How many entries each rank has."""
    counts = torch.zeros((size, 1), dtype=torch.int64, device=mine.device)
    own = torch.tensor([mine._nnz()], device=mine.device)
    backend.submit(_ALL_GATHER, (own,), counts.unbind(), False).wait()
    return [int(count) for count in counts]
