"""DDP whose backward passes the caller finalizes, and buckets that exist during backward only (torch 2.15)."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import torchdist_ref as dist
from torchdist_ref.testing import fill, run

OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
STEPS = 3


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(fill(number, parameter.shape))
    return made


def average(step: int, size: int) -> list[torch.Tensor]:
    """Return the averages of all ranks' gradients, computed on one."""
    module = model()
    total = sum(module(fill(7 * step + rank, (5, 3))).pow(2).sum() for rank in range(size))
    return list(torch.autograd.grad(total / size, list(module.parameters())))  # type: ignore[operator]


def gradients(ddp: Any) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def check(found: list[list[list[torch.Tensor]]]) -> None:
    for steps in found:
        for step, gradients in enumerate(steps):
            torch.testing.assert_close(gradients, average(step, len(found)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_gradients_are_averages_once_the_caller_has_finalized(backend: str, options: dict[str, Any]) -> None:
    def program(rank: int) -> Any:
        ddp = dist.DistributedDataParallel(model(), **options)
        assert not (ddp.require_manual_backward_finalization or ddp.should_finalize_after_backward)
        ddp.require_manual_backward_finalization = True
        found, late = [], []
        for step in range(STEPS):
            ddp.zero_grad()
            ddp(fill(7 * step + rank, (5, 3))).pow(2).sum().backward()
            late.append(ddp.should_finalize_after_backward)
            ddp.finalize_backward()
            found.append(gradients(ddp))
        return found, late

    values = run(program, 2, backend=backend)
    check([found for found, _ in values])
    # torch says False with find_unused_parameters, where this reducer learns the unused ones at the end of backward.
    always = bool(options.get("find_unused_parameters"))
    assert all(late == [True, always or "static_graph" in options, always] for _, late in values)


def test_a_hook_may_finalize_during_backward() -> None:
    def program(rank: int) -> Any:
        first = nn.Linear(3, 3)
        ddp = dist.DistributedDataParallel(model())
        ddp.require_manual_backward_finalization = True
        seen: list[Any] = []
        for step in range(STEPS):
            ddp.zero_grad()
            hidden = first(fill(7 * step + rank, (5, 3)))
            inputs = fill(7 * step + rank, (5, 3)) + 0 * hidden
            output = ddp(inputs).pow(2).sum()
            early = not ddp.should_finalize_after_backward
            if early:
                # Its gradient comes after those of the parameters of DDP.
                hidden.register_hook(lambda gradient: (ddp.finalize_backward(), seen.append(gradients(ddp)), None)[2])
            output.backward()
            if not early:
                ddp.finalize_backward()
                seen.append(gradients(ddp))
        return seen

    check(run(program, 2))


def test_finalizing_at_the_wrong_time_raises_and_says_why() -> None:
    def program(rank: int) -> list[str]:
        ddp = dist.DistributedDataParallel(model())
        errors: list[str] = []

        def refused(call: Any) -> None:
            with pytest.raises(RuntimeError) as caught:
                call()
            errors.append(str(caught.value))

        refused(ddp.finalize_backward)
        ddp.require_manual_backward_finalization = True
        output = ddp(fill(rank, (5, 3))).sum()
        refused(ddp.finalize_backward)
        refused(lambda: setattr(ddp, "require_manual_backward_finalization", False))
        output.backward()
        refused(lambda: ddp(fill(rank, (5, 3))))
        ddp.finalize_backward()
        refused(ddp.finalize_backward)
        with ddp.no_sync():
            ddp(fill(rank, (5, 3))).sum().backward()
            refused(ddp.finalize_backward)
        ddp.require_manual_backward_finalization = False
        ddp(fill(rank, (5, 3))).sum().backward()
        return errors

    expected = [
        "manual backward finalization is not required",
        "no gradient reduction requires finalization",
        "after forward while a backward pass is expected or in progress",
        "Expected to have finalized the prior backward pass before starting a new one",
        "no gradient reduction requires finalization",
        "no gradient reduction requires finalization",
    ]
    for errors in run(program, 2):
        assert all(words in text for words, text in zip(expected, errors, strict=True)), errors


def test_a_copy_finalizes_as_the_original_does() -> None:
    def program(rank: int) -> Any:
        ddp = dist.DistributedDataParallel(model(), lazy_bucket_allocation=True)
        ddp.require_manual_backward_finalization = True
        copy = pickle.loads(pickle.dumps(ddp))
        copy(fill(rank, (5, 3))).pow(2).sum().backward()
        copy.finalize_backward()
        return [gradients(copy)]

    check(run(program, 2))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_lazy_buckets_exist_during_backward_only(options: dict[str, Any]) -> None:
    def program(rank: int) -> Any:
        ddp = dist.DistributedDataParallel(model(), lazy_bucket_allocation=True, **options)
        buffers: list[weakref.ref[torch.Tensor]] = []

        def average_hook(_: Any, bucket: dist.GradBucket) -> Any:
            buffers.append(weakref.ref(bucket.buffer()))
            # Not asynchronous: a group's thread keeps the tensors of its last call.
            dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        # The hook keeps all gradients in buckets; else ranks that share memory average the last ones in place.
        ddp.register_comm_hook(None, average_hook)
        memory, found = [], []
        for step in range(STEPS):
            ddp.zero_grad()
            output = ddp(fill(7 * step + rank, (5, 3))).pow(2).sum()
            memory.append([reference() is not None for reference in buffers])
            output.backward()
            found.append(gradients(ddp))
            # Views that are gradients keep their buffer.
            ddp.zero_grad()
            memory.append([reference() is not None for reference in buffers])
        return found, memory

    values = run(program, 2)
    check([found for found, _ in values])
    for _, memory in values:
        assert len(memory[-1]) >= STEPS and not any(map(any, memory))
