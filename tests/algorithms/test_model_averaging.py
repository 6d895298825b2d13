"""Model averagers: steps and groups of averages, compared with torch's, and invalid arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torchdist_ref.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

import torchdist_ref as dist
from tests.parallel.training import forked
from tests.torchs_world import start_torch
from torchdist_ref.algorithms.model_averaging import averagers as utils
from torchdist_ref.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from torchdist_ref.testing import fill, run

with warnings.catch_warnings():
    # torch's modules compile things as they are imported.
    warnings.simplefilter("ignore")
    import torch.distributed.algorithms.model_averaging.averagers as their_averagers
    import torch.distributed.algorithms.model_averaging.hierarchical_model_averager as theirs_hierarchical

Make = Callable[[bool], Any]


def periodic(ours: bool) -> Any:
    return (PeriodicModelAverager if ours else their_averagers.PeriodicModelAverager)(3, 2)


def hierarchical(ours: bool) -> Any:
    kind = HierarchicalModelAverager if ours else theirs_hierarchical.HierarchicalModelAverager
    return kind({2: 2, 4: 4}, 1)


def subgroup(ours: bool) -> Any:
    module = dist if ours else torch.distributed
    group = [module.new_group(ranks) for ranks in ([0, 1, 2], [3])][dist.get_rank() == 3]
    return (PeriodicModelAverager if ours else their_averagers.PeriodicModelAverager)(2, 0, group)


def history(make: Make, ours: bool, rank: int) -> list[Tensor]:
    weights = [nn.Parameter(fill(rank + i, shape)) for i, shape in enumerate([(2, 3), (4,), (1,)])]
    # The last has no gradient, so it is never averaged.
    for weight in weights[:2]:
        weight.grad = torch.zeros_like(weight)
    averager, seen = make(ours), []
    for step in range(9):
        averager.average_parameters([{"params": weights[:1]}, {"params": weights[1:]}] if step % 2 else weights)
        seen.append(torch.cat([weight.detach().flatten() for weight in weights]))
        for weight in weights:
            weight.data = weight.data + rank * step
    return seen


MAKERS: dict[str, Make] = {"periodic": periodic, "hierarchical": hierarchical, "subgroup": subgroup}


def beside(rank: int, path: str) -> Any:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=4)
    found = {name: (history(make, False, rank), history(make, True, rank)) for name, make in MAKERS.items()}
    torch.distributed.destroy_process_group()
    return found


def test_every_step_equals_torch(tmp_path: Path) -> None:
    # Four ranks add in different orders: a few units in the last place.
    for found in forked(beside, 4, str(tmp_path / "meet")):
        for name, (theirs, ours) in found.items():
            for step, (right, mine) in enumerate(zip(theirs, ours, strict=True)):
                torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6, msg=f"{name}, step {step}")


def test_tensors_are_changed_in_place_in_every_dtype_and_layout() -> None:
    def program(rank: int) -> Any:
        tensors = [
            fill(rank, (3,), torch.float64),
            fill(rank, (4,), torch.bfloat16),
            fill(rank, (3, 2)).t(),
            fill(rank, ()),
        ]
        weights = [nn.Parameter(tensor) for tensor in tensors]
        addresses = [weight.data_ptr() for weight in weights]
        utils.average_parameters(iter(weights), None)
        return [weight.detach() for weight in weights], addresses == [weight.data_ptr() for weight in weights]

    for found, in_place in run(program, 2):
        right = [
            (fill(0, (3,), torch.float64) + fill(1, (3,), torch.float64)) / 2,
            (fill(0, (4,), torch.bfloat16) + fill(1, (4,), torch.bfloat16)) / 2,
            ((fill(0, (3, 2)) + fill(1, (3, 2))) / 2).t(),
            (fill(0, ()) + fill(1, ())) / 2,
        ]
        assert in_place and all(map(torch.equal, found, right))


def test_a_rank_outside_the_group_keeps_its_parameters() -> None:
    def program(rank: int) -> float:
        group = dist.new_group([0, 1])
        weight = nn.Parameter(torch.tensor([4.0 * rank]))
        utils.average_parameters(iter([weight]), group)
        return weight.item()

    assert run(program, 3) == [2.0, 2.0, 8.0]


def test_averaging_no_parameters() -> None:
    assert run(lambda rank: utils.average_parameters_or_parameter_groups([], None), 2) == [None, None]


def test_objects_that_are_no_parameters_raise() -> None:
    with pytest.raises(dist.ArgumentTypeError, match="'params' must be an iterable of parameters"):
        utils.get_params_to_average([torch.zeros(1)])


def test_invalid_arguments_of_averagers_raise() -> None:
    with pytest.raises(dist.NotInitializedError, match="PeriodicModelAverager"):
        PeriodicModelAverager(2)
    with pytest.raises(TypeError, match="abstract"):
        ModelAverager()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PeriodicModelAverager(0), "'period' must be at least 1, got 0"),
        (lambda: PeriodicModelAverager("4"), "'period' must be a number of steps, got '4'"),  # type: ignore[arg-type]
        (lambda: PeriodicModelAverager(2, -1), "'warmup_steps' must be 0 or more, got -1"),
        (lambda: HierarchicalModelAverager({}), "must be one or more increasing periods"),
        (lambda: HierarchicalModelAverager({0: 1, 2: 2}), "must be one or more increasing periods"),
        (lambda: HierarchicalModelAverager({4: 1, 2: 2}), "must be one or more increasing periods"),
        (lambda: HierarchicalModelAverager({2: 1, 4: 4}), "whose last size is that of the process group, 2"),
        (lambda: HierarchicalModelAverager({2: 2}, -3), "'warmup_steps' must be 0 or more, got -3"),
    ],
)
def test_misuse_raises(make: Callable[[], Any], message: str) -> None:
    def program(rank: int) -> str:
        try:
            make()
        except (ValueError, TypeError) as error:
            return str(error)
        return "fine"

    assert all(message in found for found in run(program, 2))


@pytest.mark.parametrize("make", [lambda: PeriodicModelAverager(1), lambda: HierarchicalModelAverager({1: 1})])
def test_a_period_of_one_warns(make: Callable[[], Any]) -> None:
    def program(rank: int) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make()
        return "".join(f"{Path(warning.filename).name}: {warning.message}" for warning in caught)

    (found,) = run(program, 1)
    assert found.startswith("test_model_averaging.py: Averaging the model in every step")
