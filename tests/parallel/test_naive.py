"""DistributedDataParallel beside the naive one: the same losses, gradients and states."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.covering import covering
from tests.parallel.training import MODELS, build, train
from torchdist_ref.parallel import NaiveDataParallel, naive
from torchdist_ref.testing import fill, run

CAP = 0.004
WAYS: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]


def beside(rank: int, name: str) -> list[Any]:
    """Losses and states of six steps: naive, then DDP in several ways."""
    found = [train(NaiveDataParallel, name, rank, 6)[:2]]
    for options in WAYS:
        losses, states, ddp = train(dist.DistributedDataParallel, name, rank, 6, bucket_cap_mb=CAP, **options)
        assert len(ddp.reducer.assignment) > 1
        found.append((losses, states))
    return found


@pytest.mark.parametrize(("name", "world"), covering(list(MODELS), (3, 2, 4, 1)))
def test_ddp_trains_as_the_naive_one(name: str, world: int) -> None:
    for (losses, states), *others in run(lambda rank: beside(rank, name), world):
        for other_losses, other_states in others:
            # Two numbers have one sum; more are added in another order, or multiplied by another reciprocal.
            exact = world <= 2
            near: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(other_losses, losses, **near)
            torch.testing.assert_close(other_states, states, **near)


def test_naive_gradients_are_averages_and_replicas_begin_as_rank_0s() -> None:
    def program(rank: int) -> Any:
        model = build("convnet")
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(rank)
        ddp = NaiveDataParallel(model)
        begin = [torch.cat([parameter.detach().flatten() for parameter in model.parameters()])]
        ddp.eval()(torch.ones(2, 12))
        begin += [buffer.clone() for buffer in model.buffers()]
        linear = NaiveDataParallel(torch.nn.Linear(3, 2, bias=False))
        linear(fill(rank, (4, 3))).sum().backward()
        return begin, linear.module.weight.grad, ddp.module is model

    everyone = run(program, 3)
    wanted = torch.stack([fill(rank, (4, 3)).sum(0) for rank in range(3)]).mean(0).expand(2, 3)
    for begin, gradient, kept in everyone:
        assert all(map(torch.equal, begin, everyone[0][0])) and len(begin) == 7 and kept
        torch.testing.assert_close(gradient, wanted)


def test_naive_averages_over_its_group_only() -> None:
    def program(rank: int) -> float:
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        model = NaiveDataParallel(torch.nn.Linear(1, 1, bias=False), group)
        model(torch.tensor([[float(rank * rank)]])).sum().backward()
        return model.module.weight.grad.item()

    assert run(program, 4) == [0.5, 0.5, 6.5, 6.5]


def test_the_naive_one_is_at_most_thirty_lines() -> None:
    source = inspect.getsource(NaiveDataParallel)
    docstring = ast.parse(source).body[0].body[0]  # type: ignore[attr-defined]
    lines = source.splitlines()
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    assert docstring.end_lineno and len([line for line in lines if line.strip()]) <= 30
    assert naive.__all__ == ["NaiveDataParallel"]
