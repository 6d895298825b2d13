"""DDP's buckets in registered memory (zero-copy): the same bits as without, and gradients that outlive their group."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchdist_ref as dist
from torchdist_ref import groups
from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torchdist_ref.backends.ref.steps import Step
from torchdist_ref.backends.ref.zero_copy import RegisteredPath
from torchdist_ref.parallel import DistributedDataParallel
from torchdist_ref.testing import run
from torchdist_ref.transports.registered_memory import handle_of


def ordinary(count: int, *, dtype: torch.dtype, group: object) -> Tensor:
    return torch.empty(count, dtype=dtype)


def train(rank: int, pointing: bool, registered: bool) -> tuple[list[Tensor], int, bool]:
    """Return gradients of three steps, the number of zero-copy calls, and whether all gradients are registered."""
    calls, found = [0], RegisteredPath.phases

    def counted(path: RegisteredPath, locations: bytes) -> Iterable[Sequence[Step]]:
        calls[0] += 1
        return found(path, locations)

    RegisteredPath.phases = counted  # type: ignore[method-assign]
    if not registered:
        groups.empty_registered = ordinary  # type: ignore[assignment]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 901), nn.Tanh(), nn.Linear(901, 301), nn.Tanh(), nn.Linear(301, 7))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.2, gradient_as_bucket_view=pointing)
    torch.manual_seed(rank)
    for _ in range(3):
        model.zero_grad()
        ddp(torch.randn(5, 300)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * (torch.zeros(()) if parameter.grad is None else parameter.grad)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    dist.destroy_process_group()
    return [g.clone() for g in gradients], calls[0], all(handle_of(g) is not None for g in gradients)


@pytest.mark.parametrize(("size", "pointing"), [(2, False), (2, True), (3, True)])
def test_registered_buckets_have_the_bits_of_ordinary_ones(size: int, pointing: bool) -> None:
    zero_copy, staged = (run(train, size, pointing, registered, ranks="processes") for registered in (True, False))
    for (one, calls, there), (other, none, _) in zip(zero_copy, staged, strict=True):
        assert len(one) == len(other) == 6 and all(map(torch.equal, one, other))
        assert calls >= 2 and none == 0
        assert there == pointing


def test_buckets_without_shared_memory_are_not_registered() -> None:
    def program(rank: int) -> bool:
        model = DistributedDataParallel(nn.Linear(300, 100))
        return handle_of(model.reducer.buckets[0].buffer) is None

    assert run(program, 2, backend="gloo", ranks="processes") == [True, True]


@pytest.mark.parametrize("hook", [None, fp16_compress_hook])
def test_first_buckets_are_freed_when_rebuilt(hook: Any) -> None:
    def program(rank: int) -> bool:
        ddp = DistributedDataParallel(nn.Linear(300, 100))
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        ddp(torch.randn(5, 300)).sum().backward()
        first = weakref.ref(ddp.reducer.buckets[0])
        was = gc.isenabled()
        gc.disable()
        try:
            ddp(torch.randn(5, 300)).sum().backward()
            return ddp.reducer.rebuilt and first() is None
        finally:
            if was:
                gc.enable()

    assert run(program, 1, ranks="processes") == [True]
