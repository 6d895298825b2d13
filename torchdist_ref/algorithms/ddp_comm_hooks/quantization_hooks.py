"""Quantization hooks: each rank rounds its gradients to 256 levels, and all ranks gather and sum them.

A number x becomes the level round(x / scale) + zero. Scale and zero are chosen so that the tensor's range, extended to
include 0, fits into 0 … 255. Every rank has other scales, so levels cannot be summed: ranks gather all levels and sum
the numbers that they stand for. The bytes grow with the number of ranks; beyond eight ranks they exceed those of an
exact average.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future

from torchdist_ref.algorithms.bucket import GradBucket
from torchdist_ref.algorithms.ddp_comm_hooks.hook_support import HookGroup, comm_hook
from torchdist_ref.algorithms.division import average
from torchdist_ref.errors import ArgumentError, explain

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

LEVELS = 255
SMALLEST_SCALE = torch.finfo(torch.float32).eps


@comm_hook
def quantization_pertensor_hook(process_group: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average gradients sent as 8-bit integers, with one scale for the whole bucket.

    Args:
        process_group: The group over which to average, or None for the default group.
        bucket: The gradients.

    Returns:
        A Future of the average, with an error of at most half a level of each rank.

    Raises:
        DistBackendError: A rank died, aborted, or did not call in time. The Future raises the error of a call that has
            begun.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     bucket = dist.GradBucket(buffer=torch.tensor([0.0, 100.0 + 10 * rank, 255.0]))
        ...     return quantization_pertensor_hook(None, bucket).wait().tolist()
        >>> run(program, 2)
        [[0.0, 105.0, 255.0], [0.0, 105.0, 255.0]]

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    return _average(process_group, bucket, max(1, bucket.buffer().numel()))


@comm_hook
def quantization_perchannel_hook(
    process_group: Any, bucket: GradBucket, bucket_size: int = 512
) -> Future[torch.Tensor]:
    """Average gradients sent as 8-bit integers, with a scale for every ``bucket_size`` of them.

    More exact than `quantization_pertensor_hook` if a bucket holds gradients of very different size.

    Args:
        process_group: The group over which to average, or None for the default group.
        bucket: The gradients.
        bucket_size: Elements that share a scale. Default 512.

    Returns:
        A Future of the average, with an error of at most half a level of each rank.

    Raises:
        DistBackendError: A rank died, aborted, or did not call in time. The Future raises the error of a call that has
            begun.
        ArgumentError: ``bucket_size`` is not a positive int.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.quantization_hooks import quantization_perchannel_hook
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     bucket = dist.GradBucket(buffer=torch.tensor([0.0, 255.0, 0.0, 0.00255 * (1 + rank)]))
        ...     return [round(x, 5) for x in quantization_perchannel_hook(None, bucket, 2).wait().tolist()]
        >>> run(program, 2)
        [[0.0, 255.0, 0.0, 0.00383], [0.0, 255.0, 0.0, 0.00383]]

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    if not isinstance(bucket_size, int) or bucket_size < 1:
        raise ArgumentError(explain("quantization_perchannel_hook", "bucket_size", "an int of at least 1", bucket_size))
    return _average(process_group, bucket, bucket_size)


def _average(process_group: Any, bucket: GradBucket, width: int) -> Future[torch.Tensor]:
    """Gather every rank's levels, scales and zeros in one message; sum and divide."""
    group, buffer = HookGroup(process_group, bucket), bucket.buffer()
    everyone, gathered = group.start_gather(pack(rows(buffer, width)))

    def average_levels(future: Future[Any]) -> torch.Tensor:
        future.wait()
        total = torch.stack([unpack(one, width) for one in everyone]).sum(0)
        return average(total.flatten()[: buffer.numel()], group.divisor).to(buffer.dtype)

    return gathered.then(average_levels)


def rows(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """Return the numbers as rows of ``width`` with a scale each; the last row is padded with zeros."""
    missing = -buffer.numel() % width
    return torch.nn.functional.pad(buffer.detach().float(), (0, missing)).view(-1, width)


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """Return scales, zeros and levels of a matrix, row by row, as one run of bytes.

    >>> unpack(pack(torch.tensor([[0.0, 1.0, 255.0]])), 3)
    tensor([[  0.,   1., 255.]])
    """
    low, high = matrix.amin(1).clamp_max(0), matrix.amax(1).clamp_min(0)
    scale = ((high - low) / LEVELS).clamp_min(SMALLEST_SCALE)
    zero = torch.round(-low / scale).clamp_(0, LEVELS)
    levels = torch.round(matrix / scale[:, None]).add_(zero[:, None]).clamp_(0, LEVELS).to(torch.uint8)
    return torch.cat([torch.stack([scale, zero]).view(torch.uint8).flatten(), levels.flatten()])


def unpack(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Return the matrix that `pack` packed, rounded to its levels."""
    count = packed.numel() // (width + 8)
    scale, zero = packed[: 8 * count].clone().view(torch.float32).view(2, count, 1).unbind()
    levels = packed[8 * count :].view(count, width).float()
    return levels.sub_(zero).mul_(scale)
