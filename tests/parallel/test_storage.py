"""Buckets by themselves: gradients of any size come in, multiplied once, and stay where they are to stay."""

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
    """A group of this process only."""
    dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(pointing: bool, dtype: torch.dtype = torch.float32) -> tuple[DenseBucket, list[Tensor]]:
    """A bucket of small and large parameters with gradients, and what these are."""
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
    for number, parameter in enumerate(parameters):
        parameter.grad = fill(number, parameter.shape).to(dtype)
    bucket = DenseBucket(0, list(range(len(SIZES))), list(parameters), True, pointing, None)
    return bucket, [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


def taken(bucket: DenseBucket, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """What a hook gets to see once all gradients are in."""
    bucket.set_packing(scale, dtype)
    for place in range(len(SIZES)):
        bucket.copy_in(place)
    shown = bucket.grad_bucket()
    return torch.cat(shown.gradients()) if shown.wire_dtype is None else shown.wire_buffer(shown.wire_dtype)


@pytest.mark.usefixtures("alone")
# A half is exact in every type, a third in none.
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("pointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_gradients_of_any_size_are_multiplied_as_by_a_number_of_pythons(
    dtype: torch.dtype, pointing: bool, scale: float
) -> None:
    bucket, gradients = made(pointing, dtype)
    for step in range(2):
        assert torch.equal(taken(bucket, scale), torch.cat(gradients) * scale), step
        if pointing:
            assert all(p.grad is view for p, view in zip(bucket.parameters, bucket.views, strict=True))
            gradients = [view.clone() for view in bucket.views]


@pytest.mark.usefixtures("alone")
def test_what_travels_in_another_type_is_multiplied_in_that_type_and_lies_in_its_buffer_nowhere() -> None:
    bucket, gradients = made(pointing=False)
    bucket.buffer.fill_(7.0)
    assert torch.equal(taken(bucket, 1 / 3, torch.float16), torch.cat(gradients).half() * (1 / 3))
    assert bool((bucket.buffer == 7.0).all())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_where_gradients_can_not_be_rounded_they_are_not_multiplied_either(dtype: torch.dtype) -> None:
    bucket, gradients = made(pointing=dtype is torch.float16)
    assert torch.equal(taken(bucket, 0.5, dtype), torch.cat(gradients))
    shown = bucket.grad_bucket()
    assert shown.scale == 1.0 and shown.wire_dtype is None


@pytest.mark.usefixtures("alone")
def test_a_bucket_that_does_not_go_holds_nothing_over_to_the_next_step() -> None:
    bucket, gradients = made(pointing=False)
    bucket.set_packing()
    bucket.copy_in(0)
    bucket.parameters[0].grad = None
    assert torch.equal(taken(bucket), torch.cat([torch.zeros(3), *gradients[1:]]))


class Two(nn.Module):
    """Two layers, of which rank 1 leaves out one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.one(x) + self.other(x) if both else self.one(x)


@pytest.mark.parametrize("pointing", [False, True])
def test_a_hook_that_changes_nothing_leaves_gradients_where_they_are(pointing: bool) -> None:
    def program(rank: int) -> bool:
        ddp = DistributedDataParallel(Two(), gradient_as_bucket_view=pointing, find_unused_parameters=True)
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
