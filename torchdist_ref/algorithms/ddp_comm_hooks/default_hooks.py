"""The everyday hooks: average the gradients, in their own precision or in half of it.

Half precision halves what travels and costs two conversions, so it pays where the link is the
bottleneck. Each hook divides before it sums, so that sums of half-precision numbers stay in range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from torchdist_ref.algorithms.ddp_comm_hooks.peers import Peers, comm_hook, only, promises, restored, rounded
from torchdist_ref.parallel.bucket import GradBucket

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


@comm_hook
def allreduce_hook(process_group: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients over the ranks: what DDP does without a hook. A starting point for hooks that also watch.

    Args:
        process_group: The group over which to average, or None for the default group.
        bucket: The gradients; averaged in place.

    Returns:
        A Future of the bucket's buffer, holding the average on every rank.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        >>> from torchdist_ref.testing import fill, run
        >>> def program(rank):
        ...     bucket = dist.GradBucket(buffer=torch.tensor([1.0, 10.0 * rank]))
        ...     return allreduce_hook(None, bucket).wait().tolist()
        >>> run(program, 2)
        [[1.0, 5.0], [1.0, 5.0]]
    """
    return average(Peers(process_group, bucket), bucket)


# Our DDP may divide gradients while it lays them into the bucket, or average them where they lie, without a bucket.
vars(allreduce_hook)["only_averages"] = True


def average(peers: Peers, bucket: GradBucket) -> Future[torch.Tensor]:
    """Begin to average the bucket's buffer over the ranks, in place."""
    return peers.sum(peers.divided(bucket, bucket.buffer())).then(only)


def _compressed_average(dtype: torch.dtype, process_group: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    peers = Peers(process_group, bucket)
    buffer = bucket.buffer()
    small = peers.divided(bucket, rounded(bucket, dtype))
    return peers.sum(small).then(lambda future: restored(bucket, buffer, only(future)))


@comm_hook
def fp16_compress_hook(process_group: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients as 16-bit floats (5 bits of exponent, 10 of fraction): half the bytes, 3 decimal digits.

    Args:
        process_group: The group over which to average, or None for the default group.
        bucket: The gradients; averaged in place. Values beyond 65504 become infinite.

    Returns:
        A Future of the bucket's buffer, in its own precision again.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        >>> from torchdist_ref.parallel import GradBucket
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     return fp16_compress_hook(None, GradBucket(buffer=torch.tensor([1 / 3]))).wait().item()
        >>> [round(value, 6) for value in run(program, 2)]
        [0.333252, 0.333252]
    """
    return _compressed_average(torch.float16, process_group, bucket)


# Our DDP may round gradients while it takes them, then divide them, and leave their conversion back to the moment when
# it hands them out; or do all of that where they lie.
vars(fp16_compress_hook).update(takes_rounded=torch.float16, only_averages=True)


@comm_hook
def bf16_compress_hook(process_group: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients as bfloat16 (8 bits of exponent, 7 of fraction): half the bytes, the range of float32.

    Runs on every backend. torch's DDP refuses any hook of this *name* on CPU builds; there, register it under another:
    ``half = lambda state, bucket: bf16_compress_hook(state, bucket)``.

    Args:
        process_group: The group over which to average, or None for the default group.
        bucket: The gradients; averaged in place, with 2 to 3 decimal digits.

    Returns:
        A Future of the bucket's buffer, in its own precision again.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        >>> from torchdist_ref.parallel import GradBucket
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     return bf16_compress_hook(None, GradBucket(buffer=torch.tensor([1e38]))).wait().item() > 9.9e37
        >>> run(program, 2)
        [True, True]
    """
    return _compressed_average(torch.bfloat16, process_group, bucket)


vars(bf16_compress_hook).update(takes_rounded=torch.bfloat16, only_averages=True)


def _wrapper(dtype: torch.dtype, hook: Hook, name: str) -> Hook:
    def wrapped(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        bucket.set_buffer(rounded(bucket, dtype))
        return hook(state, bucket).then(lambda future: restored(bucket, buffer, future.value()))

    wrapped.__name__ = wrapped.__qualname__ = name
    says = promises(hook)
    # A hook that rounds once more divides after that.
    vars(wrapped).update(takes_rounded=dtype, only_averages=says.get("only_averages") and "takes_rounded" not in says)
    return comm_hook(wrapped)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Let ``hook`` see the gradients as 16-bit floats, and convert what it returns back.

    Args:
        hook: Any hook, say ``powerSGD_hook``; its bucket's buffer and gradients have dtype ``torch.float16``.

    Returns:
        A hook with the same state.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
        >>> from torchdist_ref.parallel import GradBucket
        >>> bucket = GradBucket(buffer=torch.tensor([1.0001]))
        >>> fp16_compress_wrapper(noop_hook)(None, bucket).wait()
        tensor([1.])
    """
    return _wrapper(torch.float16, hook, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Let ``hook`` see the gradients as bfloat16, and convert what it returns back.

    Args:
        hook: Any hook; its bucket's buffer and gradients have dtype ``torch.bfloat16``.

    Returns:
        A hook with the same state.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper
        >>> from torchdist_ref.parallel import GradBucket
        >>> bucket = GradBucket(buffer=torch.tensor([1.001]))
        >>> bf16_compress_wrapper(noop_hook)(None, bucket).wait()
        tensor([1.])
    """
    return _wrapper(torch.bfloat16, hook, "bf16_compress_wrapper_hook")
