"""Tensors of a device on `ref`, on a stand-in for one: its streams do nothing before somebody waits for them.

That is the most that a real one may put things off, so whoever forgets to wait reads old values for sure. What only a
real device shows is in `test_on_gpu`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from torchdist_ref.backends import staging
from torchdist_ref.calls import AllReduce
from torchdist_ref.testing import fill, run


class Stream:
    """Tasks that are put off until somebody waits."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        while self.tasks:
            with torch._C.DisableTorchFunctionSubclass():
                self.tasks.pop(0)()


_of_thread = threading.local()


def current_stream(device: object = None) -> Stream:
    """Each thread has a stream of its own: what it puts off no other thread's waiting brings about."""
    if not hasattr(_of_thread, "stream"):
        _of_thread.stream = Stream()
    found: Stream = _of_thread.stream
    return found


class OnDevice(Tensor):
    """A tensor of the stand-in: copies to it and from it that need not be waited for are put off."""

    is_cuda = True
    is_cpu = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            current_stream().tasks.append(lambda: Tensor.copy_(*args[:2]))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


def to_be_doubled(tensor: Tensor) -> Tensor:
    """The caller's stream has yet to double the tensor."""
    current_stream().tasks.append(lambda: tensor.mul_(2))
    return tensor


def seen_by_host(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor).clone()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(staging, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    yield


TOTAL = fill(0, (1000,)) + fill(1, (1000,))


def wait_for_calls(rank: int) -> tuple[bool, Tensor]:
    tensor = to_be_doubled(on_device(fill(rank, (1000,))))
    dist.all_reduce(tensor)
    put_off = bool(current_stream().tasks)
    current_stream().synchronize()
    return put_off, seen_by_host(tensor)


def test_a_call_sees_what_the_stream_was_to_do_and_leaves_the_result_to_it() -> None:
    for put_off, result in run(wait_for_calls, 2):
        assert torch.equal(result, 2 * TOTAL)
        assert put_off, "the host waited for the way back"


def go_on(rank: int) -> Tensor:
    tensor = to_be_doubled(on_device(fill(rank, (1000,))))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None and work.wait()
    return seen_by_host(tensor)


def test_after_wait_the_result_is_there_for_every_stream() -> None:
    assert all(torch.equal(result, 2 * TOTAL) for result in run(go_on, 2))


def lists(rank: int) -> list[Tensor]:
    ours, rows = to_be_doubled(on_device(fill(rank, (50,)))), [on_device(torch.zeros(50)) for _ in range(2)]
    dist.all_gather(rows, ours)
    part = on_device(torch.zeros(25))
    dist.reduce_scatter_tensor(part, ours)
    strided = on_device(fill(rank, (6, 4))).t()
    dist.broadcast(strided, 1)
    current_stream().synchronize()
    return [seen_by_host(tensor) for tensor in (*rows, part, strided)]


def test_lists_blocks_and_strides() -> None:
    data = [fill(rank, (50,)) for rank in range(2)]
    for rank, (first, second, part, strided) in enumerate(run(lists, 2)):
        assert torch.equal(first, 2 * data[0]) and torch.equal(second, 2 * data[1])
        assert torch.equal(part, (2 * data[0] + 2 * data[1])[25 * rank : 25 * rank + 25])
        assert torch.equal(strided, fill(1, (6, 4)).t())


def messages(rank: int) -> list[Tensor]:
    other, got, late = 1 - rank, on_device(torch.zeros(3)), on_device(torch.zeros(3))
    sending = dist.isend(to_be_doubled(on_device(fill(rank, (3,)))), other)
    dist.recv(got, other)
    assert sending is not None and sending.wait()
    receiving = dist.irecv(late, other)
    dist.send(on_device(fill(rank, (3,))), other)
    assert receiving is not None and receiving.wait()
    at_once = seen_by_host(late)
    current_stream().synchronize()
    return [seen_by_host(got), at_once]


def test_messages() -> None:
    for rank, (got, late) in enumerate(run(messages, 2)):
        assert torch.equal(got, 2 * fill(1 - rank, (3,))) and torch.equal(late, fill(1 - rank, (3,)))


def test_what_is_plain_is_not_copied() -> None:
    tensor, call = fill(0, (4, 3)), AllReduce("sum")
    assert staging.plain(tensor, call) is tensor
    assert staging.plain(tensor.t(), call).data_ptr() != tensor.data_ptr()
    with pytest.raises(dist.DistBackendError, match="meta"):
        staging.plain(torch.empty(2, device="meta"), call)
