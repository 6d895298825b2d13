"""Pipe: the values and gradients of the model, GPipe's schedule, and recomputed activations."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchdist_ref.pipeline.sync import NoChunk, Pipe, WithDevice, is_checkpointing, is_recomputing
from torchdist_ref.pipeline.sync.pipe import LocalResult, PipeSequential
from torchdist_ref.pipeline.sync.schedule import clock_cycles, draw
from torchdist_ref.pipeline.sync.utils import partition_model

import torchdist_ref as dist
from torchdist_ref.testing import fill

WAYS = ("always", "except_last", "never")


def layers() -> nn.Sequential:
    """Build a model of float64, so that sums in another order agree to many digits."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(fill(i, parameter.shape, torch.float64) / 16)
    return model


def piped(model: nn.Sequential, balance: list[int], **options: Any) -> Pipe:
    return Pipe(partition_model(model, balance, ["cpu"] * len(balance)), **options)


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], inputs: Tensor) -> list[Tensor]:
    inputs = inputs.clone().requires_grad_()
    result = run(inputs)
    (result * fill(5, result.shape, torch.float64)).sum().backward()
    return [result.detach(), inputs.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("checkpoint", WAYS)
@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("chunks", [1, 3, 4, 20])
def test_values_and_gradients_equal_the_models(checkpoint: str, balance: list[int], chunks: int) -> None:
    inputs = fill(0, (10, 6), torch.float64) / 8
    plain = layers()
    right = gradients(plain, plain, inputs)
    model = layers()
    pipe = piped(model, balance, chunks=chunks, checkpoint=checkpoint)
    found = gradients(model, lambda x: pipe(x).local_value(), inputs)
    for mine, other in zip(found, right, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("partitions", [1, 3])
def test_every_micro_batch_visits_every_partition_once_in_order(chunks: int, partitions: int) -> None:
    clocks = list(clock_cycles(chunks, partitions))
    assert len(clocks) == chunks + partitions - 1
    when = {pair: clock for clock, pairs in enumerate(clocks) for pair in pairs}
    assert when == {(i, j): i + j for i in range(chunks) for j in range(partitions)}
    assert [line.count(".") for line in draw(chunks, partitions).splitlines()] == [partitions - 1] * partitions


class Spy(nn.Module):
    """Writes down who was where, forwards and backwards."""

    def __init__(self, log: list[Any], place: int) -> None:
        super().__init__()
        self.log, self.place = log, place

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, 0].item())
        state = "again" if is_recomputing() else "once" if is_checkpointing() else "kept"
        self.log.append((number, self.place, state, threading.current_thread()))
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda grad: self.log.append((number, self.place, "back", threading.current_thread())))
        return x


def spied(checkpoint: str, train: bool = True) -> list[Any]:
    log: list[Any] = []
    pipe = piped(nn.Sequential(Spy(log, 0), Spy(log, 1), Spy(log, 2)), [1, 1, 1], chunks=4, checkpoint=checkpoint)
    inputs = torch.arange(4.0).view(4, 1).requires_grad_()
    pipe.train(train)(inputs).local_value().sum().backward()
    assert inputs.grad is not None and torch.equal(inputs.grad, torch.ones(4, 1))
    return log


def test_forward_follows_the_schedule_and_backward_reverses_it() -> None:
    log = spied("never")
    forward = [(i, j) for i, j, state, _ in log if state == "kept"]
    position = {pair: index for index, pair in enumerate(forward)}
    for earlier, later in itertools.pairwise(clock_cycles(4, 3)):
        assert max(position[pair] for pair in earlier) < min(position[pair] for pair in later)
    for partition in (1, 2):
        assert [i for i, j, state, _ in log if state == "back" and j == partition] == [3, 2, 1, 0]


def test_each_partition_has_a_thread_of_its_own() -> None:
    log = spied("never")
    threads = [{thread for _, j, state, thread in log if state == "kept" and j == place} for place in range(3)]
    assert [len(found) for found in threads] == [1, 1, 1] and len(set.union(*threads)) == 3
    assert threading.current_thread() not in set.union(*threads)


@pytest.mark.parametrize(("checkpoint", "forgotten"), [("always", 4), ("except_last", 3), ("never", 0)])
def test_checkpointed_activations_are_recomputed(checkpoint: str, forgotten: int) -> None:
    log = spied(checkpoint)
    for place in range(3):
        states = {state: [i for i, j, s, _ in log if (j, s) == (place, state)] for state in ("once", "again", "kept")}
        assert sorted(states["once"]) == sorted(states["again"]) == list(range(forgotten))
        assert states["kept"] == list(range(forgotten, 4))
    for partition in (1, 2):
        assert [i for i, j, state, _ in log if state == "back" and j == partition] == [3, 2, 1, 0]


def test_no_activation_is_checkpointed_in_evaluation() -> None:
    assert {state for _, _, state, _ in spied("always", train=False)} == {"kept", "back"}
    assert not is_checkpointing() and not is_recomputing()


@pytest.mark.parametrize(
    ("checkpoint", "forward", "all_told"), [("always", 0, 4), ("except_last", 1, 4), ("never", 4, 4)]
)
def test_checkpointed_activations_are_freed(checkpoint: str, forward: int, all_told: int) -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
                return x.exp()

    kept: list[Tensor] = []
    inputs = torch.ones(4, requires_grad=True)
    result = Pipe(nn.Sequential(Exp()), 4, checkpoint)(inputs).local_value()
    assert len(kept) == forward
    result.sum().backward()
    assert len(kept) == 4


def test_recomputation_draws_the_same_random_numbers() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.rand_like(x)
            if is_recomputing():
                seen["again"].append(mask)
            elif is_checkpointing():
                seen["once"].append(mask)
            return x * mask

    seen: dict[str, list[Tensor]] = {"once": [], "again": []}
    pipe = piped(nn.Sequential(Both(), Both(), Both()), [1, 1, 1], chunks=5, checkpoint="except_last")
    inputs = torch.ones(5, 1000, requires_grad=True)
    state = torch.get_rng_state()
    result = pipe(inputs).local_value()
    between = torch.get_rng_state()
    result.sum().backward()
    assert not torch.equal(state, between) and torch.equal(between, torch.get_rng_state())
    assert len(seen["once"]) == 12 and len(seen["again"]) == 12
    again = {mask.sum().item(): mask for mask in seen["again"]}
    assert all(torch.equal(again[mask.sum().item()], mask) for mask in seen["once"])
    # With one weight a micro-batch, the gradient is the product of the masks, which is the result.
    torch.testing.assert_close(inputs.grad, result)


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: Any, whole: Tensor) -> tuple[Tensor, Any, Tensor, str]:
        return x * factor, factor, whole, f"{len(x)} rows"


class Ends(nn.Module):
    def forward(self, x: Tensor, factor: Any, whole: Tensor, note: str) -> tuple[Tensor, Tensor, str]:
        return x + whole.sum(), (x > 0).sum(1), note


@pytest.mark.parametrize("checkpoint", WAYS)
def test_tuples_other_values_and_whole_tensors_reach_every_partition(checkpoint: str) -> None:
    pipe = piped(nn.Sequential(Scaled(), Ends()), [1, 1], chunks=2, checkpoint=checkpoint)
    x, whole = fill(0, (3, 2)).requires_grad_(), fill(1, (5,)).requires_grad_()
    result, signs, notes = pipe(x, 3.0, NoChunk(whole)).local_value()
    assert torch.equal(result, 3 * x + whole.sum()) and torch.equal(signs, (x > 0).sum(1))
    assert notes == ["2 rows", "1 rows"]
    result.sum().backward()
    assert x.grad is not None and whole.grad is not None
    assert torch.equal(x.grad, torch.full((3, 2), 3.0)) and torch.equal(whole.grad, torch.full((5,), 6.0))


def test_partitions_run_in_the_modes_of_the_calling_thread() -> None:
    pipe = piped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=2, checkpoint="always")
    with torch.no_grad():
        assert not pipe(torch.ones(2, 4)).local_value().requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        result = pipe(torch.ones(2, 4)).local_value()
    assert result.dtype == torch.bfloat16
    result.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in pipe.parameters())


def test_an_error_in_a_partition_is_raised() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] == 2:
                raise ZeroDivisionError("in the third micro-batch")
            return x

    pipe = piped(nn.Sequential(nn.Identity(), Fails()), [1, 1], chunks=4)
    with pytest.raises(ZeroDivisionError, match="third"):
        pipe(torch.arange(4.0).view(4, 1))
    assert threading.active_count() < 20


def test_a_pipe_is_a_sequence_of_layers() -> None:
    model = layers()
    pipe = piped(model, [2, 3])
    assert len(pipe) == 5 and list(pipe) == list(model) and pipe[3] is model[3]
    assert [len(list(part)) for part in pipe.partitions] == [2, 3]
    assert pipe.devices == [torch.device("cpu")] * 2
    assert len(Pipe(layers()).partitions) == 5
    assert pipe.to(torch.float32)[0].weight.dtype == torch.float32


@pytest.mark.skipif(not torch.distributed.rpc.is_available(), reason="this torch has no remote calls")
def test_the_result_is_an_rref_if_rpc_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import rpc

    made: list[Any] = []
    monkeypatch.setattr(rpc, "_is_current_rpc_agent_set", lambda: True)
    monkeypatch.setattr(rpc, "RRef", lambda value: made.append(value) or "an RRef")
    assert Pipe(nn.Sequential(nn.Identity()))(torch.ones(2)) == "an RRef"
    assert torch.equal(made[0], torch.ones(2))


def test_without_rpc_the_result_is_local() -> None:
    result = Pipe(nn.Sequential(nn.Identity()))(torch.ones(2))
    assert result.is_owner() and torch.equal(result.to_here(), result.local_value())


class Adds(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Sum())


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Sums(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class Says(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "hello"


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Pipe(nn.Linear(1, 1)), TypeError, "module must be nn.Sequential to be partitioned, got Linear"),
        (lambda: Pipe(layers(), chunks=0), ValueError, "number of chunks must be positive integer, got 0"),
        (lambda: Pipe(layers(), chunks="2"), ValueError, "number of chunks must be positive integer, got '2'"),
        (lambda: Pipe(layers(), chunks=2.5), ValueError, "number of chunks must be positive integer, got 2.5"),
        (
            lambda: Pipe(layers(), checkpoint="often"),
            ValueError,
            "checkpoint is not one of 'always', 'except_last', or",
        ),
        (
            lambda: Pipe(nn.Sequential(*[nn.Linear(1, 1)] * 2)),
            ValueError,
            "module with duplicate children is not supported",
        ),
        (
            lambda: Pipe(nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")))),
            ValueError,
            "child '0' is on .'cpu', 'meta'.: it should have all parameters on a single device, please use .to",
        ),
        (lambda: Pipe(layers()).cuda(), TypeError, "have their devices"),
        (lambda: Pipe(layers()).cpu(), TypeError, "have their devices"),
        (lambda: Pipe(layers()).to("cpu"), TypeError, "have their devices"),
        (lambda: Pipe(layers()).to(device="cpu"), TypeError, "have their devices"),
        (lambda: Pipe(layers())("text"), TypeError, "inputs do not have any tensors"),
        (
            lambda: Pipe(layers(), 4)(torch.ones(4, 6), torch.ones(2, 6)),
            RuntimeError,
            r"numbers of rows, .4, 2., .*chunks",
        ),
        # Both are cut in two pieces, and the second pieces of two rows and of one were added.
        (lambda: Pipe(Adds(), 2)(torch.ones(4), torch.ones(3)), RuntimeError, "numbers of rows, .4, 3."),
        (lambda: Pipe(layers(), 2)(torch.tensor(1.0)), RuntimeError, "at least a 1-dimensional tensor"),
        (lambda: Pipe(nn.Sequential(Sums()), 2)(torch.ones(4)), RuntimeError, "zero-dimensional .* cannot be concat"),
        (lambda: Pipe(nn.Sequential(Says()), 2)(torch.ones(4)), TypeError, "No tensor found.*str: 'hello'"),
        (lambda: Pipe(nn.Sequential())("text"), TypeError, "inputs do not have any tensors"),
        (
            lambda: Pipe(layers())(torch.ones(4, 6, device="meta")),
            ValueError,
            "All inputs should be on the same device",
        ),
        (lambda: Pipe(nn.Sequential(nn.Identity()))(torch.ones(2)).backward(), RuntimeError, "one element .* is .2."),
        (lambda: LocalResult("text").backward(), RuntimeError, "one element .* is str"),
        (lambda: LocalResult(torch.ones(1)).backward(3), RuntimeError, "'dist_autograd_ctx_id' must be -1"),
        (lambda: NoChunk("text"), TypeError, "'inp' must be a tensor, got 'str'"),
        (lambda: partition_model(layers(), [2, 2]), ValueError, "sum up to the 5 layers"),
        (lambda: partition_model(layers(), [5, 0]), ValueError, "sum up to the 5 layers"),
        (lambda: partition_model(layers(), [2, 3], ["cpu"]), ValueError, "'devices' must be 2 devices"),
    ],
)
def test_misuse_raises_an_error(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        make()
    assert isinstance(caught.value, dist.ArgumentError | dist.ArgumentTypeError)


def test_each_child_on_the_cpu_and_each_run_on_another_device_is_a_partition() -> None:
    def meta() -> nn.Module:
        return nn.Linear(1, 1, device="meta")

    nested = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(1, 1))), nn.ReLU())
    model = nn.Sequential(*nested, meta(), WithDevice(nn.ReLU(), "meta"), meta(), nn.ReLU(), meta())
    pipe = Pipe(copy.copy(model))
    assert [len(list(part)) for part in pipe.partitions] == [1, 2, 1, 3, 1, 1]
    assert [device.type for device in pipe.devices] == ["cpu", "cpu", "cpu", "meta", "cpu", "meta"]
    assert all(type(part) is PipeSequential for part in pipe.partitions) and not isinstance(pipe[5], WithDevice)
    # The keys that torch 1.13 has for this model.
    weights = ["0.0", "1.1.0", "3.0", "3.2", "5.0"]
    names = [f"partitions.{name}.{kind}" for name in weights for kind in ("weight", "bias")]
    assert list(pipe.state_dict()) == names
    state = {name: torch.zeros(1, 1) if name.endswith("weight") else torch.ones(1) for name in names}
    pipe.load_state_dict(state, assign=True)
    assert pipe[0](torch.ones(1)).item() == 1


def test_a_parameter_on_two_devices_is_an_error() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    second.weight = first.weight
    assert len(Pipe(nn.Sequential(first, second)).partitions) == 2
    # One device by two names: a move to it keeps the parameter.
    with pytest.raises(
        ValueError, match=r"duplicate parameters on distinct devices is not supported: 0.weight of part"
    ):
        Pipe(nn.Sequential(WithDevice(first, "cpu"), WithDevice(second, "cpu:0")))


def test_a_model_without_layers_returns_its_inputs() -> None:
    pipe, one = Pipe(nn.Sequential()), torch.tensor(42)
    assert pipe(fill(0, (3,))).local_value().tolist() == fill(0, (3,)).tolist() and len(pipe) == 0
    assert [value.tolist() for value in pipe(fill(0, (2,)), fill(1, (2,))).local_value()] == [
        fill(0, (2,)).tolist(),
        fill(1, (2,)).tolist(),
    ]
    with pytest.raises(dist.ArgumentError, match="1-dimensional"):
        pipe(one)


def test_the_number_of_chunks_is_converted_as_torch_does() -> None:
    pipe = Pipe(layers(), chunks=42.0)  # type: ignore[arg-type]
    assert pipe.chunks == 42 and type(pipe.chunks) is int


def test_a_local_result_runs_the_backward_pass() -> None:
    x = torch.ones(4, 1, requires_grad=True)
    result = LocalResult(Pipe(nn.Sequential(nn.Identity()), 2)(x).local_value().pow(2).sum())
    result.backward(retain_graph=True)
    result.backward()
    assert x.grad is not None and x.grad.tolist() == [[4.0]] * 4 and result.confirmed_by_owner()


class Random(nn.Module):
    """Dropout, and other random operations."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x) + torch.empty_like(x).uniform_() + torch.bernoulli(torch.full_like(x, 0.5))
        return nn.functional.dropout(x, 0.5, self.training) + noise


def random_results(checkpoint: str, seed: int, chunks: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    pipe = Pipe(nn.Sequential(Random(), nn.Tanh(), Random()), chunks, checkpoint)
    x = fill(0, (8, 40)).requires_grad_()
    results = [pipe(x).local_value() for _ in range(2)]
    assert not torch.equal(*results)
    sum(results).sum().backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return torch.stack([result.detach() for result in results]), x.grad


def test_random_numbers_depend_on_the_seed_only() -> None:
    """Neither the order of the partitions' threads nor recomputation changes them."""
    right = random_results("never", 9)
    for _ in range(5):
        for checkpoint in WAYS:
            found = random_results(checkpoint, 9)
            assert all(map(torch.equal, found, right)), checkpoint
    assert not torch.equal(random_results("never", 10)[0], right[0])
    rows = right[0].view(2, 4, -1)
    assert len({tuple(row.tolist()) for run in rows for row in run}) == 8


def test_with_one_micro_batch_random_numbers_are_those_of_the_model() -> None:
    model = nn.Sequential(Random(), nn.Tanh(), Random())
    torch.manual_seed(9)
    right = model(fill(0, (8, 5)))
    torch.manual_seed(9)
    assert torch.equal(Pipe(model, 1)(fill(0, (8, 5))).local_value(), right)


def test_a_model_without_random_numbers_leaves_the_generator_alone() -> None:
    pipe, state = Pipe(layers(), 4), torch.get_rng_state()
    pipe(fill(0, (8, 6), torch.float64)).local_value().sum().backward()
    generator = torch.Generator().manual_seed(3)

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape, generator=generator)

    Pipe(nn.Sequential(Own(), nn.Identity()), 4)(fill(0, (8, 6)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("checkpoint", WAYS)
def test_partitions_on_the_cpu_run_at_once(checkpoint: str) -> None:
    """A micro-batch is in one partition while the micro-batch behind it is in the other: they wait for each other."""
    meeting = threading.Barrier(2)

    class Meets(nn.Module):
        def __init__(self, alone: int) -> None:
            super().__init__()
            self.alone = alone

        def forward(self, x: Tensor) -> Tensor:
            if int(x[0, 0]) != self.alone and not is_recomputing():
                meeting.wait(10)
            return nn.functional.dropout(x + 0, 0.0)

    pipe = Pipe(nn.Sequential(Meets(0), Meets(2)), 3, checkpoint)
    x = torch.arange(3.0).view(3, 1).requires_grad_()
    assert pipe(x).local_value().tolist() == [[0], [1], [2]]


def test_an_error_names_the_partition_and_the_micro_batch() -> None:
    pipe = Pipe(nn.Sequential(nn.Identity(), nn.Linear(3, 1)), 2)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        pipe(torch.ones(4, 2))
    assert caught.value.__notes__ == ["Pipe: raised by partition 1, in micro-batch 0."]
