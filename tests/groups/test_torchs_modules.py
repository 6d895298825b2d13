"""torch's own modules on our groups and meshes: the same numbers as on torch's Gloo, in worlds of 2 to 4 ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as theirs
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.distributed.collective_utils as collective_utils
import torch.distributed.device_mesh as their_mesh
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchdist_ref as dist
from tests.covering import covering
from tests.torch_versions import needs_torch
from torchdist_ref.testing import fill, run

pytestmark = pytest.mark.usefixtures("torchs_modules")
# A program gets its rank, the library that makes groups and meshes, and a folder; it returns tensors.
Program = Callable[[int, Any, str], list[Tensor]]


def model(width: int = 8) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def stepped(net: nn.Module, rank: int, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        (net(fill(rank + 10 * step, (4, 5)) / 9) ** 2).mean().backward()
        optimizer.step()


def sampled(rank: int, library: Any, path: str) -> list[Tensor]:
    """Train torch's DDP on batches of torch's sampler, shuffled, with a remainder."""
    data = TensorDataset(fill(3, (22, 5)) / 9, fill(4, (22, 3)) / 9)
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=5)
    net = model()
    ddp = nn.parallel.DistributedDataParallel(net, process_group=library.group.WORLD)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows, wanted in DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(rows), wanted).backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()]


def fsdp1(rank: int, library: Any, path: str) -> list[Tensor]:
    group = library.new_group(list(range(theirs.get_world_size())))
    net = FullyShardedDataParallel(model(), process_group=group, device_id=torch.device("cpu"), use_orig_params=True)
    stepped(net, rank)
    with FullyShardedDataParallel.summon_full_params(net):
        return [p.detach().clone() for p in net.parameters()]


def fsdp2(rank: int, library: Any, path: str) -> list[Tensor]:
    world = theirs.get_world_size()
    shape = (2, 2) if world == 4 else (1, world)
    mesh = library.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    stepped(fully_shard(net, mesh=mesh), rank)
    return [p.full_tensor() for p in net.parameters()]  # type: ignore[attr-defined]


def tensor_parallel(rank: int, library: Any, path: str) -> list[Tensor]:
    mesh = library.init_device_mesh("cpu", (theirs.get_world_size(),))
    net = parallelize_module(model(12), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # All ranks see the same data.
    stepped(net, 0)
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]


def dtensors(rank: int, library: Any, path: str) -> list[Tensor]:
    world = theirs.get_world_size()
    mesh = library.init_device_mesh("cpu", (world,))
    rows = distribute_tensor(fill(2, (2 * world + 1, 6)), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = rows @ distribute_tensor(fill(5, (6, 3)), mesh, [Replicate()])
    return [rows.to_local(), columns.to_local(), product.full_tensor(), (rows.sum(0) * 2).full_tensor()]


def functions(rank: int, library: Any, path: str) -> list[Tensor]:
    group, world = library.new_group(list(range(theirs.get_world_size()))), theirs.get_world_size()
    mine = fill(rank, (2 * world, 3))
    found = [functional.all_reduce(mine, op, group) for op in ("sum", "max")]
    found.append(functional.all_gather_tensor(mine, 0, group))
    found.append(functional.reduce_scatter_tensor(mine, "sum", 0, group))
    found.append(functional.all_to_all_single(mine, None, None, group))
    found.append(functional.broadcast(mine, world - 1, group))
    found += functional.all_reduce_coalesced([mine, mine + 1], "sum", group)
    return [each + 0 for each in found]


def checkpoints(rank: int, library: Any, path: str) -> list[Tensor]:
    """Save in both ways through a group, and load what was sharded by rows sharded by columns."""
    world = theirs.get_world_size()
    mesh, group = library.init_device_mesh("cpu", (world,)), library.new_group(list(range(world)))
    found = []
    for number in range(2):
        where = os.path.join(path, str(number))
        state = {"table": distribute_tensor(fill(number, (2 * world + 1, 5)), mesh, [Shard(0)]), "own": fill(7, (3,))}
        if number:
            checkpoint.async_save(state, checkpoint_id=where, process_group=group).result()  # type: ignore[union-attr]
        else:
            checkpoint.save(state, checkpoint_id=where, process_group=group)
        theirs.barrier()
        again = {
            "table": distribute_tensor(torch.zeros(2 * world + 1, 5), mesh, [Shard(1)]),
            "own": torch.zeros(3),
        }
        checkpoint.load(again, checkpoint_id=where, process_group=group)
        found += [again["table"].full_tensor(), again["own"]]  # type: ignore[attr-defined]
        assert len([name for name in os.listdir(where) if name.endswith(".distcp")]) == world
    return found


def objects(rank: int, library: Any, path: str) -> list[Tensor]:
    """Exchange objects by torch's functions for them."""
    group, world = library.new_group(list(range(theirs.get_world_size()))), theirs.get_world_size()
    first = collective_utils.broadcast(lambda: {"rank": rank, "of": world}, rank=world - 1, pg=group)
    everyone = collective_utils.all_gather(lambda: rank**2 + 1, pg=group)
    parts: list[Any] = [None]
    theirs.scatter_object_list(parts, [each**3 for each in range(world)] if rank == 0 else None, 0, group=group)
    return [torch.tensor([first["rank"], first["of"], *everyone, *parts])]


SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


def pipelined(rank: int, library: Any, path: str) -> list[Tensor]:
    """Run each of torch's schedules: the gradients of this rank's stages."""
    world, found = theirs.get_world_size(), []
    group = library.new_group(list(range(world)))
    rows, wanted = fill(1, (4 * world, 5)) / 9, fill(2, (4 * world, 5)) / 9
    for name, per_rank in SCHEDULES.items():
        kind = pipelining.schedules.get_schedule_class(name)
        count = per_rank * world
        torch.manual_seed(11)
        layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(count)]
        mine = [rank, count - 1 - rank] if name in ("ZBVZeroBubble", "DualPipeV") else range(rank, count, world)
        stages = [pipelining.PipelineStage(layers[i], i, count, torch.device("cpu"), group=group) for i in mine]
        schedule = kind(stages if per_rank == 2 else stages[0], 2 * world, loss_fn=nn.MSELoss())  # type: ignore[arg-type, call-arg]
        first, last = 0 in mine, count - 1 in mine
        schedule.step(*([rows] if first else []), **({"target": wanted} if last else {}))
        found += [p.grad for i in mine for p in layers[i].parameters() if p.grad is not None]
    return found


def compiled(rank: int, library: Any, path: str) -> list[Tensor]:
    """Compile functional collectives over a group and along a mesh."""
    world = theirs.get_world_size()
    group, mesh = library.new_group(list(range(world))), library.init_device_mesh("cpu", (world,))

    def program(tensor: Tensor) -> Tensor:
        gathered = functional.all_gather_tensor(tensor.sin(), 0, group)
        return functional.reduce_scatter_tensor(gathered * 2, "sum", 0, (mesh, 0)) + 1

    return [torch.compile(program, backend="aot_eager", fullgraph=True)(fill(rank, (2, 3)))]


PROGRAMS: list[Any] = [
    sampled,
    fsdp1,
    fsdp2,
    tensor_parallel,
    dtensors,
    functions,
    compiled,
    checkpoints,
    objects,
    # torch 2.11's schedules raise in batch_isend_irecv, on torch's own Gloo.
    pytest.param(pipelined, marks=needs_torch("2.13", "torch.distributed.pipelining on Gloo")),
]


PARTS: dict[Any, list[str]] = {
    sampled: ["nn.parallel", "utils.data"],
    fsdp1: ["fsdp"],
    fsdp2: ["device_mesh", "fsdp"],
    tensor_parallel: ["device_mesh", "tensor"],
    dtensors: ["device_mesh", "tensor"],
    functions: ["_functional_collectives"],
    compiled: ["_functional_collectives"],
    checkpoints: ["checkpoint"],
    objects: ["collective_utils", "distributed_c10d"],
    pipelined: ["pipelining"],
}


def on_gloo(rank: int, program: Program, world: int, path: str) -> list[Tensor]:
    """Run a program on torch's own Gloo, without our library."""
    store = theirs.FileStore(os.path.join(path, "store"), world)
    theirs.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        return program(rank, Torch, os.path.join(path, "theirs"))
    finally:
        theirs.barrier()
        theirs.destroy_process_group()


class Torch:
    """The functions of torch that make groups and meshes."""

    new_group = staticmethod(theirs.new_group)
    init_device_mesh = staticmethod(their_mesh.init_device_mesh)
    group = theirs.group


def on_ours(rank: int, program: Program, path: str) -> list[Tensor]:
    found = program(rank, dist, path)
    theirs.barrier()
    return found


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Program, int], list[list[Tensor]]]:
    """Return a function that runs a program once on torch's Gloo."""
    known: dict[tuple[Program, int], list[list[Tensor]]] = {}

    def find(program: Program, world: int) -> list[list[Tensor]]:
        if (program, world) not in known:
            path = str(tmp_path_factory.mktemp("gloo"))
            known[program, world] = run(
                on_gloo, world, program, world, path, ranks="processes", init=False, timeout=90.0
            )
        return known[program, world]

    return find


CASES = covering([("ref", 4), ("gloo", 2), ("ref", 3), ("gloo", 4), ("ref", 2)], PROGRAMS)


@pytest.mark.parametrize(("backend", "world", "program"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_torchs_modules_find_the_numbers_of_torchs_gloo(
    program: Program, backend: str, world: int, right: Any, tmp_path: Any, proof: Any
) -> None:
    """CI has each program in one world, and each world with two programs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = right(program, world)
        found = run(on_ours, world, program, str(tmp_path), backend=backend, ranks="processes", timeout=90.0)
    for mine, theirs_ in zip(found, wanted, strict=True):
        assert len(mine) == len(theirs_) > 0
        for one, other in zip(mine, theirs_, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    proof(PARTS[program], [backend], world, "torch's Gloo")
