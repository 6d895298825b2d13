"""torch's own modules on devices, on a group that torch makes on `ref`: values as on the CPU on Gloo.

The device is simulated. Ranks are forked before it is used, and each has a device of its own.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.backends.inside_torch import on
from tests.on_devices import check
from tests.on_sim import on_sim
from torchdist_ref.testing import fill, run

SIZE = 2
Program = Callable[[torch.device], Any]


def with_mesh(where: torch.device) -> Any:
    return c10d.device_mesh.init_device_mesh(where.type, (SIZE,))


def model(where: torch.device) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    with torch.no_grad():
        for place, parameter in enumerate(net.parameters()):
            parameter.copy_(fill(place, parameter.shape, torch.float64) / 16)
    return net.to(where)


def trained(net: Any, where: torch.device) -> list[Tensor]:
    """Train three steps; return the losses and the gradients of the last step."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5), []
    for step in range(3):
        optimizer.zero_grad()
        loss = net(fill(c10d.get_rank() + step, (5, 6), torch.float64).to(where) / 4).square().mean()
        loss.backward()
        losses.append(loss.detach())
        if step < 2:
            optimizer.step()
    return losses


def full(tensors: Any) -> list[Tensor]:
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.detach() for each in tensors]


def collectives(where: torch.device) -> list[Tensor]:
    """Calls that wait, calls that do not, functional calls, messages, and objects."""
    rank = c10d.get_rank()
    mine = fill(rank, (6,)).to(where) * 2 + 1
    c10d.all_reduce(total := mine.clone())
    work = c10d.all_reduce(late := mine.clone(), async_op=True)
    assert work is not None
    work.wait()
    c10d.all_gather_into_tensor(whole := torch.zeros(12, device=where), mine)
    c10d.reduce_scatter_tensor(part := torch.zeros(3, device=where), mine)
    c10d.all_to_all_single(turned := torch.zeros(6, device=where), mine)
    functional = c10d._functional_collectives.all_reduce(mine, "sum", c10d.group.WORLD) * 1
    got = torch.zeros(6, device=where)
    ops = [c10d.P2POp(c10d.isend, mine, 1 - rank), c10d.P2POp(c10d.irecv, got, 1 - rank)]
    for each in c10d.batch_isend_irecv(ops):
        each.wait()
    objects: list[Any] = [None] * SIZE
    c10d.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    c10d.barrier()
    return [total, late, whole, part, turned, functional, got]


def data_parallel(where: torch.device) -> list[Tensor]:
    ids = {} if where.type == "cpu" else {"device_ids": [where.index]}
    net = TorchDDP(model(where), bucket_cap_mb=1e-4, **ids)
    return [*trained(net, where), *full(p.grad for p in net.parameters())]


def fully_sharded(where: torch.device) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    net, mesh = model(where), with_mesh(where)
    for layer in [*net, net]:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    return [*trained(net, where), *full(p.grad for p in net.parameters()), *full(net.parameters())]


def distributed_tensors(where: torch.device) -> list[Tensor]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, whole = with_mesh(where), fill(3, (4, 6)).to(where)
    rows, columns = (distribute_tensor(whole, mesh, [Shard(dim)]) for dim in (0, 1))
    return full([rows, columns, rows @ columns.t(), columns.redistribute(mesh, [Replicate()]), (rows * 2).sum()])


def subgroups(where: torch.device) -> list[Tensor]:
    mesh = c10d.device_mesh.init_device_mesh(where.type, (SIZE, 1), mesh_dim_names=("data", "model"))
    c10d.all_reduce(one := fill(c10d.get_rank(), (4,)).to(where), group=mesh.get_group("data"))
    c10d.all_reduce(other := fill(c10d.get_rank(), (4,)).to(where), group=mesh.get_group("model"))
    return [one, other]


PROGRAMS: tuple[Program, ...] = (collectives, data_parallel, fully_sharded, distributed_tensors, subgroups)


def all_programs(rank: int, size: int, where: torch.device) -> dict[str, list[Tensor]]:
    found = {}
    with warnings.catch_warnings():
        # torch names functions of its own that it has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        for program in PROGRAMS:
            found[program.__name__] = program(where)
    assert where.type == "cpu" or c10d.distributed_c10d._world.pg_backend_config[c10d.group.WORLD] == "cpu:ref,sim:ref"
    return found


def on_cpu_and_sim(rank: int, path: str) -> int:
    torch.accelerator.set_device_index(rank)
    places = (("gloo", torch.device("cpu")), ("ref", torch.device("sim", rank)))
    (wanted, _), (found, seen) = (
        on(backend, rank, SIZE, path, functools.partial(all_programs, where=where)) for backend, where in places
    )
    check(found, wanted, exact=False)
    return sum(seen.values())


@on_sim
def test_torchs_modules_on_devices(tmp_path: Path) -> None:
    assert min(run(on_cpu_and_sim, SIZE, str(tmp_path / "meet"), init=False, ranks="processes", timeout=90)) > 30


def without_a_name(rank: int, path: str) -> tuple[str, list[float]]:
    """The device's default backend is `ref`, since torch has none of its own for it."""
    torch.accelerator.set_device_index(rank)
    c10d.init_process_group(init_method=f"file://{path}", rank=rank, world_size=SIZE)
    c10d.all_reduce(tensor := fill(rank, (4,)).to(f"sim:{rank}"))
    found = c10d.distributed_c10d._world.pg_backend_config[c10d.group.WORLD], tensor.tolist()
    c10d.destroy_process_group()
    return found


@on_sim
def test_torch_chooses_ref_for_the_device_where_a_program_names_no_backend(tmp_path: Path) -> None:
    total = (fill(0, (4,)) + fill(1, (4,))).tolist()
    found = run(without_a_name, SIZE, str(tmp_path / "meet"), init=False, ranks="processes", timeout=60)
    assert [values for _, values in found] == [total] * 2
    assert all("sim:ref" in config for config, _ in found), found
