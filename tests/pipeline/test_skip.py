"""Skip connections within and across partitions, and batch normalization over micro-batches."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchdist_ref.pipeline.sync import Pipe
from torchdist_ref.pipeline.sync.batchnorm import DeferredBatchNorm
from torchdist_ref.pipeline.sync.skip import Namespace, pop, skippable, stash, verify_skippables
from torchdist_ref.pipeline.sync.utils import partition_model

import torchdist_ref as dist
from torchdist_ref.testing import fill


@skippable(stash=["skip"])
class Keep(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return 2 * x


@skippable(pop=["skip"])
class Add(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x if skip is None else x + skip


@skippable(stash=["skip"])
class KeepNone(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", None)
        return x


def crossed() -> nn.Sequential:
    """Two connections that cross each other, over four partitions."""
    first, second = Namespace(), Namespace()
    return nn.Sequential(
        Keep().isolate(first),
        nn.Linear(3, 3),
        Keep().isolate(second),
        Add().isolate(first),
        nn.Tanh(),
        Add().isolate(second, only=["skip"]),
    ).double()


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("balance", [[6], [1, 2, 1, 2], [1, 1, 1, 1, 1, 1], [3, 3]])
def test_skip_connections_give_the_values_of_the_model(balance: list[int], checkpoint: str) -> None:
    model = crossed()
    other = copy.deepcopy(model)
    pipe = Pipe(partition_model(other, balance, ["cpu"] * len(balance)), chunks=3, checkpoint=checkpoint)
    inputs = [(fill(0, (7, 3), torch.float64) / 8).requires_grad_() for _ in range(2)]
    results = model(inputs[0]), pipe(inputs[1]).local_value()
    for result in results:
        (result**2).sum().backward()
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-12, atol=1e-12)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_none_can_be_stashed(checkpoint: str) -> None:
    model = partition_model(nn.Sequential(KeepNone(), Add()), [1, 1], ["cpu", "cpu"])
    assert torch.equal(Pipe(model, 2, checkpoint)(torch.ones(2, 1)).local_value(), torch.ones(2, 1))


def test_mismatched_skip_connections_are_named() -> None:
    with pytest.raises(TypeError, match=r"'1' stashes 'skip', as one before it.*'1' stashes 'skip', which no module"):
        verify_skippables(nn.Sequential(Keep(), Keep()))
    with pytest.raises(TypeError, match="'0' pops 'skip', which is not stashed; module '1' stashes 'skip', which no"):
        Pipe(nn.Sequential(Add(), Keep()))
    with pytest.raises(TypeError, match="'2' pops 'skip', which is not stashed"):
        verify_skippables(nn.Sequential(Keep(), Add(), Add()))
    verify_skippables(nn.Sequential(Keep(), nn.ReLU(), Add()))


@skippable(stash=["a"], pop=["b"])
class Wrong(nn.Module):
    def __init__(self, *steps: Any) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> Any:
        for number in range(len(self.steps)):
            yield self.steps[number]
        return x


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((stash("a", None),), "Wrong is declared to pop .'b'., but its forward did not"),
        ((pop("b"),), "Wrong is declared to stash .'a'., but its forward did not"),
        ((stash("c", None),), "Wrong is not declared to stash 'c'"),
        ((stash("a", None), stash("a", None)), "Wrong is not declared to stash 'a' .once."),
        ((pop("a"),), "Wrong is not declared to pop 'a'"),
        ((3,), "Wrong yielded 3; yield stash"),
    ],
)
def test_undeclared_operations_are_errors(steps: tuple[Any, ...], message: str) -> None:
    @skippable(stash=["b"])
    class Before(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("b", x)
            return x

    with pytest.raises((ValueError, TypeError), match=message):
        nn.Sequential(Before(), Wrong(*steps))(torch.ones(1))


def test_namespaces_can_be_sorted_and_keep_their_identity() -> None:
    spaces = [Namespace() for _ in range(5)]
    ordered = sorted(spaces)
    assert all(first < second for first, second in itertools.pairwise(ordered)) and set(ordered) == set(spaces)
    assert copy.deepcopy(spaces[0]) == spaces[0] and hash(copy.copy(spaces[0])) == hash(spaces[0])
    assert spaces[0] != spaces[1] and spaces[0] is not None


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_running_statistics_are_those_of_the_batch(checkpoint: str, momentum: float | None) -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum)).double()
    pipe = Pipe(copy.deepcopy(plain), chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    for step in range(3):
        batch = fill(step, (8, 3, 2, 5), torch.float64).requires_grad_()
        plain(batch)
        pipe(batch).local_value().sum().backward()
    count = 8 * 2 * 5
    norm = pipe[0]
    assert isinstance(norm, DeferredBatchNorm) and int(norm.num_batches_tracked) == 3
    torch.testing.assert_close(norm.running_mean, plain[0].running_mean)
    # Variances are not corrected for the number of values; what is left of the first 1 is the same in both.
    left = 0.0 if momentum is None else (1 - momentum) ** 3
    torch.testing.assert_close(norm.running_var - left, (plain[0].running_var - left) * (count - 1) / count)
    torch.testing.assert_close(pipe.eval()(batch).local_value(), norm(batch))


def test_micro_batches_are_normalized_by_their_own_statistics() -> None:
    pipe = Pipe(nn.Sequential(nn.BatchNorm1d(2, affine=False)), chunks=2, deferred_batch_norm=True)
    batch = fill(0, (6, 2))
    alone = [nn.functional.batch_norm(part, None, None, training=True) for part in batch.chunk(2)]
    torch.testing.assert_close(pipe(batch).local_value(), torch.cat(alone))


def test_conversion_keeps_parameters_and_other_layers() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    )
    weight = model[0].weight
    made = DeferredBatchNorm.convert_deferred_batch_norm(model, 3)
    assert isinstance(made[0], DeferredBatchNorm) and made[0].weight is weight and made[0].chunks == 3
    assert not isinstance(made[1][1], DeferredBatchNorm)
    assert DeferredBatchNorm.convert_deferred_batch_norm(made[0], 3) is made[0]
    with pytest.raises(ValueError, match="'input' must be a tensor of at least 2 dimensions"):
        made[0](torch.ones(2))


def test_a_tensor_that_was_not_stashed_cannot_be_popped() -> None:
    with pytest.raises(KeyError, match="Add pops 'skip', which no module before it has stashed") as caught:
        Add()(torch.ones(1))
    assert isinstance(caught.value, dist.ArgumentError)


def test_names_are_lists_of_known_names() -> None:
    with pytest.raises(TypeError, match=r"stash must be a list of names, got 'abc'; pass \['abc'\]"):
        skippable(stash="abc")
    with pytest.raises(ValueError, match=r"Keep.isolate: it neither stashes nor pops \['skap'\], but \['skip'\]"):
        Keep().isolate(Namespace(), only=["skap"])
