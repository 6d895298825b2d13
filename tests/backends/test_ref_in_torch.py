"""Users of process groups inside torch on `ref`: the values of Gloo over three steps, computed by `ref`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.backends.inside_torch import compared
from tests.covering import covering
from torchdist_ref.testing import fill

# The older names of functional collectives are the ones that torch 2.11 has too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.usefixtures("torchs_modules"),
]

STEPS = 3


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))


def train(net: nn.Module, rank: int, steps: int = STEPS) -> list[Tensor]:
    """The gradients of each step and the weights after the last; sharded ones are put together."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        net(fill(rank + 3 * step, (6, 7)) / 4).square().mean().backward()
        history += [whole(parameter.grad) for parameter in net.parameters()]
        optimizer.step()
    return history + [whole(parameter) for parameter in net.parameters()]


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def ddp(rank: int, size: int) -> list[Tensor]:
    # Four buckets, from the second step on.
    return train(DistributedDataParallel(model(), bucket_cap_mb=0.001), rank)


def joined(rank: int, size: int) -> list[Tensor]:
    """Uneven inputs: C++ waits for the Work of a count of ranks, which Python has dropped by then."""
    found = []
    for divide in (False, True):
        net = DistributedDataParallel(model(), bucket_cap_mb=0.001)
        with net.join(divide_by_initial_world_size=divide):
            found += train(net, rank, STEPS + rank)[: -len(list(net.parameters()))]
        found += [whole(parameter) for parameter in net.parameters()]
    return found


def ddp_with_half_precision(rank: int, size: int) -> list[Tensor]:
    net = DistributedDataParallel(model())
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(net, rank)


def power_sgd(rank: int, size: int) -> list[Tensor]:
    net = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(net, rank, 5)


def fsdp(rank: int, size: int) -> list[Tensor]:
    net = model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    return train(fully_shard(net, mesh=mesh), rank)


def dtensor(rank: int, size: int) -> list[Tensor]:
    """Sharded along either dimension, unevenly too, summed, multiplied, moved from one placement to another."""
    mesh = init_device_mesh("cpu", (size,))
    results = []
    for step in range(STEPS):
        a = distribute_tensor(fill(step, (5, 6)), mesh, [Shard(0)])
        b = distribute_tensor(fill(step + 1, (6, 4)), mesh, [Replicate()])
        product = a @ b
        results += [product.full_tensor(), product.sum().full_tensor()]
        results += [product.redistribute(mesh, [Shard(1)]).to_local()]
        for placement in (Partial(), Partial("avg")):
            pending = DTensor.from_local(fill(rank + step, (4, 4)), mesh, [placement])
            results += [pending.redistribute(mesh, [Shard(0)]).to_local(), pending.full_tensor()]
        results += [distribute_tensor(fill(rank, (3, 2)), mesh, [Replicate()]).to_local()]
    return results


def functional_collectives(rank: int, size: int) -> list[Tensor]:
    group = c10d.group.WORLD
    results = []
    for step in range(STEPS):
        tensor = fill(rank + step, (2 * size, 3))
        given, taken = [rank + to + 1 for to in range(size)], [rank + source + 1 for source in range(size)]
        results += [
            functional.all_reduce(tensor, "avg", group),
            functional.all_gather_tensor(tensor, 1, group),
            functional.reduce_scatter_tensor(tensor, "sum", 0, group),
            functional.broadcast(tensor, size - 1, group),
            functional.all_to_all_single(fill(rank, (sum(given), 2)), taken, given, group),
            *functional.all_reduce_coalesced([tensor, tensor + 1], "max", group),
            *functional.all_gather_into_tensor_coalesced([tensor, tensor[0]], group),
            *functional.reduce_scatter_tensor_coalesced([tensor, tensor + 1], "sum", [0, 0], group),
        ]
    return [result.clone() for result in results]


def compiled(rank: int, size: int) -> list[Tensor]:
    def step(tensor: Tensor) -> Tensor:
        total = functional.all_reduce(tensor * 2, "sum", c10d.group.WORLD)
        return total + functional.all_gather_tensor(tensor, 0, c10d.group.WORLD).sum()

    program = torch.compile(step, backend="aot_eager", fullgraph=True)
    return [program(fill(rank + shift, (4, 3))).clone() for shift in range(STEPS)]


def compiled_in_place(rank: int, size: int) -> list[Tensor]:
    def step(tensor: Tensor) -> Tensor:
        doubled = tensor * 2
        c10d.all_reduce(doubled, c10d.ReduceOp.MAX)
        return doubled + 1

    program = torch.compile(step, backend="aot_eager")
    return [program(fill(rank + shift, (4, 3))) for shift in range(STEPS)]


def compiled_ddp(rank: int, size: int) -> list[Tensor]:
    """C++ calls the group's methods while the compiler watches: buffers travel before each forward."""
    net = DistributedDataParallel(nn.Sequential(model(), nn.BatchNorm1d(3)))
    return train(torch.compile(net, backend="eager"), rank)


# What the recorder must have seen at least once.
USERS: dict[Callable[[int, int], list[Tensor]], set[str]] = {
    ddp: {"all_reduce", "broadcast", "all_gather"},
    joined: {"all_reduce", "broadcast"},
    ddp_with_half_precision: {"all_reduce"},
    power_sgd: {"all_reduce"},
    fsdp: {"all_gather", "reduce_scatter"},
    dtensor: {"all_gather", "all_reduce", "reduce_scatter", "scatter", "broadcast"},
    functional_collectives: {"all_gather", "all_reduce", "reduce_scatter", "broadcast", "all_to_all"},
    compiled: {"all_gather", "all_reduce"},
    compiled_in_place: {"all_reduce"},
    compiled_ddp: {"all_reduce", "broadcast"},
}

# Sums of three half-precision numbers depend on the order.
APART = {ddp_with_half_precision: 1e-2}


# Over a second: two groups, on two backends, in more processes than there are cores; dynamo is slow to start.
@pytest.mark.parametrize(("size", "user"), covering((2, 3), list(USERS)), ids=lambda it: getattr(it, "__name__", None))
def test_torch_on_ref_gives_the_values_of_gloo(user: Any, size: int, tmp_path: Path) -> None:
    """CI has each user in one of two worlds."""
    for ours, theirs, seen in compared(user, size, str(tmp_path / "meet")):
        assert len(ours) == len(theirs) >= STEPS
        for got, wanted in zip(ours, theirs, strict=True):
            tolerance = APART.get(user, 1e-5)
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance / 10)
        assert USERS[user] <= seen.keys(), seen


def hooks_in_cpp(rank: int, size: int) -> tuple[Tensor, str]:
    """Return a gradient that the first of torch's hooks in C++ averaged, and the message of the second on `ref`."""
    found, message = [], ""
    for kind in (c10d.BuiltinCommHookType.ALLREDUCE, c10d.BuiltinCommHookType.FP16_COMPRESS):
        torch.manual_seed(2)
        model = DistributedDataParallel(nn.Linear(4, 3))
        model._register_builtin_comm_hook(kind)
        try:
            model(fill(rank, (2, 4), torch.float32) / 8).square().sum().backward()
            found.append(model.module.weight.grad)
        except RuntimeError as error:
            message = str(error)
    return found[0], message


# Over a second: two groups, on two backends, in two processes.
def test_of_torchs_hooks_in_cpp_one_works_and_the_other_asks_for_a_future_of_cpp(tmp_path: Path) -> None:
    for (ours, refusal), (theirs, nothing), _ in compared(hooks_in_cpp, 2, str(tmp_path / "meet")):
        torch.testing.assert_close(ours, theirs)
        assert "ProcessGroup::allreduce should return TensorList" in refusal and not nothing
