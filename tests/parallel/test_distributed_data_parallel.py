"""Options of DistributedDataParallel against the formula: the average of gradients that each rank computes alone."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchdist_ref as dist
from tests.parallel.training import batch, build, forked
from torchdist_ref.parallel.construction import mapped
from torchdist_ref.testing import fill, run

DDP = dist.DistributedDataParallel
# In MiB: less than one layer of the multilayer perceptron, and less than one 3 x 3 matrix.
SMALL, TINY = 0.0005, 0.00003


class Branches(nn.Module):
    """Four layers, of which a forward pass uses those of its argument."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(layers))
        for place, layer in enumerate(self.layers):
            layer.weight.data = fill(place, (3, 3))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return torch.stack([self.layers[i](x) for i in used]).sum(0)


def grads(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def alone(make: Callable[[], nn.Module], rank: int, loss: Callable[[nn.Module, int], Tensor]) -> list[Tensor | None]:
    """Return the gradients of one rank alone."""
    model = make()
    loss(model, rank).backward()
    return grads(model)


def expected(
    make: Callable[[], nn.Module], world: int, loss: Callable[[nn.Module, int], Tensor], times: int = 1
) -> list[Tensor | None]:
    """Return the average over ranks; None where no rank has a gradient."""
    columns = zip(*(alone(make, rank, loss) for rank in range(world)), strict=True)
    return [_mean(column, world, times) for column in columns]


def _mean(column: tuple[Tensor | None, ...], world: int, times: int) -> Tensor | None:
    there = [g.to_dense() for g in column if g is not None]
    return torch.stack(there).sum(0) * times / world if there else None


def check(got: list[list[Tensor | None]], wanted: list[Tensor | None]) -> None:
    for one in got:
        for mine, right in zip(one, wanted, strict=True):
            assert (mine is None) == (right is None)
            if mine is not None and right is not None:
                torch.testing.assert_close(mine.to_dense(), right, rtol=1e-5, atol=1e-6)


def step(rank: int, make: Callable[[], nn.Module], loss: Callable[[Any, int], Tensor], steps: int, **kw: Any) -> Any:
    """Return the gradients of the last of several steps, and the number of buckets."""
    model = make()
    ddp = DDP(model, **{"bucket_cap_mb": SMALL, **kw})
    for _ in range(steps):
        model.zero_grad()
        loss(ddp, rank).backward()
    return grads(model), len(ddp.reducer.assignment)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize(
    "used",
    [lambda rank: [0, 1, 3], lambda rank: [0, 2] if rank else [1, 2], lambda rank: [rank], lambda rank: [0, 1, 2, 3]],
    ids=["same on all ranks", "differing", "one each", "all"],
)
def test_unused_parameters(used: Callable[[int], list[int]], views: bool) -> None:
    def loss(model: Any, rank: int) -> Tensor:
        return (model(fill(rank, (2, 3)), used(rank)) ** 2).sum()

    def program(rank: int) -> Any:
        ways = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
        return step(rank, Branches, loss, 2, bucket_cap_mb=TINY, **ways)

    outcomes = run(program, 3)
    check([gradients for gradients, _ in outcomes], expected(Branches, 3, loss))
    assert all(buckets == 4 for _, buckets in outcomes)


def test_a_rank_without_used_parameters_contributes_zeros() -> None:
    def loss(model: Any, rank: int) -> Tensor:
        x = fill(rank, (2, 3)).requires_grad_()
        return (model(x, [0]) if rank else x + model(x, [1]) * 0).sum()

    def program(rank: int) -> Any:
        return step(rank, Branches, loss, 2, find_unused_parameters=True)[0]

    check(run(program, 2), expected(Branches, 2, loss))


def test_an_output_outside_the_loss_leaves_its_parameters_unchanged() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": self.a(x), "b": self.b(x)}

    def program(rank: int) -> Any:
        ddp = DDP(Two(), find_unused_parameters=True, bucket_cap_mb=SMALL)
        for _ in range(2):
            ddp.zero_grad()
            ddp(fill(rank, (2, 3)))["a"].sum().backward()
        return grads(ddp.module)

    both = torch.stack([fill(rank, (2, 3)).sum(0, keepdim=True) for rank in range(2)]).mean(0)
    check(run(program, 2), [both, None])


def test_static_graph_with_reused_and_unused_parameters() -> None:
    class Whole(Branches):
        """Checkpointing inside, so that backward runs inside backward."""

        def forward(self, x: Tensor, used: list[int]) -> Tensor:
            once = checkpoint(super().forward, x.requires_grad_(), used, use_reentrant=True)
            return checkpoint(super().forward, once, used, use_reentrant=True)

    def inner(model: Any, rank: int) -> Tensor:
        return (model(fill(rank, (2, 3)), [0, 1, 3]) / 100).pow(2).sum()

    def program(rank: int) -> Any:
        return step(rank, Whole, inner, 4, bucket_cap_mb=TINY, static_graph=True)

    outcomes = run(program, 2)
    check([gradients for gradients, _ in outcomes], expected(Whole, 2, inner))
    assert outcomes[0][1] == 4


def quadratic(model: Any, rank: int) -> Tensor:
    inputs, _ = batch(rank, 0)
    return (model(inputs) ** 2).mean()


@pytest.mark.parametrize("views", [False, True])
def test_gradients_accumulate_locally_under_no_sync(views: bool) -> None:
    def program(rank: int) -> Any:
        ddp = DDP(build("mlp"), bucket_cap_mb=SMALL, gradient_as_bucket_view=views)
        seen = []
        for _ in range(2):
            ddp.zero_grad()
            with ddp.no_sync():
                quadratic(ddp, rank).backward()
                quadratic(ddp, rank).backward()
            seen.append(grads(ddp.module))
            quadratic(ddp, rank).backward()
            seen.append(grads(ddp.module))
        return seen

    everyone = run(program, 2)
    for rank, (first, averaged, second, again) in enumerate(everyone):
        twice = [None if g is None else 2 * g for g in alone(lambda: build("mlp"), rank, quadratic)]
        check([first, second], twice)
        check([averaged, again], expected(lambda: build("mlp"), 2, quadratic, times=3))


def test_averages_accumulate_without_zero_grad() -> None:
    def program(rank: int) -> Any:
        ddp = DDP(build("mlp"), bucket_cap_mb=SMALL, gradient_as_bucket_view=bool(rank))
        for _ in range(3):
            quadratic(ddp, rank).backward()
        return grads(ddp.module)

    check(run(program, 2), expected(lambda: build("mlp"), 2, quadratic, times=3))


def test_gradient_as_bucket_view() -> None:
    def program(rank: int) -> Any:
        ddp = DDP(build("mlp"), bucket_cap_mb=SMALL, gradient_as_bucket_view=True)
        for _ in range(3):
            ddp.zero_grad(set_to_none=rank == 0)
            quadratic(ddp, rank).backward()
        views = [view for bucket in ddp.reducer.buckets for view in bucket.views]
        return len(views), {p.grad.data_ptr() for p in ddp.parameters()} == {view.data_ptr() for view in views}

    assert run(program, 2) == [(6, True), (6, True)]


def test_gradient_tensors_of_the_user_are_kept() -> None:
    def program(rank: int) -> Any:
        ddp = DDP(build("mlp"), bucket_cap_mb=SMALL)
        mine = [torch.zeros_like(p) for p in ddp.parameters()]
        for parameter, tensor in zip(ddp.parameters(), mine, strict=True):
            parameter.grad = tensor
        quadratic(ddp, rank).backward()
        return mine

    check(run(program, 2), expected(lambda: build("mlp"), 2, quadratic))


def test_create_graph_gives_averages_without_graph() -> None:
    def loss_of(model: Any, rank: int) -> Tensor:
        return quadratic(model, rank)

    def program(rank: int) -> Any:
        outcomes = []
        for views in (False, True):
            ddp = DDP(build("mlp"), bucket_cap_mb=SMALL, gradient_as_bucket_view=views)
            loss_of(ddp, rank).backward(create_graph=True)
            outcomes.append([g.detach() for g in grads(ddp.module) if g is not None])
        return outcomes

    with pytest.warns(UserWarning, match="create_graph"):
        everyone = run(program, 2)
    check([one for both in everyone for one in both], expected(lambda: build("mlp"), 2, quadratic))


class Mixed(nn.Module):
    """Two dtypes, a shared weight, a scalar, a channels_last convolution, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(fill(1, (4, 3), torch.float64))
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
        self.conv.weight.data.copy_(fill(2, (4, 4, 3, 3)))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.again = self.conv

    def forward(self, x: Tensor) -> Tensor:
        inner = (x.double() @ self.wide.t()).float().view(-1, 4, 1, 1).expand(-1, 4, 2, 2)
        return self.again(self.conv(inner * self.scale))


@pytest.mark.parametrize("views", [False, True])
def test_mixed_dtypes_shared_scalar_channels_last_and_frozen_parameters(views: bool) -> None:
    def loss(model: Any, rank: int) -> Tensor:
        return (model(fill(rank, (2, 3))) / 1e4).pow(2).sum()

    def program(rank: int) -> Any:
        return step(rank, Mixed, loss, 3, gradient_as_bucket_view=views)

    outcomes = run(program, 2)
    check([gradients for gradients, _ in outcomes], expected(Mixed, 2, loss))
    strides = outcomes[0][0][2].stride()
    assert strides == Mixed().conv.weight.stride() and outcomes[0][1] >= 2


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)
        self.words.weight.data = fill(0, (20, 4))
        self.head = nn.Linear(4, 2)
        nn.init.constant_(self.head.weight, 0.5)
        nn.init.constant_(self.head.bias, 0.25)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words))


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_sparse_gradients_are_averaged_without_becoming_dense(backend: str) -> None:
    def loss(model: Any, rank: int) -> Tensor:
        return model(torch.tensor([rank, rank, 3, 5 + 2 * rank][: 4 - rank])).pow(2).sum()

    def program(rank: int) -> Any:
        gradients, _ = step(rank, Words, loss, 2)
        return gradients, gradients[0].is_sparse, gradients[0].coalesce().indices().flatten().tolist()

    outcomes = run(program, 3, backend=backend)
    check([gradients for gradients, _, _ in outcomes], expected(Words, 3, loss))
    assert all(kept and rows == [0, 1, 2, 3, 5] for _, kept, rows in outcomes)


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_join_contributes_no_rows_to_sparse_gradients(backend: str) -> None:
    def program(rank: int) -> Any:
        ddp = DDP(Words())
        with ddp.join():
            for _ in range(1 + rank):
                ddp.zero_grad()
                ddp(torch.tensor([rank, 3])).sum().backward()
        return ddp.module.words.weight.grad.to_dense()

    alone = Words()
    alone(torch.tensor([1, 3])).sum().backward()
    assert torch.equal(run(program, 2, backend=backend)[1], alone.words.weight.grad.to_dense() / 2)  # type: ignore[union-attr]


def test_ddp_over_a_subgroup() -> None:
    def program(rank: int) -> Any:
        group = dist.new_group([0, 2])
        if rank == 1:
            return alone(lambda: build("mlp"), rank, quadratic)
        return step(rank, lambda: build("mlp"), quadratic, 2, process_group=group)[0]

    first, second, third = run(program, 3)
    mine, other = (alone(lambda: build("mlp"), rank, quadratic) for rank in (0, 2))
    check([first, third], [(a + b) / 2 for a, b in zip(mine, other, strict=True)])  # type: ignore[operator]
    check([second], alone(lambda: build("mlp"), 1, quadratic))


def test_an_undefined_gradient_counts_as_zeros() -> None:
    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0], None

    class Module(Branches):
        def forward(self, x: Tensor, used: list[int]) -> Tensor:
            return Silent.apply(super().forward(x, used), self.layers[3].weight)

    def loss(model: Any, rank: int) -> Tensor:
        return model(fill(rank, (2, 3)), [0, 1, 2]).sum()

    def program(rank: int) -> Any:
        return step(rank, Module, loss, 2)[0]

    wanted = expected(Module, 2, loss)
    wanted[3] = torch.zeros(3, 3)
    check(run(program, 2), wanted)


def test_clip_grad_norm_and_autocast() -> None:
    def program(rank: int) -> Any:
        ddp = DDP(build("mlp"), bucket_cap_mb=SMALL)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = quadratic(ddp, rank)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
        return norm.item(), torch.cat([g.flatten() for g in grads(ddp.module) if g is not None]).norm().item()

    outcomes = run(program, 2)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] > 0.01 and outcomes[0][1] == pytest.approx(0.01, rel=1e-3)


def test_buckets_are_rebuilt_in_rank_0s_order_of_gradients() -> None:
    class Order(Branches):
        def forward(self, x: Tensor, used: list[int]) -> Tensor:
            for place in used:
                x = torch.tanh(self.layers[place](x) / 10)
            return x

    def program(rank: int) -> Any:
        ddp = DDP(Order(), bucket_cap_mb=TINY)
        before = ddp.reducer.assignment
        for _ in range(2):
            # Each rank uses the layers in an order of its own; rank 0's is 2, 0, 3, 1, and backward runs it in reverse.
            ddp(fill(rank, (2, 3)), [2, 0, 3, 1] if rank == 0 else [0, 1, 2, 3]).sum().backward()
        return before, ddp.reducer.assignment

    assert run(program, 2) == [([[0, 1, 2, 3]], [[1], [3], [0], [2]])] * 2


def test_unused_parameters_of_a_static_graph_are_in_the_last_buckets() -> None:
    def program(rank: int) -> Any:
        ddp = DDP(Branches(), bucket_cap_mb=TINY, static_graph=True)
        for _ in range(3):
            ddp(fill(rank, (2, 3)), [1, 2]).sum().backward()
        return [bucket.members for bucket in ddp.reducer.buckets]

    assert run(program, 2) == [[[2], [1], [0], [3]]] * 2


def test_state_dicts_of_torchs_ddp_and_ours_are_interchangeable() -> None:
    def program(rank: int) -> Any:
        ours = DDP(build("convnet"))
        keys = list(ours.state_dict())
        ours.load_state_dict({key: torch.full_like(value, 2) for key, value in ours.state_dict().items()})
        return keys, ours.module[2].weight[0].item()

    keys = ["module." + key for key in build("convnet").state_dict()]
    assert run(program, 2) == [(keys, 2.0)] * 2


@pytest.mark.parametrize("way", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))], ids=["copy", "pickle"])
def test_copies_and_pickles_are_independent(way: Callable[[Any], Any]) -> None:
    def program(rank: int) -> Any:
        ddp = DDP(build("mlp"), bucket_cap_mb=SMALL, gradient_as_bucket_view=True)
        quadratic(ddp, rank).backward()
        other = way(ddp)
        for _ in range(2):
            other.zero_grad()
            quadratic(other, rank).backward()
        return grads(ddp.module), grads(other.module), len(other.reducer.assignment)

    for one, other, buckets in run(program, 2):
        check([one, other], expected(lambda: build("mlp"), 2, quadratic))
        assert buckets >= 1


# torch's compiler looks at .grad of whatever a function is called with.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("torchs_modules")
def test_compiled_modules_and_compiled_ddp() -> None:
    def program(rank: int) -> Any:
        inside = DDP(torch.compile(build("mlp"), backend="eager"), bucket_cap_mb=SMALL)
        outside = DDP(build("mlp"), bucket_cap_mb=SMALL)
        around = torch.compile(outside, backend="eager")
        for _ in range(3):
            inside.zero_grad()
            outside.zero_grad()
            quadratic(inside, rank).backward()
            quadratic(around, rank).backward()
        return grads(inside.module), grads(outside.module)

    # The compiler keeps state of the process, so these ranks are processes.
    everyone = forked(program, 2)
    check([one for both in everyone for one in both], expected(lambda: build("mlp"), 2, quadratic))


def test_parameters_and_buffers_are_broadcast_from_rank_0() -> None:
    class Rank(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(fill(rank, (3, 5)))
            self.register_buffer("seen", fill(rank, (7,), torch.int64))
            self.register_buffer("flag", fill(rank, (3,), torch.bool))
            self.register_buffer("own", fill(rank, (2,)))
            self._ddp_params_and_buffers_to_ignore = ["own"]

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x @ self.weight

    def program(rank: int) -> Any:
        module = Rank(rank)
        ddp = DDP(module)
        begin = [module.weight.detach().clone(), module.seen.clone(), module.flag.clone(), module.own.clone()]
        module.seen.add_(100 * rank)
        ddp(torch.ones(2, 3)).sum().backward()
        return begin, module.seen.clone()

    for rank, (begin, seen) in enumerate(run(program, 2)):
        assert torch.equal(begin[0], fill(0, (3, 5))) and torch.equal(begin[1], fill(0, (7,), torch.int64))
        assert torch.equal(begin[2], fill(0, (3,), torch.bool)) and torch.equal(begin[3], fill(rank, (2,)))
        assert torch.equal(seen, fill(0, (7,), torch.int64) + 1)


def test_a_compiler_that_another_thread_imports_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int) -> Tensor:
        ddp = DDP(nn.Linear(3, 2, bias=False))
        ddp(fill(rank, (4, 3))).sum().backward()
        return ddp.module.weight.grad

    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    expected = (fill(0, (4, 3)).sum(0) + fill(1, (4, 3)).sum(0)) / 2
    for found in run(program, 2):
        torch.testing.assert_close(found, expected.expand(2, 3))


# ---- several passes over one graph


class Smooth(nn.Module):
    """Two outputs of a curved function, whose gradient depends on the input; a third layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        for place, parameter in enumerate(self.parameters()):
            parameter.data = fill(place, tuple(parameter.shape)) / 50

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.layers[0](x)), torch.tanh(self.layers[1](x))


def energy_and_forces(module: nn.Module, rank: int) -> Tensor:
    """Return a loss of the outputs and of their gradient with respect to the input."""
    x = (fill(rank, (2, 3)) / 20).requires_grad_()
    energy = torch.stack(module(x)).sum()
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy + forces.pow(2).sum()


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_gradients_are_averaged_after_a_pass_that_accumulates_none(option: str) -> None:
    """Once `torch.autograd.grad` ended the iteration, and each rank kept its own gradients."""

    def program(rank: int) -> list[list[Tensor | None]]:
        model, found = Smooth(), []
        ddp = DDP(model, **{option: True})  # type: ignore[arg-type]
        for _ in range(3):
            model.zero_grad()
            energy_and_forces(ddp, rank).backward()
            found.append(grads(model))
        return found

    wanted = expected(Smooth, 2, energy_and_forces)
    assert [each is None for each in wanted] == [False] * 4 + [True] * 2
    for found in run(program, 2):
        for gradients in found:
            for gradient, right in zip(gradients, wanted, strict=True):
                # A static graph leaves zeros where no rank has a gradient.
                filled = torch.zeros(()) if gradient is None else gradient
                assert torch.allclose(filled, torch.zeros(()) if right is None else right)


def test_outputs_that_are_differentiated_one_after_another_raise_if_the_first_pass_averages() -> None:
    """Once the second pass left its gradients as they were on each rank."""

    def program(rank: int) -> None:
        ddp = DDP(Smooth(), find_unused_parameters=True)
        first, second = ddp(fill(rank, (2, 3)))
        first.sum().backward()
        with pytest.raises(dist.DistError, match=r"parameter 'layers.1.\w+' got its gradient after the reduction"):
            second.sum().backward()

    run(program, 2)


def test_an_output_that_was_left_out_may_be_used_without_communication() -> None:
    def program(rank: int) -> list[Tensor | None]:
        model = Smooth()
        ddp = DDP(model, find_unused_parameters=True)
        ddp(fill(rank, (2, 3)))[0].sum().backward()
        with ddp.no_sync():
            ddp(fill(rank, (2, 3)))[1].sum().backward()
        return grads(model)

    for rank, found in enumerate(run(program, 2)):
        assert found[2] is not None
        own = alone(Smooth, rank, lambda module, rank: module(fill(rank, (2, 3)))[1].sum())
        torch.testing.assert_close(found[2], own[2])


# ---- evaluation and buffers


def test_training_follows_an_evaluation_in_inference_mode() -> None:
    """Once the second step raised: a tensor that DDP keeps had been made in inference mode."""

    def program(rank: int) -> Tensor:
        model = nn.BatchNorm1d(3, affine=False)
        ddp = DDP(nn.Sequential(nn.Linear(3, 3), model))
        ddp.eval()
        with torch.inference_mode():
            ddp(fill(rank, (2, 3)))
        ddp.train()
        for _ in range(3):
            ddp(fill(rank, (2, 3))).sum().backward()
        ddp(fill(rank, (2, 3)))
        return model.num_batches_tracked

    assert [int(count) for count in run(program, 2)] == [4, 4]


def test_a_buffer_may_change_its_shape() -> None:
    class Growing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.resize_(len(self.seen) + 1).fill_(float(x[0, 0]))
            return super().forward(x)

    def program(rank: int) -> list[float]:
        model = Growing()
        ddp = DDP(model)
        for _ in range(3):
            ddp(fill(rank, (2, 3)) + 1).sum().backward()
        ddp._sync_buffers()
        found: list[float] = model.seen.tolist()
        return found

    assert run(program, 2) == [[float(fill(0, (2, 3))[0, 0]) + 1] * 4] * 2


def test_packed_sequences_and_dataclasses_are_mapped_as_torch_moves_them() -> None:
    packed = nn.utils.rnn.pack_sequence([fill(0, (3, 2)), fill(1, (2, 2))])
    moved = mapped([packed], lambda tensor: tensor.to("meta"))[0]
    assert moved.data.is_meta and not moved.batch_sizes.is_meta
    cast = mapped(packed, lambda tensor: tensor.double())
    assert torch.equal(cast.data, packed.data.double()) and torch.equal(cast.batch_sizes, packed.batch_sizes)

    @dataclass(frozen=True)
    class Batch:
        inputs: Tensor
        names: list[str]

    given = Batch(fill(2, (2,)), ["a"])
    found = mapped({"batch": given}, lambda tensor: tensor * 2)["batch"]
    assert torch.equal(found.inputs, given.inputs * 2) and found.names == ["a"] and given.inputs is not found.inputs
