"""What every backend must do, as a function that you can call on your own.

`check_backend` makes a group of the backend and puts it through one clause after the other; each clause is a
function that compares tensors with a plain formula over `fill`. It says nothing about speed or about faults.
Add a clause where a backend could get something wrong that users would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchdist_ref.groups as dist
from torchdist_ref.testing.filling import fill
from torchdist_ref.testing.running import run

# Empty, one element, a matrix, odd sizes, and one that needs several windows of a stage.
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (), (1,), (2, 3), (257,), (3, 5, 7), (400_003,))
DTYPES = (torch.int64, torch.float32, torch.float64, torch.uint8, torch.bfloat16)


def check_backend(name: str, world_size: int, ranks: str = "threads", timeout: float = 60.0) -> None:
    """Put a backend through the whole contract of the front door.

    Args:
        name: The backend's registered name.
        world_size: How many ranks to use.
        ranks: ``"threads"`` or ``"processes"``.
        timeout: Seconds for everything.

    Raises:
        RankError: A clause does not hold; the cause names it.

    Example:
        >>> from torchdist_ref.testing.backend_contract import check_backend
        >>> check_backend("ref", 2)
    """
    run(_all_clauses, world_size, backend=name, ranks=ranks, timeout=timeout)


def _all_clauses(rank: int) -> None:
    size = dist.get_world_size()
    for clause in CLAUSES:
        try:
            clause(rank, size)
        except AssertionError as error:
            raise AssertionError(f"{clause.__name__} does not hold on rank {rank} of {size}: {error}") from error


def same(got: Tensor, wanted: Tensor) -> None:
    """Raise unless two tensors are equal in dtype, shape and every value."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, f"{got.dtype} {got.shape}, wanted {wanted.shape}"
    assert torch.equal(got, wanted), f"got {got.flatten()[:8].tolist()}..., wanted {wanted.flatten()[:8].tolist()}..."


def _sum(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack([fill(r, shape, dtype) for r in range(size)]).sum(0, dtype=dtype)


def sums_everywhere(rank: int, size: int) -> None:
    """all_reduce gives every rank the sum, for every shape and dtype, empty tensors included."""
    for shape in SHAPES:
        for dtype in DTYPES:
            tensor = fill(rank, shape, dtype)
            assert dist.all_reduce(tensor) is None, "a call that waits returns None"
            same(tensor, _sum(size, shape, dtype))


def reduces_as_asked(rank: int, size: int) -> None:
    """Each reduction is the one that was asked for: not the sum by another name."""
    data = torch.stack([fill(r, (301,), torch.int64) for r in range(size)])
    wanted = {
        dist.ReduceOp.PRODUCT: data.prod(0),
        dist.ReduceOp.MIN: data.amin(0),
        dist.ReduceOp.MAX: data.amax(0),
    }
    for op, result in wanted.items():
        tensor = data[rank].clone()
        dist.all_reduce(tensor, op)
        same(tensor, result)


def averages(rank: int, size: int) -> None:
    """AVG divides by the number of ranks, once, in one call and in a windowed one."""
    for shape in ((5,), (400_003,)):
        tensor = fill(rank, shape, torch.float64) * size
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, _sum(size, shape, torch.float64))


def multiplies_before_it_adds(rank: int, size: int) -> None:
    """PREMUL_SUM adds what each rank has multiplied by a factor of its own, and reads inputs without changing them."""
    wanted = torch.stack([(r + 0.5) * fill(r, (301,)) for r in range(size)]).sum(0)
    tensor, output = fill(rank, (301,)), torch.empty(301)
    # ReduceOp.PREMUL_SUM(factor) is torch 2.13's; this name is older.
    times: Any = torch.distributed._make_nccl_premul_sum  # type: ignore[attr-defined]
    dist.all_reduce(tensor, times(rank + 0.5))
    same(tensor, wanted)
    inputs = [fill(rank, (301,)) for _ in range(size)]
    dist.reduce_scatter(output, inputs, times(torch.tensor(rank + 0.5)))
    same(output, wanted)
    same(inputs[0], fill(rank, (301,)))


def keeps_every_type(rank: int, size: int) -> None:
    """Types that few backends know are added all the same: what small numbers add up to has one right answer."""
    for dtype in (torch.int16, torch.uint16, torch.int8, torch.float16, torch.float8_e5m2, torch.complex64):
        tensor, row = fill(rank, (9,), dtype), torch.empty(9 * size, dtype=dtype)
        dist.all_gather_into_tensor(row, tensor)
        assert torch.equal(row[-9:].view(torch.uint8), fill(size - 1, (9,), dtype).view(torch.uint8))
        wide = torch.complex128 if dtype.is_complex else torch.float64
        if dtype.itemsize > 1:
            dist.all_reduce(tensor)
            same(tensor, torch.stack([fill(r, (9,), dtype).to(wide) for r in range(size)]).sum(0).to(dtype))
    truth = torch.tensor([True, rank == 0])
    dist.all_reduce(truth)
    assert truth.view(torch.uint8).tolist() == [1, 1], "a sum of truth values is a truth value"


def works_bitwise(rank: int, size: int) -> None:
    """BAND, BOR and BXOR work on the bits of integers."""
    data = [fill(r, (64,), torch.uint8) for r in range(size)]
    for op, combine in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        wanted = data[0]
        for other in data[1:]:
            wanted = combine(wanted, other)
        tensor = data[rank].clone()
        dist.all_reduce(tensor, op)
        same(tensor, wanted)


def leaves_replicas_identical(rank: int, size: int) -> None:
    """Sums that round still end with the same bits on every rank."""
    for count in (3, 100_003):
        tensor = fill(rank, (count,)) / 7.0 + fill(rank + 3, (count,)) * 1e-5
        dist.all_reduce(tensor)
        copies = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(copies, tensor)
        for copy in copies:
            same(copy, tensor)


def broadcasts_from_any_root(rank: int, size: int) -> None:
    """Broadcast copies the root's tensor, and only the root's, whoever that is."""
    for root in range(size):
        for shape in SHAPES:
            tensor = fill(rank, shape)
            dist.broadcast(tensor, root)
            same(tensor, fill(root, shape))


def reduces_to_any_root(rank: int, size: int) -> None:
    """Reduce leaves the sum on the root."""
    for root in range(size):
        for count in (1, 70_001):
            tensor = fill(rank, (count,), torch.int64)
            dist.reduce(tensor, root)
            if rank == root:
                same(tensor, _sum(size, (count,), torch.int64))


def gathers(rank: int, size: int) -> None:
    """all_gather and gather put rank r's tensor at place r, and change nothing else."""
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
    """Scatter gives rank r the root's entry r; all_to_all gives rank d everybody's entry d."""
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
    """reduce_scatter leaves rank r the sum of everybody's entry r; AVG divides it."""
    for count in (0, 1, 129, 200_003):
        output = torch.empty(count, dtype=torch.float64)
        inputs = [fill(rank + 10 * block, (count,), torch.float64) for block in range(size)]
        wanted = torch.stack([fill(r + 10 * rank, (count,), torch.float64) for r in range(size)]).sum(0)
        dist.reduce_scatter(output, inputs)
        same(output, wanted)
        dist.reduce_scatter_tensor(output, torch.cat(inputs) * size, dist.ReduceOp.AVG)
        same(output, wanted)


def finishes_async_calls_in_order(rank: int, size: int) -> None:
    """Works of overlapping calls each deliver their own result; their futures hold the list of outputs."""
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


def respects_strides(rank: int, size: int) -> None:
    """A strided view is reduced, received and gathered in place, and nothing outside it is touched."""
    base = fill(rank, (6, 8))
    view = base[::2, 1::3]
    wanted = torch.stack([fill(r, (6, 8))[::2, 1::3] for r in range(size)]).sum(0)
    untouched = base.clone()
    dist.all_reduce(view)
    same(view.contiguous(), wanted)
    untouched[::2, 1::3] = wanted
    same(base, untouched)
    target = fill(50, (4, 4))
    dist.broadcast(target[:, 2], size - 1) if rank else dist.broadcast(target.t()[2], size - 1)
    same(target[:, 0].contiguous(), fill(50, (4, 4))[:, 0].contiguous())


def passes_messages(rank: int, size: int) -> None:
    """Messages travel between every pair, of every size, in either direction, and name their sender."""
    for count in (0, 1, 1000, 150_001):
        for source in range(size):
            for target in range(size):
                _message(rank, source, target, count)


def _message(rank: int, source: int, target: int, count: int) -> None:
    # The tag keeps messages of other pairs away from a receive that takes any sender.
    tag = 100 * source + target
    if source != target and rank == source:
        dist.send(fill(tag, (count,)), target, tag=tag)
    if source != target and rank == target:
        tensor = torch.empty(count)
        assert dist.recv(tensor, source if count % 2 else None, tag=tag) == source
        same(tensor, fill(tag, (count,)))


def matches_tags_in_any_order(rank: int, size: int) -> None:
    """A receive takes the message with its tag, whatever else came before."""
    if rank == 0 and size > 1:
        works = [dist.isend(fill(tag, (9,)), 1, tag=tag) for tag in (3, 1, 2)]
        assert all(work is not None and work.wait() for work in works)
    if rank == 1:
        for tag in (2, 3, 1):
            tensor = torch.empty(9)
            dist.recv(tensor, 0, tag=tag)
            same(tensor, fill(tag, (9,)))


def separates_groups(rank: int, size: int) -> None:
    """A group of some ranks counts them anew, and its calls don't mix with those of the others."""
    members = list(range(0, size, 2))
    group = dist.new_group(members)
    if rank in members:
        assert dist.get_rank(group) == members.index(rank)
        tensor = fill(rank, (11,))
        dist.all_reduce(tensor, group=group)
        same(tensor, torch.stack([fill(r, (11,)) for r in members]).sum(0))
        dist.broadcast(tensor, members[-1], group)
    everybody = fill(rank, (3,))
    dist.all_reduce(everybody)
    same(everybody, _sum(size, (3,), torch.float32))


CLAUSES: tuple[Callable[[int, int], None], ...] = (
    sums_everywhere,
    reduces_as_asked,
    averages,
    multiplies_before_it_adds,
    keeps_every_type,
    works_bitwise,
    leaves_replicas_identical,
    broadcasts_from_any_root,
    reduces_to_any_root,
    gathers,
    scatters,
    reduces_and_scatters,
    finishes_async_calls_in_order,
    respects_strides,
    passes_messages,
    matches_tags_in_any_order,
    separates_groups,
)
