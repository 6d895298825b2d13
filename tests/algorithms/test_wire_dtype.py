"""Hooks with traits: gradients are rounded and divided while they are packed, with the same bits as without."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as theirs

import torchdist_ref as dist
from tests.covering import covering
from torchdist_ref.algorithms.ddp_comm_hooks import default_hooks as ours
from torchdist_ref.parallel import DistributedDataParallel
from torchdist_ref.testing import fill, run

Hook = Callable[[Any, Any], Any]

TWICE = ours.bf16_compress_wrapper(ours.fp16_compress_wrapper(ours.allreduce_hook))
HOOKS: dict[str, tuple[Hook, Hook]] = {
    "allreduce": (ours.allreduce_hook, theirs.allreduce_hook),
    "fp16": (ours.fp16_compress_hook, theirs.fp16_compress_hook),
    "bf16": (ours.bf16_compress_hook, theirs.bf16_compress_hook),
    "fp16 wrapper": (
        ours.fp16_compress_wrapper(ours.allreduce_hook),
        theirs.fp16_compress_wrapper(theirs.allreduce_hook),
    ),
    "bf16 wrapper": (
        ours.bf16_compress_wrapper(ours.allreduce_hook),
        theirs.bf16_compress_wrapper(theirs.allreduce_hook),
    ),
    # torch's inner wrapper doesn't convert back; so ours is compared with itself without traits.
    "two wrappers": (TWICE, lambda state, bucket: TWICE(state, bucket)),
}


def trained(hook: Hook, rank: int, **options: Any) -> list[torch.Tensor]:
    """Return the gradients of three steps in several buckets, large and small, accumulated from step to step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 191), nn.Tanh(), nn.Linear(191, 31), nn.Tanh(), nn.Linear(31, 7))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005, **options)
    # Under another name: torch's hooks ask for NCCL in bf16 by theirs.
    ddp.register_comm_hook(None, hook)
    found = []
    for step in range(3):
        ddp(fill(rank + 3 * step, (5, 30)) / 7).square().sum().backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert len(ddp.reducer.assignment) > 1
    return found


@pytest.mark.parametrize(("name", "world"), covering(list(HOOKS), (2, 3)))
def test_folded_hooks_have_the_bits_of_torchs_hooks(name: str, world: int) -> None:
    def program(rank: int) -> bool:
        one, other = HOOKS[name]
        plain = trained(other, rank)
        ways: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
        return all(all(map(torch.equal, trained(one, rank, **way), plain)) for way in ways) and len(plain) == 18

    assert run(program, world, ranks="processes") == [True] * world


def test_a_function_around_a_hook_sees_unpacked_gradients() -> None:
    seen: list[torch.Tensor] = []

    @wraps(ours.fp16_compress_hook)
    def watching(state: Any, bucket: dist.GradBucket) -> Any:
        seen.append(bucket.buffer().clone())
        future = ours.fp16_compress_hook(state, bucket)
        return future.then(lambda done: seen.append(done.value()) or done.value())

    def program(rank: int) -> list[tuple[torch.dtype, float]]:
        model = nn.Linear(3, 1, bias=False)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, watching)
        ddp(torch.tensor([[1.0, 2.0, 0.1]])).sum().backward()
        return [(tensor.dtype, tensor[2].item()) for tensor in seen]

    [[before, after]] = run(program, 1, ranks="processes")
    assert before == (torch.float32, torch.tensor(0.1).item())
    assert after == (torch.float32, torch.tensor(0.1).half().item())
