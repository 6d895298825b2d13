"""Features of training loops (GradScaler, autocast, accumulation), compared with torch's DDP bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from tests.parallel.training import batch, build, forked, train, update
from tests.torchs_world import start_torch

pytestmark = pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
DDP = dist.DistributedDataParallel
SMALL = 0.004


def flat(model: nn.Module) -> Tensor:
    return torch.cat([t.detach().flatten().double() for t in model.state_dict().values()])


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    inputs, labels = batch(rank, step)
    return nn.functional.cross_entropy(model(inputs).float(), labels)


def skipped_steps(wrap: Any, rank: int) -> Any:
    """GradScaler: in step 2 one rank's loss overflows, so that no rank steps."""
    model = build("mlp")
    ddp = wrap(model, bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    found = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, step) * (float("inf") if step == 2 and rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        found.append((flat(model), scaler.get_scale()))
    assert torch.equal(found[1][0], found[2][0]) and found[2][1] < found[1][1]
    return torch.cat([states for states, _ in found]), [scale for _, scale in found]


def autocast(wrap: Any, rank: int) -> Any:
    model = build("transformer")
    ddp = wrap(model, bucket_cap_mb=SMALL)
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(5):
        ddp.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(ddp, rank, step)
        loss.backward()
        update(model, momenta)
    return flat(model), []


def accumulation(wrap: Any, rank: int) -> Any:
    """Three batches a step, exchanged with the last."""
    model = build("convnet")
    ddp = wrap(model, bucket_cap_mb=SMALL, gradient_as_bucket_view=True)
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(4):
        ddp.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, rank, 3 * step).backward()
            loss_of(ddp, rank, 3 * step + 1).backward()
        loss_of(ddp, rank, 3 * step + 2).backward()
        update(model, momenta)
    return flat(model), []


def channels_last(wrap: Any, rank: int) -> Any:
    model = build("convnet").to(memory_format=torch.channels_last)
    ddp = wrap(model, bucket_cap_mb=SMALL)
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(5):
        ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
        update(model, momenta)
    return flat(model), [p.grad.stride() for p in model.parameters()]


def restored(wrap: Any, rank: int) -> Any:
    """Two steps from the other's checkpoint."""
    other = DDP if wrap is TorchDDP else TorchDDP
    first = train(other, "convnet", rank, 2)[2]
    model = build("convnet")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ddp = wrap(model, bucket_cap_mb=SMALL)
    ddp.load_state_dict(first.state_dict())
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(2):
        ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
        update(model, momenta)
    return flat(model), list(ddp.state_dict())


def ignored(wrap: Any, rank: int) -> Any:
    """A parameter and a buffer that are each rank's own."""
    model = build("convnet")
    wrap._set_params_and_buffers_to_ignore_for_model(model, ["1.bias", "2.running_mean"])
    ddp = wrap(model, bucket_cap_mb=SMALL)
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
        update(model, momenta)
    return flat(model), []


FEATURES: dict[str, Callable[[Any, int], Any]] = {
    "a skipped GradScaler step": skipped_steps,
    "autocast": autocast,
    "gradient accumulation": accumulation,
    "channels_last": channels_last,
    "the other's state_dict": restored,
    "ignored parameters": ignored,
}
kept: list[Any] = []


def meet(rank: int, path: str) -> None:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=2)
    kept.append(torch.distributed.group.WORLD)


def beside(rank: int, path: str, name: str) -> list[Any]:
    meet(rank, path)
    found = [FEATURES[name](wrap, rank) for wrap in (TorchDDP, DDP)]
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("name", FEATURES)
def test_features_of_training_loops_equal_torchs(name: str, tmp_path: Path) -> None:
    for (theirs, also), (ours, too) in forked(beside, 2, str(tmp_path / "meet"), name, backend="ref"):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert also == too


def slowed(rank: int, path: str, name: str) -> list[Any]:
    """Fifty steps; rank 1 is late with every gradient, so buckets fill at other times than on rank 0."""
    meet(rank, path)

    def late(wrap: Any) -> Any:
        def wrapped(model: nn.Module, **kw: Any) -> Any:
            ddp = wrap(model, **kw)
            for parameter in model.parameters() if rank == 1 else ():
                parameter.register_hook(lambda gradient: gradient + torch.ones(90, 90).matrix_power(3).isnan().any())
            return ddp

        return wrapped

    theirs = train(late(TorchDDP), name, rank, 20, bucket_cap_mb=SMALL)
    ours = train(late(DDP), name, rank, 20, bucket_cap_mb=SMALL)
    torch.distributed.destroy_process_group()
    return [theirs[:2], ours[:2], len(ours[2].reducer.assignment)]


# Twenty steps of two models: a second each.
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("mlp", "convnet")), "transformer"]
)
def test_twenty_steps_with_a_slow_rank_equal_torchs_bits(name: str, tmp_path: Path) -> None:
    for theirs, ours, buckets in forked(slowed, 2, str(tmp_path / "meet"), name, backend="ref"):
        assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])
        assert buckets >= 2
