"""ZeroRedundancyOptimizer compared with torch's and with the same optimizer without ranks; its shards and state."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from tests.parallel.training import batch, build, forked
from tests.torchs_world import start_torch
from torchdist_ref.algorithms import Join
from torchdist_ref.optim import ZeroRedundancyOptimizer
from torchdist_ref.testing import fill, run

Make = Callable[..., Any]
with warnings.catch_warnings():
    # torch's module compiles things as it is imported.
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer as THEIRS
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
}


def parameters(sizes: tuple[int, ...] = (5, 40, 3, 17, 9, 9)) -> list[nn.Parameter]:
    return [nn.Parameter(fill(i, (size,)) / 8) for i, size in enumerate(sizes)]


def set_gradients(weights: list[nn.Parameter], step: int) -> None:
    for i, weight in enumerate(weights):
        weight.grad = fill(step + 2 * i, weight.shape, weight.dtype) / 4


def groups_of(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": weights[:4]}, {"params": weights[4:], "lr": 0.05}]


def trained(make: Make, name: str, steps: int = 4) -> tuple[list[nn.Parameter], Any]:
    """Train in two groups with a scheduler; the parameters and the optimizer."""
    weights = parameters()
    kind, options = SETTINGS[name]
    optimizer = make(groups_of(weights), kind, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        set_gradients(weights, step)
        optimizer.step()
        schedule.step()
    return weights, optimizer


def alone(params: Any, optimizer_class: Any, parameters_as_bucket_view: bool = False, **options: Any) -> Any:
    return optimizer_class(params, **options)


def outcome(make: Make, name: str, views: bool) -> dict[str, Any]:
    weights, optimizer = trained(lambda *a, **kw: make(*a, parameters_as_bucket_view=views, **kw), name)
    optimizer.consolidate_state_dict(to=1)
    return {
        "weights": [weight.detach() for weight in weights],
        "shard": [[len(p) for p in group["params"]] for group in optimizer.optim.param_groups],
        "options": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "state": optimizer.state_dict() if torch.distributed.get_rank() == 1 else None,
    }


def beside(rank: int, world: int, path: str) -> Any:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=world)
    found = {
        (name, views): (outcome(THEIRS, name, views), outcome(ZeroRedundancyOptimizer, name, views))
        for name in SETTINGS
        for views in (False, True)
    }
    torch.distributed.destroy_process_group()
    return found


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


def test_parameters_shards_options_and_state_equal_torchs(tmp_path: Path) -> None:
    for found in forked(beside, 3, 3, str(tmp_path / "meet")):
        for way, (theirs, ours) in found.items():
            for what in theirs:
                assert equal(theirs[what], ours[what]), (way, what)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_zero_trains_as_the_optimizer_without_ranks(name: str, backend: str) -> None:
    right, _ = trained(alone, name)
    for weights, _ in run(lambda rank: trained(ZeroRedundancyOptimizer, name), 3, backend=backend):
        assert all(map(torch.equal, weights, right))


def test_each_rank_keeps_the_state_of_its_shard_only() -> None:
    # 40, then 17 to rank 1, 5 and 3 to rank 2; of the second group 9 to rank 2, which has 8, and 9 to rank 1.
    def program(rank: int) -> list[int]:
        _, optimizer = trained(ZeroRedundancyOptimizer, "adam")
        return sorted(len(p) for p in optimizer.optim.state)

    assert run(program, 3) == [[40], [9, 17], [3, 5, 9]]


def continued(optimizer: Any, weights: list[nn.Parameter]) -> list[Tensor]:
    for step in (7, 8):
        set_gradients(weights, step)
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


@pytest.mark.parametrize("name", SETTINGS)
def test_state_dict_moves_from_three_ranks_to_one_process_to_two_ranks(name: str) -> None:
    kind, options = SETTINGS[name]
    right = continued(*reversed(trained(alone, name)))

    def save(rank: int) -> Any:
        weights, optimizer = trained(ZeroRedundancyOptimizer, name)
        optimizer.consolidate_state_dict()
        return (weights, optimizer.state_dict()) if rank == 0 else None

    weights, state = run(save, 3)[0]
    whole = kind(groups_of(copies := copy.deepcopy(weights)), **options)
    whole.load_state_dict(copy.deepcopy(state))
    assert all(map(torch.equal, continued(whole, copies), right))

    def load(rank: int) -> list[Tensor]:
        mine = copy.deepcopy(weights)
        optimizer = ZeroRedundancyOptimizer(groups_of(mine), kind, **options)
        optimizer.load_state_dict(state)
        return continued(optimizer, mine)

    kept = copy.deepcopy(state)
    assert all(all(map(torch.equal, found, right)) for found in run(load, 2))
    assert equal(state, kept)


@pytest.mark.parametrize("views", [False, True])
def test_parameters_can_be_added(views: bool) -> None:
    def program(rank: int, make: Make) -> list[nn.Parameter]:
        weights = parameters()
        optimizer = make(weights[:3], torch.optim.Adam, parameters_as_bucket_view=views, lr=0.01)
        set_gradients(weights, 0)
        optimizer.step()
        optimizer.add_param_group({"params": weights[3:], "lr": 0.1})
        optimizer.step()
        return weights

    right = program(0, alone)
    for weights in run(program, 3, ZeroRedundancyOptimizer):
        assert all(map(torch.equal, weights, right))


def test_bucket_views_are_contiguous() -> None:
    def program(rank: int) -> list[bool]:
        weights = parameters((4, 3, 2))
        ZeroRedundancyOptimizer(weights, torch.optim.SGD, parameters_as_bucket_view=True)
        return [weights[0].untyped_storage().data_ptr() == w.untyped_storage().data_ptr() for w in weights[1:]]

    # Rank 0 updates four numbers, rank 1 three and two.
    assert run(program, 2) == [[False, False]] * 2

    def together(rank: int) -> bool:
        weights = parameters((4, 3, 2))
        ZeroRedundancyOptimizer(weights, torch.optim.SGD, parameters_as_bucket_view=True)
        return weights[2].data_ptr() == weights[1].data_ptr() + 12

    assert run(together, 2) == [True, True]


def test_dtypes_may_differ() -> None:
    def program(rank: int, make: Make) -> list[nn.Parameter]:
        weights = [nn.Parameter(fill(0, (3,))), nn.Parameter(fill(1, (3,), torch.float64))]
        optimizer = make(weights, torch.optim.SGD, parameters_as_bucket_view=True, lr=0.5)
        set_gradients(weights, 1)
        optimizer.step()
        return weights

    for weights in run(program, 2, ZeroRedundancyOptimizer):
        assert all(map(torch.equal, weights, program(0, alone)))


def test_a_closure_is_called_and_its_loss_returned() -> None:
    def program(rank: int) -> tuple[float, float]:
        weight = nn.Parameter(torch.tensor([3.0]))
        optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=1.0)

        def closure() -> Tensor:
            weight.grad = torch.ones(1)
            return weight.sum().detach().clone()

        return float(optimizer.step(closure=closure)), weight.item()

    assert run(program, 2)[0] == (3.0, 2.0)


def uneven(ddp: Any, zero: Any, join: Any, rank: int) -> Tensor:
    model = build("mlp")
    wrapped = ddp(model)
    optimizer = zero(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with join([wrapped, optimizer]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            inputs, labels = batch(rank, step)
            nn.functional.cross_entropy(wrapped(inputs), labels).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def join_beside(rank: int, path: str) -> Any:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=2)
    theirs = uneven(TorchDDP, THEIRS, torch.distributed.algorithms.Join, rank)
    found = theirs, uneven(dist.DistributedDataParallel, ZeroRedundancyOptimizer, Join, rank)
    torch.distributed.destroy_process_group()
    return found


def test_join_with_uneven_inputs_equals_torch(tmp_path: Path) -> None:
    for theirs, ours in forked(join_beside, 2, str(tmp_path / "meet")):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_optimizer_can_be_the_first_joinable() -> None:
    def program(rank: int) -> list[float]:
        weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=1.0)
        set_gradients(weights, 0)
        with Join([optimizer]):
            for _ in range(1 + 2 * rank):
                optimizer.step()
        return torch.cat([w.detach() for w in weights]).tolist()

    right = [-3 * g for i in range(2) for g in (fill(2 * i, (2,)) / 4).tolist()]
    assert run(program, 2) == [right, right]


def test_a_hook_can_step_part_by_part() -> None:
    def program(rank: int) -> tuple[list[nn.Parameter], bool]:
        weights = parameters()
        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.Adam, overlap_with_ddp=True, lr=0.01)
        optimizer.assign([weights[:2], weights[2:]])
        gradients = [fill(2 * i, weight.shape) / 4 for i, weight in enumerate(weights)]
        for bucket in (weights[3:], weights[:3]):
            mine = {w: g for w, g in zip(weights, gradients, strict=True) if optimizer.owner(w) == rank}
            optimizer.step_with({w: g for w, g in mine.items() if any(w is b for b in bucket)})
            for work in optimizer.share(bucket):
                work.wait()
        return weights, all(weight.grad is None for weight in weights)

    right = parameters()
    set_gradients(right, 0)
    torch.optim.Adam(right, lr=0.01).step()
    for weights, untouched in run(program, 2):
        assert all(map(torch.equal, weights, right)) and untouched


def test_step_with_overlap_does_nothing_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: int) -> Any:
        weights = parameters((2, 2))
        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, overlap_with_ddp=True, lr=1.0)
        set_gradients(weights, 0)
        return optimizer.step(), torch.equal(weights[0], parameters((2, 2))[0]), optimizer.assigned

    with caplog.at_level(logging.WARNING, "torchdist_ref.optim"):
        assert run(program, 1) == [(None, True, False)]
    assert "the hook updates" in caplog.text


def failure(rank: int, attempt: Callable[[list[nn.Parameter]], Any]) -> str:
    try:
        attempt(parameters())
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def zero(weights: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(weights, torch.optim.SGD, **options)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda w: zero(w).state_dict(), "DistError: .*consolidate_state_dict.to=0."),
        (
            lambda w: zero(w).consolidate_state_dict(to=7),
            "BackendArgumentError: .*_state_dict: argument 'to' .* got 7",
        ),
        (lambda w: zero(w).load_state_dict({}), "KeyError: .*load_state_dict: argument .*state_dict.* lacks 'state'"),
        (lambda w: zero(w).load_state_dict(5), "ArgumentTypeError: .*load_state_dict: argument 'state_dict' .* got 5"),
        (lambda w: zero(w, overlap_with_ddp=True).consolidate_state_dict(), "DistError: .*before the hook"),
        (lambda w: zero(w, overlap_with_ddp=True).load_state_dict({}), "DistError: .*before the hook"),
        (lambda w: zero(w, overlap_with_ddp=True).add_param_group({"params": parameters()}), "DistError: .*later"),
        (lambda w: zero(w, overlap_with_ddp=True).assign([w, w]), "ArgumentError: .*'params_per_rank' must be 1 lists"),
        (lambda w: zero(w, overlap_with_ddp=True).assign([parameters()]), "ArgumentError: .*this optimizer"),
        (lambda w: zero(w).assign([w]), "ArgumentError: .*already"),
        (lambda w: zero([torch.zeros(2).to_sparse().requires_grad_()]), "ArgumentError: .*'params' must be dense"),
        (
            lambda w: ZeroRedundancyOptimizer(w, torch.optim.SGD(w, lr=1.0)),  # type: ignore[arg-type]
            "ArgumentTypeError: .*'optimizer_class' must be a class",
        ),
        (lambda w: zero(w).step(5), "ArgumentTypeError: ZeroRedundancyOptimizer.step: argument 'closure' .*got 5"),
        (lambda w: zero([]), "ArgumentError: .*empty parameter list"),
        (lambda w: zero(w, process_group=dist.GroupMember.NON_GROUP_MEMBER), "ArgumentError: .*'process_group'"),
    ],
)
def test_misuse_raises(attempt: Callable[[list[nn.Parameter]], Any], message: str) -> None:
    (found,) = run(failure, 1, attempt)
    assert re.match(message, found, re.DOTALL), found


def test_models_of_different_shapes_are_named_at_construction() -> None:
    def program(rank: int) -> list[str]:
        found = []
        same = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
        other = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, 1 + rank))]
        optimizer = zero(same)
        for attempt in (lambda: zero(other), lambda: optimizer.add_param_group({"params": other[1:]})):
            with pytest.raises(dist.MismatchError) as caught:
                attempt()
            found.append(str(caught.value))
        return found

    for rank, found in enumerate(run(program, 2)):
        for index, message in zip((1, 0), found, strict=True):
            assert message.startswith(
                f"ZeroRedundancyOptimizer: parameter {index} ('of shape [3, {1 + rank}]') differs"
            )
            assert "(3, 1), strides (1, 1) on ranks [0]" in message and "(3, 2), strides (2, 1) on ranks [1]" in message


def test_arguments_of_step_reach_the_optimizer_as_they_are() -> None:
    class Recording(torch.optim.SGD):
        """Optimizer whose step has other arguments, as those of some programs have."""

        def step(self, closure: Any = None, kwarg: Any = None) -> Any:
            kwarg.append(closure)
            return super().step()

    def program(rank: int) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer as Theirs

        seen = []
        for kind in (ZeroRedundancyOptimizer, Theirs):
            weight = nn.Parameter(fill(7, (3,)))
            weight.grad = fill(8, (3,))
            optimizer, passed = kind([weight], Recording, lr=0.5), []
            optimizer.step(0, kwarg=passed)
            seen.append((passed, weight.detach().tolist()))
        return seen

    for ours, torchs in run(program, 2):
        assert ours == torchs
        assert ours[0] in ([0], [])
