"""DDP on devices, with the values that the same training has on the CPU: see `tests.on_devices`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torchdist_ref as dist
from tests.on_devices import on_each_device, same_as_on_cpu
from torchdist_ref.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torchdist_ref.algorithms.join import Join
from torchdist_ref.optim import ZeroRedundancyOptimizer
from torchdist_ref.parallel import MixedPrecision
from torchdist_ref.testing import fill, run

STEPS = 3


def numbers(rank: int, *shape: int, where: torch.device) -> Tensor:
    """Return small numbers that differ from rank to rank."""
    return (fill(rank, shape) / 16).to(where)


def initialized(module: nn.Module, rank: int = 0) -> nn.Module:
    """Fill the parameters with numbers that depend on the rank, so that a missing broadcast is seen."""
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter.copy_(fill(rank + 3 * place, parameter.shape) / 24)
    return module


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Sigmoid(), nn.Linear(5, 3))


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def train(net: nn.Module, rank: int, where: torch.device, steps: int = STEPS, width: int = 6) -> list[Tensor]:
    """Train by stochastic gradient descent; return the losses, the gradients and the parameters."""
    losses = []
    for step in range(steps):
        net.zero_grad(set_to_none=step % 2 == 0)
        loss = net(numbers(rank + 2 * step, 4, width, where=where)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.25)
        losses.append(loss.detach())
    states = [*net.state_dict().values()]
    return [*losses, *(p.grad for p in net.parameters() if p.grad is not None), *states]


def wrapped(net: nn.Module, rank: int, where: torch.device, **options: Any) -> dist.DistributedDataParallel:
    """Move a module to a device and wrap it."""
    return dist.DistributedDataParallel(initialized(net, rank).to(where), **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 1e-4},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "lazy buckets": {"lazy_bucket_allocation": True, "bucket_cap_mb": 1e-4},
}


@on_each_device
def test_training_with_each_option(device: str) -> None:
    def program(rank: int, where: torch.device) -> dict[str, list[Tensor]]:
        ids = {} if where.type == "cpu" else {"device_ids": [where.index]}
        return {
            # DDP moves inputs to the device.
            name: train(wrapped(mlp(), rank, where, **ids, **options), rank, torch.device("cpu"))
            for name, options in OPTIONS.items()
        }

    same_as_on_cpu(device, program, exact=False)


class Halves(nn.Module):
    """Model whose second half is on a second device."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.second = second
        self.a, self.b, self.c = nn.Linear(6, 8).to(first), nn.Linear(8, 5).to(second), nn.Linear(8, 3).to(first)
        self.register_buffer("seen", torch.zeros(2, device=second))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        there = self.b(hidden.to(self.second, non_blocking=True))
        self.seen = self.seen + there.detach().mean()
        return torch.cat([self.c(hidden), there.to(hidden.device)], 1)


@on_each_device
def test_a_module_on_several_devices(device: str) -> None:
    def program(rank: int, first: torch.device, second: torch.device) -> list[Tensor]:
        net = dist.DistributedDataParallel(initialized(Halves(first, second), rank), bucket_cap_mb=2e-4)
        return train(net, rank, first)

    same_as_on_cpu(device, program, exact=False, devices=2)


@on_each_device
def test_mixed_precision(device: str) -> None:
    def program(rank: int, where: torch.device) -> list[Tensor]:
        low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
        return train(wrapped(with_statistics(), rank, where, mixed_precision=low), rank, where)

    same_as_on_cpu(device, program, exact=False)


def own_hook(state: Any, bucket: Any) -> Any:
    """Average in float64, with a call that is not waited for."""
    wide = bucket.buffer().double()
    future = dist.all_reduce(wide, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0] / dist.get_world_size()))


HOOKS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "all_reduce": lambda net: (None, default_hooks.allreduce_hook),
    "float16": lambda net: (None, default_hooks.fp16_compress_hook),
    "bfloat16": lambda net: (None, default_hooks.bf16_compress_hook),
    "wrapped": lambda net: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "none": lambda net: (None, default_hooks.noop_hook),
    "quantized by tensor": lambda net: (None, quantization_hooks.quantization_pertensor_hook),
    "quantized by channel": lambda net: (None, quantization_hooks.quantization_perchannel_hook),
    "PowerSGD": lambda net: (powerSGD_hook.PowerSGDState(None, 1, 2), powerSGD_hook.powerSGD_hook),
    "batched PowerSGD": lambda net: (powerSGD_hook.PowerSGDState(None, 1, 2), powerSGD_hook.batched_powerSGD_hook),
    "local SGD": lambda net: (
        default_hooks.PostLocalSGDState(None, dist.new_subgroups(1)[0], 2),
        default_hooks.post_localSGD_hook,
    ),
    "own": lambda net: (None, own_hook),
}


@on_each_device
def test_hooks(device: str) -> None:
    def trained(rank: int, where: torch.device, hook: Callable[[Any], tuple[Any, Any]]) -> list[Tensor]:
        net = wrapped(mlp(), rank, where, bucket_cap_mb=1e-4)
        net.register_comm_hook(*hook(net))
        return train(net, rank, where, steps=4)

    def program(rank: int, where: torch.device) -> dict[str, list[Tensor]]:
        return {name: trained(rank, where, hook) for name, hook in HOOKS.items()}

    same_as_on_cpu(device, program, exact=False)


WITH_ZERO: dict[str, Callable[..., Any]] = {
    "after the last bucket": ddp_zero_hook.hook_with_zero_step,
    "bucket by bucket": ddp_zero_hook.hook_with_zero_step_interleaved,
}


@on_each_device
def test_an_optimizer_that_steps_in_the_backward_pass(device: str) -> None:
    def trained(rank: int, where: torch.device, hook: Callable[..., Any]) -> list[Tensor]:
        net = wrapped(mlp(), rank, where, bucket_cap_mb=1e-4)
        zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.25, momentum=0.5)
        net.register_comm_hook(None, hook(default_hooks.allreduce_hook, net, zero))
        for step in range(5):
            net.zero_grad()
            net(numbers(rank + step, 4, 6, where=where)).square().mean().backward()
            zero.step()
        return [parameter.detach() for parameter in net.parameters()]

    def program(rank: int, where: torch.device) -> dict[str, list[Tensor]]:
        return {name: trained(rank, where, hook) for name, hook in WITH_ZERO.items()}

    same_as_on_cpu(device, program, exact=False)


@on_each_device
def test_ranks_with_other_numbers_of_batches(device: str) -> None:
    def program(rank: int, where: torch.device) -> list[Tensor]:
        ddp = wrapped(with_statistics(), rank, where, bucket_cap_mb=1e-4)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.05)
        with Join([ddp, zero]):
            for step in range(2 + 3 * rank):
                ddp.zero_grad()
                ddp(numbers(rank + step, 4, 6, where=where)).square().mean().backward()
                zero.step()
        return [*ddp.module.state_dict().values()]

    same_as_on_cpu(device, program, exact=False)


@on_each_device
def test_buffers_of_rank_0_are_sent_before_each_forward_pass(device: str) -> None:
    def program(rank: int, where: torch.device) -> list[Tensor]:
        net = wrapped(with_statistics(), rank, where)
        results = train(net, rank, where)
        net.module[1].running_mean.fill_(rank)
        return [*results, *train(net, rank, where, steps=1)]

    same_as_on_cpu(device, program, exact=False)


def synchronized(rank: int, device: str) -> list[Tensor]:
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    where = torch.device(device, torch.accelerator.current_device_index())
    net = nn.SyncBatchNorm.convert_sync_batchnorm(with_statistics())
    # Batches of other sizes: the mean over all is not the mean of the means.
    return [each.cpu() for each in train_weighted(wrapped(net, rank, where), halves()[rank].to(where))]


def halves() -> Sequence[Tensor]:
    return numbers(1, 9, 6, where=torch.device("cpu")).split([4, 5])


def train_weighted(net: nn.Module, batch: Tensor) -> list[Tensor]:
    """Train on the sum over a batch; return the gradients and the statistics."""
    for _ in range(2):
        net.zero_grad()
        net(batch).square().sum().backward()
    states = [value.float() for name, value in net.state_dict().items() if "running" in name or "batches" in name]
    return [*(parameter.grad for parameter in net.parameters() if parameter.grad is not None), *states]


@on_each_device
def test_batch_normalization_over_the_batches_of_all_ranks(device: str) -> None:
    """The layer of torch normalizes as one layer does that gets the batches of all ranks."""
    found = run(synchronized, 2, device, ranks="processes", timeout=90)
    *gradients, mean, variance, count = train_weighted(initialized(with_statistics()), torch.cat([*halves()]))
    for rank in found:
        for one, wanted in zip(rank, [*(each / 2 for each in gradients), mean, variance, count], strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)
