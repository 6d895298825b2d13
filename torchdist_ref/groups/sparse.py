"""The sum of sparse tensors: every rank gathers all entries and adds up those of one place.

Ranks have entries at different places, so there is nothing to reduce on the way: what travels are coordinates and
values, as tensors whose first dimension differs from rank to rank. Don't add other operations on sparse tensors;
torch's engines have none either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchdist_ref.calls import AllGather
from torchdist_ref.errors import EngineArgumentError, explain
from torchdist_ref.groups.arguments import word_of
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.joined import joined
from torchdist_ref.work import Work

_ALL_GATHER = AllGather()


def sum_sparse(group: ProcessGroup, tensor: Tensor, op: Any, async_op: bool) -> Work | None:
    """The sum over all ranks, in place, of tensors in coordinate format.

    How many entries the others have has to be known before any of them can be received: so far it waits for all ranks
    even where `async_op` asks not to.

    Raises:
        EngineArgumentError: Another reduction than the sum.
    """
    if word_of(op, "all_reduce") != "sum":
        raise EngineArgumentError(explain("all_reduce", "op", "ReduceOp.SUM where tensors are sparse", op))
    mine = tensor.detach().coalesce()
    parts = mine.indices().t().contiguous(), mine.values().contiguous()
    counts = _counts(group, mine)
    gathered = [[part.new_empty((count, *part.shape[1:])) for count in counts] for part in parts]
    pairs = zip(parts, gathered, strict=True)
    works = [group.backend.submit(_ALL_GATHER, (part,), room, False) for part, room in pairs]

    @torch.no_grad()
    def add_up() -> None:
        places, values = (torch.cat(room) for room in gathered)
        total = torch.sparse_coo_tensor(places.t(), values, tensor.shape, check_invariants=False)
        tensor.copy_(total.coalesce())

    return joined("all_reduce", [tensor], works, async_op, add_up)


def _counts(group: ProcessGroup, mine: Tensor) -> list[int]:
    """How many entries each rank has."""
    counts = torch.zeros((group.size(), 1), dtype=torch.int64, device=mine.device)
    own = torch.tensor([mine._nnz()], device=mine.device)
    group.backend.submit(_ALL_GATHER, (own,), counts.unbind(), False).wait()
    return [int(count) for count in counts]
