"""Tensors that `ref` can't work on where they are: strided ones, and those on a GPU, by way of copies.

Strided tensors go through contiguous copies, so that nothing outside a view is ever written. Tensors of a CUDA device
go through pinned memory of the host, but for ranks that share a device and can lay out data there (`one_gpu`).

A call that its caller waits for works on the caller's current stream: after what that stream still does, and before
what it does next. A call on its way works on a stream that no program uses, after what the caller's current stream
did when it was made (`after`), and is complete only when that stream is idle. So a caller's stream never sees anything
too early, as with NCCL, and only streams that a call is on are ever waited for. Memory is safe without telling the
allocator of streams: a call keeps its tensors until its stream is done with them. Don't add knowledge of groups here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.backends.ref.operands import IN_PLACE
from torchdist_ref.calls import Call
from torchdist_ref.errors import UnsupportedError


def straight(tensor: Tensor, call: Call) -> Tensor:
    """The tensor, or what lies where it does, if that is a plain row of values; else such a copy on the same device.

    Raises:
        UnsupportedError: It is sparse, or on a device that is neither the CPU nor CUDA.
    """
    if not tensor.is_cpu and not tensor.is_cuda:
        raise UnsupportedError(
            f"{call.op}: backend 'ref' works on tensors of the CPU and of CUDA devices, and this one is on "
            f"{tensor.device}. Move it with .cpu()."
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{call.op}: backend 'ref' works on dense tensors, and this one is {tensor.layout}. Use .to_dense()."
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def plain(tensor: Tensor, call: Call) -> Tensor:
    """What `straight` returns, in the host's memory. Raises the same."""
    if _is_plain(tensor):
        return tensor
    found = straight(tensor, call)
    if found.is_cpu:
        return found
    host = _pinned(found)
    host.copy_(found, non_blocking=True)
    settle((found,))
    return host


def blank(tensor: Tensor, call: Call) -> Tensor:
    """As `plain`, for a tensor that is going to be overwritten: what is copied from a device has no values yet."""
    if _is_plain(tensor):
        return tensor
    return _pinned(tensor) if tensor.is_cuda else straight(tensor, call)


def _is_plain(tensor: Tensor) -> bool:
    odd = tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
    return tensor.is_cpu and tensor.is_contiguous() and not odd


def _pinned(tensor: Tensor) -> Tensor:
    # torch keeps such memory for the next call, and hands it out again when no stream has to do with it any more.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def bring_back(result: Tensor, tensor: Tensor) -> None:
    """Copy a result where the caller wants it, unless it is there; on a device, as the current stream's next task."""
    if result.device != tensor.device or not result.is_set_to(tensor):
        tensor.detach().copy_(result, non_blocking=True)


Run = Callable[..., Any]


def through_host(run: Run, call: Call, inputs: int) -> Run:
    """Make what runs on plain tensors of the host run on those of devices.

    Args:
        run: Takes a call's operands, and more.
        call: The call.
        inputs: How many of the operands are inputs only. The others are outputs, and of those only what a call works
            on in place has to be on the host before.
    """

    def run_through_host(tensors: Sequence[Tensor], *more: Any) -> None:
        hosts = [tensor if tensor.is_cpu else _pinned(tensor) for tensor in tensors]
        pairs = list(zip(hosts, tensors, strict=True))
        for host, tensor in pairs if call.op in IN_PLACE else pairs[:inputs]:
            if host is not tensor:
                host.copy_(tensor, non_blocking=True)
        settle(tensors)
        run(hosts, *more)
        for host, tensor in pairs[inputs:]:
            if host is not tensor:
                tensor.copy_(host, non_blocking=True)

    return run_through_host


def settle(tensors: Sequence[Tensor]) -> None:
    """Wait for what the current streams still do to tensors: the host, or another process, is to use them."""
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()


def after(tensors: Sequence[Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """Where to work on tensors on another thread: after what the current streams still do, and not on these streams.

    Returns:
        What makes a context for that. At its end all that was begun in it is done.
    """
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    if not devices:
        return nullcontext
    events = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    @contextmanager
    def aside() -> Iterator[None]:
        with ExitStack() as entered:
            for device, event in events.items():
                stream = _stream(device)
                stream.wait_event(event)
                entered.callback(stream.synchronize)
                entered.enter_context(torch.cuda.stream(stream))
            yield

    return aside


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of calls on their way: on the program's own ones they would come after all that it does meanwhile."""
    return torch.cuda.Stream(device)
