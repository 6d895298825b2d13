"""Weights are equal bit for bit on 1, 2, 4 and 8 ranks, and a difference is named by step and tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchdist_ref as dist
from torchdist_ref.errors import ArgumentError, MismatchError
from torchdist_ref.optim import ZeroRedundancyOptimizer
from torchdist_ref.reproducible import Fingerprints, MicroBatches, fingerprint, first_difference, hazards
from torchdist_ref.testing import run

MICRO_BATCHES = 8


class Block(nn.Module):
    """Residual block with group normalization, as batch normalization would depend on the other samples."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(2, outputs), nn.GroupNorm(2, outputs)])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(inner)) + self.shortcut(x)).relu()


class SmallGpt(nn.Module):
    """Two layers of causal attention over 7 letters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(11, 16), nn.Parameter(torch.randn(7, 16) / 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(7)
        return self.head(self.layers(self.embedding(x) + self.positions, mask=mask, is_causal=True))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 5))


def resnet() -> nn.Module:
    blocks = [Block(3, 4, 1), Block(4, 6, 2), Block(6, 8, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def samples(kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if kind == "gpt":
        letters = torch.randint(0, 11, (3, 8), generator=generator)
        return letters[:, :-1], letters[:, 1:].reshape(-1)
    shape = (3, 13) if kind == "mlp" else (3, 3, 8, 8)
    return torch.randn(shape, generator=generator), torch.randint(0, 5, (3,), generator=generator)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "resnet": resnet, "gpt": SmallGpt}


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "zero":
        return ZeroRedundancyOptimizer(list(parameters), torch.optim.AdamW, lr=1e-2)
    return torch.optim.SGD(parameters, 0.05, momentum=0.9) if name == "sgd" else torch.optim.AdamW(parameters, 1e-2)


def train(rank: int, start: nn.Module, kind: str, optimizer_name: str, ddp: str, steps: int) -> dict[str, str]:
    wrapper = dist.DistributedDataParallel if ddp == "ours" else nn.parallel.DistributedDataParallel
    model = wrapper(copy.deepcopy(start), bucket_cap_mb=0.001 * (1 + dist.get_world_size()))
    optimizer, batches = optimizer_of(optimizer_name, model.parameters()), MicroBatches(MICRO_BATCHES, model)
    record = Fingerprints()
    for step in range(steps):
        for number in batches.step():
            inputs, targets = samples(kind, torch.Generator().manual_seed(1000 * step + number))
            outputs = model(inputs)
            nn.functional.cross_entropy(outputs.reshape(len(targets), -1), targets).backward()
        optimizer.step()
        record.add(model)
    return fingerprint(model.module)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(size: int, kind: str, *how: Any, **where: Any) -> dict[str, str]:
    # Ranks that are threads share torch's generator, so the model is made before.
    torch.manual_seed(5)
    return run(train, size, MODELS[kind](), kind, *how, **where)[0]


@pytest.mark.parametrize(("kind", "optimizer"), [("mlp", "sgd"), ("resnet", "adamw"), ("gpt", "zero")])
def test_equal_weights_on_1_2_and_8_ranks(kind: str, optimizer: str) -> None:
    one, *others = (weights(size, kind, optimizer, "ours", 4) for size in (1, 2, 8))
    assert all(other == one for other in others)


def test_equal_weights_under_torchs_ddp() -> None:
    one, *others = (weights(size, "mlp", "adamw", "torchs", 4, ranks="processes") for size in (1, 2, 4))
    assert all(other == one for other in others)
    assert one == weights(2, "mlp", "adamw", "ours", 4)


@pytest.mark.long
@pytest.mark.parametrize("ddp", ["ours", "torchs"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "zero"])
@pytest.mark.parametrize("kind", MODELS)
def test_equal_weights_after_50_steps(kind: str, optimizer: str, ddp: str) -> None:
    one, *others = (weights(size, kind, optimizer, ddp, 50, ranks="processes", timeout=600) for size in (1, 2, 4, 8))
    assert all(other == one for other in others)


def test_without_micro_batches_the_number_of_ranks_changes_bits() -> None:
    """The comparison can fail: the plain average of the same samples differs."""

    start = mlp()

    def plain(rank: int) -> dict[str, str]:
        model = dist.DistributedDataParallel(copy.deepcopy(start))
        for number in range(rank * 8 // dist.get_world_size(), (rank + 1) * 8 // dist.get_world_size()):
            inputs, targets = samples("mlp", torch.Generator().manual_seed(number))
            last = number == (rank + 1) * 8 // dist.get_world_size() - 1
            if last:
                nn.functional.cross_entropy(model(inputs), targets).backward()
            else:
                with model.no_sync():
                    nn.functional.cross_entropy(model(inputs), targets).backward()
        return fingerprint({name: p.grad * dist.get_world_size() / 8 for name, p in model.named_parameters()})

    assert run(plain, 1)[0] != run(plain, 2)[0]


@pytest.mark.parametrize(("count", "size"), [(0, 2), (3, 2), (6, 2), (12, 4), (1, 2)])
def test_micro_batches_that_do_not_divide_are_named(count: int, size: int) -> None:
    def program(rank: int) -> str:
        with pytest.raises(ArgumentError) as caught:
            MicroBatches(count, dist.DistributedDataParallel(mlp()))
        return str(caught.value)

    expected = f"MicroBatches: argument 'count' must be {size} (the number of ranks) times a power of two, got {count}"
    assert expected in run(program, size)[0]


def test_16_bit_parameters_and_missing_gradients_are_named() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return self.used(x) + self.unused(x) if both else self.used(x)

    def program(rank: int) -> list[str]:
        mixed = mlp()
        mixed[2].to(torch.bfloat16)
        with pytest.raises(ArgumentError) as narrow:
            MicroBatches(4, dist.DistributedDataParallel(mixed))
        model = dist.DistributedDataParallel(Sometimes(), find_unused_parameters=True)
        batches = MicroBatches(4, model)
        with pytest.raises(ArgumentError) as missing:
            for number in batches.step():
                model(torch.ones(2, 3), both=number % 2 == 1).sum().backward()
        # Two ranks run two each, so that the one without is also each rank's last.
        with pytest.raises(ArgumentError) as last:
            for number in batches.step():
                model(torch.ones(2, 3), both=number % 2 == 0).sum().backward()
        return [str(narrow.value), str(missing.value), str(last.value)]

    narrow, missing, last = run(program, 2)[0]
    assert "float32 or float64 parameters with dense gradients, and 'module.2.weight' is torch.bfloat16" in narrow
    assert "and 'module.unused.weight' got none in micro-batch 0" in missing
    assert "and 'module.unused.weight' got none in micro-batch 1" in last


@pytest.mark.parametrize("share", [1, 2])
def test_sparse_gradients_are_named(share: int) -> None:
    """In a rank's only micro-batch, which DDP communicates, and in one before."""

    def program(rank: int) -> str:
        model = dist.DistributedDataParallel(nn.Sequential(nn.Embedding(5, 2, sparse=True)))
        # DDP names the hook too, in an error of its own.
        with pytest.raises((ArgumentError, dist.DistError)) as caught:
            for _ in MicroBatches(2 * share, model).step():
                model(torch.tensor([1, 3])).sum().backward()
        return str(caught.value)

    assert "the gradient of 'module.0.weight' is sparse_coo" in run(program, 2)[0]


def test_parameters_of_two_exact_dtypes_have_equal_weights() -> None:

    class ToDouble(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh().double()

    start = nn.Sequential(nn.Linear(13, 7), ToDouble(), nn.Linear(7, 5).double())

    def program(rank: int) -> dict[str, str]:
        model = dist.DistributedDataParallel(copy.deepcopy(start))
        for number in MicroBatches(4, model).step():
            inputs, targets = samples("mlp", torch.Generator().manual_seed(number))
            nn.functional.cross_entropy(model(inputs), targets).backward()
        return fingerprint(model, gradients=True)

    one, *others = (run(program, size)[0] for size in (1, 2, 4))
    assert all(other == one for other in others)


def test_ranks_that_differ_are_named_with_step_and_tensor(tmp_path: Path) -> None:
    start = mlp()

    def program(rank: int) -> str:
        model, record = copy.deepcopy(start), Fingerprints(tmp_path / "run.jsonl")
        for step in range(5):
            if (step, rank) == (3, 1):
                model[2].bias.data[4] += 1
            try:
                record.add(model)
            except MismatchError as error:
                return str(error)
        return ""

    text = "Fingerprints: ranks differ at step 3, first in '2.bias': ranks 0, 2 have one value and rank 1 another."
    assert [found.partition("\n")[0] for found in run(program, 3)] == [text] * 3
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert len(lines) == 4 and len(set(lines)) == 1


def test_two_runs_are_compared_by_their_records(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two", "three")]
    for number, path in enumerate(paths):
        record, values = Fingerprints(path), {"a": torch.zeros(3), "b": torch.zeros(2)}
        for step in range(6 if number < 2 else 4):
            values["b"][1] = -0.0 if number == 1 and step >= 4 else 0.0
            record.add(values)
    found = first_difference(paths[0], paths[1])
    assert found is not None and (found.step, found.name) == (4, "b") and None not in found.found
    shorter = first_difference(paths[0], paths[2])
    assert shorter is not None and (shorter.step, shorter.name, shorter.found[1]) == (4, "a", None)
    assert first_difference(paths[0], paths[0]) is None
    paths[2].write_text("no record")
    with pytest.raises(ArgumentError, match="must be a file that Fingerprints wrote"):
        first_difference(paths[0], paths[2])


def test_zeros_of_other_shapes_and_dtypes_differ() -> None:
    zeros = [torch.zeros(6), torch.zeros(2, 3), torch.zeros(6, dtype=torch.int32), torch.zeros(6) * -1]
    assert len({fingerprint({"weight": tensor})["weight"] for tensor in zeros}) == 4


def test_gradients_come_first() -> None:
    model = mlp()
    model(torch.ones(1, 13)).sum().backward()
    names = list(fingerprint(model, gradients=True))
    assert names[:2] == ["0.weight.grad", "0.bias.grad"] and "0.weight" in names[4:]


def test_hazards_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.1), nn.Dropout(0.0))
    assert [text.partition(":")[0] for text in hazards(model)] == ["'1' is a BatchNorm1d", "'2' is a Dropout"]
    assert hazards(model.eval()) == []
