"""Oracle: torch's own Gloo, run on the same ranks with the same data, gives what `ref` gives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as oracle
from torch import Tensor

import torchdist_ref as dist
from tests.torch_versions import needs_torch
from tests.torchs_world import start_torch
from torchdist_ref.testing import fill, run

SHAPES = [(0,), (), (5,), (3, 4), (1031,), (150_001,)]
DTYPES = [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64]
Call = Callable[..., object]


def rounding(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-6, torch.float64: 1e-14}.get(dtype, 0.0)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Floats that round when they are added; whole numbers otherwise."""
    data = fill(rank, shape, dtype)
    return data / 7 + data * data * 1e-3 if dtype.is_floating_point else data


def agree(ours: Tensor, theirs: Tensor, name: str) -> None:
    scale = theirs.abs().max().item() if theirs.numel() and theirs.dtype.is_floating_point else 1.0
    tolerance = rounding(ours.dtype) * scale
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, msg=lambda m: f"{name} {ours.shape}: {m}")


def in_place(name: str, call: Callable[..., object], rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ours, theirs = values(rank, shape, dtype), values(rank, shape, dtype)
    call(dist, ours)
    call(oracle, theirs)
    agree(ours, theirs, name)


def program(rank: int, size: int, path: str, compare: Callable[..., None]) -> None:
    store = oracle.FileStore(path, size)
    start_torch(store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    try:
        for shape in SHAPES:
            for dtype in DTYPES:
                compare(rank, size, shape, dtype)
    finally:
        oracle.destroy_process_group()


def compare_values(rank: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ops = ["SUM", "PRODUCT", "MIN", "MAX"] + ([] if dtype.is_floating_point else ["BAND", "BOR", "BXOR"])
    ops += ["AVG"] if dtype.is_floating_point else []
    for op in ops:
        reduction = getattr(oracle.ReduceOp, op)
        in_place(f"all_reduce {op} {dtype}", lambda d, t, r=reduction: d.all_reduce(t, r), rank, shape, dtype)
    for root in {0, size - 1}:
        in_place(f"broadcast {root}", lambda d, t, r=root: d.broadcast(t, r), rank, shape, dtype)
    compare_blocks(rank, size, shape, dtype)


def compare_blocks(rank: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gathered = {}
    scattered = {}
    for name, d in (("ours", dist), ("theirs", oracle)):
        gathered[name] = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
        d.all_gather(gathered[name], values(rank, shape, dtype))
        scattered[name] = torch.zeros(shape, dtype=dtype)
        d.reduce_scatter(scattered[name], [values(rank + 7 * block, shape, dtype) for block in range(size)])
    agree(scattered["ours"], scattered["theirs"], "reduce_scatter")
    for r in range(size):
        agree(gathered["ours"][r], gathered["theirs"][r], "all_gather")


def compare_exchanges(rank: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    exchanged = {}
    for name, d in (("ours", dist), ("theirs", oracle)):
        exchanged[name] = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
        d.all_to_all(exchanged[name], [values(rank + 5 * target, shape, dtype) for target in range(size)])
    for r in range(size):
        agree(exchanged["ours"][r], exchanged["theirs"][r], "all_to_all")


def against_gloo(world_size: int, path: str, compare: Callable[..., None]) -> None:
    run(program, world_size, world_size, path, compare, ranks="processes", timeout=90.0)


# Over a second: some five hundred collectives on each of two backends, with more ranks than cores.
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ref_equals_torchs_gloo(world_size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    against_gloo(world_size, str(tmp_path_factory.mktemp("oracle") / "store"), compare_values)


@needs_torch("2.13", "lists of blocks in Gloo's all_to_all")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ref_exchanges_what_torchs_gloo_exchanges(world_size: int, tmp_path: Path) -> None:
    against_gloo(world_size, str(tmp_path / "store"), compare_exchanges)
