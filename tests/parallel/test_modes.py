"""Mixed precision and delayed parameters, compared with torch or a plain formula."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import torchdist_ref as dist
from tests.covering import covering
from tests.parallel.training import batch, build, clear, forked, update
from tests.torchs_world import start_torch
from torchdist_ref.parallel import MixedPrecision
from torchdist_ref.testing import fill, run

pytestmark = pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
DDP = dist.DistributedDataParallel
SMALL = 0.004


def flat(model: nn.Module) -> Tensor:
    return torch.cat([t.detach().flatten().double() for t in model.state_dict().values()])


def trained(wrap: Any, name: str, rank: int, steps: int, **kw: Any) -> tuple[Tensor, Tensor]:
    """Train; return losses of this rank, and states at the end."""
    model = build(name)
    ddp = wrap(model, bucket_cap_mb=SMALL, **kw)
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    losses = []
    for step in range(steps):
        clear(model, step)
        inputs, labels = batch(rank, step)
        loss = nn.functional.cross_entropy(ddp(inputs).float(), labels)
        loss.backward()
        losses.append(loss.detach())
        update(model, momenta)
    return torch.stack(losses), flat(model)


def meet(rank: int, path: str) -> None:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=2)


# ---- mixed precision


def by_hand(name: str, steps: int, reduce_dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Losses of both ranks and states at the end, from a copy in bfloat16 for each rank and each step."""
    model = build(name)
    for buffer in model.buffers():
        buffer.data = buffer.to(torch.bfloat16) if buffer.is_floating_point() else buffer
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    losses: list[list[Tensor]] = [[], []]
    for step in range(steps):
        copies = [copy.deepcopy(model).to(torch.bfloat16) for _ in range(2)]
        for rank, low in enumerate(copies):
            low.zero_grad()
            inputs, labels = batch(rank, step)
            loss = nn.functional.cross_entropy(low(inputs.to(torch.bfloat16)).float(), labels)
            loss.backward()
            losses[rank].append(loss.detach())
        for mine, first, second in zip(model.parameters(), *(low.parameters() for low in copies), strict=True):
            assert first.grad is not None and second.grad is not None
            mine.grad = ((first.grad.to(reduce_dtype) + second.grad.to(reduce_dtype)) / 2).float()
        for mine, first in zip(model.buffers(), copies[0].buffers(), strict=True):
            mine.copy_(first)
        update(model, momenta)
    return [torch.stack(of_rank) for of_rank in losses], flat(model)


@pytest.mark.parametrize(
    ("name", "reduce_dtype", "config", "views"),
    covering(
        ("mlp", "convnet", "transformer"),
        (None, torch.float32, torch.float16),
        (pytest.param(MixedPrecision), pytest.param(_MixedPrecision)),
        (False, True),
        together=2,
    ),
)
def test_mixed_precision_equals_a_low_precision_copy_per_step(
    name: str, reduce_dtype: torch.dtype | None, config: Any, views: bool
) -> None:
    """Every pair of options; `long` has all combinations."""
    # torch's own, on CPU, asks for streams that are not there; with them left out it reads memory that it has freed.
    low = torch.bfloat16
    chosen = config(low, reduce_dtype, low)

    def program(rank: int) -> Any:
        return trained(DDP, name, rank, 8, mixed_precision=chosen, gradient_as_bucket_view=views)

    losses, states = by_hand(name, 8, reduce_dtype or low)
    outcomes = run(program, 2)
    for rank, (found, after) in enumerate(outcomes):
        assert torch.equal(found, losses[rank])
        assert torch.equal(after, states) or name == "convnet"
    # Running statistics are each rank's own until the next forward pass takes those of rank 0.
    assert torch.equal(outcomes[0][1], states)


@pytest.mark.parametrize("views", [False, True])
def test_parameters_are_in_full_precision_outside_of_forward_and_backward(views: bool) -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)
            self.register_buffer("scales", torch.ones(2))
            self.seen: list[Any] = []

        def forward(self, x: Tensor, scale: float) -> Tensor:
            self.seen.append((x.dtype, self.layer.weight.dtype, self.scales.dtype))
            return self.layer(x) * scale

    def program(rank: int) -> Any:
        model = Probe()
        low = torch.bfloat16
        ddp = DDP(model, mixed_precision=MixedPrecision(low, buffer_dtype=torch.float16), gradient_as_bucket_view=views)
        outside = []
        x = batch(rank, 0)[0]
        with torch.no_grad():
            ddp(x, scale=2.0)
        outside.append(model.layer.weight.dtype)
        with ddp.no_sync():
            ddp(x, scale=2.0).sum().backward()
        outside += [model.layer.weight.dtype, model.layer.weight.grad.dtype]
        ddp(x, scale=2.0).sum().backward()
        outside += [model.layer.weight.dtype, model.layer.weight.grad.dtype]
        return set(model.seen), set(outside), model.layer.weight.grad

    wanted = torch.stack([4 * batch(rank, 0)[0].to(torch.bfloat16).sum(0).expand(4, 12) for rank in range(2)]).mean(0)
    for seen, outside, gradient in run(program, 2):
        assert seen == {(torch.bfloat16, torch.bfloat16, torch.float16)}
        assert outside == {torch.float32}
        torch.testing.assert_close(gradient, wanted.float(), rtol=0.02, atol=0.05)


def test_mixed_precision_refuses_another_hook() -> None:
    def program(rank: int) -> None:
        ddp = DDP(nn.Linear(1, 1), mixed_precision=MixedPrecision(torch.bfloat16))
        with pytest.raises(dist.DistError, match="has a hook already, '_reducer_allreduce_and_upcast_hook'"):
            ddp.register_comm_hook(None, lambda state, bucket: None)

    run(program, 1)


# ---- delayed parameters


def delaying(wrap: Any, everything: bool) -> Any:
    """Delays the layers but the first, or all; the first layer's weight gets its gradient last."""

    def delayed(model: nn.Module, **kw: Any) -> Any:
        named = [(name, p) for name, p in model.named_parameters() if everything or not name.startswith("0.")]
        trigger = next(model.parameters())
        return wrap(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=trigger, **kw)

    return delayed


def beside(rank: int, path: str, everything: bool) -> list[Any]:
    meet(rank, path)
    theirs = trained(TorchDDP, "mlp", rank, 6)
    # torch does not wait before the optimizer reads these gradients, so its plain DDP is the reference.
    ours = [
        trained(delaying(DDP, everything), "mlp", rank, 6, gradient_as_bucket_view=views) for views in (False, True)
    ]
    torch.distributed.destroy_process_group()
    return [theirs, *ours]


@pytest.mark.parametrize("everything", [False, True])
def test_delayed_parameters_are_averaged(everything: bool, tmp_path: Path) -> None:
    for theirs, *ours in forked(beside, 2, str(tmp_path / "meet"), everything, backend="ref"):
        assert all(torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1]) for mine in ours)


class Chain(nn.Module):
    """Three layers without biases; the first one's weight gets its gradient last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
        for place, layer in enumerate(self.layers):
            layer.weight.data = fill(place, (3, 3)) / 9

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def averaged(rank: int, delayed: list[int], trigger: int, wrap: Any = DDP) -> list[Tensor]:
    model = Chain()
    weights = [layer.weight for layer in model.layers]
    named = [(f"layers.{place}.weight", weights[place]) for place in delayed]
    ddp = wrap(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=weights[trigger])
    for _ in range(2):
        ddp.zero_grad()
        ddp(fill(rank, (2, 3)) / 9).sum().backward()
    return [weight.grad.clone() for weight in weights]


def test_a_trigger_that_is_not_delayed() -> None:
    plain = run(lambda rank: averaged(rank, [1, 2], 0), 2)
    wanted = run(lambda rank: [p.grad for p in _plain(rank).parameters()], 2)
    for found, right in zip(plain, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-7)


def _plain(rank: int) -> nn.Module:
    ddp = DDP(Chain())
    ddp(fill(rank, (2, 3)) / 9).sum().backward()
    return ddp


def test_a_delayed_gradient_after_the_trigger_raises() -> None:
    def program(rank: int) -> None:
        with pytest.raises(dist.DistError, match=r"'layers.1.weight' came after .*\(on rank \d\)"):
            averaged(rank, [1, 2], 2)

    run(program, 2)


@pytest.mark.parametrize(
    ("kw", "fault"),
    [
        ({"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))}, "need each other"),
        ({"delay_all_reduce_named_params": []}, "need each other"),
    ],
)
def test_one_delay_argument_without_the_other_raises(kw: dict[str, Any], fault: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises(dist.ArgumentError, match=fault):
            DDP(nn.Linear(1, 1), **kw)

    run(program, 1)


def test_delayed_parameters_of_two_dtypes_raise() -> None:
    def program(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        with pytest.raises(dist.ArgumentError, match="of one dtype on one device"):
            named = list(model.named_parameters())
            DDP(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=named[0][1])

    run(program, 1)


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("in the middle of backward")


def test_parameters_are_in_full_precision_after_a_backward_pass_that_raised() -> None:
    """Once they stayed in low precision for good, and the optimizer trained that copy."""

    def program(rank: int) -> tuple[set[torch.dtype], Tensor]:
        model = build("mlp")
        ddp = DDP(model, mixed_precision=MixedPrecision(torch.bfloat16))
        inputs = batch(rank, 0)[0]
        before = flat(model)
        with ddp.no_sync(), pytest.raises(ValueError, match="in the middle"):
            ddp(Raising.apply(inputs.clone().requires_grad_())).sum().backward()
        model.zero_grad()
        ddp(inputs).sum().backward()
        return {parameter.dtype for parameter in model.parameters()}, (flat(model) - before).abs().max()

    assert run(program, 2) == [({torch.float32}, torch.tensor(0.0, dtype=torch.float64))] * 2


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_mixed_precision_rounds_alike_with_every_option(option: str, views: bool) -> None:
    """Once gradients were copied out in low precision, or raised where they are views."""

    def program(rank: int, **kw: Any) -> Tensor:
        config = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
        return trained(DDP, "mlp", rank, 3, mixed_precision=config, **kw)[1]

    plain = run(program, 2)
    options = {option: True, "gradient_as_bucket_view": views}
    for found, right in zip(run(lambda rank: program(rank, **options), 2), plain, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_keep_their_dtype_get_one_gradient(dtype: torch.dtype) -> None:
    """Once the first backward pass said that they got it twice."""

    def program(rank: int) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False).to(dtype))
        for parameter in model.parameters():
            parameter.data = torch.ones_like(parameter)
        ddp = DDP(model, mixed_precision=MixedPrecision(dtype))
        ddp(torch.full((1, 3), rank + 1.0)).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for found in run(program, 2):
        assert [gradient.flatten().tolist() for gradient in found] == [[1.5] * 6, [4.5] * 2]


def test_a_copy_delays_its_own_parameters() -> None:
    def program(rank: int) -> tuple[list[float], list[float]]:
        model = nn.Linear(3, 1, bias=False)
        model.weight.data = fill(1, (1, 3))
        ddp = DDP(
            nn.Sequential(model, nn.Linear(1, 1)),
            delay_all_reduce_named_params=[("0.weight", model.weight)],
            param_to_hook_all_reduce=model.weight,
        )
        twin = copy.deepcopy(ddp)
        for each in (ddp, twin):
            each(fill(rank, (1, 3))).sum().backward()
        found = [each.module[0].weight.grad.flatten().tolist() for each in (ddp, twin)]
        return found[0], found[1]

    results = run(program, 2)
    assert results[0] == results[1] and results[0][0] == results[0][1]
