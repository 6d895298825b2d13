"""Differentiable collectives: values and gradients as torch's on Gloo, and as finite differences say."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed import ReduceOp

import torchdist_ref as dist
import torchdist_ref.nn
from tests.parallel.training import forked
from tests.torchs_world import start_torch
from torchdist_ref.nn import functional as ours
from torchdist_ref.testing import fill, run

Results = Tensor | tuple[Tensor, ...]
Call = Callable[[ModuleType, Tensor, int, int, Any], Results]


def lists(tensor: Tensor) -> list[Tensor]:
    return list(tensor.unbind())


def sizes(rank: int, world: int) -> tuple[list[int], list[int]]:
    """Rank `s` sends `d + 1` rows to rank `d`."""
    return [rank + 1] * world, [d + 1 for d in range(world)]


# Each takes the functions, one tensor of `world` rows, rank, world and group; the results are made of new tensors.
CALLS: dict[str, Call] = {
    "broadcast": lambda f, x, rank, world, group: f.broadcast(x, 1, group),
    "gather": lambda f, x, rank, world, group: f.gather(x, 1, group),
    "scatter": lambda f, x, rank, world, group: f.scatter(lists(x), 1, group),
    "reduce": lambda f, x, rank, world, group: f.reduce(x, 1, ReduceOp.SUM, group),
    "reduce_scatter": lambda f, x, rank, world, group: f.reduce_scatter(torch.empty_like(x[0]), lists(x), group=group),
    "all_gather": lambda f, x, rank, world, group: f.all_gather(x, group),
    "all_to_all": lambda f, x, rank, world, group: f.all_to_all([torch.empty_like(row) for row in x], lists(x), group),
    "all_to_all_single": lambda f, x, rank, world, group: f.all_to_all_single(torch.empty_like(x), x, group=group),
    "all_to_all_single, uneven": lambda f, x, rank, world, group: f.all_to_all_single(
        x.new_empty(world * (rank + 1)), x.flatten()[: world * (world + 1) // 2], *sizes(rank, world), group
    ),
    "all_reduce": lambda f, x, rank, world, group: f.all_reduce(x, group=group),
}
# torch takes ranks in the group and global ranks for each other.
WRONG_IN_SUBGROUPS = ("broadcast", "gather", "scatter", "all_gather", "all_to_all")
NOT_LINEAR = {"product": ReduceOp.PRODUCT, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "avg": ReduceOp.AVG}
REDUCTIONS: dict[str, Callable[[ModuleType, Tensor, int, Any], Results]] = {
    "reduce": lambda f, x, world, op: f.reduce(x, 1, op),
    "reduce_scatter": lambda f, x, world, op: f.reduce_scatter(torch.empty_like(x[0]), lists(x), op),
    "all_reduce": lambda f, x, world, op: f.all_reduce(x, op),
}


def start(rank: int, world: int) -> Tensor:
    return fill(rank, (world, 4), torch.float64)


def loss_of(results: Results, rank: int) -> Tensor:
    """Something that is not linear, and another on each rank."""
    results = results if isinstance(results, tuple) else (results,)
    return sum(((y * y * fill(rank + 3 * i, y.shape)).sum() for i, y in enumerate(results)), torch.zeros(()))


def values_and_gradient(call: Call, f: ModuleType, rank: int, world: int, group: Any) -> Any:
    x = start(rank, world).requires_grad_()
    results = call(f, x, rank, world, group)
    loss_of(results, rank).backward()
    found = results if isinstance(results, tuple) else (results,)
    return [y.detach().clone() for y in found], x.grad


def beside(rank: int, world: int, path: str) -> Any:
    """Run every call on torch's Gloo and on ours: on all ranks, and on ranks 1 and following."""
    # torch warns that functional collectives take the place of these.
    warnings.simplefilter("ignore", FutureWarning)
    start_torch(init_method=f"file://{path}", rank=rank, world_size=world)
    members = list(range(1, world))
    subgroups = torch.distributed.new_group(members), dist.new_group(members)
    found = {}
    for name, call in CALLS.items():
        found[name, world] = both_ways(call, rank, world, (None, None))
        if rank > 0 and name not in WRONG_IN_SUBGROUPS:
            found[name, world - 1] = both_ways(call, rank - 1, world - 1, subgroups)
    torch.distributed.destroy_process_group()
    return found


def both_ways(call: Call, rank: int, world: int, groups: tuple[Any, Any]) -> tuple[Any, Any]:
    theirs = values_and_gradient(call, torch.distributed.nn.functional, rank, world, groups[0])
    return theirs, values_and_gradient(call, ours, rank, world, groups[1])


@pytest.fixture(scope="module", params=["ref", "gloo"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Start three processes once for all calls: 2 s."""
    path = tmp_path_factory.mktemp("gloo") / "meet"
    return forked(beside, 3, 3, str(path), backend=request.param)


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_torchs(name: str, both: list[Any]) -> None:
    found = [(rank, pair) for rank, calls in enumerate(both) for (call, _), pair in calls.items() if call == name]
    for rank, (theirs, mine) in found:
        torch.testing.assert_close(mine[1], theirs[1], rtol=0, atol=0)
        if name != "reduce" or rank == 1:
            # Elsewhere torch leaves open what the result of a reduce is.
            torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=0)
    assert len(found) == (3 if name in WRONG_IN_SUBGROUPS else 5)


def differences(rank: int, world: int, call: Callable[[Tensor], Results]) -> tuple[Tensor, Tensor]:
    """Return the gradient, and what finite differences say: each number of each rank is moved in turn."""
    x = (start(rank, world) / 4).requires_grad_()
    loss_of(call(x), rank).backward()
    assert x.grad is not None
    measured = torch.zeros_like(x)
    for place in range(world * x.numel()):
        owner, index = divmod(place, x.numel())
        totals = [total(moved(x, index, step if rank == owner else 0.0), rank, call) for step in (1e-5, -1e-5)]
        if rank == owner:
            measured.view(-1)[index] = (totals[0] - totals[1]) / 2e-5
    return x.grad, measured


def moved(x: Tensor, index: int, step: float) -> Tensor:
    y = x.detach().clone()
    y.view(-1)[index] += step
    return y


def total(x: Tensor, rank: int, call: Callable[[Tensor], Results]) -> float:
    loss = loss_of(call(x), rank).double()
    dist.all_reduce(loss)
    return float(loss)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_of_the_sum_of_all_losses(name: str) -> None:
    def program(rank: int) -> Any:
        return differences(rank, 2, lambda x: CALLS[name](ours, x, rank, 2, None))

    for gradient, measured in run(program, 2):
        torch.testing.assert_close(gradient, measured, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", NOT_LINEAR)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_other_reductions_have_their_own_gradients(name: str, op: str) -> None:
    # torch runs the same reduction over the gradients, which is not the derivative of any of these but the average.
    def program(rank: int) -> Any:
        return differences(rank, 2, lambda x: REDUCTIONS[name](ours, x, 2, NOT_LINEAR[op]))

    for gradient, measured in run(program, 2):
        torch.testing.assert_close(gradient, measured, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", NOT_LINEAR)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_other_reductions_have_the_values_of_the_plain_calls(name: str, op: str) -> None:
    def program(rank: int) -> Any:
        x, plain = start(rank, 3), torch.stack([start(r, 3) for r in range(3)])
        formulas = {"product": plain.prod(0), "min": plain.amin(0), "max": plain.amax(0), "avg": plain.mean(0)}
        result = REDUCTIONS[name](ours, x, 3, NOT_LINEAR[op])
        right = formulas[op][rank] if name == "reduce_scatter" else formulas[op]
        return result, right if name != "reduce" or rank == 1 else torch.zeros_like(right)

    for result, right in run(program, 3):
        torch.testing.assert_close(result, right)


def test_bitwise_reductions_run_without_gradients() -> None:
    found = run(lambda rank: ours.all_reduce(torch.tensor([rank + 1, 4]), ReduceOp.BOR).tolist(), 2)
    assert found == [[3, 4], [3, 4]]


@pytest.mark.parametrize("name", ["reduce_scatter", "all_to_all", "all_to_all_single"])
def test_outputs_are_written_too(name: str) -> None:
    def program(rank: int) -> bool:
        x = start(rank, 2)
        rows = [torch.empty(4, dtype=torch.float64) for _ in range(2)]
        if name == "reduce_scatter":
            return torch.equal(ours.reduce_scatter(rows[0], lists(x), ReduceOp.MAX), rows[0])
        if name == "all_to_all":
            return all(map(torch.equal, ours.all_to_all(rows, lists(x)), rows))
        output = torch.empty_like(x)
        return torch.equal(ours.all_to_all_single(output, x), output)

    assert run(program, 2) == [True, True]


def test_gradients_can_be_differentiated_again() -> None:
    def program(rank: int) -> float:
        x = torch.tensor([2.0 + rank], requires_grad=True)
        (first,) = torch.autograd.grad((ours.all_reduce(x) ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return second.item()

    # The losses are two times s ** 3 with s = 5; the sum over both ranks of d/dx of (2 * 3 s ** 2) is 2 * 12 s.
    assert run(program, 2) == [120.0, 120.0]


def test_inputs_are_not_changed() -> None:
    def program(rank: int) -> bool:
        x = start(rank, 2)
        for name in CALLS:
            CALLS[name](ours, x, rank, 2, None)
        return torch.equal(x, start(rank, 2))

    assert run(program, 2) == [True, True]


def test_a_rank_outside_the_group_gets_an_error() -> None:
    def program(rank: int) -> str:
        group = dist.new_group([0])
        try:
            ours.all_reduce(torch.ones(1), group=group)
        except dist.ArgumentError as error:
            return str(error)
        return "fine"

    fine, told = run(program, 2)
    assert fine == "fine" and "all_reduce: argument 'group'" in told


def test_without_a_group_an_error_is_raised() -> None:
    with pytest.raises(dist.NotInitializedError):
        ours.all_reduce(torch.ones(1))


def test_scatter_requires_one_shape() -> None:
    def program(rank: int) -> None:
        ours.scatter([torch.ones(1), torch.ones(2)])

    with pytest.raises(RuntimeError, match="scatter: argument 'tensors' must be tensors of one shape"):
        run(program, 2)


def test_the_package_has_the_functions_too() -> None:
    assert all(getattr(torchdist_ref.nn, name) is getattr(ours, name) for name in ours.__all__)


WRONG: dict[str, Callable[[Any], Any]] = {
    "broadcast: .*'tensor'": lambda wrong: ours.broadcast(wrong, 0),
    "gather: .*'tensor'": lambda wrong: ours.gather(wrong),
    "reduce: .*'tensor'": lambda wrong: ours.reduce(wrong, 0),
    "all_reduce: .*'tensor'": lambda wrong: ours.all_reduce(wrong),
    "all_gather: .*'tensor'": lambda wrong: ours.all_gather(wrong),
    "scatter: .*'tensors'": lambda wrong: ours.scatter(wrong[0]),
    "reduce_scatter: .*'output'": lambda wrong: ours.reduce_scatter(wrong, wrong),
    "reduce_scatter: .*'input_list'": lambda wrong: ours.reduce_scatter(wrong[0], wrong[0]),
    "all_to_all: .*'output_tensor_list'": lambda wrong: ours.all_to_all(wrong[0], wrong),
    "all_to_all: .*'input_tensor_list'": lambda wrong: ours.all_to_all(wrong, wrong[0]),
    "all_to_all_single: .*'output'": lambda wrong: ours.all_to_all_single(wrong, wrong[0]),
    "all_to_all_single: .*`input`": lambda wrong: ours.all_to_all_single(wrong[0], wrong),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_list_for_a_tensor_is_named(message: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises(dist.ArgumentTypeError, match=message):
            WRONG[message]([torch.ones(1)])

    run(program, 1)


def test_a_rank_whose_input_needs_no_gradient_is_explained() -> None:
    """The other rank runs backward alone; it waits until this one makes another call or leaves."""

    def program(rank: int) -> list[str]:
        tensor = torch.ones(2, requires_grad=rank == 0)
        result = ours.all_reduce(tensor)
        try:
            result.sum().backward() if rank == 0 else dist.barrier()
        except dist.DistBackendError as error:
            return getattr(error, "__notes__", [])
        return []

    notes, others = run(program, 2)
    assert len(notes) == 2 and notes[1:] == others == ["See: calls-differ"]
    assert "backward pass of nn.functional's AllReduce" in notes[0] and "requires no gradient" in notes[0]
