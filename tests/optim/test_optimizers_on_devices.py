"""ZeRO and averaging of models on devices, with the values that the CPU has: see `tests.on_devices`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torchdist_ref.algorithms.model_averaging.utils import average_parameters

import torchdist_ref as dist
from tests.on_devices import on_each_device, same_as_on_cpu
from torchdist_ref.algorithms.model_averaging import averagers, hierarchical_model_averager
from torchdist_ref.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torchdist_ref.testing import fill

SIZES = (3, 700, 41, 5)


def parameters(rank: int, where: torch.device) -> list[nn.Parameter]:
    return [nn.Parameter((fill(rank + n, (size,)) / 16).to(where)) for n, size in enumerate(SIZES)]


def with_gradients(weights: list[nn.Parameter], step: int) -> None:
    """Set gradients that the device has yet to compute."""
    for n, weight in enumerate(weights):
        weight.grad = fill(step + 2 * n, weight.shape).to(weight.device) / 4


def sharded(rank: int, where: torch.device, **options: Any) -> list[Any]:
    weights = parameters(0, where)
    optimizer = ZeroRedundancyOptimizer(weights, torch.optim.Adam, lr=0.1, **options)
    for step in range(3):
        with_gradients(weights, step)
        optimizer.step()
    optimizer.consolidate_state_dict(to=1)
    state = optimizer.state_dict()["state"] if rank == 1 else {}
    return [*weights, [each["exp_avg"].cpu().tolist() for each in state.values()]]


@on_each_device
def test_sharded_states(device: str) -> None:
    def program(rank: int, where: torch.device) -> dict[str, list[Any]]:
        options: dict[str, Any] = {"plain": {}, "views": {"parameters_as_bucket_view": True}}
        return {name: sharded(rank, where, **each) for name, each in options.items()}

    same_as_on_cpu(device, program)


@on_each_device
def test_a_state_that_is_loaded(device: str) -> None:
    def program(rank: int, where: torch.device) -> list[Tensor]:
        weights = parameters(0, where)
        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.1, momentum=0.5)
        with_gradients(weights, 1)
        optimizer.step()
        optimizer.consolidate_state_dict(to=0)
        saved = [optimizer.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(saved, src=0, device=where)
        fresh = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.1, momentum=0.5)
        assert saved[0] is not None
        fresh.load_state_dict(saved[0])
        with_gradients(weights, 2)
        fresh.step()
        return [weight.detach() for weight in weights]

    same_as_on_cpu(device, program)


@on_each_device
def test_averages_of_parameters(device: str) -> None:
    def program(rank: int, where: torch.device) -> dict[str, list[Tensor]]:
        weights = parameters(rank, where)
        average_parameters(iter(weights), dist.group.WORLD)
        local = parameters(rank, where)
        sgd = torch.optim.SGD(local, lr=0.1, momentum=0.5)
        optimizer = PostLocalSGDOptimizer(sgd, averagers.PeriodicModelAverager(period=2, warmup_steps=1))
        for step in range(4):
            with_gradients(local, step + rank)
            optimizer.step()
        by_level = parameters(rank, where)
        averager = hierarchical_model_averager.HierarchicalModelAverager(OrderedDict({1: 2, 2: 4}), warmup_steps=1)
        for _ in range(4):
            with torch.no_grad():
                for weight in by_level:
                    weight.mul_(1.0 + rank)
            averager.average_parameters(iter(by_level))
        return {"at once": [*weights], "periodic": [*local], "hierarchical": [*by_level]}

    same_as_on_cpu(device, program, ranks=4, exact=False)
