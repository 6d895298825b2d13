"""Optimizers that step inside backward, compared with torch's DDP and an optimizer after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _hook_then_optimizer as torchs_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _OptimizerHookState as TorchState
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from tests.covering import covering
from tests.parallel.training import batch, build, forked
from tests.torchs_world import start_torch
from torchdist_ref.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torchdist_ref.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _hook_then_optimizer, _OptimizerHookState
from torchdist_ref.optim import ZeroRedundancyOptimizer
from torchdist_ref.testing import run

DDP = dist.DistributedDataParallel
# In MiB: three buckets of the multilayer perceptron.
SMALL = 0.004


class Momentum:
    """SGD with momentum, one parameter at a time: what torch calls a functional optimizer."""

    def __init__(self) -> None:
        self.momenta: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step_param(self, parameter: Tensor, gradient: Tensor | None) -> None:
        assert gradient is not None
        momentum = self.momenta.setdefault(parameter, torch.zeros_like(parameter))
        momentum.mul_(0.9).add_(gradient)
        parameter.sub_(momentum, alpha=0.05)


def states(model: nn.Module) -> Tensor:
    return torch.cat([t.detach().flatten().float() for t in model.state_dict().values()])


def steps(ddp: Any, rank: int, count: int, optimizer: Any = None, first: int = 0) -> None:
    for step in range(first, first + count):
        ddp.zero_grad()
        inputs, labels = batch(rank, step)
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        if optimizer is not None:
            optimizer.step()


# torch's group ends its threads when its last reference goes; if that is in a callback, on one of them, it hangs.
kept: list[Any] = []


def meet(rank: int, world: int, path: str) -> None:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=world)
    kept.append(torch.distributed.group.WORLD)


def after_hook(rank: int, path: str, some: bool, views: bool) -> list[Tensor]:
    """torch's `_hook_then_optimizer` on torch's DDP, and ours on ours; on all parameters or on some."""
    meet(rank, 2, path)
    found = []
    theirs = torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook
    for wrap, state, then_optimizer, inner in (
        (TorchDDP, TorchState, torchs_wrapper, theirs),
        (DDP, _OptimizerHookState, _hook_then_optimizer, default_hooks.allreduce_hook),
    ):
        model = build("mlp")
        ddp = wrap(model, bucket_cap_mb=SMALL, gradient_as_bucket_view=views)
        chosen = list(model.parameters())[:3] if some else None
        ddp.register_comm_hook(None, then_optimizer(inner, state(Momentum(), chosen)))
        steps(ddp, rank, 6)
        found.append(states(model))
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize(("some", "views"), covering((False, True), (False, True)))
def test_hook_then_optimizer_equals_torchs(some: bool, views: bool, tmp_path: Path) -> None:
    for theirs, ours in forked(after_hook, 2, str(tmp_path / "meet"), some, views, backend="ref"):
        assert torch.equal(theirs, ours)


def elsewhere(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average, in memory of its own and in another precision."""
    return default_hooks.allreduce_hook(state, bucket).then(lambda done: done.value().double().view(1, -1))


@pytest.mark.parametrize("hook", [elsewhere, quantization_hooks.quantization_pertensor_hook])
def test_the_optimizer_steps_on_the_result_of_the_hook_in_any_memory(hook: Any) -> None:
    # Steps on the gradients from before the exchange would drive the ranks apart.
    def program(rank: int, hook: Any) -> Tensor:
        ddp = DDP(build("mlp"), bucket_cap_mb=SMALL)
        ddp.register_comm_hook(
            None,
            _hook_then_optimizer(hook, _OptimizerHookState(Momentum())),
        )
        steps(ddp, rank, 4)
        return states(ddp.module)

    wanted = run(program, 2, default_hooks.allreduce_hook)[0]
    first, second = run(program, 2, hook)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, wanted, rtol=0, atol=0 if hook is elsewhere else 0.01)


def carrying(rank: int, path: str, views: bool) -> list[Any]:
    """Parameters that carry optimizers, all but the last bias; beside torch's DDP with those optimizers after it."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    meet(rank, 2, path)
    # torch's own hook asks for the current stream of an accelerator.
    plain = TorchDDP(build("mlp"), bucket_cap_mb=SMALL)
    steps(plain, rank, 5, torch.optim.SGD(list(plain.parameters())[:-1], lr=0.05, momentum=0.9))
    model = build("mlp")
    _apply_optimizer_in_backward(torch.optim.SGD, list(model.parameters())[:-1], {"lr": 0.05, "momentum": 0.9})
    ddp = DDP(model, bucket_cap_mb=SMALL, gradient_as_bucket_view=views)
    steps(ddp, rank, 5)
    torch.distributed.destroy_process_group()
    return [states(plain.module), states(model), [p.grad is None for p in model.parameters()]]


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("views", [False, True])
def test_parameters_that_carry_optimizers_step_on_averages(views: bool, tmp_path: Path) -> None:
    # Imports torch's compiler: some 2 s, once.
    import torch.distributed.optim  # noqa: F401

    for theirs, ours, none in forked(carrying, 2, str(tmp_path / "meet"), views, backend="ref"):
        assert torch.equal(theirs, ours)
        assert none == [True] * 5 + [False]


def test_an_object_that_is_no_functional_optimizer_raises() -> None:
    with pytest.raises(dist.ArgumentError, match="method step_param"):
        _OptimizerHookState(object())


# ---- sharded


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
}


def sharded(rank: int, way: str, shard: bool, kind: str, idle: int = 2, **kw: Any) -> tuple[Tensor, Tensor, int]:
    """Weights with the hook, and with an optimizer of one rank after DDP that leaves out the first steps."""
    make, options = KINDS[kind]
    model = build("mlp")
    ddp = DDP(model, bucket_cap_mb=SMALL, **kw)
    zero = ZeroRedundancyOptimizer(model.parameters(), make, overlap_with_ddp=True, **options)
    hook = getattr(ddp_zero_hook, way)(default_hooks.allreduce_hook, ddp, zero, shard)
    ddp.register_comm_hook(None, hook)
    steps(ddp, rank, 8)
    plain = DDP(build("mlp"), bucket_cap_mb=SMALL, **kw)
    steps(plain, rank, idle)
    steps(plain, rank, 8 - idle, make(plain.parameters(), **options), first=idle)
    return states(model), states(plain.module), len(zero.optim.state)


CASES = covering(["ref", "gloo"], ddp_zero_hook.__all__, [False, True], list(KINDS), together=2)


@pytest.mark.parametrize(("backend", "way", "shard", "kind"), CASES)
def test_sharded_steps_inside_backward_equal_steps_after_it(way: str, shard: bool, kind: str, backend: str) -> None:
    """CI has each pair of values."""
    # Two ranks, where a half is exact, whether DDP multiplies by it or the hook divides.
    outcomes = run(sharded, 2, way, shard, kind, backend=backend)
    assert all(torch.equal(found, wanted) for found, wanted, _ in outcomes)
    assert sum(count for _, _, count in outcomes) == 6 and max(count for _, _, count in outcomes) < 6


@pytest.mark.parametrize(
    ("way", "idle"), [("static_graph", 3), ("find_unused_parameters", 1), ("gradient_as_bucket_view", 2)]
)
def test_updates_begin_when_buckets_are_final(way: str, idle: int) -> None:
    def program(rank: int) -> Any:
        return sharded(rank, "hook_with_zero_step_interleaved", False, "SGD", idle, **{way: True})

    for found, wanted, _ in run(program, 2):
        assert torch.equal(found, wanted)


def beside_torch(rank: int, path: str, way: str) -> tuple[Tensor, Tensor]:
    """Ours on torch's DDP, and torch's DDP with an optimizer after it; torch's own hook refuses Gloo."""
    meet(rank, 2, path)
    model = build("mlp")
    ddp = TorchDDP(model, bucket_cap_mb=SMALL)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    ddp.register_comm_hook(None, getattr(ddp_zero_hook, way)(default_hooks.allreduce_hook, ddp, zero))
    steps(ddp, rank, 6)
    plain = TorchDDP(build("mlp"), bucket_cap_mb=SMALL)
    steps(plain, rank, 2)
    steps(plain, rank, 4, torch.optim.SGD(plain.parameters(), lr=0.05), first=2)
    torch.distributed.destroy_process_group()
    return states(model), states(plain.module)


@pytest.mark.parametrize("way", ddp_zero_hook.__all__)
def test_sharded_steps_on_torchs_ddp(way: str, tmp_path: Path) -> None:
    for found, wanted in forked(beside_torch, 2, str(tmp_path / "meet"), way, backend="ref"):
        assert torch.equal(found, wanted)


def test_zero_step_after_the_last_bucket_works_with_powersgd() -> None:
    def program(rank: int) -> Tensor:
        model = build("mlp")
        ddp = DDP(model, bucket_cap_mb=SMALL)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
        state = powerSGD_hook.PowerSGDState(None, 1, 2)
        ddp.register_comm_hook(state, ddp_zero_hook.hook_with_zero_step(powerSGD_hook.powerSGD_hook, ddp, zero))
        steps(ddp, rank, 8)
        return states(model)

    for backend in ("ref", "gloo"):
        everyone = run(program, 3, backend=backend)
        assert all(torch.equal(found, everyone[0]) for found in everyone)
        assert not torch.equal(everyone[0], states(build("mlp")))


def test_other_optimizers_raise() -> None:
    def program(rank: int) -> None:
        ddp = DDP(build("mlp"))
        with pytest.raises(dist.ArgumentTypeError, match=r"torchdist_ref.optim, got 'SGD'"):
            ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, ddp, torch.optim.SGD(ddp.parameters(), 0.1))
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(dist.ArgumentError, match="overlap_with_ddp=True"):
            ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, ddp, zero)

    run(program, 1)
