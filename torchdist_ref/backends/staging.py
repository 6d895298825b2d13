"""Tensors that `ref` can't work on where they are: strided ones, and those on a GPU, by way of copies on the host.

Strided tensors go through contiguous copies, so that nothing outside a view is ever written. Tensors of a CUDA device
go through pinned memory of the host: that is slow, and it is enough for two ranks on one GPU, where NCCL refuses. A
call waits for what the caller's current stream still does to its tensors, and puts its results on the current stream
of the thread that carries it out: the caller's, or another that then waits until they are there. So a caller's stream
never sees anything too early, as with NCCL. Don't add fast paths between GPUs: use NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchdist_ref.calls import Call
from torchdist_ref.errors import UnsupportedError


def plain(tensor: Tensor, call: Call) -> Tensor:
    """The tensor itself if it is plain, else a contiguous copy in the host's memory.

    Raises:
        UnsupportedError: It is sparse, or on a device that is neither the CPU nor CUDA.
    """
    if not tensor.is_cpu and not tensor.is_cuda:
        raise UnsupportedError(
            f"{call.op}: backend 'ref' works on tensors of the CPU and of CUDA devices, and this one is on "
            f"{tensor.device}. Move it with .cpu()."
        )
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg()):
        return tensor
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{call.op}: backend 'ref' works on dense tensors, and this one is {tensor.layout}. Use .to_dense()."
        )
    found = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return found if tensor.is_cpu else _on_host(found)


def _on_host(tensor: Tensor) -> Tensor:
    host = _pinned(tensor.shape, tensor.dtype)
    host.copy_(tensor, non_blocking=True)
    settle((tensor,))
    return host


def _pinned(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    # torch keeps such memory for the next call, and hands it out again when no stream has to do with it any more.
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def bring_back(result: Tensor, tensor: Tensor) -> None:
    """Copy a result where the caller wants it, unless it is there; on a device, as the current stream's next task."""
    if result.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(result, non_blocking=True)


def settle(tensors: Sequence[Tensor]) -> None:
    """Wait for what the current streams still do to tensors: the host, or another thread's stream, is to use them."""
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
