"""Every call with tensors on devices, with the values that the same program has on the CPU: see `tests.on_devices`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from tests.on_devices import RANKS, check, late, on_each_device, same_as_on_cpu
from tests.on_sim import on_sim
from torchdist_ref.backends.ref import contiguous
from torchdist_ref.testing import fill, run


def every_collective(rank: int, where: torch.device, async_op: bool) -> list[Tensor]:
    results = []

    def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        work = function(*arguments, async_op=async_op, **options)
        assert not async_op or work.wait()

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (2, 6000):
            x = late(rank, count, where).to(dtype)
            empty = functools.partial(torch.full, (count,), -1, dtype=dtype, device=where)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                call(dist.all_reduce, total := x.clone(), op)
                results.append(total)
            call(dist.reduce, mine := x.clone(), 1)
            call(dist.broadcast, sent := x.clone(), 1)
            rows = [empty() for _ in range(RANKS)]
            call(dist.all_gather, rows, x)
            there = [empty() for _ in range(RANKS)] if rank == 0 else None
            call(dist.gather, x, there, dst=0)
            call(dist.scatter, part := empty(), [x, x + 1] if rank == 1 else None, src=1)
            call(dist.reduce_scatter, piece := empty(), [x, x + 3])
            call(dist.all_to_all, swapped := [empty() for _ in range(RANKS)], [x, x + 1])
            call(dist.all_to_all_single, turned := empty(), x)
            call(dist.all_gather_into_tensor, whole := torch.zeros(2 * count, dtype=dtype, device=where), x)
            call(dist.reduce_scatter_tensor, half := torch.zeros(count // 2, dtype=dtype, device=where), x)
            results += [mine, sent, *rows, *(there or []), part, piece, *swapped, turned, whole, half]
    wide = late(rank, 12, where).view(3, 4)
    call(dist.all_reduce, wide.t()[1])
    call(dist.all_reduce, mean := late(rank, 5, where), dist.ReduceOp.AVG)
    dist.barrier()
    return [*results, wide, mean]


@on_each_device
def test_every_collective_that_waits(device: str) -> None:
    same_as_on_cpu(device, functools.partial(every_collective, async_op=False))


@on_each_device
def test_every_collective_that_does_not_wait(device: str) -> None:
    same_as_on_cpu(device, functools.partial(every_collective, async_op=True))


def messages_and_objects(rank: int, where: torch.device) -> list[Any]:
    peer, got, later = 1 - rank, torch.zeros(300, device=where), torch.zeros(300, device=where)
    sending = dist.isend(late(rank, 300, where), peer)
    dist.recv(got, peer)
    receiving = dist.irecv(later, peer, tag=3)
    dist.send(late(rank, 300, where), peer, tag=3)
    assert sending is not None and sending.wait() and receiving is not None and receiving.wait()
    batch = torch.zeros(4, device=where)
    ops = [dist.P2POp(dist.isend, late(rank, 4, where), peer), dist.P2POp(dist.irecv, batch, peer)]
    assert all(work.wait() for work in dist.batch_isend_irecv(ops))
    several = [late(rank, n, where) for n in (3, 700)]
    dist.all_reduce_coalesced(several)
    rows = [[torch.zeros(n, device=where) for n in (3, 700)] for _ in range(RANKS)]
    dist.all_gather_coalesced(rows, [late(rank, n, where) for n in (3, 700)])
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank})
    sent = [f"from {rank}", rank]
    dist.broadcast_object_list(sent, src=1, device=where)
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, ["a", "b"] if rank == 0 else None, src=0)
    host = dist.empty_registered(3000).fill_(rank)
    dist.all_reduce(host)
    assert host.tolist() == [1.0] * 3000
    mixed = torch.full((3000,), 1.0 + rank, device=where) if rank else dist.empty_registered(3000).fill_(1)
    dist.all_reduce(mixed)
    return [got, later, batch, *several, *rows[0], *rows[1], objects, sent, taken, mixed.sum().item()]


@on_each_device
def test_messages_coalesced_calls_objects_and_registered_memory(device: str) -> None:
    same_as_on_cpu(device, messages_and_objects)


def differentiable_calls(rank: int, where: torch.device) -> list[Tensor]:
    from torchdist_ref.nn import functional

    results = []
    for call in (
        lambda x: functional.all_reduce(x),
        lambda x: functional.broadcast(x, 1),
        lambda x: torch.stack(functional.all_gather(x)),
        lambda x: functional.reduce_scatter(torch.empty_like(x), [x, 2 * x]),
        lambda x: torch.stack(functional.all_to_all([torch.empty_like(x) for _ in range(RANKS)], [x, 3 * x])),
    ):
        x = late(rank, 5, where).requires_grad_()
        result = call(x)
        (result * (rank + 1)).square().sum().backward()
        assert x.grad is not None
        results += [result.detach(), x.grad]
    return results


@on_each_device
def test_differentiable_calls(device: str) -> None:
    same_as_on_cpu(device, differentiable_calls)


class Capturing:
    """Device's module while a graph is captured."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return (lambda: True) if name == "is_current_stream_capturing" else getattr(self._module, name)


@contextmanager
def capturing(device: str) -> Iterator[None]:
    module = getattr(torch, device)
    setattr(torch, device, Capturing(module))
    try:
        yield
    finally:
        setattr(torch, device, module)


@on_each_device
def test_a_capture_is_refused_in_words_and_leaves_the_group_usable(device: str) -> None:
    """The stream was synchronized, which ends a capture with an error of CUDA's."""
    dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.ones(3, device=device)
        calls = (
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_reduce(tensor, async_op=True),
            lambda: dist.isend(tensor, 0),
        )
        with capturing(device):
            for call in calls:
                with pytest.raises(dist.UnsupportedError, match="cannot be captured in a graph of"):
                    call()
        dist.all_reduce(tensor)
        assert tensor.cpu().tolist() == [1.0] * 3
    finally:
        dist.destroy_process_group()


class NeverDone:
    """Stream whose task waits for something that does not come."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record_event(self) -> NeverDone:
        return self

    def query(self) -> bool:
        return False


@on_each_device
def test_a_stream_that_does_not_end_raises_at_the_time_out(device: str) -> None:
    """The time-out of the group did not hold for this wait."""
    timeout = timedelta(seconds=0.2)
    dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    tensor = torch.ones(3, device=device)
    original = contiguous.accelerators.current_stream
    contiguous.accelerators.current_stream = NeverDone
    try:
        with pytest.raises(
            dist.RankStalledError, match=r"all_reduce.* on a stream of .* did not end within 0\.2 s"
        ) as caught:
            dist.all_reduce(tensor)
        assert caught.value.ranks == (0,)
    finally:
        contiguous.accelerators.current_stream = original
        dist.destroy_process_group()


class StuckHere(NeverDone):
    """`NeverDone` on the first device alone."""

    def __new__(cls, device: torch.device) -> Any:
        return super().__new__(cls) if device.index == 0 else torch.accelerator.current_stream(device)


@on_sim
def test_a_device_that_waits_for_a_rank_which_waits_for_it_ends_at_the_time_out() -> None:
    """Both ranks name the rank whose device did not end; the other one waited for its call."""

    def program(rank: int, store: dist.Store) -> tuple[str, tuple[int, ...]]:
        timeout = timedelta(seconds=1)
        dist.init_process_group("ref", store=store, rank=rank, world_size=2, timeout=timeout)
        tensor = torch.ones(3, device=f"sim:{rank}")
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(tensor)
        return str(caught.value), caught.value.ranks

    original = contiguous.accelerators.current_stream
    contiguous.accelerators.current_stream = StuckHere
    try:
        (stuck, named), (waited, blamed) = run(program, 2, dist.HashStore(), init=False)
    finally:
        contiguous.accelerators.current_stream = original
    assert "on a stream of sim:0 did not end within 1 s" in stuck and named == (0,)
    assert blamed == (0,) and "rank 0" in waited, waited


@on_sim
def test_a_barrier_orders_programs_and_waits_for_no_device() -> None:
    """What the device has yet to compute stays queued, whatever `device_ids` says: see `barrier`."""

    def program(rank: int) -> list[int]:
        pending, tensor, found = torch.ops.simulated_device.pending, late(rank, 4, torch.device("sim", rank)), []
        for device_ids in (None, [rank]):
            dist.barrier(device_ids=device_ids)
            found.append(pending(rank))
        torch.accelerator.synchronize(rank)
        assert torch.equal(tensor.cpu(), fill(rank, (4,)) * 2 + 1)
        return [*found, pending(rank)]

    for first, second, synchronized in run(program, 2):
        assert first == second > 0 == synchronized


@on_each_device
def test_lists_of_tensors_on_several_devices_of_one_process(device: str) -> None:
    count = min(2, torch.accelerator.device_count())

    def program(rank: int, everywhere: list[torch.device]) -> list[Tensor]:
        tensors = [late(rank * count + n, 40, where) for n, where in enumerate(everywhere)]
        dist.all_reduce_multigpu(tensors)
        given = [late(rank * count + n, 7, where) for n, where in enumerate(everywhere)]
        dist.broadcast_multigpu(given, 1)
        reduced = [late(rank * count + n, 7, where) for n, where in enumerate(everywhere)]
        dist.reduce_multigpu(reduced, 0)
        own = [late(rank * count + n, 5, where) for n, where in enumerate(everywhere)]
        rows = [[torch.zeros(5, device=where) for _ in range(RANKS * count)] for where in everywhere]
        dist.all_gather_multigpu(rows, own)
        parts = [torch.zeros(3, device=where) for where in everywhere]
        blocks = [[late(n, 3, where) for n in range(RANKS * count)] for where in everywhere]
        dist.reduce_scatter_multigpu(parts, blocks)
        return [*tensors, *given, *(reduced if rank == 0 else []), *(row for each in rows for row in each), *parts]

    wanted = run(program, RANKS, [torch.device("cpu")] * count)
    check(run(program, RANKS, [torch.device(device, n) for n in range(count)], timeout=60), wanted, True)
