"""Compiled training steps on our groups: torch's DDP and ours, FSDP2 and tensor parallelism, beside eager ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchdist_ref as dist
from tests.backends.test_modes_and_compilers import IDS, OURS, Program, made
from torchdist_ref.testing import fill, run

STEPS = 3
TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.timeout(600),
]


def block() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def train(model: Any, step: Any, rank: int) -> list[Tensor]:
    """Return the losses of some steps and the last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = step(fill(rank + number, (4, 8), torch.float32)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    return losses + [getattr(each, "full_tensor", lambda each=each: each)() for each in gradients]


def ddp(library: Any, world: int) -> Any:
    return DistributedDataParallel(block())


def ddp_of_ours(library: Any, world: int) -> Any:
    return dist.DistributedDataParallel(block()) if library is dist else DistributedDataParallel(block())


def fsdp(library: Any, world: int) -> Any:
    model = block()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=library.init_device_mesh("cpu", (world,)))
    return fully_shard(model, mesh=library.init_device_mesh("cpu", (world,)))


def tensor_parallel(library: Any, world: int) -> Any:
    mesh = library.init_device_mesh("cpu", (world,))
    return parallelize_module(block(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def steps_of(make: Any, compiler: str | None) -> Program:
    """Return a program that trains a model, compiled if a compiler is named."""

    def program(library: Any, rank: int, world: int) -> list[Tensor]:
        # All ranks of a tensor-parallel model have the same data.
        data = 0 if make is tensor_parallel else rank
        model = make(library, world)
        return train(model, torch.compile(model, backend=compiler) if compiler else model, data)

    return program


LONG = [
    pytest.param(make, "inductor", world, entry, marks=pytest.mark.long, id=f"{make.__name__}-{world}-{name}")
    for make in (ddp, ddp_of_ours, fsdp, tensor_parallel)
    for world in (2, 4)
    for entry, name in zip(OURS, IDS, strict=True)
]


# Over a second: three groups, and the compiler is slow to start.
@pytest.mark.parametrize(("make", "compiler", "world", "entry"), [(tensor_parallel, "aot_eager", 2, OURS[0]), *LONG])
def test_compiled_steps_give_the_values_of_eager_ones(
    make: Any, compiler: str, world: int, entry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CI has no Inductor, which needs a C++ compiler and minutes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    results = [
        run(
            made,
            world,
            world,
            str(tmp_path / name),
            *library,
            steps_of(make, how),
            init=False,
            ranks="processes",
            timeout=180,
        )
        for name, library, how in (
            ("compiled", entry, compiler),
            ("eager", entry, None),
            ("gloo", ("torch", "gloo"), None),
        )
    ]
    for compiled, eager, gloo in zip(*results, strict=True):
        assert len(compiled) == STEPS + 4
        for got, plain, wanted in zip(compiled, eager, gloo, strict=True):
            torch.testing.assert_close(got, plain, rtol=TOLERANCE, atol=TOLERANCE)
            torch.testing.assert_close(plain, wanted, rtol=TOLERANCE, atol=TOLERANCE)
