"""Tensors of a device on `ref`, through the host's memory, on a stand-in for a device (`device_stand_in`).

What only a real device shows is in `test_on_gpu`.
"""

from __future__ import annotations

import threading
from typing import cast

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from tests.backends.device_stand_in import (
    OnDevice,
    Stream,
    current_stream,
    on_device,
    on_stream,
    seen_by_host,
    stand_in,
    to_be_doubled,
)
from torchdist_ref.backends.ref import contiguous
from torchdist_ref.calls import AllReduce
from torchdist_ref.testing import fill, run
from torchdist_ref.transports.link import Link


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


TOTAL = fill(0, (1000,)) + fill(1, (1000,))


def wait_for_calls(rank: int) -> tuple[bool, Tensor]:
    tensor = to_be_doubled(on_device(fill(rank, (1000,))))
    dist.all_reduce(tensor)
    put_off = not current_stream().idle
    current_stream().synchronize()
    return put_off, seen_by_host(tensor)


def test_a_call_runs_after_the_streams_tasks_and_before_its_later_ones() -> None:
    for put_off, result in run(wait_for_calls, 2):
        assert torch.equal(result, 2 * TOTAL)
        assert put_off, "the host waited for the way back"


def go_on(rank: int) -> Tensor:
    tensor = to_be_doubled(on_device(fill(rank, (1000,))))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None and work.wait()
    return seen_by_host(tensor)


def test_after_wait_the_result_is_visible_to_every_stream() -> None:
    assert all(torch.equal(result, 2 * TOTAL) for result in run(go_on, 2))


def make_while_the_stream_is_busy(rank: int) -> tuple[bool, Tensor]:
    """The host goes on at once, and what the caller's stream does after the call is no matter to the call."""
    busy, side = threading.Event(), Stream()
    tensor = on_device(fill(rank, (1000,)))
    with on_stream(side):
        side.put(lambda: busy.wait(5))
        to_be_doubled(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        tensor.add_(1)
    assert work is not None and not work.is_completed()
    busy.set()
    assert work.wait()
    return not side.idle, seen_by_host(tensor)


def test_an_asynchronous_call_waits_for_earlier_tasks_of_the_stream_and_for_nothing_else() -> None:
    for put_off, result in run(make_while_the_stream_is_busy, 2):
        assert torch.equal(result, 2 * TOTAL)
        assert put_off, "a stream that the call is not on was waited for"


def lists(rank: int) -> list[Tensor]:
    ours, rows = to_be_doubled(on_device(fill(rank, (50,)))), [on_device(torch.zeros(50)) for _ in range(2)]
    dist.all_gather(rows, ours)
    part = on_device(torch.zeros(25))
    dist.reduce_scatter_tensor(part, ours)
    strided = on_device(fill(rank, (6, 4))).t()
    dist.broadcast(strided, 1)
    spread = on_device(torch.zeros(50, 2))
    dist.all_gather_into_tensor(spread.view(100)[::2], on_device(fill(rank, (25,))))
    current_stream().synchronize()
    return [seen_by_host(tensor) for tensor in (*rows, part, strided, spread)]


def test_lists_blocks_and_strides() -> None:
    data = [fill(rank, (50,)) for rank in range(2)]
    for rank, (first, second, part, strided, spread) in enumerate(run(lists, 2)):
        assert torch.equal(first, 2 * data[0]) and torch.equal(second, 2 * data[1])
        assert torch.equal(part, (2 * data[0] + 2 * data[1])[25 * rank : 25 * rank + 25])
        assert torch.equal(strided, fill(1, (6, 4)).t())
        assert torch.equal(spread[:, 0], torch.cat([fill(0, (25,)), fill(1, (25,))])) and not spread[:, 1].any()


def messages(rank: int) -> list[Tensor]:
    other, got, late = 1 - rank, on_device(torch.zeros(3)), on_device(torch.zeros(3))
    sending = dist.isend(to_be_doubled(on_device(fill(rank, (3,)))), other)
    dist.recv(got, other)
    assert sending is not None and sending.wait()
    to_be_doubled(late.fill_(5))
    receiving = dist.irecv(late, other)
    dist.send(on_device(fill(rank, (3,))), other)
    assert receiving is not None and receiving.wait()
    at_once = seen_by_host(late)
    current_stream().synchronize()
    return [seen_by_host(got), at_once, seen_by_host(late)]


def test_messages() -> None:
    for rank, (got, late, later) in enumerate(run(messages, 2)):
        assert torch.equal(got, 2 * fill(1 - rank, (3,)))
        assert torch.equal(late, fill(1 - rank, (3,))) and torch.equal(later, late)


def test_only_what_is_read_is_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    seen = OnDevice.__torch_function__

    def note(cls: type, func: object, types: object, args: tuple[Tensor, ...] = (), kwargs: object = None) -> object:
        if func is Tensor.copy_ and type(args[0]) is Tensor:
            copied.append(args[1].numel())
        return seen(func, types, args, kwargs)

    monkeypatch.setattr(OnDevice, "__torch_function__", classmethod(note))
    run(lambda rank: dist.all_gather_into_tensor(on_device(torch.zeros(20)), on_device(fill(rank, (10,)))), 2)
    assert copied == [10, 10]


def test_contiguous_tensors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, call, no_link = fill(0, (4, 3)), AllReduce("sum"), cast("Link", None)
    assert contiguous.contiguous_on_host(tensor, call, no_link) is tensor
    assert contiguous.receive_buffer(tensor, call) is tensor
    assert contiguous.contiguous_on_host(tensor.t(), call, no_link).data_ptr() != tensor.data_ptr()
    on_meta = torch.empty(2, device="meta")
    monkeypatch.undo()
    with pytest.raises(dist.DistBackendError, match="meta"):
        contiguous.contiguous_on_host(on_meta, call, no_link)
    with pytest.raises(dist.DistBackendError, match="meta"):
        contiguous.receive_buffer(on_meta, call)
