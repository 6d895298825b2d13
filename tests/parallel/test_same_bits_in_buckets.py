"""The bucket of a gradient changes no bit of it: neither its size, nor the order, nor where the gradient is kept."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from torchdist_ref.parallel import DistributedDataParallel
from torchdist_ref.testing import run

SIZES = (0.0001, 0.003, 0.05, 25)


def gradients(rank: int, bucket_cap_mb: float, view: bool) -> dict[str, Tensor]:
    model = nn.Sequential(nn.Linear(37, 101), nn.Tanh(), nn.Linear(101, 53), nn.Tanh(), nn.Linear(53, 3))
    # Ranks are threads here, which share torch's generator: each draws from one of its own.
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=view)
    for step in range(2):  # buckets are rebuilt after the first
        model.zero_grad()
        inputs = torch.randn(5, 37, generator=torch.Generator().manual_seed(10 * rank + step))
        parallel(inputs).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("size", [3, 4])
def test_buckets_change_no_bit(size: int) -> None:
    found = [run(gradients, size, *how)[0] for how in itertools.product(SIZES, (False, True))]
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])
