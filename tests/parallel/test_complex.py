"""Complex parameters: gradients are communicated as real numbers, so no hook loses an imaginary part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchdist_ref as dist
from torchdist_ref.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torchdist_ref.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torchdist_ref.testing import fill, run

DDP = dist.DistributedDataParallel


class Waves(nn.Module):
    """Two complex parameters, one of them stored by columns, and a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(fill(0, (6, 4), torch.complex64))
        self.second = nn.Parameter(fill(1, (3, 4), torch.complex64).t())
        self.bias = nn.Parameter(fill(2, (3,)))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.first @ self.second).abs().sqrt() + self.bias


def loss(model: Any, rank: int) -> Tensor:
    return (model(fill(rank, (5, 6)) + 0.5) * fill(rank + 7, (5, 3))).sum() / 100


def gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
        found.append(parameter.grad.clone())
    return found


def average(world: int) -> list[Tensor]:
    sums = []
    for rank in range(world):
        model = Waves()
        loss(model, rank).backward()
        sums.append(gradients(model))
    return [torch.stack(each).mean(0) for each in zip(*sums, strict=True)]


def full_rank() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0.1)


# Registration of the hook, and the greatest distance of gradients from the average.
HOOKS: dict[str, tuple[Callable[[Any], None], float]] = {
    "none": (lambda ddp: None, 1e-6),
    "fp16": (lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook), 2e-3),
    "bf16": (lambda ddp: ddp.register_comm_hook(None, default_hooks.bf16_compress_hook), 2e-2),
    "wrapped": (
        lambda ddp: ddp.register_comm_hook(None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        2e-2,
    ),
    "quantized": (lambda ddp: ddp.register_comm_hook(None, quantization_hooks.quantization_perchannel_hook), 2e-2),
    "powerSGD": (lambda ddp: ddp.register_comm_hook(full_rank(), powerSGD_hook), 1e-4),
}


@pytest.mark.parametrize("pointing", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_average_real_and_imaginary_parts(name: str, pointing: bool) -> None:
    register, tolerance = HOOKS[name]

    def program(rank: int) -> list[Tensor]:
        model = Waves()
        ddp = DDP(model, gradient_as_bucket_view=pointing)
        register(ddp)
        for _ in range(3):
            ddp.zero_grad()
            loss(ddp, rank).backward()
        return gradients(model)

    wanted = average(3)
    for found in run(program, 3):
        for mine, right in zip(found, wanted, strict=True):
            assert mine.dtype == right.dtype
            torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance * right.abs().max().item())


def test_a_bucket_of_complex_gradients_is_real_and_its_gradients_are_complex_views() -> None:
    seen = []

    def hook(_: Any, bucket: dist.GradBucket) -> Any:
        seen.append((bucket.buffer().dtype, [(g.dtype, g.shape, g.stride()) for g in bucket.gradients()]))
        if bucket.gradients()[0].is_complex():
            bucket.gradients()[0].fill_(2 - 1j)
        return default_hooks.allreduce_hook(None, bucket)

    def program(rank: int) -> Tensor:
        model = Waves()
        ddp = DDP(model)
        ddp.register_comm_hook(None, hook)
        loss(ddp, rank).backward()
        return gradients(model)[0]

    assert torch.equal(run(program, 1)[0], torch.full((6, 4), 2 - 1j))
    assert (torch.float32, [(torch.complex64, (6, 4), (4, 1)), (torch.complex64, (4, 3), (1, 4))]) in seen


def test_complex_gradients_fit_a_real_buffer_of_twice_their_size() -> None:
    complex_one, real_one = torch.empty(2, dtype=torch.complex64), torch.empty(3)
    bucket = dist.GradBucket(buffer=torch.arange(7.0), gradients=[complex_one, real_one])
    assert [g.tolist() for g in bucket.gradients()] == [[0 + 1j, 2 + 3j], [4.0, 5.0, 6.0]]
    bucket.set_buffer(bucket.buffer().bfloat16())
    assert bucket.gradients()[0].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    with pytest.raises(ValueError, match="7 elements together"):
        dist.GradBucket(buffer=torch.arange(7.0), gradients=[complex_one, complex_one])
