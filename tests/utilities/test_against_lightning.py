"""The helpers beside those of today's Lightning on torch's Gloo, where their meaning is unchanged since 1.7."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from tests.parallel.training import forked
from torchdist_ref.testing import fill, run
from torchdist_ref.utilities import distributed as helpers

if find_spec("lightning") is None:
    pytest.skip("Lightning is not installed", allow_module_level=True)

WORLD = 3
NAMES = ("gather_all_tensors", "sync_ddp", "all_gather_ddp_if_available")
Value = Callable[[Any, int], Any]


def gathered(shape: Callable[[int], tuple[int, ...]], dtype: torch.dtype = torch.float32) -> Value:
    return lambda module, rank: module.gather_all_tensors(fill(rank, shape(rank), dtype))


def reduced(name: Any) -> Value:
    if name in ("band", "bor", "BXOR"):
        return lambda module, rank: module.sync_ddp(torch.arange(6) * (rank + 3), reduce_op=name)
    return lambda module, rank: module.sync_ddp(fill(rank, (3, 2)), reduce_op=name)


def differentiated(shape: tuple[int, ...], turned: bool = False) -> Value:
    def value(module: Any, rank: int) -> tuple[Tensor, Tensor]:
        leaf = fill(rank, shape).requires_grad_()
        rows = module.all_gather_ddp_if_available(leaf.t() if turned else leaf, sync_grads=True)
        weights = torch.arange(1.0, rows.numel() + 1).view(rows.shape)
        (rows * weights * (rank + 1)).pow(2).sum().backward()
        assert leaf.grad is not None
        return rows.detach(), leaf.grad

    return value


VALUES: dict[str, Value] = {
    "numbers": gathered(lambda rank: ()),
    "1 dimension": gathered(lambda rank: (rank + 1,)),
    "1 dimension, one empty": gathered(lambda rank: (rank,), torch.int64),
    "2 dimensions": gathered(lambda rank: (3 - rank, rank + 1)),
    "2 dimensions, no columns on rank 0": gathered(lambda rank: (2, rank)),
    "all empty": gathered(lambda rank: (0, rank)),
    "3 dimensions": gathered(lambda rank: (2, rank + 1, 3 - rank)),
    "3 dimensions, alike": gathered(lambda rank: (2, 2, 2)),
    "strided": lambda module, rank: module.gather_all_tensors(fill(rank, (3, rank + 2)).t()),
    **{f"reduced by {name}": reduced(name) for name in ("sum", "SUM", "Max", "min", "product", "avg", "mean")},
    **{f"bits reduced by {name}": reduced(name) for name in ("band", "bor", "BXOR")},
    "reduced by torch's MAX": reduced(torch.distributed.ReduceOp.MAX),
    "gradients": differentiated((2, 3)),
    "gradients of a strided tensor": differentiated((2, 3), turned=True),
    "gradients of numbers": differentiated(()),
}


def theirs(rank: int, path: str) -> dict[str, Any]:
    # Some seconds, and 80 MiB that the other tests' processes would be forked with.
    lightning = import_module("lightning.fabric.utilities.distributed")
    module = SimpleNamespace(**{name: getattr(lightning, f"_{name}") for name in NAMES})
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    with warnings.catch_warnings():
        # Lightning takes slices with a list of them, which torch has deprecated.
        warnings.simplefilter("ignore")
        found = {name: value(module, rank) for name, value in VALUES.items()}
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return forked(theirs, WORLD, str(tmp_path_factory.mktemp("torch") / "meet"), init=False)


@pytest.mark.parametrize(("backend", "ranks"), [("ref", "threads"), ("ref", "processes"), ("gloo", "threads")])
def test_values_match_lightnings(wanted: list[dict[str, Any]], backend: str, ranks: Any) -> None:
    def program(rank: int) -> dict[str, Any]:
        return {name: value(helpers, rank) for name, value in VALUES.items()}

    for right, found in zip(wanted, run(program, WORLD, backend=backend, ranks=ranks), strict=True):
        for name in VALUES:
            torch.testing.assert_close(found[name], right[name], rtol=1e-6, atol=1e-6, msg=name)
