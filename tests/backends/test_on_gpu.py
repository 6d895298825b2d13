"""What only a device can show: streams, NCCL, and ranks of `ref` on one device. One GPU is enough.

What needs no NCCL runs on a simulated device too. On a GPU: ``pytest -m gpu``; what was seen, and where, is on the page
"Verified where".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.backends import one_gpu_ranks
from tests.backends.one_gpu_ranks import busy
from tests.on_devices import on_each_device
from torchdist_ref.testing import fill, run

# Some tenths of a second on any GPU: long enough for the host to be seen going on.
CYCLES = 500_000_000
HOST = torch.device("cpu")
BACKENDS = {"cuda": ("nccl", "ref"), "sim": ("ref",)}


def needs_nccl(test: Callable[..., None]) -> Any:
    reason = "needs a CUDA device and NCCL"
    there = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return pytest.mark.gpu(pytest.mark.skipif(not there, reason=reason)(test))


def on_device(device: str, *shape: int, rank: int = 0) -> torch.Tensor:
    return fill(rank, shape).to(device)


@contextmanager
def alone(backend: str) -> Iterator[None]:
    """A world of one rank on a backend."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@on_each_device
def test_a_result_is_used_on_a_second_stream(device: str) -> None:
    """The example with two streams of torch's page on collectives."""
    for backend in BACKENDS[device]:
        with alone(backend):
            output, second = on_device(device, 4), torch.Stream(device)
            handle = dist.all_reduce(output, async_op=True)
            assert handle is not None
            handle.wait()
            ready = torch.accelerator.current_stream()
            with second:
                second.wait_stream(ready)
                output.add_(100)
            second.synchronize()
            assert torch.equal(output.to(HOST), fill(0, (4,)) + 100)


@needs_nccl
def test_waiting_orders_the_stream_and_lets_the_host_go_on() -> None:
    with alone("nccl"):
        tensor, stream = on_device("cuda", 4), torch.cuda.current_stream()
        torch.cuda._sleep(CYCLES)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None and not work.is_completed() and work.wait() and not stream.query()
        dist.all_reduce(tensor)
        assert not stream.query(), "a call that waits blocks the host"
        tensor.add_(1)
        assert torch.equal(tensor.to(HOST), fill(0, (4,)) + 1)


@needs_nccl
def test_a_future_is_complete_once_the_call_is_on_its_stream() -> None:
    with alone("nccl"):
        torch.cuda._sleep(CYCLES)
        work = dist.all_reduce(on_device("cuda", 4), async_op=True)
        assert work is not None
        doubled = work.get_future().then(lambda done: done.value()[0] * 2)
        assert not torch.cuda.current_stream().query()
        assert torch.equal(doubled.wait().to(HOST), fill(0, (4,)) * 2)


@on_each_device
def test_every_collective_of_one_rank(device: str) -> None:
    for backend in BACKENDS[device]:
        with alone(backend):
            one_rank(device)


def one_rank(device: str) -> None:
    tensor, into, strided = on_device(device, 6), torch.zeros(6, device=device), on_device(device, 4, 3)
    for call in (dist.all_reduce, lambda t: dist.broadcast(t, 0), lambda t: dist.reduce(t, 0)):
        call(tensor)
    dist.all_reduce(strided.t()[1])
    dist.all_gather([into], tensor)
    dist.reduce_scatter(into, [into.clone()])
    dist.all_to_all([into], [into.clone()])
    dist.gather(tensor, [into], dst=0)
    dist.scatter(into, [tensor], src=0)
    dist.all_gather_into_tensor(into, tensor)
    dist.barrier()
    assert torch.equal(into.to(HOST), fill(0, (6,))) and torch.equal(tensor.to(HOST), fill(0, (6,)))
    assert torch.equal(strided.to(HOST), fill(0, (4, 3)))
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"rank": 0})
    assert objects == [{"rank": 0}]


@needs_nccl
def test_lists_of_one_tensor_and_a_scaled_sum() -> None:
    with alone("nccl"):
        tensors = [on_device("cuda", 4)]
        dist.all_reduce_multigpu(tensors)
        dist.broadcast_multigpu(tensors, 0)
        assert torch.equal(tensors[0].to(HOST), fill(0, (4,)))
        dist.all_reduce(tensors[0], torch.distributed._make_nccl_premul_sum(2.0))
        assert torch.equal(tensors[0].to(HOST), fill(0, (4,)) * 2)


@needs_nccl
def test_with_no_name_each_tensor_finds_its_backend() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        for tensor in (fill(0, (3,)), on_device("cuda", 3)):
            dist.all_reduce(tensor)
            assert torch.equal(tensor.to(HOST), fill(0, (3,)))
        assert dist.get_backend() == "cpu:ref,cuda:nccl"
    finally:
        dist.destroy_process_group()


def two_on_one(rank: int, device: str) -> list[torch.Tensor]:
    """Sync and async calls, messages, and a stream that still writes when the call is made."""
    total, late = on_device(device, 1000, rank=rank), on_device(device, 1000, rank=rank)
    got, ready, side = torch.zeros(3, device=device), torch.accelerator.current_stream(), torch.Stream(device)
    dist.all_reduce(total)
    with side:
        side.wait_stream(ready)
        busy(device, CYCLES // 10)
        late.mul_(2)
        work = dist.all_reduce(late, async_op=True)
    assert work is not None and work.wait()
    sending = dist.isend(on_device(device, 3, rank=rank), 1 - rank)
    dist.recv(got, 1 - rank)
    assert sending is not None and sending.wait()
    return [total.to(HOST), late.to(HOST), got.to(HOST)]


@on_each_device
def test_two_ranks_share_one_device_on_ref(device: str) -> None:
    total = fill(0, (1000,)) + fill(1, (1000,))
    for rank, (first, second, got) in enumerate(run(two_on_one, 2, device)):
        assert torch.equal(first, total) and torch.equal(second, total * 2)
        assert torch.equal(got, fill(1 - rank, (3,)))


SHARED = {
    program.__name__: program
    for program in (
        one_gpu_ranks.every_collective,
        one_gpu_ranks.fresh_tensors,
        one_gpu_ranks.two_streams,
        one_gpu_ranks.training,
        one_gpu_ranks.groups_one_after_another,
        one_gpu_ranks.without_ipc,
    )
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("program", SHARED)
@on_each_device
def test_processes_share_one_device_on_ref(device: str, program: str, size: int) -> None:
    """Some seconds each on a GPU: every rank starts a Python and a device of its own."""
    one_gpu_ranks.start(SHARED[program], size, device)


@needs_nccl
def test_training_on_nccl_equals_training_alone() -> None:
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)).to("cuda")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = dist.DistributedDataParallel(copy.deepcopy(plain))
        for step in range(3):
            for net in (plain, wrapped):
                net.zero_grad()
                net(on_device("cuda", 5, 7, rank=step) / 4).square().mean().backward()
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.sub_(parameter.grad * 0.1)
        for own, alone in zip(wrapped.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, alone)
    finally:
        dist.destroy_process_group()
