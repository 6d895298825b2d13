"""Hooks of one collective: the contract of hooks, errors, and training by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.covering import covering
from tests.parallel.training import train
from torchdist_ref.algorithms import ddp_comm_hooks
from torchdist_ref.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torchdist_ref.testing import RankError, fill, run
from torchdist_ref.testing.hook_contract import BUCKETS, check_hook, exact_average, gradients

ACCURATE: dict[str, tuple[Any, float]] = {
    "allreduce": (default_hooks.allreduce_hook, 1e-6),
    "fp16": (default_hooks.fp16_compress_hook, 1e-3),
    "bf16": (default_hooks.bf16_compress_hook, 8e-3),
    "fp16 around allreduce": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 1e-3),
    "bf16 around allreduce": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), 8e-3),
    "per tensor": (quantization_hooks.quantization_pertensor_hook, 5e-3),
    "per channel": (quantization_hooks.quantization_perchannel_hook, 5e-3),
}


@pytest.mark.parametrize(("name", "world", "backend"), covering(list(ACCURATE), (2, 3), ("ref", "gloo"), together=2))
def test_averaging_hooks_satisfy_the_contract(name: str, world: int, backend: str) -> None:
    hook, tolerance = ACCURATE[name]
    check_hook(hook, world_size=world, backend=backend, tolerance=tolerance)


def test_noop_keeps_every_ranks_gradients() -> None:
    check_hook(debugging_hooks.noop_hook, tolerance=None, alike=False)
    with pytest.raises(RankError, match="the value is the average within"):
        check_hook(debugging_hooks.noop_hook)


def test_the_contract_detects_a_sum_that_is_not_divided() -> None:
    def forgetful(state: Any, bucket: dist.GradBucket) -> Any:
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    with pytest.raises(RankError, match=r"average within 1e-06; step 0, bucket 0: 1\nSee: "):
        check_hook(forgetful)


def test_the_contract_detects_ranks_that_differ() -> None:
    def drifting(state: Any, bucket: dist.GradBucket) -> Any:
        rank = dist.get_rank()
        return default_hooks.allreduce_hook(state, bucket).then(lambda future: future.value() * (1 + rank / 1e6))

    with pytest.raises(RankError, match="every rank gets the same bits"):
        check_hook(drifting, tolerance=1e-5)


def test_fp16_hook_communicates_float16() -> None:
    def program(rank: int) -> Any:
        bucket = dist.GradBucket(buffer=torch.tensor([1.0 + 2.0**-11, 3e4]))
        return default_hooks.fp16_compress_hook(None, bucket).wait().tolist()

    # 1 + 2^-11 is not a 16-bit float; and 3e4 + 3e4 would be too large if the division came after the sum.
    assert run(program, 2) == [[1.0, 30000.0]] * 2


@pytest.mark.parametrize("given", [True, False])
def test_post_local_sgd_changes_groups_at_start_step(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a subgroup, that of the ranks of a host: as many as it has GPUs."""
    if not given:
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)

    def program(rank: int) -> Any:
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2] if given else None
        state = post_localSGD_hook.PostLocalSGDState(None, pair, start_localSGD_iter=2)
        found = []
        for _ in range(3):
            for last in (False, True):
                bucket = dist.GradBucket(buffer=fill(rank, (5,)), is_last=last)
                found.append(post_localSGD_hook.post_localSGD_hook(state, bucket).wait().clone())
        return found

    everyone = run(program, 4)
    whole = torch.stack([fill(r, (5,)) for r in range(4)]).mean(0)
    for rank, found in enumerate(everyone):
        pair = torch.stack([fill(r, (5,)) for r in (rank // 2 * 2, rank // 2 * 2 + 1)]).mean(0)
        assert all(torch.equal(one, whole) for one in found[:4])
        assert all(torch.equal(one, pair) for one in found[4:])


def test_post_local_sgd_without_a_subgroup_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    with pytest.raises(dist.ArgumentError, match="'subgroup' must be a group, got None"):
        post_localSGD_hook.PostLocalSGDState(None, None, 5)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 1300])
def test_quantization_error_is_within_half_a_level(size: int) -> None:
    x = fill(3, (size,)) * 1.37
    matrix = quantization_hooks.rows(x, 512)
    back = quantization_hooks.unpack(quantization_hooks.pack(matrix), 512)
    level = (matrix.amax(1).clamp_min(0) - matrix.amin(1).clamp_max(0)) / 255 if size else torch.ones(0)
    assert ((back - matrix).abs().amax(1) <= level * 0.5 + 1e-6).all() if size else back.numel() == 0


@pytest.mark.parametrize("kind", DDPCommHookType)
def test_every_named_hook_trains(kind: DDPCommHookType) -> None:
    def program(rank: int) -> Any:
        def wrap(model: Any, **kw: Any) -> Any:
            ddp = dist.DistributedDataParallel(model, **kw)
            register_ddp_comm_hook(kind, ddp)
            return ddp

        losses, states, _ = train(wrap, "mlp", rank, 4, bucket_cap_mb=0.004)
        return losses, states

    (losses, first), (_, second) = run(program, 2)
    assert torch.isfinite(losses).all()
    assert torch.equal(first, second) == (kind is not DDPCommHookType.NOOP)


def test_register_by_name_raises_on_a_function() -> None:
    with pytest.raises(dist.ArgumentTypeError, match=r"model.register_comm_hook\(state, hook\)"):
        ddp_comm_hooks.register_ddp_comm_hook(default_hooks.allreduce_hook, None)


def test_gradients_of_the_contract_differ_by_rank_step_and_bucket() -> None:
    seen = [torch.cat([g.flatten() for g in gradients(r, s, i)]) for r in range(3) for s in (1, 2) for i in range(4)]
    assert len({tuple(x.tolist()) for x in seen}) == 24
    assert [exact_average(2, 1, i).numel() for i in range(len(BUCKETS))] == [408, 289, 1027, 38]
    assert [exact_average(2, 0, i).numel() for i in range(2)] == [409, 1315], "other sizes at the first step"


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_wrapper_returns_its_result_in_the_dtype_of_the_buffer(name: str) -> None:
    """On torch's DDP nobody else converts it: a result in the wire dtype would be read as garbage."""
    wrap = getattr(default_hooks, f"{name}_compress_wrapper")

    def program(rank: int) -> Any:
        bucket = dist.GradBucket(buffer=torch.tensor([1.5, -2.25, 8.0 * rank]))
        return wrap(default_hooks.allreduce_hook)(None, bucket).wait()

    for result in run(program, 2):
        assert result.dtype == torch.float32
        assert result.tolist() == [1.5, -2.25, 4.0]
