"""RowBlocks: blocks that are views of one tensor give the results of a list, for all shapes, dtypes and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.covering import covering
from torchdist_ref.backends.operands import RowBlocks
from torchdist_ref.testing import fill, run

WORLD = 3
# One that is copied before it is reduced, one that is cut out, and one that takes several windows.
SIZES = (2, 6000, 600_000)


def of_rows(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    block, whole = (shape[0] // WORLD, *shape[1:]), fill(rank, shape, dtype)
    mine, everything, exchanged = torch.zeros(block, dtype=dtype), torch.zeros_like(whole), torch.zeros_like(whole)
    dist.reduce_scatter_tensor(mine, whole)
    dist.all_gather_into_tensor(everything, whole[: block[0]])
    dist.all_to_all_single(exchanged, whole)
    return mine, everything, exchanged


def of_lists(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    block, blocks = (shape[0] // WORLD, *shape[1:]), list(fill(rank, shape, dtype).chunk(WORLD))
    mine = torch.zeros(block, dtype=dtype)
    everything, exchanged = ([torch.zeros(block, dtype=dtype) for _ in range(WORLD)] for _ in range(2))
    dist.reduce_scatter(mine, blocks)
    dist.all_gather(everything, blocks[0])
    dist.all_to_all(exchanged, blocks)
    return mine, torch.cat(everything), torch.cat(exchanged)


CASES = covering(SIZES, [torch.float32, torch.bfloat16, torch.int64], [0, 1], together=2)


@pytest.mark.parametrize(("rows", "dtype", "more_dimensions"), CASES)
def test_row_blocks_give_the_results_of_a_list(rows: int, dtype: torch.dtype, more_dimensions: int) -> None:
    """CI has each pair of values."""

    def program(rank: int) -> None:
        shape = (rows * WORLD, *[2] * more_dimensions)
        for of_one, of_many in zip(of_rows(rank, shape, dtype), of_lists(rank, shape, dtype), strict=True):
            assert torch.equal(of_one, of_many)

    run(program, WORLD)


def test_views_are_made_once_and_share_the_tensors_memory() -> None:
    tensor = torch.zeros(2, 3)
    rows = RowBlocks(tensor, 3)
    assert len(rows) == 3 and rows[1] is list(rows)[1]
    rows[1].fill_(7)
    assert tensor.flatten().tolist() == [0, 0, 7, 7, 0, 0]
