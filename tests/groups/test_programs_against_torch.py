"""Small programs on torch's Gloo and on ours: the same results, warnings and exceptions.

`tests.meaning` checks single calls; the programs here need several: groups, membership, batches, odd integer types.
Add one for each surprise that a user reports.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as oracle

import torchdist_ref as dist
from tests.torch_versions import torch_has
from tests.torchs_world import start_torch
from torchdist_ref.testing import fill, run

TIMEOUT = timedelta(seconds=25)


def total(library: Any, rank: int, group: Any = None) -> list[float]:
    tensor = fill(rank, (3,))
    library.all_reduce(tensor, group=group)
    return tensor.tolist()


def only_members_make_groups(library: Any, rank: int) -> Any:
    """Then all make one; the group counts differ by then, and no rank waits for non-members."""
    members = [0, 1] if rank < 2 else [2, 3]
    mine = library.new_group(members, use_local_synchronization=True)
    again = library.new_group(members, use_local_synchronization=True) if rank < 2 else mine
    every = library.new_group([3, 1, 0])
    sums = total(library, rank, mine), total(library, rank, again), total(library, rank, every) if rank != 2 else None
    return sums, library.new_group([3 - rank], use_local_synchronization=True)


def a_batch_outside_the_group(library: Any, rank: int) -> Any:
    group = library.new_group([0])
    if rank == 0:
        return None
    op = library.P2POp(library.isend, fill(rank, (2,)), 0, group)
    return op.peer, library.batch_isend_irecv([op])


def ranks_of_other_integer_types(library: Any, rank: int) -> Any:
    group = library.new_group(list(np.arange(1, 4)))
    tensor, other = fill(rank, (3,)), fill(rank, (2,))
    library.broadcast(tensor, torch.tensor(2))
    library.broadcast(other, group_src=np.int64(3))
    return library.get_rank(group), tensor.tolist(), other.tolist()


def sparse(rank: int, width: int = 1) -> torch.Tensor:
    values = fill(rank, (2, width))
    return torch.sparse_coo_tensor(torch.tensor([[rank, rank + 1]]), values, (6, width))


def sparse_sums(library: Any, rank: int) -> Any:
    """Sum sparse tensors: one rank has no entries, and one has two entries of one index."""
    one, other = sparse(rank), sparse(rank, 3)
    library.all_reduce(one)
    library.all_reduce(other, async_op=True).wait()
    few = torch.sparse_coo_tensor(torch.zeros(1, rank, dtype=torch.int64), fill(rank, (rank,)), (4,))
    library.all_reduce(few)
    return [tensor.to_dense().tolist() for tensor in (one, other, few)], few.is_coalesced(), few.layout


PROGRAMS: list[Callable[[Any, int], Any]] = [
    a_batch_outside_the_group,
    ranks_of_other_integer_types,
    sparse_sums,
]
if not torch_has("2.14"):
    # There torch's ranks wait for one another in the third group, as long as they may.
    PROGRAMS.append(only_members_make_groups)


def seen(program: Callable[[Any, int], Any], library: Any, rank: int) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = program(library, rank)
    return answer, sorted({w.category.__name__ for w in caught if "belong" in str(w.message)})


def beside(rank: int, path: str) -> list[tuple[str, Any, Any]]:
    start_torch(store=oracle.FileStore(path, 4), rank=rank, world_size=4, timeout=TIMEOUT)
    found = [(program.__name__, seen(program, oracle, rank), seen(program, dist, rank)) for program in PROGRAMS]
    oracle.destroy_process_group()
    return found


# Over a second: four ranks with two libraries each, on two cores.
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_torch_returns_the_same(backend: str, tmp_path: Path) -> None:
    for rank, found in enumerate(run(beside, 4, str(tmp_path / "store"), ranks="processes", backend=backend)):
        for name, theirs, ours in found:
            assert ours == theirs, f"{name} on rank {rank}"
