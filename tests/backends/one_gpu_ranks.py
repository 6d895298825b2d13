"""Programs of ranks that share one GPU, for `test_on_gpu`. The processes are spawned: CUDA survives no fork."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import Tensor

import torchdist_ref as dist
from torchdist_ref.backends.ref import contiguous, one_gpu
from torchdist_ref.testing import fill


def start(program: Callable[[int, int], None], size: int, folder: Path) -> None:
    """Run a program on processes, all on the first device; raise the first error of any."""
    mp.spawn(_rank, (program, size, str(folder / "store")), nprocs=size)


def _rank(rank: int, program: Callable[[int, int], None], size: int, path: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("ref", store=dist.FileStore(path, size), rank=rank, world_size=size)
    program(rank, size)
    dist.destroy_process_group()


def nothing_through_the_host() -> None:
    """Make every use of host memory for a tensor of the device raise."""

    def refuse(tensor: Tensor) -> Tensor:
        raise AssertionError(f"a tensor of {tensor.numel()} elements goes through the host's memory")

    contiguous.pinned = refuse


def same(what: str, got: Tensor, wanted: Tensor) -> None:
    assert torch.equal(got.cpu(), wanted), f"{what}: {got}, not {wanted}"


def every_collective(rank: int, size: int) -> None:
    """Check values; the largest tensors pass through a staging buffer of 16 MiB in several windows."""
    nothing_through_the_host()
    for block in (1, 257, 3_000_001 // size):
        count, last = block * size, size - 1
        data = [fill(r, (count,)) for r in range(size)]
        total, mine = torch.stack(data).sum(0), data[rank].cuda()
        dist.all_reduce(tensor := mine.clone())
        same("all_reduce", tensor, total)
        dist.all_reduce(half := (mine % 8).bfloat16())
        same("all_reduce of bfloat16", half, torch.stack([each % 8 for each in data]).sum(0).bfloat16())
        dist.reduce(tensor := mine.clone(), last)
        same("reduce", tensor, total if rank == last else data[rank])
        dist.broadcast(tensor := mine.clone(), last)
        same("broadcast", tensor, data[last])
        rows = [torch.zeros(count, device="cuda") for _ in data]
        dist.all_gather(rows, mine)
        same("all_gather", torch.cat(rows), torch.cat(data))
        dist.gather(mine, rows if rank == last else None, dst=last)
        dist.scatter(tensor, rows if rank == last else None, src=last)
        same("gather and scatter", tensor, data[rank])
        dist.all_to_all_single(tensor, mine)
        same("all_to_all", tensor, torch.cat([each.view(size, -1)[rank] for each in data]))
        dist.reduce_scatter_tensor(part := torch.zeros(block, device="cuda"), mine)
        same("reduce_scatter", part, total.view(size, -1)[rank])
        wide = torch.zeros(count, 3, device="cuda")
        wide[:, 1] = mine
        dist.all_reduce(wide[:, 1])
        same("all_reduce of a column", wide[:, 1], total)
        assert not wide[:, 0].any() and not wide[:, 2].any()


def fresh_tensors(rank: int, size: int) -> None:
    """Allocate and free tensors on a delayed stream: no memory leaks, and no call reads too early."""
    nothing_through_the_host()
    held = []
    for turn in range(200):
        count = 1_000_000 + 1000 * (turn % 7)
        torch.cuda._sleep(100_000)
        tensor = torch.full((count,), float(rank + turn), device="cuda")
        dist.all_reduce(tensor)
        kept = tensor.clone()
        tensor.fill_(-1)
        assert kept.eq(size * turn + sum(range(size))).all(), f"turn {turn}: {kept}"
        del tensor, kept
        held.append(torch.cuda.memory_reserved())
    assert held[-1] == held[20], f"memory grew: {held}"


def two_streams(rank: int, size: int) -> None:
    """Check that an asynchronous call runs after its caller's stream, and that all streams see its result."""
    nothing_through_the_host()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    tensor, plain = torch.ones(1_000_000, device="cuda"), torch.ones(1_000_000, device="cuda")
    torch.cuda.synchronize()
    for turn in range(20):
        with torch.cuda.stream(one):
            torch.cuda._sleep(5_000_000)
            tensor.fill_(rank + turn)
            work = dist.all_reduce(tensor, async_op=True)
        with torch.cuda.stream(other):
            dist.all_reduce(plain.fill_(turn))
            assert work is not None and work.wait()
            results = tensor * 1, plain * 1
        other.synchronize()
        same("the call on its way", results[0], torch.full((1_000_000,), float(size * turn + sum(range(size)))))
        same("the call beside it", results[1], torch.full((1_000_000,), float(size * turn)))


def training(rank: int, size: int) -> None:
    """Train ten steps with DDP and compare with training on all the data."""
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(7, 900), torch.nn.Tanh(), torch.nn.Linear(900, 2)).cuda()
    wrapped = dist.DistributedDataParallel(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(net.parameters(), 0.05) for net in (plain, wrapped)]
    for step in range(10):
        data = torch.randn(5 * size, 7, generator=torch.Generator().manual_seed(step)).cuda()
        for net, optimizer, rows in zip((plain, wrapped), optimizers, (data, data.chunk(size)[rank]), strict=True):
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            optimizer.step()
    for alone, own in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(own, alone, rtol=1e-4, atol=1e-5)


def without_ipc(rank: int, size: int) -> None:
    """Let one rank fail to export: all go through pinned memory."""
    if rank == 1:
        one_gpu.MEMORIES["cuda"].export = refuse  # type: ignore[method-assign]
    data = [fill(r, (100_000,)) for r in range(size)]
    for _ in range(3):
        dist.all_reduce(tensor := data[rank].cuda())
        same("all_reduce through the host", tensor, torch.stack(data).sum(0))


def refuse(tensor: Tensor) -> bytes:
    raise RuntimeError("not exported")
