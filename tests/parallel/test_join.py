"""Ranks with different numbers of inputs, with and without DDP's own collectives in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from tests.covering import covering
from tests.parallel.training import batch, build, forked, update
from tests.torchs_world import start_torch
from torchdist_ref.algorithms.join import Join
from torchdist_ref.testing import run

DDP = dist.DistributedDataParallel


def uneven(wrap: Any, name: str, rank: int, divide: bool, **kw: Any) -> torch.Tensor:
    """Train on 3 + 2 * rank batches; return the parameters and buffers at the end."""
    model = build(name)
    wrapped = wrap(model, bucket_cap_mb=0.004, **kw)
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    with wrapped.join(divide_by_initial_world_size=divide):
        for step in range(3 + 2 * rank):
            wrapped.zero_grad()
            inputs, labels = batch(rank, step)
            nn.functional.cross_entropy(wrapped(inputs), labels).backward()
            update(model, momenta)
    return torch.cat([t.detach().flatten().float() for t in model.state_dict().values()])


def both(rank: int, world: int, path: str, name: str, divide: bool, kw: dict[str, Any]) -> Any:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=world)
    outcomes = uneven(TorchDDP, name, rank, divide, **kw), uneven(DDP, name, rank, divide, **kw)
    torch.distributed.destroy_process_group()
    return outcomes


@pytest.mark.parametrize(
    ("name", "kw", "divide"),
    covering(
        [("mlp", {}), ("convnet", {"gradient_as_bucket_view": True}), ("mlp", {"find_unused_parameters": True})],
        (True, False),
    ),
)
def test_join_with_uneven_inputs_equals_torch(name: str, kw: dict[str, Any], divide: bool, tmp_path: Path) -> None:
    outcomes = forked(both, 3, 3, str(tmp_path / "meet"), name, divide, kw)
    for theirs, ours in outcomes:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert torch.equal(ours, outcomes[0][1])


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_a_rank_without_any_input_joins(backend: str) -> None:
    def program(rank: int) -> Any:
        model = build("mlp")
        ddp = DDP(model, bucket_cap_mb=0.004)
        momenta = [torch.zeros_like(p) for p in model.parameters()]
        with ddp.join():
            for step in range(0 if rank == 0 else 3):
                ddp.zero_grad()
                inputs, labels = batch(rank, step)
                nn.functional.cross_entropy(ddp(inputs), labels).backward()
                update(model, momenta)
        return torch.cat([p.detach().flatten() for p in model.parameters()]), ddp.reducer.rebuilt

    (first, rebuilt), (second, _) = run(program, 2, backend=backend)
    assert torch.equal(first, second) and rebuilt
    assert not torch.equal(first, torch.cat([p.detach().flatten() for p in build("mlp").parameters()]))


def test_throw_on_early_termination_raises_on_every_rank() -> None:
    def program(rank: int) -> str:
        ddp = DDP(build("mlp"))
        steps = 0
        try:
            with ddp.join(throw_on_early_termination=True):
                for step in range(2 + rank):
                    ddp(batch(rank, step)[0]).sum().backward()
                    steps += 1
        except dist.DistError as error:
            return f"{steps} {error}"
        return "nothing"

    first, second = run(program, 2)
    assert first.startswith("2 Join: rank 0 used up its inputs")
    assert second == "2 Join: a rank has used up its inputs; rank 1 stops with it."


def test_join_disabled_does_nothing_and_errors_propagate() -> None:
    def program(rank: int) -> Any:
        ddp = DDP(build("mlp"))
        with ddp.join(enable=False):
            ddp(batch(rank, 0)[0]).sum().backward()
        with pytest.raises(ZeroDivisionError), ddp.join():
            raise ZeroDivisionError
        return Join.notify_join_context(ddp)

    assert run(program, 2) == [None, None]


def test_join_raises_on_other_groups_and_no_joinables() -> None:
    def program(rank: int) -> Any:
        one = DDP(nn.Linear(1, 1))
        other = DDP(nn.Linear(1, 1), process_group=dist.new_group([0, 1]))
        with pytest.raises(dist.ArgumentError, match="one process group"):
            Join([one, other])
        with pytest.raises(dist.ArgumentError, match="at least one Joinable"):
            Join([])
        with pytest.raises(
            dist.ArgumentTypeError, match=r"'joinables\[1\]' must be a Joinable, got 'Linear'.*Wrap models"
        ):
            Join([one, nn.Linear(1, 1)])  # type: ignore[list-item]
        with pytest.raises(
            dist.ArgumentTypeError, match=r"'joinables' must be a list of .* got 'DistributedDataParallel'"
        ):
            Join(one)  # type: ignore[arg-type]
        return True

    assert run(program, 2) == [True, True]
