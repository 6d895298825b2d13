"""Lightning's helpers against formulas, and gradients against a single program that has all tensors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torchdist_ref as dist
from tests.parallel.training import forked
from tests.torchs_world import start_torch
from torchdist_ref import utilities
from torchdist_ref.algorithms.ddp_comm_hooks import default_hooks
from torchdist_ref.testing import RankError, fill, run
from torchdist_ref.utilities import distributed as helpers
from torchdist_ref.utilities.distributed import AllGatherGrad

WORLDS = (1, 2, 3)
SHAPES = ((), (3,), (2, 3), (0, 2))


def value(rank: int, shape: tuple[int, ...]) -> Tensor:
    return fill(rank, shape, torch.float64) / 8 + 0.25


def loss_of(rank: int, rows: Tensor) -> Tensor:
    """Return a loss that differs from rank to rank and is not linear in any row."""
    weights = 1.0 + (rank + 1) * torch.arange(rows.numel(), dtype=rows.dtype).reshape(rows.shape) ** 2 / 4
    return (weights * rows**3).sum() + (rank + 2) * rows.sum() ** 2


def expected_gradients(world: int, shape: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return first gradients, and gradients of the sum of their squares, from a single program."""
    leaves = [value(rank, shape).requires_grad_() for rank in range(world)]
    total = torch.stack([loss_of(rank, torch.stack(leaves)) for rank in range(world)]).sum()
    first = torch.autograd.grad(total, leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([(one**2).sum() for one in first]).sum(), leaves)
    return [one.detach() for one in first], list(second)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_gradients_match_a_single_program(backend: str, shape: tuple[int, ...], world: int) -> None:
    def program(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        tensor = value(rank, shape).requires_grad_()
        rows = AllGatherGrad.apply(tensor)  # type: ignore[no-untyped-call]
        (first,) = torch.autograd.grad(loss_of(rank, rows), tensor, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), tensor)
        return rows.detach(), first.detach(), second

    firsts, seconds = expected_gradients(world, shape)
    for rank, (rows, first, second) in enumerate(run(program, world, backend=backend)):
        assert torch.equal(rows, torch.stack([value(one, shape) for one in range(world)]))
        torch.testing.assert_close(first, firsts[rank], rtol=1e-13, atol=0)
        torch.testing.assert_close(second, seconds[rank], rtol=1e-13, atol=0)


def test_rows_and_gradients_of_a_subgroup_are_in_group_order() -> None:
    def program(rank: int) -> Any:
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        tensor = value(rank, (2,)).requires_grad_()
        rows = AllGatherGrad.apply(tensor, group)  # type: ignore[no-untyped-call]
        loss_of(rank - 1, rows).backward()
        return rows.detach(), tensor.grad

    leaves = [value(rank, (2,)).requires_grad_() for rank in (1, 2)]
    torch.stack([loss_of(rank, torch.stack(leaves)) for rank in (0, 1)]).sum().backward()
    _, *members = run(program, 3)
    for leaf, (rows, gradient) in zip(leaves, members, strict=True):
        assert torch.equal(rows, torch.stack([leaf.detach() for leaf in leaves]))
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-13, atol=0)


def test_a_strided_tensor_is_gathered_by_its_values() -> None:
    def program(rank: int) -> Tensor:
        return helpers.all_gather_ddp_if_available(fill(rank, (4, 3)).t()[:, ::2])

    wanted = torch.stack([fill(rank, (4, 3)).t()[:, ::2] for rank in range(2)])
    assert all(torch.equal(found, wanted) for found in run(program, 2))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("sync", [False, True])
def test_gradients_flow_only_where_asked(world: int, sync: bool) -> None:
    def program(rank: int) -> Any:
        tensor = value(rank, (3,)).requires_grad_()
        rows = helpers.all_gather_ddp_if_available(tensor, sync_grads=sync)
        if sync:
            loss_of(rank, rows).backward()
        return rows.detach(), rows.requires_grad, tensor.grad

    firsts, _ = expected_gradients(world, (3,))
    for rank, (rows, requires, gradient) in enumerate(run(program, world)):
        assert torch.equal(rows, torch.stack([value(one, (3,)) for one in range(world)]))
        assert requires is sync
        if sync:
            torch.testing.assert_close(gradient, firsts[rank], rtol=1e-13, atol=0)
        else:
            assert gradient is None


def test_without_a_process_group_the_tensor_is_returned() -> None:
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    assert helpers.all_gather_ddp_if_available(tensor, sync_grads=True) is tensor
    assert helpers.sync_ddp_if_available(tensor, reduce_op="mean") is tensor
    for needs_ranks in (helpers.sync_ddp, helpers.gather_all_tensors):
        with pytest.raises(dist.NotInitializedError, match="init_process_group"):
            needs_ranks(tensor)


UNEVEN: dict[str, Callable[[int], tuple[int, ...]]] = {
    "one shape": lambda rank: (2, 3),
    "numbers": lambda rank: (),
    "rows differ": lambda rank: (2 * rank + 1, 3),
    "all dimensions differ": lambda rank: (3 - rank, 1 + rank * rank),
    "number of dimensions differs": lambda rank: (2,) * rank,
    "nothing on rank 0": lambda rank: (rank, 2),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize("name", UNEVEN)
def test_tensors_of_any_shape_are_gathered(name: str, backend: str, world: int) -> None:
    shape = UNEVEN[name]

    def program(rank: int) -> list[Tensor]:
        return helpers.gather_all_tensors(fill(rank, shape(rank)).requires_grad_())

    for everyone in run(program, world, backend=backend):
        assert [tuple(one.shape) for one in everyone] == [shape(rank) for rank in range(world)]
        assert all(torch.equal(one, fill(rank, shape(rank))) for rank, one in enumerate(everyone))
        assert not any(one.requires_grad for one in everyone)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_tensors_of_any_dtype_are_gathered(dtype: torch.dtype) -> None:
    def program(rank: int) -> list[Tensor]:
        return helpers.gather_all_tensors(fill(rank, (rank + 2,)).to(dtype))

    for everyone in run(program, 2):
        assert all(torch.equal(one, fill(rank, (rank + 2,)).to(dtype)) for rank, one in enumerate(everyone))


FORMULAS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "nothing": (None, lambda rows: rows.sum(0)),
    "sum": ("sum", lambda rows: rows.sum(0)),
    "ReduceOp.SUM": (dist.ReduceOp.SUM, lambda rows: rows.sum(0)),
    "mean": ("mean", lambda rows: rows.sum(0) / len(rows)),
    "Avg": ("Avg", lambda rows: rows.sum(0) / len(rows)),
    "MAX": ("MAX", lambda rows: rows.amax(0)),
    "min": ("min", lambda rows: rows.amin(0)),
    "product": ("product", lambda rows: rows.prod(0)),
    "ReduceOp.MAX": (dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("sync", [helpers.sync_ddp, helpers.sync_ddp_if_available])
def test_reductions_match_formulas(name: str, world: int, sync: Callable[..., Tensor]) -> None:
    op, formula = FORMULAS[name]

    def program(rank: int) -> tuple[Tensor, bool]:
        mine = fill(rank, (2, 3))
        found = sync(mine, reduce_op=op)
        return found, found is mine

    wanted = formula(torch.stack([fill(rank, (2, 3)) for rank in range(world)]))
    for found, same in run(program, world):
        assert torch.equal(found, wanted)
        assert same is (name not in ("mean", "Avg"))


def test_the_mean_of_integers_and_of_a_group_divides_by_the_right_number() -> None:
    def program(rank: int) -> Any:
        pair = dist.new_group([0, 2])
        return helpers.sync_ddp(torch.tensor([rank * rank, 1]), pair, "mean").tolist() if rank != 1 else None

    assert run(program, 3) == [[2.0, 1.0], None, [2.0, 1.0]]


@pytest.mark.parametrize(
    "call", [helpers.sync_ddp, helpers.sync_ddp_if_available, helpers.gather_all_tensors, AllGatherGrad.apply]
)
def test_a_rank_outside_the_group_raises(call: Callable[..., Any]) -> None:
    def program(rank: int) -> str:
        group = dist.new_group([0])
        if rank == 0:
            return ""
        with pytest.raises(dist.ArgumentError, match=r"a group that this rank is in.*on rank 1"):
            call(torch.ones(2), group)
        return "told"

    assert run(program, 2) == ["", "told"]


def test_an_unknown_reduction_lists_the_known_ones() -> None:
    with pytest.raises(RankError) as caught:
        run(lambda rank: helpers.sync_ddp(torch.ones(1), reduce_op="median"), 1)
    assert isinstance(caught.value.__cause__, dist.ArgumentError)
    assert "one of sum, avg, mean, product, min, max, band, bor, bxor, got 'median'" in str(caught.value.__cause__)


class Cluster:
    """Cluster environment like Lightning's, which counts its calls."""

    main_address = "127.0.0.1"

    def __init__(self, port: int, rank: int, size: int) -> None:
        self.main_port, self.rank, self.size = port, rank, size
        self.asked: list[str] = []

    def global_rank(self) -> int:
        self.asked.append("global_rank")
        return self.rank

    def world_size(self) -> int:
        self.asked.append("world_size")
        return self.size


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "nonsense")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_init_dist_connection_uses_the_cluster_environment(clean_environment: pytest.MonkeyPatch, backend: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    # Rank 0 serves elsewhere, so that the port is known to be free: all ranks are clients, as under an elastic agent.
    clean_environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def program(rank: int) -> Any:
        cluster = Cluster(server.port, rank, 2)
        helpers.init_dist_connection(cluster, backend)
        tensor = fill(rank, (3,))
        dist.all_reduce(tensor)
        found = dist.get_rank(), dist.get_world_size(), dist.get_backend(), tensor
        helpers.init_dist_connection(Cluster(1, 7, 9), "nonsense")
        dist.destroy_process_group()
        return found, cluster.asked

    try:
        answers = run(program, 2, init=False)
    finally:
        server.close()
    total = fill(0, (3,)) + fill(1, (3,))
    for number, ((rank, size, name, tensor), asked) in enumerate(answers):
        assert (rank, size, name, asked) == (number, 2, backend, ["global_rank", "world_size"])
        assert torch.equal(tensor, total)


def test_arguments_override_the_cluster_environment(clean_environment: pytest.MonkeyPatch) -> None:
    cluster = Cluster(0, 5, 7)
    helpers.init_dist_connection(cluster, "ref", global_rank=0, world_size=1, store=dist.HashStore())
    try:
        assert (dist.get_rank(), dist.get_world_size(), cluster.asked) == (0, 1, [])
    finally:
        dist.destroy_process_group()


def test_options_go_to_init_process_group(clean_environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(dist.ArgumentError, match="give either 'store' or 'init_method'"):
        helpers.init_dist_connection(Cluster(0, 0, 1), "ref", store=dist.HashStore(), init_method="env://")
    assert not dist.is_initialized()


def test_an_incomplete_cluster_environment_is_refused() -> None:
    with pytest.raises(dist.ArgumentTypeError, match=r"cluster_environment.*main_address, main_port, global_rank"):
        helpers.init_dist_connection("localhost", "ref")  # type: ignore[arg-type]


class Model:
    """Stands for a DistributedDataParallel: keeps what is registered."""

    def __init__(self) -> None:
        self.registered: list[tuple[Any, Any]] = []

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.registered.append((state, hook))


def test_hooks_are_registered_with_state_and_wrapper() -> None:
    model, state = Model(), object()
    helpers.register_ddp_comm_hook(model, state, default_hooks.allreduce_hook)
    helpers.register_ddp_comm_hook(model, ddp_comm_hook=len, ddp_comm_wrapper=lambda hook: (hook, "wrapped"))  # type: ignore[arg-type, return-value]
    assert model.registered == [(state, default_hooks.allreduce_hook), (None, (len, "wrapped"))]


def test_state_without_a_hook_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with caplog.at_level(logging.WARNING, "torchdist_ref.utilities"):
        helpers.register_ddp_comm_hook(model)
        assert not caplog.records
        helpers.register_ddp_comm_hook(model, ddp_comm_state=1)
    assert not model.registered
    assert "no ddp_comm_hook" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("state", "ddp_comm_state"),
        ("hook", "ddp_comm_hook"),
        ("wrapper", "ddp_comm_wrapper"),
        ("group", "one of model"),
    ],
)
def test_a_wrong_keyword_names_the_right_one(wrong: str, right: str) -> None:
    with pytest.raises(dist.ArgumentTypeError, match=f"no argument '{wrong}'; it is {right}"):
        helpers.register_ddp_comm_hook(Model(), ddp_comm_hook=default_hooks.allreduce_hook, **{wrong: None})


def test_a_model_without_hooks_is_refused() -> None:
    with pytest.raises(dist.ArgumentTypeError, match=r"DistributedDataParallel.*got 'Linear'"):
        helpers.register_ddp_comm_hook(torch.nn.Linear(1, 1), ddp_comm_hook=default_hooks.allreduce_hook)


# torch's group joins its threads with its last reference; if a callback on one of them drops it, the process aborts.
kept: list[Any] = []


def meet(rank: int, world: int, path: str) -> None:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=world)
    kept.append(torch.distributed.group.WORLD)


def gradient(wrap: Any, rank: int) -> Any:
    model = wrap(torch.nn.Linear(2, 1, bias=False))
    helpers.register_ddp_comm_hook(model, None, default_hooks.fp16_compress_hook)
    model(torch.tensor([[1.0, 2.0]]) * (1 + rank)).sum().backward()
    return model.module.weight.grad.tolist()


def ours_and_torchs(rank: int, world: int, path: str) -> Any:
    meet(rank, world, path)
    found = [gradient(wrap, rank) for wrap in (dist.DistributedDataParallel, DistributedDataParallel)]
    torch.distributed.destroy_process_group()
    return found


def test_a_registered_hook_works_on_ours_and_on_torchs(tmp_path: Path) -> None:
    assert forked(ours_and_torchs, 2, 2, str(tmp_path / "meet"), backend="gloo") == [[[[1.5, 3.0]]] * 2] * 2


INTERNVL = (
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
)


def test_the_five_hooks_of_internvl_are_our_default_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """InternVL imports its hooks from a file ``ddp_hooks.py`` beside the program; our module can be that file."""
    monkeypatch.setitem(sys.modules, "ddp_hooks", default_hooks)
    namespace: dict[str, Any] = {}
    exec(f"from ddp_hooks import {', '.join(INTERNVL)}", namespace)
    assert [name for name in INTERNVL if namespace[name] is not getattr(default_hooks, name)] == []
    assert set(INTERNVL) <= set(default_hooks.__all__)

    def program(rank: int) -> list[Any]:
        average = fill(rank, (3,)).mul(2)
        group = dist.new_group([0, 1])
        hooks = [namespace[name] for name in INTERNVL if name.endswith("hook")]
        hooks += [namespace[name](namespace["allreduce_hook"]) for name in INTERNVL if name.endswith("wrapper")]
        return [hook(group, dist.GradBucket(buffer=average.clone())).wait() for hook in hooks]

    wanted = fill(0, (3,)) + fill(1, (3,))
    for averages in run(program, 2):
        assert len(averages) == 5
        for found in averages:
            assert found.dtype is torch.float32
            torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", helpers.__all__)
def test_every_helper_is_documented(name: str) -> None:
    assert utilities.__doc__ and getattr(helpers, name).__doc__
