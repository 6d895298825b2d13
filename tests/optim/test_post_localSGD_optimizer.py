"""PostLocalSGDOptimizer compared with torch's, and with schedulers and checkpoints."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

from tests.parallel.training import forked
from tests.torchs_world import start_torch
from torchdist_ref.algorithms.model_averaging import averagers
from torchdist_ref.optim import PostLocalSGDOptimizer
from torchdist_ref.testing import fill, run

with warnings.catch_warnings():
    # torch's module compiles things as it is imported.
    warnings.simplefilter("ignore")
    import torch.distributed.algorithms.model_averaging.averagers as their_averagers
    from torch.distributed.optim import PostLocalSGDOptimizer as THEIRS


def trained(kind: Any, module: ModuleType, rank: int) -> tuple[list[Tensor], dict[str, Any]]:
    weights = [nn.Parameter(fill(rank, (size,)) / 8) for size in (3, 5)]
    local = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    optimizer = kind(local, module.PeriodicModelAverager(period=3, warmup_steps=2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(7):
        optimizer.zero_grad()
        for i, weight in enumerate(weights):
            weight.grad = fill(rank + step + i, weight.shape) / 4
        optimizer.step()
        schedule.step()
    return [weight.detach() for weight in weights], optimizer.state_dict()


def beside(rank: int, path: str) -> Any:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=2)
    found = trained(THEIRS, their_averagers, rank), trained(PostLocalSGDOptimizer, averagers, rank)
    torch.distributed.destroy_process_group()
    return found


def test_training_and_saving_equal_torchs(tmp_path: Path) -> None:
    for theirs, ours in forked(beside, 2, str(tmp_path / "meet")):
        assert all(map(torch.equal, ours[0], theirs[0]))
        assert ours[1].pop("step") == theirs[1].pop("step") == 7
        assert ours[1]["param_groups"] == theirs[1]["param_groups"]
        torch.testing.assert_close(ours[1]["state"], theirs[1]["state"], rtol=0, atol=0)


def optimizer_of(weight: nn.Parameter) -> PostLocalSGDOptimizer:
    return PostLocalSGDOptimizer(torch.optim.SGD([weight], lr=1.0), averagers.PeriodicModelAverager(2, 1))


def test_learning_rate_changes_after_loading() -> None:
    # A plain optimizer makes new groups when it loads; torch's wrapper goes on showing the old ones.
    def program(rank: int) -> float:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = optimizer_of(weight)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.25
        weight.grad = torch.ones(1)
        optimizer.step()
        return weight.item()

    assert run(program, 1) == [-0.25]


def test_loading_resumes_at_the_saved_step() -> None:
    def program(rank: int) -> tuple[int, int]:
        optimizer = optimizer_of(nn.Parameter(torch.zeros(1)))
        optimizer.averager.step = 5
        state = optimizer.state_dict()
        optimizer.averager.step = 1
        optimizer.load_state_dict(state)
        found = optimizer.averager.step
        del state["step"]
        optimizer.load_state_dict(state)
        return found, optimizer.averager.step

    with pytest.warns(UserWarning, match="begins at step 0"):
        assert run(program, 1) == [(5, 0)]


def test_attributes_are_those_of_the_optimizer_inside() -> None:
    def program(rank: int) -> bool:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = optimizer_of(weight)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 3.0})
        weight.grad = torch.ones(1)
        optimizer.zero_grad(set_to_none=False)
        same = optimizer.state is optimizer.optim.state and optimizer.defaults is optimizer.optim.defaults
        return same and len(optimizer.param_groups) == 2 and weight.grad.item() == 0 and "SGD" in repr(optimizer)

    assert run(program, 1) == [True]


class Mute:
    """An averager that averages nothing."""

    step = 0

    def average_parameters(self, params: Any) -> None:
        pass


@pytest.mark.parametrize("averager", [None, "periodic"])
def test_an_optimizer_without_an_averager_is_named_at_construction(averager: Any) -> None:
    inside = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(TypeError, match=f"'averager' must be an object with .*average_parameters, got '?{averager}"):
        PostLocalSGDOptimizer(inside, averager)
    with pytest.raises(TypeError, match="'optim' must be an object with a method step, got None"):
        PostLocalSGDOptimizer(None, Mute())  # type: ignore[arg-type]


def test_optimizer_can_be_copied() -> None:
    inside = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer = PostLocalSGDOptimizer(inside, averager=Mute())  # type: ignore[arg-type]
    assert copy.copy(optimizer).param_groups[0]["lr"] == 1.0
    assert isinstance(pickle.loads(pickle.dumps(optimizer)), PostLocalSGDOptimizer)
