"""torch's PowerSGD hook, unchanged, with several buckets, on `ref`. On Gloo its ranks call in different orders.

The reference is one process with everybody's data: all that PowerSGD exchanges is linear in the gradients, so the
average over ranks behaves as the one gradient of a single process does, error feedback included.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.backends.inside_torch import on
from torchdist_ref.testing import fill, run

WIDTH, LAYERS, ROWS = 20, 5, 6


def data(rank: int, step: int) -> Tensor:
    return fill(rank + 3 * step, (ROWS, WIDTH), torch.float64) / 8


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(5)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    ddp = DistributedDataParallel(nn.Sequential(*layers).double(), bucket_cap_mb=0.002)
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def dawdle(chance: random.Random) -> None:
    """Come late, by some milliseconds or not at all."""
    side = chance.choice([1, 1, 200, 400])
    torch.ones(side, side) @ torch.ones(side, side)


def train(rank: int, whose: list[int], steps: int) -> tuple[list[Tensor], int]:
    """The weights during training on the data of the given ranks, and how many buckets; rank 1 is slow at random."""
    history: list[Tensor] = []
    ddp, chance = wrapped(), random.Random(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        if rank == 1:
            dawdle(chance)
        ddp(torch.cat([data(r, step) for r in whose])).square().mean().backward()
        optimizer.step()
        history.append(torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()]))
    buckets = len(ddp.reducer._get_zeros_like_grad_buckets())
    return history, buckets


def one_rank(rank: int, size: int, path: str, steps: int) -> tuple[list[Tensor], int, int]:
    whose = [rank] if size > 1 else [0, 1]
    (weights, buckets), seen = on("ref", rank, size, path, lambda r, n: train(r, whose, steps))
    return weights, buckets, seen["all_reduce"]


def trained(size: int, path: Path, steps: int) -> list[tuple[list[Tensor], int, int]]:
    return run(one_rank, size, size, str(path), steps, init=False, ranks="processes", timeout=90.0)


# Error feedback carries roundings on and makes them grow: by step 50 they are at 1e-13, by step 200 at 1e-5.
COMPARED = 50


# Over a second: many steps, because the order in which ranks call differs only now and then.
def test_several_buckets_equal_one_process(tmp_path: Path) -> None:
    steps = 200
    alone, buckets, _ = trained(1, tmp_path / "alone", COMPARED)[0]
    assert buckets >= 4
    first, second = trained(2, tmp_path / "together", steps)
    assert len(first[0]) == len(second[0]) == steps
    for got, wanted in zip(first[0], alone, strict=False):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
    for got, other in zip(first[0], second[0], strict=True):
        assert torch.equal(got, other)
    # The recorder keeps the last 1024 calls.
    assert first[2] == second[2] == 1024
