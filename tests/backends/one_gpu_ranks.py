"""Programs of ranks that share one device, for `test_on_gpu`: CUDA's first, or a simulated one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import torch
from torch import Tensor

import torchdist_ref as dist
from torchdist_ref.backends.ref import contiguous, one_gpu
from torchdist_ref.testing import fill, run

# Elements of the largest tensors and bytes of a staging buffer. What simulated devices do costs the CPU its time.
LARGEST = {"cuda": 3_000_001, "sim": 60_001}
SIMULATED_BUFFER_BYTES = 1 << 17
TURNS = {"cuda": 200, "sim": 40}


def start(program: Callable[[int, int, str], None], size: int, device: str) -> None:
    """Run a program on processes, all on the first device; raise the first error of any.

    They are forked, or started anew if this process has used the accelerator.
    """
    run(_rank, size, program, size, device, ranks="processes", timeout=90)


def _rank(rank: int, program: Callable[[int, int, str], None], size: int, device: str) -> None:
    if device == "sim":
        one_gpu.BUFFER_BYTES = SIMULATED_BUFFER_BYTES
    torch.accelerator.set_device_index(0)
    program(rank, size, device)


def busy(device: str, cycles: int) -> None:
    """Keep the current stream busy. That of a simulated device holds its operations back by itself."""
    if device == "cuda":
        torch.cuda._sleep(cycles)


def nothing_through_the_host() -> None:
    """Make every use of host memory for a tensor of the device raise."""

    def refuse(tensor: Tensor) -> Tensor:
        raise AssertionError(f"a tensor of {tensor.numel()} elements goes through the host's memory")

    contiguous.pinned = refuse


def same(what: str, got: Tensor, wanted: Tensor) -> None:
    assert torch.equal(got.cpu(), wanted), f"{what}: {got}, not {wanted}"


def every_collective(rank: int, size: int, device: str) -> None:
    """Check values; the largest tensors pass through a staging buffer of 16 MiB in several windows."""
    nothing_through_the_host()
    for block in (1, 257, LARGEST[device] // size):
        count, last = block * size, size - 1
        data = [fill(r, (count,)) for r in range(size)]
        total, mine = torch.stack(data).sum(0), data[rank].to(device)
        dist.all_reduce(tensor := mine.clone())
        same("all_reduce", tensor, total)
        dist.all_reduce(half := (mine % 8).bfloat16())
        same("all_reduce of bfloat16", half, torch.stack([each % 8 for each in data]).sum(0).bfloat16())
        dist.reduce(tensor := mine.clone(), last)
        same("reduce", tensor, total if rank == last else data[rank])
        dist.broadcast(tensor := mine.clone(), last)
        same("broadcast", tensor, data[last])
        rows = [torch.zeros(count, device=device) for _ in data]
        dist.all_gather(rows, mine)
        same("all_gather", torch.cat(rows), torch.cat(data))
        dist.gather(mine, rows if rank == last else None, dst=last)
        dist.scatter(tensor, rows if rank == last else None, src=last)
        same("gather and scatter", tensor, data[rank])
        dist.all_to_all_single(tensor, mine)
        same("all_to_all", tensor, torch.cat([each.view(size, -1)[rank] for each in data]))
        dist.reduce_scatter_tensor(part := torch.zeros(block, device=device), mine)
        same("reduce_scatter", part, total.view(size, -1)[rank])
        wide = torch.zeros(count, 3, device=device)
        wide[:, 1] = mine
        dist.all_reduce(wide[:, 1])
        same("all_reduce of a column", wide[:, 1], total)
        assert not wide[:, 0].any() and not wide[:, 2].any()


def fresh_tensors(rank: int, size: int, device: str) -> None:
    """Allocate and free tensors on a delayed stream: no memory leaks, and no call reads too early."""
    nothing_through_the_host()
    held = []
    for turn in range(TURNS[device]):
        count = LARGEST[device] // 3 + 1000 * (turn % 7)
        busy(device, 100_000)
        tensor = torch.full((count,), float(rank + turn), device=device)
        dist.all_reduce(tensor)
        kept = tensor.clone()
        tensor.fill_(-1)
        assert kept.eq(size * turn + sum(range(size))).all(), f"turn {turn}: {kept}"
        del tensor, kept
        held.append(torch.accelerator.memory_reserved())
    assert held[-1] == held[20], f"memory grew: {held}"


def two_streams(rank: int, size: int, device: str) -> None:
    """Check that an asynchronous call runs after its caller's stream, and that all streams see its result."""
    nothing_through_the_host()
    one, other = torch.Stream(device), torch.Stream(device)
    count = LARGEST[device] // 3
    tensor, plain = torch.ones(count, device=device), torch.ones(count, device=device)
    torch.accelerator.synchronize()
    for turn in range(20):
        with one:
            busy(device, 5_000_000)
            tensor.fill_(rank + turn)
            work = dist.all_reduce(tensor, async_op=True)
        with other:
            dist.all_reduce(plain.fill_(turn))
            assert work is not None and work.wait()
            results = tensor * 1, plain * 1
        other.synchronize()
        same("the call on its way", results[0], torch.full((count,), float(size * turn + sum(range(size)))))
        same("the call beside it", results[1], torch.full((count,), float(size * turn)))


def training(rank: int, size: int, device: str) -> None:
    """Train ten steps with DDP and compare with training on all the data."""
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(7, 900), torch.nn.Tanh(), torch.nn.Linear(900, 2)).to(device)
    wrapped = dist.DistributedDataParallel(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(net.parameters(), 0.05) for net in (plain, wrapped)]
    for step in range(10):
        data = torch.randn(5 * size, 7, generator=torch.Generator().manual_seed(step)).to(device)
        for net, optimizer, rows in zip((plain, wrapped), optimizers, (data, data.chunk(size)[rank]), strict=True):
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            optimizer.step()
    for alone, own in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(own, alone, rtol=1e-4, atol=1e-5)


def groups_one_after_another(rank: int, size: int, device: str) -> None:
    """Make and destroy groups: each gives the memory of its staging buffers back, without a garbage collection."""
    nothing_through_the_host()
    gc.disable()
    held = []
    for _ in range(4):
        group = dist.new_group()
        dist.all_reduce(tensor := fill(rank, (1000,)).to(device), group=group)
        same("all_reduce", tensor, torch.stack([fill(r, (1000,)) for r in range(size)]).sum(0))
        dist.destroy_process_group(group)
        # A peer may release its mapping later.
        dist.barrier()
        held.append(torch.accelerator.memory_reserved())
    assert held[-1] == held[1], f"memory grew: {held}"


def without_ipc(rank: int, size: int, device: str) -> None:
    """Let one rank fail to export: all go through pinned memory."""
    if rank == 1:
        one_gpu.MEMORIES[device].export = refuse  # type: ignore[method-assign]
    data = [fill(r, (100_000,)) for r in range(size)]
    for _ in range(3):
        dist.all_reduce(tensor := data[rank].to(device))
        same("all_reduce through the host", tensor, torch.stack(data).sum(0))


def refuse(tensor: Tensor) -> bytes:
    raise RuntimeError("not exported")
