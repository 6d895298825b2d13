"""Copies of tensors that `ref` can't work on in place: strided ones, and those on an accelerator.

Strided tensors go through contiguous copies, so that nothing outside a view is ever written. Tensors of an accelerator
go through pinned host memory, except where all ranks share a device whose memory processes can share (`one_gpu`).

A call that its caller waits for works on the caller's current stream: after the stream's earlier tasks and before its
later ones. An asynchronous call works on a side stream, after the tasks that the caller's current stream had when the
call was made (`side_streams`), and completes only when the side stream is idle. So no stream of the caller sees a
result too early, as with NCCL, and only streams of calls are ever waited for. The allocator need not know of side
streams: a call keeps its tensors until its stream is done with them. Do not add knowledge of groups here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from torchdist_ref.backends.ref.plan import Plan
from torchdist_ref.calls import IN_PLACE, Call
from torchdist_ref.errors import RankStalledError, UnsupportedError
from torchdist_ref.torch_internals import accelerators
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.transports.link import Link

_COMPLEX = (torch.complex64, torch.complex128, torch.complex32)


def device_types() -> Sequence[str]:
    """Return the types of the devices whose tensors `ref` takes in this process."""
    return accelerators.usable_types()


def contiguous(tensor: Tensor, call: Call) -> Tensor:
    """Return the values of a tensor as a contiguous row: its own memory if that is one, else a copy on its device.

    Raises:
        UnsupportedError: It is sparse, or on a device that is neither the CPU nor an accelerator.
    """
    if not tensor.is_cpu and not accelerators.is_accelerator(tensor.device):
        raise UnsupportedError(
            f"{call.op}: backend 'ref' works on tensors of the CPU and of accelerators, and this one is on "
            f"{tensor.device}. Move it with .cpu()."
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{call.op}: backend 'ref' works on dense tensors, and this one is {tensor.layout}. Use .to_dense()."
        )
    return tensor.resolve_conj().resolve_neg().contiguous()


def contiguous_on_host(tensor: Tensor, call: Call, link: Link) -> Tensor:
    """Return what `contiguous` returns, in host memory; raise the same, and what `settle` raises."""
    if _is_flat_on_host(tensor):
        return tensor
    refuse_capture((tensor,), call.op)
    with outside_modes():
        found = contiguous(tensor, call)
        if found.is_cpu:
            return found
        host = pinned(found)
        host.copy_(found, non_blocking=True)
        settle((found,), link, str(call))
        return host


def receive_buffer(tensor: Tensor, call: Call) -> Tensor:
    """Return memory for a tensor's new values, as `contiguous_on_host` but without copying old ones from a device."""
    if _is_flat_on_host(tensor):
        return tensor
    refuse_capture((tensor,), call.op)
    with outside_modes():
        on_accelerator = not tensor.is_cpu and accelerators.is_accelerator(tensor.device)
        return pinned(tensor) if on_accelerator else contiguous(tensor, call)


def _is_flat_on_host(tensor: Tensor) -> bool:
    """Return whether the bytes of a tensor are in host memory in order, so that they are copied as they are."""
    # Each question costs a hundredth of a small message. Of real numbers none is conjugated.
    differs = tensor.is_neg() or (tensor.dtype in _COMPLEX and tensor.is_conj())
    return tensor.is_cpu and tensor.is_contiguous() and not differs


def pinned(tensor: Tensor) -> Tensor:
    """Return uninitialized memory of the host for a tensor: pinned for one of an accelerator, for fast copies."""
    # torch caches pinned memory, and reuses it once no stream uses it any more.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=not tensor.is_cpu)


def refuse_capture(tensors: Sequence[Tensor], operation: str) -> None:
    """Raise if a graph of a device's tasks is being recorded: this backend's host would not run when it is replayed.

    Raises:
        UnsupportedError: One is.
    """
    for device in accelerators.devices_of(tensors):
        if accelerators.is_capturing(device):
            raise UnsupportedError(
                f"{operation}: backend 'ref' cannot be captured in a graph of {device}: the host takes part in every "
                f"call, and a replay would not run it. Make the call outside of the capture, or use backend 'nccl'."
            )


def copy_back(result: Tensor, tensor: Tensor) -> None:
    """Copy a result to the caller's tensor unless it is there; on a device, as the current stream's next task."""
    if result.device != tensor.device or not result.is_set_to(tensor):
        tensor.copy_(result, non_blocking=True)


def copy_to_host(plan: Plan, tensors: Sequence[Tensor], link: Link) -> Sequence[Tensor]:
    """Return the operands of a call in the host's memory: those of devices as copies. Raise what `settle` raises.

    Outputs have no values yet that need copying, but for those that the call works on in place.
    """
    if plan.on_host:
        return tensors
    hosts = [tensor if tensor.is_cpu else pinned(tensor) for tensor in tensors]
    for host, tensor in list(zip(hosts, tensors, strict=True))[: None if plan.op in IN_PLACE else plan.inputs]:
        if host is not tensor:
            host.copy_(tensor, non_blocking=True)
    settle(tensors, link, plan.text)
    return hosts


def copy_from_host(plan: Plan, hosts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy the outputs of a call from the host's memory back to devices, as the current streams' next task."""
    if plan.on_host:
        return
    for host, tensor in list(zip(hosts, tensors, strict=True))[plan.inputs :]:
        if host is not tensor:
            tensor.copy_(host, non_blocking=True)


def settle(tensors: Sequence[Tensor], link: Link, description: str) -> None:
    """Wait for the current streams' tasks, before the host or another process uses tensors.

    Args:
        tensors: The tensors; those of the CPU have no stream.
        link: The group's link, for its time-out.
        description: The call, for messages.

    Raises:
        RankStalledError: The tasks did not end within the time-out.
    """
    for device in accelerators.devices_of(tensors):
        _finish(accelerators.current_stream(device), link, description)


def _finish(stream: torch.Stream, link: Link, description: str) -> None:
    if not accelerators.finish(stream, link.timeout):
        raise RankStalledError(
            f"{link.context(description)}: the tasks before it on a stream of {stream.device} did not end within "
            f"{link.timeout:g} s. One of them may wait for a rank that waits for this one. Look at what this rank "
            f"started on the device before the call."
        ).naming((link.members[link.rank],))


def side_streams(tensors: Sequence[Tensor], link: Link, description: str) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes a context in which another thread works on tensors on side streams.

    The side streams first wait for the tasks that the current streams have now. At the end of the context, everything
    begun in it is done; it raises what `settle` raises.
    """
    devices = accelerators.devices_of(tensors)
    if not devices:
        return nullcontext
    events = {device: accelerators.current_stream(device).record_event() for device in devices}

    @contextmanager
    def on_side_streams() -> Iterator[None]:
        with ExitStack() as entered:
            for device, event in events.items():
                stream = accelerators.side_stream(device)
                stream.wait_event(event)
                entered.callback(partial(_finish, stream, link, description))
                entered.enter_context(accelerators.on_stream(stream))
            yield

    return on_side_streams
