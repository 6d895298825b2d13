"""Losses and weights of training with our DDP and torch's, on the same ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from tests.covering import covering
from tests.parallel.training import MODELS, forked, train
from tests.torchs_world import start_torch

pytestmark = pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
SMALL = 0.004
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "own buffers": {"broadcast_buffers": False},
}


def beside(rank: int, world: int, name: str, options: dict[str, dict[str, Any]], steps: int, path: str) -> list[Any]:
    """Train with both, with each set of options; return differences of losses and states, and the number of buckets."""
    start_torch(init_method=f"file://{path}", rank=rank, world_size=world)
    found = []
    for kw in options.values():
        theirs = train(TorchDDP, name, rank, steps, bucket_cap_mb=SMALL, **kw)
        ours = train(dist.DistributedDataParallel, name, rank, steps, bucket_cap_mb=SMALL, **kw)
        same = all(torch.equal(a, b) for a, b in zip(theirs[:2], ours[:2], strict=True))
        apart = max(float((a - b).abs().max()) for a, b in zip(theirs[:2], ours[:2], strict=True))
        found.append((same, apart, len(ours[2].reducer.assignment), ours[1]))
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize(("name", "backend"), covering([*MODELS], ["ref", "gloo"]))
def test_twenty_steps_on_two_ranks_equal_torchs_bits(name: str, backend: str, tmp_path: Path) -> None:
    # Two ranks add two numbers: there is one order only, so bits are equal. 20 steps of two models: a second.
    options = {"plain": OPTIONS["plain"], "views": OPTIONS["views"]}
    for outcomes in forked(beside, 2, 2, name, options, 20, str(tmp_path / "meet"), backend=backend):
        for same, apart, buckets, _ in outcomes:
            assert same, f"{apart:.3g} apart"
            assert buckets >= 2


@pytest.mark.parametrize("name", ["mlp", pytest.param("convnet", marks=pytest.mark.long)])
def test_every_option_equals_torch(name: str, tmp_path: Path) -> None:
    for outcomes in forked(beside, 2, 2, name, OPTIONS, 6, str(tmp_path / "meet"), backend="ref"):
        for options, (same, apart, buckets, _) in zip(OPTIONS, outcomes, strict=True):
            assert same, f"{options}: {apart:.3g} apart"
            assert buckets >= 2, options


@pytest.mark.parametrize("backend", ["ref", pytest.param("gloo", marks=pytest.mark.long)])
def test_three_ranks_equal_torch_within_rounding_and_each_other_exactly(backend: str, tmp_path: Path) -> None:
    everyone = forked(beside, 3, 3, "mlp", OPTIONS, 6, str(tmp_path / "meet"), backend=backend)
    for outcomes in everyone:
        for options, (_, apart, _, states), (_, _, _, first) in zip(OPTIONS, outcomes, everyone[0], strict=True):
            # A third is not exact, and three numbers can be added in several orders: a few units in the last place.
            assert apart < 2e-6, f"{options}: {apart:.3g} apart"
            assert torch.equal(states, first), options
