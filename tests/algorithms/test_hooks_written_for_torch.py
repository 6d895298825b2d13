"""Hooks that were written for torch, on our DDP where torch has no group: with state None and with our group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as torchs
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

import torchdist_ref as dist
from tests.parallel.training import train
from tests.torchs_world import start_torch
from torchdist_ref.algorithms.ddp_comm_hooks import default_hooks as ours
from torchdist_ref.testing import fill, run

DDP = dist.DistributedDataParallel


def as_in_internvl(process_group: torchs.ProcessGroup, bucket: torchs.GradBucket) -> torch.futures.Future[Tensor]:
    """The form of InternVL's `ddp_hooks`: torch's types, torch's world, the group's own size."""
    group = process_group if process_group is not None else torchs.group.WORLD
    half = bucket.buffer().to(torch.float16).div_(group.size())
    future = torchs.all_reduce(half, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


HOOKS: dict[str, tuple[Any, Any, float]] = {
    "allreduce": (lambda group: group, default_hooks.allreduce_hook, 0),
    "fp16": (lambda group: group, default_hooks.fp16_compress_hook, 0.01),
    "fp16 around allreduce": (
        lambda group: group,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        0.01,
    ),
    "ours around torch's": (lambda group: group, ours.fp16_compress_wrapper(default_hooks.allreduce_hook), 0.01),
    "InternVL": (lambda group: group, as_in_internvl, 0.01),
    "local SGD": (
        # Beyond the last step: torch would make subgroups of its own, for which it wants accelerators.
        lambda group: post_localSGD_hook.PostLocalSGDState(group, group, 9),
        post_localSGD_hook.post_localSGD_hook,
        0,
    ),
    # Compresses from the third step on.
    "PowerSGD": (lambda group: powersgd.PowerSGDState(group, 2, 3), powersgd.powerSGD_hook, 0.2),
}


# torch's PowerSGD makes calls from callbacks, which Gloo pairs by order of arrival: several buckets get mixed up.
RUNS = [
    (name, backend, ranks)
    for name in HOOKS
    for backend, ranks in [("ref", "threads"), ("ref", "processes"), ("gloo", "threads")]
    if (name, backend) != ("PowerSGD", "gloo")
]


def registered(state: Any, hook: Any) -> Any:
    def wrap(model: Any, **kw: Any) -> Any:
        ddp = DDP(model, **kw)
        ddp.register_comm_hook(state, hook)
        return ddp

    return wrap


def trained(rank: int, name: str, with_group: bool) -> tuple[Tensor, Tensor, bool]:
    """Return weights after training with the hook, and without."""
    make, hook, _ = HOOKS[name]
    wrap = registered(make(dist.GroupMember.WORLD if with_group else None), hook)
    found = train(wrap, "mlp", rank, 5, bucket_cap_mb=0.004)[1]
    return found, train(DDP, "mlp", rank, 5, bucket_cap_mb=0.004)[1], torchs.is_initialized()


@pytest.mark.parametrize("with_group", [False, True], ids=["None", "our group"])
@pytest.mark.parametrize(("name", "backend", "ranks"), RUNS)
def test_torchs_hooks_run_on_our_groups(name: str, with_group: bool, backend: str, ranks: Any, proof: Any) -> None:
    outcomes = run(trained, 2, name, with_group, backend=backend, ranks=ranks)
    for found, plain, shown in outcomes:
        assert shown and torch.equal(found, outcomes[0][0])
        apart = float((found - plain).norm() / plain.norm())
        assert apart <= HOOKS[name][2], apart
    proof(["algorithms"], [backend], 2, "our DDP without a hook")
    assert not torchs.is_initialized()


def test_lightning_registers_hooks_on_our_ddp() -> None:
    # Imports all of Lightning: some 2 s.
    overrides = pytest.importorskip("lightning.pytorch.overrides.distributed")

    def program(rank: int) -> Tensor:
        def wrap(model: Any, **kw: Any) -> Any:
            ddp = DDP(model, **kw)
            hook, around = default_hooks.allreduce_hook, default_hooks.fp16_compress_wrapper
            overrides._register_ddp_comm_hook(ddp, ddp_comm_hook=hook, ddp_comm_wrapper=around)
            return ddp

        return train(wrap, "mlp", rank, 3)[1]

    first, second = run(program, 2)
    expected = run(lambda rank: train(registered(None, ours.fp16_compress_hook), "mlp", rank, 3)[1], 2)[0]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-3)


def test_the_five_hooks_of_internvl_are_where_its_imports_look() -> None:
    # InternVL's training script begins: from ddp_hooks import fp16_compress_hook, and so on.
    from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import (
        allreduce_hook,
        bf16_compress_hook,
        bf16_compress_wrapper,
        fp16_compress_hook,
        fp16_compress_wrapper,
    )

    def program(rank: int) -> list[Tensor]:
        hooks = [
            allreduce_hook,
            fp16_compress_hook,
            bf16_compress_hook,
            fp16_compress_wrapper(as_in_internvl),
            bf16_compress_wrapper(allreduce_hook),
        ]
        group = dist.new_group([0, 1])
        return [train(registered(group, hook), "mlp", rank, 3)[1] for hook in hooks]

    first, second = run(program, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(float((a - first[0]).norm() / first[0].norm()) < 0.02 for a in first)


def test_torchs_other_functions_find_the_groups_of_threads() -> None:
    def program(rank: int) -> Any:
        pair = dist.new_group([0, 2])
        ddp = DDP(torch.nn.Linear(1, 1))
        ddp.register_comm_hook(None, debugging_hooks.noop_hook)
        objects: list[Any] = [None] * 3
        torchs.all_gather_object(objects, {"rank": rank})
        torchs.barrier()
        x = fill(rank, (5,))
        torchs.broadcast(x, src=2, group=dist.GroupMember.WORLD)
        answers = torchs.get_rank(), torchs.get_world_size(), torchs.get_backend()
        if rank != 1:
            y = fill(rank, (4,))
            torchs.all_reduce(y, group=pair)
            assert torch.equal(y, fill(0, (4,)) + fill(2, (4,)))
            assert torchs.get_rank(pair) == rank // 2
            assert torchs.get_world_size(pair) == torchs.get_global_rank(pair, 1) == 2
        return objects, torch.equal(x, fill(2, (5,))), answers

    for rank, (objects, same, answers) in enumerate(run(program, 3)):
        assert objects == [{"rank": r} for r in range(3)] and same
        assert answers == (rank, 3, "ref")


def test_a_group_of_torchs_own_stays_the_default(tmp_path: Any) -> None:
    start_torch(init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        own = torchs.group.WORLD

        def program(rank: int) -> Any:
            DDP(torch.nn.Linear(1, 1)).register_comm_hook(None, default_hooks.allreduce_hook)
            return torchs.group.WORLD is own

        assert run(program, 2) == [True, True]
        assert torchs.group.WORLD is own
    finally:
        torchs.destroy_process_group()


def test_our_group_has_torchs_methods_and_no_others() -> None:
    def program(rank: int) -> Any:
        group: Any = dist.GroupMember.WORLD
        assert not hasattr(group, "all_redoos") and not hasattr(group, "__len__")
        x = fill(rank, (3,))
        group.allreduce([x]).wait()
        return x

    assert all(torch.equal(x, fill(0, (3,)) + fill(1, (3,))) for x in run(program, 2))
