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
from torchdist_ref.pipeline.sync import NoChunk, Pipe, is_checkpointing, is_recomputing
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
    assert len(Pipe(layers()).partitions) == 1
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


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Pipe(nn.Linear(1, 1)), TypeError, "'module' must be an nn.Sequential"),
        (lambda: Pipe(layers(), chunks=0), ValueError, "'chunks' must be"),
        (lambda: Pipe(layers(), chunks="2"), ValueError, "'chunks' must be"),
        (lambda: Pipe(layers(), checkpoint="often"), ValueError, "one of always, except_last, never, got 'often'"),
        (lambda: Pipe(nn.Sequential(*[nn.Linear(1, 1)] * 2)), ValueError, "duplicate children"),
        (
            lambda: Pipe(nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")))),
            ValueError,
            "child '0' on .'cpu', 'meta'.",
        ),
        (lambda: Pipe(layers()).cuda(), TypeError, "have their devices"),
        (lambda: Pipe(layers()).cpu(), TypeError, "have their devices"),
        (lambda: Pipe(layers()).to("cpu"), TypeError, "have their devices"),
        (lambda: Pipe(layers()).to(device="cpu"), TypeError, "have their devices"),
        (lambda: Pipe(layers())("text"), TypeError, "at least one input must be a tensor"),
        (lambda: Pipe(layers(), 4)(torch.ones(4, 6), torch.ones(2, 6)), ValueError, r"micro-batches, .2, 4."),
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


def test_devices_split_a_model() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, device="meta"), nn.ReLU())
    pipe = Pipe(copy.copy(model))
    assert [len(list(part)) for part in pipe.partitions] == [2, 2]
    assert pipe.devices == [torch.device("cpu"), torch.device("meta")]
