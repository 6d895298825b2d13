"""DenseBucket by itself: gradients of any size are packed, scaled and rounded once, and stay views if they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchdist_ref.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

import torchdist_ref as dist
from torchdist_ref.parallel import DistributedDataParallel
from torchdist_ref.parallel.storage import SMALL_GRADIENT_ELEMENTS, DenseBucket
from torchdist_ref.testing import fill, run

SIZES = [3, SMALL_GRADIENT_ELEMENTS + 1, 0, SMALL_GRADIENT_ELEMENTS, 7]


@pytest.fixture
def alone() -> Iterator[None]:
    """Provide a group of this process only."""
    dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(as_view: bool, dtype: torch.dtype = torch.float32) -> tuple[DenseBucket, list[Tensor]]:
    """Return a bucket of small and large parameters with gradients, and copies of these."""
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
    for number, parameter in enumerate(parameters):
        parameter.grad = fill(number, parameter.shape).to(dtype)
    bucket = DenseBucket(0, list(range(len(SIZES))), list(parameters), True, as_view, None)
    return bucket, [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


def packed(bucket: DenseBucket, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Return the packed gradients, as a hook receives them."""
    bucket.set_packing(scale, dtype)
    for slot in range(len(SIZES)):
        bucket.copy_in(slot)
    shown = bucket.grad_bucket()
    return torch.cat(shown.gradients()) if shown.wire_dtype is None else shown.wire_buffer(shown.wire_dtype)


@pytest.mark.usefixtures("alone")
# A half is exact in every type, a third in none.
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_packing_scales_gradients_of_any_size(dtype: torch.dtype, as_view: bool, scale: float) -> None:
    bucket, gradients = made(as_view, dtype)
    for step in range(2):
        assert torch.equal(packed(bucket, scale), torch.cat(gradients) * scale), step
        if as_view:
            assert all(p.grad is view for p, view in zip(bucket.parameters, bucket.views, strict=True))
            gradients = [view.clone() for view in bucket.views]


@pytest.mark.usefixtures("alone")
def test_packing_scales_in_the_wire_dtype_and_leaves_the_buffer_alone() -> None:
    bucket, gradients = made(as_view=False)
    bucket.buffer.fill_(7.0)
    assert torch.equal(packed(bucket, 1 / 3, torch.float16), torch.cat(gradients).half() * (1 / 3))
    assert bool((bucket.buffer == 7.0).all())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_packing_scales_nothing_if_it_cannot_round(dtype: torch.dtype) -> None:
    bucket, gradients = made(as_view=dtype is torch.float16)
    assert torch.equal(packed(bucket, 0.5, dtype), torch.cat(gradients))
    shown = bucket.grad_bucket()
    assert shown.scale == 1.0 and shown.wire_dtype is None


@pytest.mark.usefixtures("alone")
def test_a_bucket_that_is_not_launched_keeps_nothing_for_the_next_step() -> None:
    bucket, gradients = made(as_view=False)
    bucket.set_packing()
    bucket.copy_in(0)
    bucket.parameters[0].grad = None
    assert torch.equal(packed(bucket), torch.cat([torch.zeros(3), *gradients[1:]]))


class Two(nn.Module):
    """Two layers, of which rank 1 leaves out one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.one(x) + self.other(x) if both else self.one(x)


@pytest.mark.parametrize("as_view", [False, True])
def test_keeps_buffer_hook_leaves_gradients_unchanged(as_view: bool) -> None:
    def program(rank: int) -> bool:
        ddp = DistributedDataParallel(Two(), gradient_as_bucket_view=as_view, find_unused_parameters=True)
        ddp.register_comm_hook(None, noop_hook)
        x, total = fill(rank, (2, 4)), torch.zeros(3, 4)
        for _ in range(3):
            ddp(x, rank == 0).sum().backward()
            total += x.sum(0)
            mine = [ddp.module.one.weight.grad, ddp.module.other.weight.grad]
            # Some rank has used the second layer, so that where it was not used its gradient is zero, and not None.
            expected: list[Any] = [total, total if rank == 0 else torch.zeros(3, 4)]
            if not all(torch.allclose(a, b) for a, b in zip(mine, expected, strict=True)):
                return False
        return True

    assert run(program, 2) == [True, True]
