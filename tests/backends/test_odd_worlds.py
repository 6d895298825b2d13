"""Every algorithm where nothing divides evenly: odd worlds, lengths around them, every dtype and reduction."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.schedules import catalogue
from torchdist_ref.testing import fill, run

OPS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
DTYPES = (torch.bfloat16, torch.complex64, torch.bool, torch.int8, torch.float64, torch.uint8, torch.float16)
FOLDS = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def fits(name: str, dtype: torch.dtype) -> bool:
    """Whether this reduction makes sense there, and the plain formula is exact: products of so many are not."""
    if dtype.is_complex:
        return name == "SUM"
    if dtype.is_floating_point:
        return name in ("SUM", "MIN", "MAX")
    return True


def check_reductions(rank: int, size: int, count: int, dtype: torch.dtype, name: str) -> None:
    op, fold, root = getattr(dist.ReduceOp, name), FOLDS[name], count % size
    wanted = reduce(fold, [fill(r, (count,), dtype) for r in range(size)])
    tensor = fill(rank, (count,), dtype)
    dist.all_reduce(tensor, op)
    assert torch.equal(tensor, wanted), (name, dtype, count)
    tensor = fill(rank, (count,), dtype)
    dist.reduce(tensor, root, op)
    assert rank != root or torch.equal(tensor, wanted), (name, dtype, count)
    output = torch.zeros(count, dtype=dtype)
    dist.reduce_scatter(output, [fill(rank + 7 * block, (count,), dtype) for block in range(size)], op)
    wanted = reduce(fold, [fill(r + 7 * rank, (count,), dtype) for r in range(size)])
    assert torch.equal(output, wanted), (name, dtype, count)


def check_copies(rank: int, size: int, count: int, dtype: torch.dtype) -> None:
    root, mine = count % size, fill(rank, (count,), dtype)
    tensor = mine.clone()
    dist.broadcast(tensor, root)
    assert torch.equal(tensor, fill(root, (count,), dtype))
    blocks = [torch.zeros(count, dtype=dtype) for _ in range(size)]
    dist.all_gather(blocks, mine)
    assert all(torch.equal(blocks[r], fill(r, (count,), dtype)) for r in range(size))
    blocks = [torch.zeros(count, dtype=dtype) for _ in range(size)]
    dist.gather(mine, blocks if rank == root else None, root)
    assert rank != root or all(torch.equal(blocks[r], fill(r, (count,), dtype)) for r in range(size))
    dist.scatter(tensor, [fill(r + 9, (count,), dtype) for r in range(size)] if rank == root else None, root)
    assert torch.equal(tensor, fill(rank + 9, (count,), dtype))
    dist.all_to_all(blocks, [fill(rank + 5 * target, (count,), dtype) for target in range(size)])
    assert all(torch.equal(blocks[r], fill(r + 5 * rank, (count,), dtype)) for r in range(size))


def check(rank: int, size: int, turn: int) -> None:
    for number, count in enumerate((size - 1, size + 1)):
        dtype = DTYPES[(turn + number) % len(DTYPES)]
        check_copies(rank, size, count, dtype)
        for name in FOLDS:
            if fits(name, dtype):
                check_reductions(rank, size, count, dtype, name)


# Every algorithm there is, with seven ranks on one interpreter lock; `test_every_algorithm.py` has five in CI.
@pytest.mark.long
def test_every_algorithm_keeps_the_contract_where_nothing_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    size, known = 7, {op: catalogue.algorithms(op) for op in OPS}
    for turn in range(max(map(len, known.values()))):
        taken = {op: names[turn % len(names)] for op, names in known.items()}
        monkeypatch.setenv("TORCHDIST_REF_ALGORITHM", ",".join(f"{op}={name}" for op, name in taken.items()))
        run(check, size, size, turn)
