"""One default group, known to both libraries: every part of torch finds ours, and loses it at destroy."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as theirs
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DistributedSampler

import torchdist_ref as dist
import torchdist_ref.nn.functional as nn_functional
from tests.covering import covering
from torchdist_ref.testing import fill, run

# CI has each backend and each size: three ranks on `ref`, two on Gloo.
WORLDS = pytest.mark.parametrize(("backend", "world"), covering(["ref", "gloo"], [3, 2]))


def forked(program: Callable[..., Any], world: int, backend: str, *args: Any) -> list[Any]:
    return run(program, world, *args, backend=backend, ranks="processes", timeout=90.0)


def total_of(world: int, shape: tuple[int, ...]) -> Tensor:
    return torch.stack([fill(rank, shape) for rank in range(world)]).sum(0)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss(net: nn.Module, rank: int, step: int = 0) -> Tensor:
    return (net(fill(rank + 10 * step, (4, 5)) / 9) ** 2).mean()


def trained_alone(world: int, steps: int) -> list[Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss(net, rank, step) for rank in range(world)]).mean().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def agree(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-6)


def facts(rank: int, world: int, backend: str) -> None:
    assert theirs.is_initialized() and theirs.get_rank() == rank and theirs.get_world_size() == world
    assert theirs.get_backend() == backend and theirs.get_process_group_ranks(None) == list(range(world))
    everyone: Any = theirs.group.WORLD
    assert everyone == dist.group.WORLD and hash(everyone) == hash(dist.group.WORLD)
    sampler = DistributedSampler(range(12), shuffle=False)  # type: ignore[var-annotated, arg-type]
    assert list(sampler) == list(range(rank, 12, world))
    for library, group in ((theirs, None), (theirs, dist.group.WORLD), (dist, everyone), (dist, None)):
        tensor = fill(rank, (5,))
        library.all_reduce(tensor, group=group)  # type: ignore[attr-defined]
        assert torch.equal(tensor, total_of(world, (5,)))


@WORLDS
def test_torchs_default_group_is_ours(backend: str, world: int, proof: Any) -> None:
    forked(facts, world, backend, world, backend)
    proof(["distributed_c10d", "utils.data"], [backend], world, "formulas")


def torchs_trainers(rank: int, kind: str) -> list[Tensor]:
    net = model()
    ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.0001)
    if kind == "zero":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer: Any = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss(ddp, rank, step).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("kind", ["ddp", "zero"])
@WORLDS
def test_torchs_ddp_and_zero_train_as_one_process_does(backend: str, world: int, kind: str, proof: Any) -> None:
    wanted = trained_alone(world, 3)
    for found in forked(torchs_trainers, world, backend, kind):
        agree(found, wanted)
    proof(["nn.parallel", *(["optim"] if kind == "zero" else [])], [backend], world, "one process")


def sharded(rank: int, path: str) -> list[Tensor]:
    net = fully_shard(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        loss(net, rank, step).backward()
        optimizer.step()
    weights = [p.full_tensor() for p in net.parameters()]  # type: ignore[attr-defined]
    for number, save in enumerate((checkpoint.save, lambda *a, **k: checkpoint.async_save(*a, **k).result())):
        where = os.path.join(path, str(number))
        save(net.state_dict(), checkpoint_id=where)
        empty = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
        checkpoint.load(empty, checkpoint_id=where)
        agree([value.full_tensor() for value in empty.values()], weights)
    return weights


@WORLDS
def test_fsdp2_trains_and_checkpoints_keep_every_ranks_shard(backend: str, world: int, tmp_path: Any) -> None:
    wanted = trained_alone(world, 2)
    for found in forked(sharded, world, backend, str(tmp_path)):
        agree(found, wanted)


def saved(rank: int, path: str) -> None:
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    table = distribute_tensor(total_of(2, (6, 4)), everyone, [Shard(0)])
    checkpoint.save({"table": table}, checkpoint_id=path)


def resharded(rank: int, path: str) -> Tensor:
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    table = distribute_tensor(torch.zeros(6, 4), everyone, [Shard(1)])
    checkpoint.load({"table": table}, checkpoint_id=path)
    return table.full_tensor()  # type: ignore[no-any-return]


def test_a_checkpoint_of_two_ranks_loads_on_three_sharded_otherwise(tmp_path: Any) -> None:
    forked(saved, 2, "ref", str(tmp_path))
    assert all(torch.equal(found, total_of(2, (6, 4))) for found in forked(resharded, 3, "gloo", str(tmp_path)))


def meshes(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("all", "one"))
    tensor = fill(rank, (3,))
    dist.all_reduce(tensor, group=init_device_mesh("cpu", (world,)).get_group())  # type: ignore[arg-type]
    assert torch.equal(tensor, total_of(world, (3,)))
    ours = dist.init_device_mesh("cpu", (world, 1), mesh_dim_names=("all", "one"))
    line = dist.init_device_mesh("cpu", (world,))
    again = pickle.loads(pickle.dumps(ours))
    assert again == ours and again.get_group("one") is ours.get_group("one")
    for each in (mesh["all"], DeviceMesh.from_group(line.get_group(), "cpu"), ours["all"], line, again["all"]):
        rows = distribute_tensor(fill(1, (2 * world, 3)), each, [Shard(0)])
        assert torch.equal(rows.to_local(), fill(1, (2 * world, 3))[2 * rank : 2 * rank + 2])
        whole = rows.full_tensor()
        assert torch.equal((rows @ rows.t()).redistribute(each, [Replicate()]).to_local(), whole @ whole.t())


@WORLDS
def test_dtensor_works_on_meshes_of_either_library(backend: str, world: int, proof: Any) -> None:
    forked(meshes, world, backend, world)
    proof(["device_mesh", "tensor"], [backend], world, "one process")


def made_by_torch(rank: int, world: int, backend: str) -> None:
    """Use torch's groups and meshes in our functions."""
    members = list(range(1, world))
    for name in (None, "gloo", "ref"):
        tail: Any = theirs.new_group(members, backend=name)
        if not rank:
            assert dist.get_rank(tail) == -1
            continue
        wanted = torch.stack([fill(each, (3,)) for each in members]).sum(0)
        for library in (dist, theirs, dist):
            tensor = fill(rank, (3,))
            library.all_reduce(tensor, group=tail)  # type: ignore[attr-defined]
            assert torch.equal(tensor, wanted)
        objects: list[Any] = [None] * len(members)
        dist.all_gather_object(objects, {rank}, group=tail)
        assert objects == [{each} for each in members]
        assert dist.get_process_group_ranks(tail) == members and dist.get_backend(tail) == (name or backend)
        assert dist.get_world_size(tail) == world - 1 and dist.get_global_rank(tail, 0) == 1
        assert torch.equal(nn_functional.all_reduce(fill(rank, (3,)), group=tail), wanted)
        half = dist.split_group(tail, split_ranks=[[each] for each in range(world - 1)])
        assert dist.get_process_group_ranks(half) == [rank]
        if name == "gloo":
            theirs.destroy_process_group(tail)
        else:
            dist.destroy_process_group(tail)
            assert tail not in theirs.distributed_c10d._world.pg_map
        with pytest.raises(dist.ArgumentError, match="was destroyed"):
            dist.all_reduce(tensor, group=tail)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("one", "all"))
    for each in (mesh["all"], dist.DeviceMesh.from_group(mesh.get_group("all"), "cpu")):
        tensor = fill(rank, (3,))
        dist.all_reduce(tensor, group=each.get_group())  # type: ignore[arg-type]
        assert torch.equal(tensor, total_of(world, (3,)))
        rows = distribute_tensor(fill(1, (2 * world, 3)), each, [Shard(0)])
        assert torch.equal(rows.full_tensor(), fill(1, (2 * world, 3)))
    net = model()
    ddp = dist.DistributedDataParallel(net, device_mesh=mesh["all"])
    loss(ddp, rank).backward()
    wanted = torch.stack([loss(net, each) for each in range(world)]).mean()
    agree([p.grad for p in net.parameters()], list(torch.autograd.grad(wanted, net.parameters())))  # type: ignore[misc]


@pytest.mark.parametrize("ranks", ["processes", "threads"])
@WORLDS
def test_our_functions_accept_groups_and_meshes_made_by_torch(backend: str, world: int, ranks: Any) -> None:
    run(made_by_torch, world, world, backend, backend=backend, ranks=ranks)


def compiled(rank: int, world: int) -> None:
    group: Any = theirs.group.WORLD
    gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)

    def program(tensor: Tensor) -> Tensor:
        return functional.all_reduce(tensor * 2, "sum", group) + gather(tensor, 0, group).sum()

    wanted = 2 * total_of(world, (4,)) + sum(fill(each, (4,)).sum() for each in range(world))
    assert torch.equal(program(fill(rank, (4,))), wanted)
    assert torch.equal(torch.compile(program, backend="aot_eager", fullgraph=True)(fill(rank, (4,))), wanted)


@pytest.mark.usefixtures("torchs_modules")
@pytest.mark.parametrize(("backend", "world"), [("ref", 2), ("gloo", 3)])
def test_functional_collectives_find_the_group_by_name_compiled_too(backend: str, world: int) -> None:
    forked(compiled, world, backend, world)


def subgroups(rank: int, world: int) -> None:
    before = set(theirs.distributed_c10d._world.pg_names.values())
    members = list(range(1, world))
    ours: Any = dist.new_group(members, group_desc="tail")
    if rank:
        wanted = torch.stack([fill(each, (3,)) for each in members]).sum(0)
        tensor = fill(rank, (3,))
        theirs.all_reduce(tensor, group=ours)
        assert torch.equal(tensor, wanted) and theirs.get_process_group_ranks(ours) == members
        assert torch.equal(functional.all_reduce(fill(rank, (3,)), "sum", ours), wanted)
        nn.parallel.DistributedDataParallel(nn.Linear(1, 1), process_group=ours)
        again: Any = dist.new_group(members, group_desc="tail", use_local_synchronization=True)
        assert len({again.group_name, ours.group_name}) == 2
        dist.destroy_process_group(again)
        aborted: Any = dist.new_group(members, use_local_synchronization=True)
        aborted.abort()
        dist.destroy_process_group(aborted)
        theirs.destroy_process_group(ours)
        with pytest.raises(dist.ArgumentError, match="destroyed"):
            dist.all_reduce(tensor, group=ours)
    parts: Any = dist.split_group(split_ranks=[[0], members])
    assert theirs.get_world_size(parts) == (len(members) if rank else 1)
    dist.destroy_process_group(parts)
    assert set(theirs.distributed_c10d._world.pg_names.values()) == before
    other = theirs.new_group(backend="gloo")
    tensor = fill(rank, (3,))
    theirs.all_reduce(tensor, group=other)
    assert torch.equal(tensor, total_of(world, (3,)))


@WORLDS
def test_subgroups_are_registered_until_either_library_destroys_them(backend: str, world: int) -> None:
    forked(subgroups, world, backend, world)


def shrunk(rank: int) -> tuple[int, int, float]:
    if rank == 1:
        return -1, -1, 0.0
    theirs.new_group([rank], use_local_synchronization=True)
    dist.shrink_group([1])
    tensor = fill(rank, (1,))
    theirs.all_reduce(tensor)
    return theirs.get_rank(), theirs.get_world_size(), tensor.item()


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_a_shrunk_default_group_is_torchs_too(backend: str) -> None:
    total = (fill(0, (1,)) + fill(2, (1,))).item()
    assert forked(shrunk, 3, backend) == [(0, 2, total), (-1, -1, 0.0), (1, 2, total)]


def again(rank: int, world: int, path: str, backend: str) -> None:
    for number in range(4):
        store = dist.FileStore(os.path.join(path, str(number)), world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        tensor = fill(rank, (2,))
        theirs.all_reduce(tensor)
        assert torch.equal(tensor, total_of(world, (2,)))
        # Gloo connects a pair from both sides: no rank may leave before.
        theirs.barrier(theirs.new_group(backend="gloo"))
        (dist if number % 2 else theirs).destroy_process_group()
        assert not dist.is_initialized() and not theirs.is_initialized()
        tables = theirs.distributed_c10d._world
        assert not tables.pg_map and not tables.pg_names and not tables.pg_group_ranks and not tables.tags_to_pg
        with pytest.raises(RuntimeError, match="Could not resolve"):
            theirs.distributed_c10d._resolve_process_group("world")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_the_group_is_destroyed_by_either_library_and_created_again(backend: str, tmp_path: Any) -> None:
    run(again, 2, 2, str(tmp_path), backend, ranks="processes", init=False)


def in_a_child(rank: int) -> bool:
    theirs.new_group(backend="gloo")
    child = os.fork()
    if child == 0:
        # As in `tests.backends.failing_ranks`.
        gc.freeze()
        kept = theirs.is_initialized() and theirs.get_rank() == dist.get_rank() == rank
        dist.destroy_process_group()
        clean = kept and not theirs.is_initialized() and not dist.is_initialized()
        dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
        os._exit(0 if clean and theirs.get_world_size() == 1 else 1)
    alive = os.waitpid(child, 0)[1] == 0
    tensor = fill(rank, (2,))
    theirs.all_reduce(tensor)
    return alive and torch.equal(tensor, total_of(2, (2,)))


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_a_forked_child_forgets_its_parents_group_for_one_of_its_own(backend: str) -> None:
    assert forked(in_a_child, 2, backend) == [True, True]


def test_a_second_initialization_fails_in_both_libraries() -> None:
    alone: Any = {"rank": 0, "world_size": 1}
    dist.init_process_group("ref", store=dist.HashStore(), **alone)
    try:
        for init in (theirs.init_process_group, theirs.distributed_c10d.init_process_group):
            with pytest.raises(ValueError, match="trying to initialize the default process group twice") as caught:
                init("gloo", store=theirs.HashStore(), **alone)
            (note,) = caught.value.__notes__
            assert "torchdist_ref.init_process_group has made the default group" in note and "new_group" in note
        with pytest.raises(dist.ArgumentError, match="trying to initialize the default process group twice"):
            dist.init_process_group("ref", store=dist.HashStore(), **alone)
    finally:
        dist.destroy_process_group()
    theirs.init_process_group("gloo", store=theirs.HashStore(), **alone)
    try:
        with pytest.raises(dist.ArgumentError, match=r"on backend 'gloo'.*pass backend='ref' to its initialization"):
            dist.init_process_group("ref", store=dist.HashStore(), **alone)
        assert not dist.is_initialized() and theirs.get_backend() == "gloo"
        with pytest.raises(dist.NotInitializedError, match=r"has not been initialized.*of its own, on backend 'gloo'"):
            dist.get_rank()
        with pytest.raises(ValueError, match="twice") as caught:
            theirs.init_process_group("gloo", store=theirs.HashStore(), **alone)
        assert not getattr(caught.value, "__notes__", None)
    finally:
        theirs.destroy_process_group()


def test_a_copy_of_a_model_with_a_group_is_refused_as_by_torch() -> None:
    dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        with pytest.raises((TypeError, RuntimeError)):
            copy.deepcopy(ddp.process_group)
    finally:
        dist.destroy_process_group()


def in_a_thread(rank: int, world: int, backend: str) -> None:
    facts(rank, world, backend)
    torchs_trainers(rank, "ddp")
    members = list(range(1, world))
    ours: Any = dist.new_group(members)
    if rank:
        wanted = torch.stack([fill(each, (3,)) for each in members]).sum(0)
        assert torch.equal(functional.all_reduce(fill(rank, (3,)), "sum", ours), wanted)
        theirs.destroy_process_group(ours)
    everyone: Any = theirs.group.WORLD
    assert torch.equal(functional.all_reduce(fill(rank, (3,)), "sum", everyone), total_of(world, (3,)))
    if rank == 0:
        theirs.destroy_process_group()
        assert not dist.is_initialized() and not theirs.is_initialized()


@WORLDS
def test_torchs_default_group_is_that_of_the_calling_rank_where_ranks_are_threads(backend: str, world: int) -> None:
    tables = theirs.distributed_c10d._world
    run(in_a_thread, world, world, backend, backend=backend)
    assert theirs.distributed_c10d._world is tables and not theirs.is_initialized()


def test_compiled_programs_that_ask_for_a_group_raise_where_ranks_are_threads() -> None:
    def program(rank: int) -> None:
        # torch's DDP notes the active module per process, and on threads leaves the note behind.
        with torch._dynamo.config.patch(optimize_ddp=False):
            with pytest.raises(Exception, match="ranks that are threads share compiled code"):
                compiled(rank, 2)

    run(program, 2)


def test_a_program_that_destroys_nothing_ends_quietly() -> None:
    # Over a second: one interpreter imports torch and forks; both processes end as interpreters do.
    program = """
import os, torchdist_ref as dist, torch.distributed as theirs
dist.init_process_group
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
backend = "gloo" if child else "ref"
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
theirs.new_group(backend="gloo")
print(backend, theirs.get_world_size())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ref 1\ngloo 1\n", "")
