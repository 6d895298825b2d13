"""Program of one rank under mpiexec: ``python mpi_ranks.py FOLDER CHECK...``. Run by test_mpi."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI

import torchdist_ref as dist
from tests.backends.test_completion import OURS, SIZE, check_all
from tests.process_ends import answer_of_child
from torchdist_ref.calls import AllToAll
from torchdist_ref.groups.world import default_group
from torchdist_ref.testing import fill
from torchdist_ref.testing.backend_contract import CLAUSES, same


def contract(rank: int, size: int) -> None:
    for clause in CLAUSES:
        clause(rank, size)


def other_dtypes(rank: int, size: int) -> None:
    """Dtypes that MPI does not have are reduced in another dtype; all dtypes are moved as bytes."""
    for dtype in (torch.float16, torch.bfloat16, torch.int16, torch.uint16, torch.complex64, torch.int8):
        tensor = fill(rank, (9,), dtype)
        dist.all_reduce(tensor)
        total = fill(0, (9,), dtype).to(torch.complex64 if dtype.is_complex else torch.float32)
        for other in range(1, size):
            total = total + fill(other, (9,), dtype).to(total.dtype)
        same(tensor, total.to(dtype))
    for op, combine in (("SUM", torch.any), ("MIN", torch.all)):
        flags = torch.tensor([rank == 0, True, False])
        dist.all_reduce(flags, getattr(dist.ReduceOp, op))
        same(flags, combine(torch.tensor([[r == 0, True, False] for r in range(size)]), 0))
    for dtype in (torch.float32, torch.float16, torch.complex64):
        tensor = fill(rank, (9,), dtype)
        dist.all_reduce(tensor, torch.distributed._make_nccl_premul_sum(0.5 + rank))
        same(tensor, sum((0.5 + r) * fill(r, (9,), dtype) for r in range(size)))
    eighth = fill(rank, (5,)).to(torch.float8_e4m3fn)
    dist.broadcast(eighth, size - 1)
    same(eighth.float(), fill(size - 1, (5,)).to(torch.float8_e4m3fn).float())


def unequal_blocks(rank: int, size: int) -> None:
    outputs = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(outputs, fill(rank, (rank + 1,)))
    for r, output in enumerate(outputs):
        same(output, fill(r, (r + 1,)))
    outputs = [torch.zeros(source * rank) for source in range(size)]
    # At the backend: the public function requires equal blocks.
    inputs = [fill(10 * rank + to, (rank * to,)) for to in range(size)]
    default_group().backend.submit(AllToAll(), inputs, outputs, True)
    for source, output in enumerate(outputs):
        same(output, fill(10 * source + rank, (source * rank,)))


def callbacks(rank: int, size: int) -> None:
    """A callback waits for the future of a new call; a call that no thread waits for completes too."""

    def then(future: Any) -> torch.Tensor:
        work = dist.all_reduce(future.value()[0], async_op=True)
        assert work is not None
        return work.get_future().wait()[0]

    work = dist.all_reduce(fill(rank, (4,)), async_op=True)
    assert work is not None
    same(work.get_future().then(then).wait(), size * torch.stack([fill(r, (4,)) for r in range(size)]).sum(0))
    seen = [str(event.call) for event in default_group().recorder]
    assert seen == ["all_reduce(reduction=sum)"] * 2, seen
    dist.isend(fill(rank, (100_000,)), (rank + 1) % size)
    tensor = torch.zeros(100_000)
    assert dist.recv(tensor, (rank - 1) % size) == (rank - 1) % size
    same(tensor, fill((rank - 1) % size, (100_000,)))
    own = torch.zeros(70_000)
    dist.isend(fill(rank, (70_000,)), rank, tag=3)
    dist.recv(own, rank, tag=3)
    same(own, fill(rank, (70_000,)))


def expect(kind: type[BaseException], words: str, call: Any) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"{kind.__name__} expected")


def faults(rank: int, size: int) -> None:
    one, group = torch.ones(1), dist.new_group(timeout=timedelta(seconds=0.3))
    if rank == 0:
        dist.send(torch.ones(2), 1)
        expect(dist.RankStalledError, "not done within 0.3 s", lambda: dist.all_reduce(one, group=group))
    if rank == 1:
        expect(dist.MismatchError, "8 bytes", lambda: dist.recv(torch.zeros(5), 0))
    expect(dist.UnsupportedError, "complex32", lambda: dist.all_reduce(one.to(torch.complex32)))
    expect(dist.ArgumentError, "BAND", lambda: dist.all_reduce(one, dist.ReduceOp.BAND))
    dist.barrier()
    compared(rank)
    broken: Any = dist.new_group()
    if rank == 0:
        broken.backend.abort("out of memory")
    else:
        expect(dist.GroupAbortedError, "rank 0 failed: out of memory", lambda: dist.barrier(broken))
    dist.barrier()


def compared(rank: int) -> None:
    """MPI reports nothing if ranks make different calls; at debug level DETAIL all of them get an error."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group, tensor = dist.new_group(), torch.ones(3)
    dist.set_debug_level(dist.DebugLevel.OFF)
    first = dist.all_reduce if rank == 0 else dist.barrier
    expect(dist.MismatchError, "rank 1: barrier", lambda: first(*([tensor] if rank == 0 else []), group=group))
    expect(dist.MismatchError, "rank 0: all_reduce", lambda: dist.all_reduce(tensor[: 2 - rank % 2], group=group))
    dist.all_reduce(tensor, group=group)
    assert tensor[0].item() == dist.get_world_size(group)


def forked(rank: int, size: int) -> None:
    """A forked child answers as its rank, and cannot communicate."""
    pair: Any = dist.new_group([0, size - 1])
    asked = answer_of_child(lambda: f"{dist.get_rank()} {dist.get_world_size()} {dist.get_backend()}")
    assert asked == f"{rank} {size} mpi"
    refused = answer_of_child(lambda: str(dist.all_reduce(torch.ones(1))))
    assert f"DestroyedGroupError: all_reduce: this process was forked from rank {rank}" in refused
    tensor = fill(rank, (9,))
    dist.all_reduce(tensor, group=pair) if rank in (0, size - 1) else None
    same(tensor, fill(0, (9,)) + fill(size - 1, (9,)) if rank in (0, size - 1) else fill(rank, (9,)))


def completion(rank: int, size: int) -> None:
    """The table of `test_completion`, which is of two ranks."""
    if size == SIZE:
        check_all(dist, OURS, rank)


CHECKS = {
    check.__name__: check for check in (contract, other_dtypes, unequal_blocks, callbacks, completion, faults, forked)
}


def main(folder: str, *checks: str) -> None:
    torch.set_num_threads(1)
    for check in checks:
        execute(check, f"file://{folder}/{check}")


def execute(check: str, url: str) -> None:
    """Run one check in a default group of its own."""
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    # Our ranks are in the reverse order of MPI's, so that confusing them fails.
    own = size - 1 - rank
    dist.init_process_group("mpi", init_method=url, rank=own, world_size=size, timeout=timedelta(seconds=20))
    try:
        CHECKS[check](own, size)
        print(f"rank {own} of {size}: {check} passed", flush=True)
        dist.destroy_process_group()
    except BaseException as error:
        # The others wait for this rank in calls that MPI alone can end.
        print(f"rank {own} of {size}: {error!r}", flush=True)
        MPI.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
