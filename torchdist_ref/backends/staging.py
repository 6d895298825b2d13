"""Tensors that `ref` can't work on where they are: strided ones, and those on a GPU, by way of copies on the host.

Strided tensors go through contiguous copies, so that nothing outside a view is ever written. Tensors of a CUDA device
go through the host's memory: that is slow, and it is enough for two ranks on one GPU, where NCCL refuses. Streams are
waited for on both ways, so a call that is done is done for every stream. Don't add fast paths between GPUs: use NCCL.
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
        UnsupportedError: It is on a device that is neither the CPU nor CUDA.
    """
    if not tensor.is_cpu and not tensor.is_cuda:
        raise UnsupportedError(
            f"{call.op}: backend 'ref' works on tensors of the CPU and of CUDA devices, and this one is on "
            f"{tensor.device}. Move it with .cpu()."
        )
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()


def bring_back(result: Tensor, tensor: Tensor) -> None:
    """Copy a result where the caller wants it, unless it is there. On return no stream has anything left to do."""
    if result.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(result)
        settle((tensor,))


def settle(tensors: Sequence[Tensor]) -> None:
    """Wait for what the current streams still do to tensors: another thread, with other streams, is to use them."""
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
