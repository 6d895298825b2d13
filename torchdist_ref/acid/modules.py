"""Checks of torch's own modules on the backend: DDP, FSDP2, DTensor, device meshes, optimizers, checkpoints."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from torchdist_ref.acid.checks import Ranks, check

SLOW_IMPORTS = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
)
"""What these checks import, once in the command instead of in each rank of each check."""
TORCHS = "documentation of the module in torch"


def model(ranks: Ranks) -> nn.Module:
    """Return the model that each rank begins with."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to(ranks.device)


def loss(module: Any, ranks: Ranks, rank: int) -> Tensor:
    """Return the loss of the samples of a rank."""
    value: Tensor = module(ranks.data(rank, (8, 6)) / 8).square().mean()
    return value


def expected(ranks: Ranks) -> list[Tensor]:
    """Return the gradients that one process has from the samples of all ranks."""
    module = model(ranks)
    sum(
        (loss(module, ranks, rank) for rank in ranks.everyone),
        torch.zeros((), dtype=torch.float32, device=ranks.device),
    ).backward()
    return [parameter.grad / ranks.world for parameter in module.parameters() if parameter.grad is not None]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Raise unless tensors agree but for rounding."""
    assert len(found) == len(wanted), (len(found), len(wanted))
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.allclose(one, other, atol=1e-5), f"gradient {number} is off by {(one - other).abs().max():.2g}"


@check("DistributedDataParallel", "Gradients are those of one process with all samples.", TORCHS)
def _(ranks: Ranks) -> None:
    module = nn.parallel.DistributedDataParallel(model(ranks))
    loss(module, ranks, ranks.rank).backward()
    close([parameter.grad for parameter in module.parameters() if parameter.grad is not None], expected(ranks))


@check("DDP with a communication hook", "The hook of bfloat16 gives gradients within 1 %.", TORCHS)
def _(ranks: Ranks) -> None:
    # torch's DDP compares the annotation with its own class, so there is none.
    def halves(state, bucket):  # type: ignore[no-untyped-def]
        small = bucket.buffer().to(torch.bfloat16) / ranks.world
        work = ranks.dist.all_reduce(small, async_op=True)
        return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))

    module = nn.parallel.DistributedDataParallel(model(ranks))
    module.register_comm_hook(None, halves)
    loss(module, ranks, ranks.rank).backward()
    found = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    wanted = torch.cat([each.flatten() for each in expected(ranks)])
    assert (found - wanted).norm() < 0.01 * wanted.norm(), float((found - wanted).norm() / wanted.norm())


@check("DDP with unequal inputs: join", "Ranks with more batches go on until the last is done.", TORCHS)
def _(ranks: Ranks) -> None:
    module = nn.parallel.DistributedDataParallel(model(ranks))
    with module.join():
        for _ in range(ranks.rank + 1):
            loss(module, ranks, ranks.rank).backward()


@check("FSDP2: fully_shard", "Sharded gradients are those of one process.", TORCHS)
def _(ranks: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(model(ranks), mesh=init_device_mesh(ranks.device, (ranks.world,)))
    loss(module, ranks, ranks.rank).backward()
    found = [p.grad.full_tensor() for p in module.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    close(found, expected(ranks))


@check("DTensor", "A product of sharded matrices is that of the whole ones.", TORCHS)
def _(ranks: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(ranks.device, (ranks.world,))
    left, right = ranks.data(0, (6, 12)), ranks.data(1, (12, 5))
    columns, rows = distribute_tensor(left, mesh, [Shard(1)]), distribute_tensor(right, mesh, [Shard(0)])
    product: Any = columns @ rows
    found = product.redistribute(mesh, [Replicate()]).to_local()
    assert torch.allclose(found, left @ right), (found - left @ right).abs().max()


@check("ZeroRedundancyOptimizer", "Weights after a step are those of a plain optimizer.", TORCHS)
def _(ranks: Ranks) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module, plain = nn.parallel.DistributedDataParallel(model(ranks)), model(ranks)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    loss(module, ranks, ranks.rank).backward()
    optimizer.step()
    gradients = expected(ranks)
    with torch.no_grad():
        for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
            parameter.sub_(0.1 * gradient)
    close([*module.parameters()], [*plain.parameters()])


@check("a distributed checkpoint", "What was saved by all ranks is loaded by all ranks.", TORCHS)
def _(ranks: Ranks) -> None:
    checkpoint: Any = import_module("torch.distributed.checkpoint")
    saved = {name: value.clone() + 1 for name, value in model(ranks).state_dict().items()}
    path = os.path.join(ranks.folder, "checkpoint")
    checkpoint.save(saved, checkpoint_id=path)
    loaded = {name: torch.zeros_like(value) for name, value in saved.items()}
    checkpoint.load(loaded, checkpoint_id=path)
    close([*loaded.values()], [*saved.values()])


@check("functional collectives", "The result of all_reduce is there after wait_tensor.", TORCHS)
def _(ranks: Ranks) -> None:
    from torch.distributed import _functional_collectives as functional

    found = functional.all_reduce(ranks.mine(), "sum", [*ranks.everyone])
    wanted = torch.stack([ranks.data(rank) for rank in ranks.everyone]).sum(0)
    assert torch.equal(functional.wait_tensor(found), wanted)
