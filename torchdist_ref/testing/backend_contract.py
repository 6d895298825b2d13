"""Conformance suite of backends: the contract of the public calls, as a function that users can run on their backend.

`check_backend` makes a group on the backend and runs one clause after the other. Each clause is a function that
compares tensors with a formula over `fill`. Add a clause for an error that users of a backend would notice. Do not add
checks of speed or of faults here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchdist_ref.groups as dist
from torchdist_ref.calls import AllReduce, Barrier, Broadcast
from torchdist_ref.groups.world import current
from torchdist_ref.testing.filling import fill
from torchdist_ref.testing.running import run
from torchdist_ref.torch_internals import torch_private
from torchdist_ref.work import Work

# Empty, one element, a matrix, odd sizes, and one that needs several windows of a staging buffer.
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (), (1,), (2, 3), (257,), (3, 5, 7), (400_003,))
DTYPES = (torch.int64, torch.float32, torch.float64, torch.uint8, torch.bfloat16)


def check_backend(name: str, world_size: int, ranks: str = "threads", timeout: float = 60.0) -> None:
    """Run all clauses of the contract on a backend.

    Args:
        name: The registered name of the backend.
        world_size: The number of ranks.
        ranks: ``"threads"`` or ``"processes"``.
        timeout: Time-out of the whole run, in seconds.

    Raises:
        RankError: A clause fails; the cause names it.

    Example:
        >>> from torchdist_ref.testing.backend_contract import check_backend
        >>> check_backend("ref", 2)
    """
    run(_all_clauses, world_size, backend=name, ranks=ranks, timeout=timeout)


def _all_clauses(rank: int) -> None:
    """Run all clauses on one rank."""
    size = dist.get_world_size()
    for clause in CLAUSES:
        try:
            clause(rank, size)
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"{clause.__name__} failed on rank {rank} of {size}: {kind}{error}") from error


def same(got: Tensor, expected: Tensor) -> None:
    """Raise unless two tensors are equal in dtype, shape and every value."""
    assert got.dtype == expected.dtype and got.shape == expected.shape, (
        f"{got.dtype} {got.shape}, expected {expected.shape}"
    )
    assert torch.equal(got, expected), (
        f"got {got.flatten()[:8].tolist()}..., expected {expected.flatten()[:8].tolist()}..."
    )


def _sum(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the sum of the tensors of all ranks."""
    return torch.stack([fill(r, shape, dtype) for r in range(size)]).sum(0, dtype=dtype)


def sums_everywhere(rank: int, size: int) -> None:
    """Check that all_reduce leaves the sum on every rank, for every shape and dtype, including empty tensors."""
    for shape in SHAPES:
        for dtype in DTYPES:
            tensor = fill(rank, shape, dtype)
            assert dist.all_reduce(tensor) is None, "a synchronous call returns None"
            same(tensor, _sum(size, shape, dtype))


def reduces_by_every_operation(rank: int, size: int) -> None:
    """Check that PRODUCT, MIN and MAX are computed."""
    data = torch.stack([fill(r, (301,), torch.int64) for r in range(size)])
    expected = {
        dist.ReduceOp.PRODUCT: data.prod(0),
        dist.ReduceOp.MIN: data.amin(0),
        dist.ReduceOp.MAX: data.amax(0),
    }
    for op, result in expected.items():
        tensor = data[rank].clone()
        dist.all_reduce(tensor, op)
        same(tensor, result)


def averages(rank: int, size: int) -> None:
    """Check that AVG divides by the number of ranks once, in one window and in several."""
    for shape in ((5,), (400_003,)):
        tensor = fill(rank, shape, torch.float64) * size
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, _sum(size, shape, torch.float64))


def multiplies_before_it_adds(rank: int, size: int) -> None:
    """Check that PREMUL_SUM scales by each rank's factor, and does not change inputs."""
    expected = torch.stack([(r + 0.5) * fill(r, (301,)) for r in range(size)]).sum(0)
    tensor, output = fill(rank, (301,)), torch.empty(301)
    # ReduceOp.PREMUL_SUM(factor) exists since torch 2.13 only.
    times: Any = torch_private.PREMUL_SUM.get()
    dist.all_reduce(tensor, times(rank + 0.5))
    same(tensor, expected)
    inputs = [fill(rank, (301,)) for _ in range(size)]
    dist.reduce_scatter(output, inputs, times(torch.tensor(rank + 0.5)))
    same(output, expected)
    same(inputs[0], fill(rank, (301,)))


def supports_every_dtype(rank: int, size: int) -> None:
    """Check that dtypes that few backends support are moved and added too, with exact sums of small numbers."""
    for dtype in (torch.int16, torch.uint16, torch.int8, torch.float16, torch.float8_e5m2, torch.complex64):
        tensor, row = fill(rank, (9,), dtype), torch.empty(9 * size, dtype=dtype)
        dist.all_gather_into_tensor(row, tensor)
        assert torch.equal(row[-9:].view(torch.uint8), fill(size - 1, (9,), dtype).view(torch.uint8))
        wide = torch.complex128 if dtype.is_complex else torch.float64
        if dtype.itemsize > 1:
            dist.all_reduce(tensor)
            same(tensor, torch.stack([fill(r, (9,), dtype).to(wide) for r in range(size)]).sum(0).to(dtype))
    flags = torch.tensor([True, rank == 0])
    dist.all_reduce(flags)
    assert flags.view(torch.uint8).tolist() == [1, 1], "a sum of bool is a bool"


def works_bitwise(rank: int, size: int) -> None:
    """Check that BAND, BOR and BXOR reduce the bits of integers."""
    data = [fill(r, (64,), torch.uint8) for r in range(size)]
    for op, combine in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        expected = data[0]
        for other in data[1:]:
            expected = combine(expected, other)
        tensor = data[rank].clone()
        dist.all_reduce(tensor, op)
        same(tensor, expected)


def leaves_replicas_identical(rank: int, size: int) -> None:
    """Check that rounded sums have the same bits on every rank."""
    for count in (3, 100_003):
        tensor = fill(rank, (count,)) / 7.0 + fill(rank + 3, (count,)) * 1e-5
        dist.all_reduce(tensor)
        copies = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(copies, tensor)
        for copy in copies:
            same(copy, tensor)


def broadcasts_from_any_root(rank: int, size: int) -> None:
    """Check that broadcast copies the root's tensor, for every root."""
    for root in range(size):
        for shape in SHAPES:
            tensor = fill(rank, shape)
            dist.broadcast(tensor, root)
            same(tensor, fill(root, shape))


def reduces_to_any_root(rank: int, size: int) -> None:
    """Check that reduce leaves the sum, or the largest values, on the root."""
    for root in range(size):
        for count in (1, 70_001):
            tensor = fill(rank, (count,), torch.int64)
            dist.reduce(tensor, root)
            if rank == root:
                same(tensor, _sum(size, (count,), torch.int64))
        tensor = fill(rank + root, (9,))
        dist.reduce(tensor, root, dist.ReduceOp.MAX)
        if rank == root:
            same(tensor, torch.stack([fill(r + root, (9,)) for r in range(size)]).amax(0))


def gathers(rank: int, size: int) -> None:
    """Check that all_gather and gather write rank r's tensor to entry r, and change nothing else."""
    for shape in SHAPES:
        outputs = [fill(99, shape) for _ in range(size)]
        dist.all_gather(outputs, fill(rank, shape))
        for r in range(size):
            same(outputs[r], fill(r, shape))
        row = torch.empty(size, *shape)
        dist.all_gather_into_tensor(row, fill(rank + 1, shape))
        same(row, torch.stack([fill(r + 1, shape) for r in range(size)]))
    for root in range(size):
        outputs = [torch.empty(6) for _ in range(size)] if rank == root else []
        dist.gather(fill(rank, (6,)), outputs, root)
        for r, output in enumerate(outputs):
            same(output, fill(r, (6,)))


def scatters(rank: int, size: int) -> None:
    """Check that scatter sends the root's entry r to rank r, and all_to_all every rank's entry d to rank d."""
    for root in range(size):
        tensor = torch.empty(6)
        dist.scatter(tensor, [fill(r + 10 * root, (6,)) for r in range(size)] if rank == root else None, root)
        same(tensor, fill(rank + 10 * root, (6,)))
    for count in (0, 5, 40_000):
        outputs = [torch.empty(count) for _ in range(size)]
        dist.all_to_all(outputs, [fill(10 * rank + d, (count,)) for d in range(size)])
        for source, output in enumerate(outputs):
            same(output, fill(10 * source + rank, (count,)))


def reduces_and_scatters(rank: int, size: int) -> None:
    """Check that reduce_scatter leaves the sum of all ranks' entry r on rank r, and that AVG divides it."""
    for count in (0, 1, 129, 200_003):
        output = torch.empty(count, dtype=torch.float64)
        inputs = [fill(rank + 10 * block, (count,), torch.float64) for block in range(size)]
        expected = torch.stack([fill(r + 10 * rank, (count,), torch.float64) for r in range(size)]).sum(0)
        dist.reduce_scatter(output, inputs)
        same(output, expected)
        dist.reduce_scatter_tensor(output, torch.cat(inputs) * size, dist.ReduceOp.AVG)
        same(output, expected)
        dist.reduce_scatter(output, inputs, dist.ReduceOp.MIN)
        same(output, torch.stack([fill(r + 10 * rank, (count,), torch.float64) for r in range(size)]).amin(0))
        same(torch.cat(inputs), torch.cat([fill(rank + 10 * b, (count,), torch.float64) for b in range(size)]))


def exchanges_uneven_blocks(rank: int, size: int) -> None:
    """Check blocks of another size for each pair of ranks, some of them empty; inputs keep their values."""

    def block(source: int, target: int) -> Tensor:
        return fill(10 * source + target, ((3 * source + 5 * target) % 4,))

    blocks = [block(rank, d) for d in range(size)]
    source, expected = torch.cat(blocks), torch.cat([block(s, rank) for s in range(size)])
    row = torch.empty_like(expected)
    received = [len(block(s, rank)) for s in range(size)]
    dist.all_to_all_single(row, source, received, [len(each) for each in blocks])
    same(row, expected)
    same(source, torch.cat(blocks))


def moves_every_dtype(rank: int, size: int) -> None:
    """Check that each call moves the bits of tensors that are neither float32 nor int64, NaN among them."""
    root = size - 1
    for dtype in (torch.uint8, torch.bfloat16, torch.float64, torch.bool):
        own, last = fill(rank, (7,), dtype), fill(root, (7,), dtype)
        tensor = own.clone()
        dist.broadcast(tensor, root)
        same(tensor, last)
        outputs = [torch.empty_like(own) for _ in range(size)]
        dist.gather(own, outputs if rank == root else None, root)
        if rank == root:
            same(torch.cat(outputs), torch.cat([fill(r, (7,), dtype) for r in range(size)]))
        blocks = [fill(rank + 3 * d, (7,), dtype) for d in range(size)]
        dist.scatter(tensor, blocks if rank == root else None, root)
        same(tensor, fill(root + 3 * rank, (7,), dtype))
        dist.all_to_all(outputs, blocks)
        same(torch.cat(outputs), torch.cat([fill(s + 3 * rank, (7,), dtype) for s in range(size)]))
        same(torch.cat(blocks), torch.cat([fill(rank + 3 * d, (7,), dtype) for d in range(size)]))
        if size > 1 and rank in (0, root):
            dist.send(own, root) if rank == 0 else dist.recv(tensor, 0)
            same(own, fill(rank, (7,), dtype))
            same(tensor, fill(0, (7,), dtype) if rank == root else tensor)
    tensor = torch.tensor([1.0, float("nan") if rank == root else 2.0])
    dist.all_reduce(tensor)
    assert tensor[0] == size and tensor[1].isnan(), f"a sum with NaN is NaN: {tensor}"


def waits_in_barriers(rank: int, size: int) -> None:
    """Check that no rank leaves a barrier before all have come: they count themselves in the store."""
    store = current().store
    assert store is not None
    for number in range(1, 9):
        store.add("check_backend/arrived", 1)
        dist.barrier()
        arrived = store.add("check_backend/arrived", 0)
        assert arrived >= number * size, f"barrier {number} ended after {arrived - (number - 1) * size} arrivals"
        dist.barrier()


def returns_a_work(rank: int, size: int) -> None:
    """Check that `submit` returns a Work, which is complete if the caller waits."""
    default = current().default
    assert default is not None
    row, calls = fill(rank, (3,)), (AllReduce("sum"), Broadcast(0), Barrier())
    for call in calls:
        operands = [row] if call.op != "barrier" else []
        work = default.backend.submit(call, operands, operands, True)
        assert isinstance(work, Work) and work.is_completed(), f"{call} with wait=True returned {work!r}"


def completes_async_calls(rank: int, size: int) -> None:
    """Check that overlapping calls each give their own result, and that futures have the list of outputs."""
    tensors = [fill(rank + 5 * i, (10 + 7000 * i,)) for i in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    later = fill(rank, (4,))
    dist.all_reduce(later)
    same(later, _sum(size, (4,), torch.float32))
    for i, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        assert work is not None and work.wait() is True
        assert work.is_completed()
        same(tensor, torch.stack([fill(r + 5 * i, tensor.shape) for r in range(size)]).sum(0))
        assert work.get_future().wait()[0] is tensor or work.get_future().wait()[0].data_ptr() == tensor.data_ptr()


def completes_every_async_call(rank: int, size: int) -> None:
    """Check that each call with async_op=True has its result after wait; a receive may come before its send."""
    peer, source = (rank + 1) % size, (rank - 1) % size
    copied, summed, greatest = fill(rank, (5,)), torch.empty(3), fill(rank, (4,))
    row, blocks, scattered = torch.empty(size, 5), torch.empty(size, 2), torch.empty(6)
    gathered = [torch.empty(5) for _ in range(size)] if rank == 0 else None
    of_root = [fill(r + 4, (6,)) for r in range(size)] if rank == 0 else None
    works = [
        dist.broadcast(copied, size - 1, async_op=True),
        dist.all_gather_into_tensor(row, fill(rank, (5,)), async_op=True),
        dist.reduce_scatter_tensor(summed, fill(rank, (size, 3)), async_op=True),
        dist.all_to_all_single(blocks, fill(rank, (size, 2)), async_op=True),
        dist.reduce(greatest, 0, dist.ReduceOp.MAX, async_op=True),
        dist.gather(fill(rank + 1, (5,)), gathered, 0, async_op=True),
        dist.scatter(scattered, of_root, 0, async_op=True),
    ]
    message = torch.empty(8)
    if size > 1:
        works += [dist.irecv(message, source, tag=source), dist.isend(fill(rank + 2, (8,)), peer, tag=rank)]
    works.append(dist.barrier(async_op=True))
    for work in works:
        assert work is not None and work.wait() is True
    same(copied, fill(size - 1, (5,)))
    same(row, torch.stack([fill(r, (5,)) for r in range(size)]))
    same(summed, torch.stack([fill(r, (size, 3))[rank] for r in range(size)]).sum(0))
    same(blocks, torch.stack([fill(r, (size, 2))[rank] for r in range(size)]))
    same(scattered, fill(rank + 4, (6,)))
    if rank == 0 and gathered is not None:
        same(greatest, torch.stack([fill(r, (4,)) for r in range(size)]).amax(0))
        same(torch.stack(gathered), torch.stack([fill(r + 1, (5,)) for r in range(size)]))
    if size > 1:
        same(message, fill(source + 2, (8,)))


def respects_strides(rank: int, size: int) -> None:
    """Check that a strided view is reduced and received in place, and that memory outside it is not changed."""
    base = fill(rank, (6, 8))
    view = base[::2, 1::3]
    expected = torch.stack([fill(r, (6, 8))[::2, 1::3] for r in range(size)]).sum(0)
    untouched = base.clone()
    dist.all_reduce(view)
    same(view.contiguous(), expected)
    untouched[::2, 1::3] = expected
    same(base, untouched)
    target = fill(50, (4, 4))
    dist.broadcast(target[:, 2], size - 1) if rank else dist.broadcast(target.t()[2], size - 1)
    same(target[:, 0].contiguous(), fill(50, (4, 4))[:, 0].contiguous())
    columns = fill(60, (5, 2 * size))
    dist.all_gather([columns[:, 2 * r] for r in range(size)], fill(rank, (5,)))
    for r in range(size):
        same(columns[:, 2 * r].contiguous(), fill(r, (5,)))
        same(columns[:, 2 * r + 1].contiguous(), fill(60, (5, 2 * size))[:, 2 * r + 1].contiguous())
    if size > 1 and rank == 0:
        dist.recv(columns[:, 1], 1)
        same(columns[:, 1].contiguous(), fill(70, (5,)))
    elif rank == 1:
        dist.send(fill(70, (5,)), 0)


def passes_messages(rank: int, size: int) -> None:
    """Check messages between every pair of ranks, of several sizes, in both directions, and their sources."""
    for count in (0, 1, 1000, 150_001):
        for source in range(size):
            for target in range(size):
                _message(rank, source, target, count)


def _message(rank: int, source: int, target: int, count: int) -> None:
    """Send one message and check it."""
    # The tag keeps messages of other pairs from a receive with any source.
    tag = 100 * source + target
    if source != target and rank == source:
        dist.send(fill(tag, (count,)), target, tag=tag)
    if source != target and rank == target:
        tensor = torch.empty(count)
        assert dist.recv(tensor, source if count % 2 else None, tag=tag) == source
        same(tensor, fill(tag, (count,)))


def matches_tags_in_any_order(rank: int, size: int) -> None:
    """Check that a receive matches the message with its tag, and messages with one tag in the order of their sends."""
    if rank == 0 and size > 1:
        works = [dist.isend(fill(tag, (9,)), 1, tag=tag) for tag in (3, 1, 2)]
        works += [dist.isend(fill(10 + number, (9,)), 1, tag=4) for number in range(3)]
        assert all(work is not None and work.wait() for work in works)
    if rank == 1:
        for tag in (2, 3, 1):
            tensor = torch.empty(9)
            dist.recv(tensor, 0, tag=tag)
            same(tensor, fill(tag, (9,)))
        for number in range(3):
            dist.recv(tensor, 0, tag=4)
            same(tensor, fill(10 + number, (9,)))


def separates_groups(rank: int, size: int) -> None:
    """Check that a subgroup has ranks of its own, and that its calls are separate from those of other groups."""
    members = list(range(0, size, 2))
    group = dist.new_group(members)
    if rank in members:
        assert isinstance(group, dist.ProcessGroup) and dist.get_rank(group) == members.index(rank)
        tensor = fill(rank, (11,))
        dist.all_reduce(tensor, group=group)
        same(tensor, torch.stack([fill(r, (11,)) for r in members]).sum(0))
        tensor = fill(rank + 20, (11,))
        dist.broadcast(tensor, members[-1], group)
        same(tensor, fill(members[-1] + 20, (11,)))
        assert [event.call.op for event in group.recorder] == ["all_reduce", "broadcast"], "the recorder has each call"
    of_all = fill(rank, (3,))
    dist.all_reduce(of_all)
    same(of_all, _sum(size, (3,), torch.float32))


CLAUSES: tuple[Callable[[int, int], None], ...] = (
    returns_a_work,
    sums_everywhere,
    reduces_by_every_operation,
    averages,
    multiplies_before_it_adds,
    supports_every_dtype,
    works_bitwise,
    leaves_replicas_identical,
    broadcasts_from_any_root,
    reduces_to_any_root,
    gathers,
    scatters,
    reduces_and_scatters,
    exchanges_uneven_blocks,
    moves_every_dtype,
    waits_in_barriers,
    completes_async_calls,
    completes_every_async_call,
    respects_strides,
    passes_messages,
    matches_tags_in_any_order,
    separates_groups,
)
