"""Every algorithm of the catalogue, executed on a link, gives the result of a plain formula."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.schedules import catalogue
from torchdist_ref.testing import fill, run

COUNTS = (0, 1, 5, 1000, 300_001)
CASES = [
    (op, algorithm)
    for op in ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
    for algorithm in catalogue.algorithms(op)
]
# All ranks are threads of this process.
expected = functools.cache(fill)


def data(*args: Any) -> torch.Tensor:
    """Return a copy, so that a call that writes its input is noticed."""
    return expected(*args).clone()


@functools.cache
def total(size: int, count: int, shift: int = 0) -> torch.Tensor:
    return torch.stack([expected(r + shift, (count,), torch.int64) for r in range(size)]).sum(0)


def check(rank: int, op: str, size: int) -> None:
    for count in COUNTS:
        root = count % size
        globals()[f"check_{op}"](rank, size, count, root)


def check_all_reduce(rank: int, size: int, count: int, root: int) -> None:
    tensor = data(rank, (count,), torch.int64)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total(size, count))


def check_reduce(rank: int, size: int, count: int, root: int) -> None:
    tensor = data(rank, (count,), torch.int64)
    dist.reduce(tensor, root)
    assert rank != root or torch.equal(tensor, total(size, count))


def check_broadcast(rank: int, size: int, count: int, root: int) -> None:
    tensor = data(rank, (count,))
    dist.broadcast(tensor, root)
    assert torch.equal(tensor, expected(root, (count,)))


def check_all_gather(rank: int, size: int, count: int, root: int) -> None:
    outputs = [torch.zeros(count) for _ in range(size)]
    dist.all_gather(outputs, data(rank, (count,)))
    assert all(torch.equal(outputs[r], expected(r, (count,))) for r in range(size))


def check_gather(rank: int, size: int, count: int, root: int) -> None:
    outputs = [torch.zeros(count) for _ in range(size)] if rank == root else None
    dist.gather(data(rank, (count,)), outputs, root)
    assert outputs is None or all(torch.equal(outputs[r], expected(r, (count,))) for r in range(size))


def check_scatter(rank: int, size: int, count: int, root: int) -> None:
    tensor = torch.zeros(count)
    dist.scatter(tensor, [data(r + 9, (count,)) for r in range(size)] if rank == root else None, root)
    assert torch.equal(tensor, expected(rank + 9, (count,)))


def check_reduce_scatter(rank: int, size: int, count: int, root: int) -> None:
    output = torch.zeros(count, dtype=torch.int64)
    dist.reduce_scatter(output, [data(rank + 7 * block, (count,), torch.int64) for block in range(size)])
    assert torch.equal(output, total(size, count, 7 * rank))


def check_all_to_all(rank: int, size: int, count: int, root: int) -> None:
    outputs = [torch.zeros(count) for _ in range(size)]
    dist.all_to_all(outputs, [data(rank + 5 * target, (count,)) for target in range(size)])
    assert all(torch.equal(outputs[r], expected(r + 5 * rank, (count,))) for r in range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_executed_schedule_keeps_the_contract(
    op: str, algorithm: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDIST_REF_ALGORITHM", f"{op}={algorithm}")
    run(check, size, op, size)


@pytest.mark.parametrize("algorithm", catalogue.algorithms("barrier"))
def test_barrier_algorithms_wait_for_all_ranks(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDIST_REF_ALGORITHM", f"barrier={algorithm}")
    arrived: list[int] = []

    def program(rank: int) -> int:
        for _ in range(20):
            arrived.append(rank)
            dist.barrier()
        return len(arrived)

    for size in (2, 3, 5):
        arrived.clear()
        assert run(program, size) == [20 * size] * size


def uneven(rank: int, size: int) -> None:
    lengths = [3 * r * r + 1 for r in range(size)]
    everybody = [torch.zeros(length) for length in lengths]
    dist.all_gather(everybody, fill(rank, (lengths[rank],)))
    assert all(torch.equal(everybody[r], fill(r, (lengths[r],))) for r in range(size))
    output = torch.zeros(lengths[rank], dtype=torch.int64)
    dist.reduce_scatter(output, [fill(rank + 7 * b, (lengths[b],), torch.int64) for b in range(size)])
    assert torch.equal(output, total(size, lengths[rank], 7 * rank))


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_blocks_of_different_sizes_whatever_was_asked_for(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for algorithm in catalogue.algorithms(op):
        monkeypatch.setenv("TORCHDIST_REF_ALGORITHM", f"{op}={algorithm}")
        for size in (2, 3, 4):
            run(uneven, size, size)
