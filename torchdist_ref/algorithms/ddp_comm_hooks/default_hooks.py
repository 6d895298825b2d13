"""Hooks of one collective: exact and 16-bit averages, local SGD, and no communication.

16-bit floats halve the bytes and cost two conversions, so they pay where the link is the bottleneck. Each hook divides
before it sums, so that sums of 16-bit floats stay in range. Do not add hooks of several rounds or optimizers here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.futures import Future

from torchdist_ref.algorithms.bucket import GradBucket
from torchdist_ref.algorithms.ddp_comm_hooks.hook_support import (
    Hook,
    HookGroup,
    comm_hook,
    converted_back,
    hook_traits,
    single_tensor,
    traits_of,
    wire_buffer,
)
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain
from torchdist_ref.groups import new_subgroups

__all__ = [
    "BuiltinCommHookType",
    "PostLocalSGDState",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
]

logger = logging.getLogger("torchdist_ref.algorithms")


@hook_traits(only_averages=True)
@comm_hook
def allreduce_hook(process_group: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients over the ranks, as DDP does without a hook. A starting point for hooks of your own.

    Args:
        process_group: The group over which to average, or None for the default group.
        bucket: The gradients; averaged in place.

    Returns:
        A Future of the bucket's buffer, holding the average on every rank.

    Raises:
        DistBackendError: A rank died, aborted, or did not call in time. The Future raises the error of a call that has
            begun.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        >>> from torchdist_ref.testing import fill, run
        >>> def program(rank):
        ...     bucket = dist.GradBucket(buffer=torch.tensor([1.0, 10.0 * rank]))
        ...     return allreduce_hook(None, bucket).wait().tolist()
        >>> run(program, 2)
        [[1.0, 5.0], [1.0, 5.0]]

    Elsewhere:
        ``MPI_Allreduce`` and a division in MPI; ``ncclAllReduce`` with ``ncclAvg`` in NCCL; ``jax.lax.pmean`` in JAX.
    """
    return HookGroup(process_group, bucket).average(bucket)


def _compressed_average(dtype: torch.dtype, process_group: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    group, buffer = HookGroup(process_group, bucket), bucket.buffer()
    rounded = group.divide(bucket, wire_buffer(bucket, dtype))
    return group.start_sum(rounded).then(lambda future: converted_back(bucket, buffer, single_tensor(future)))


@hook_traits(only_averages=True, wire_dtype=torch.float16)
@comm_hook
def fp16_compress_hook(process_group: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients as float16 (5 bits of exponent, 10 of fraction): half the bytes, 3 decimal digits.

    Args:
        process_group: The group over which to average, or None for the default group.
        bucket: The gradients; averaged in place. Values beyond 65504 become infinite.

    Returns:
        A Future of the bucket's buffer, in its own precision again.

    Raises:
        DistBackendError: A rank died, aborted, or did not call in time. The Future raises the error of a call that has
            begun.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        >>> from torchdist_ref.parallel import GradBucket
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     return fp16_compress_hook(None, GradBucket(buffer=torch.tensor([1 / 3]))).wait().item()
        >>> [round(value, 6) for value in run(program, 2)]
        [0.333252, 0.333252]

    Elsewhere:
        None in MPI, whose standard has no 16-bit floats; ``ncclAllReduce`` of ``ncclFloat16`` in NCCL;
        ``jax.lax.pmean`` of gradients cast to ``float16`` in JAX.
    """
    return _compressed_average(torch.float16, process_group, bucket)


@hook_traits(only_averages=True, wire_dtype=torch.bfloat16)
@comm_hook
def bf16_compress_hook(process_group: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients as bfloat16 (8 bits of exponent, 7 of fraction): half the bytes, the range of float32.

    Runs on every backend. torch's DDP refuses any hook of this *name* on CPU builds; there, register it under another:
    ``compressed = lambda state, bucket: bf16_compress_hook(state, bucket)``.

    Args:
        process_group: The group over which to average, or None for the default group.
        bucket: The gradients; averaged in place, with 2 to 3 decimal digits.

    Returns:
        A Future of the bucket's buffer, in its own precision again.

    Raises:
        DistBackendError: A rank died, aborted, or did not call in time. The Future raises the error of a call that has
            begun.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        >>> from torchdist_ref.parallel import GradBucket
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     return bf16_compress_hook(None, GradBucket(buffer=torch.tensor([1e38]))).wait().item() > 9.9e37
        >>> run(program, 2)
        [True, True]

    Elsewhere:
        None in MPI, whose standard has no 16-bit floats; ``ncclAllReduce`` of ``ncclBfloat16`` in NCCL;
        ``jax.lax.pmean`` of gradients cast to ``bfloat16`` in JAX.
    """
    return _compressed_average(torch.bfloat16, process_group, bucket)


def _wrapper(dtype: torch.dtype, hook: Hook, name: str) -> Hook:
    if not callable(hook):
        raise ArgumentTypeError(explain(name.removesuffix("_hook"), "hook", "a communication hook", hook))

    def wrapped(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        bucket.set_buffer(wire_buffer(bucket, dtype))
        return hook(state, bucket).then(lambda future: converted_back(bucket, buffer, future.value()))

    wrapped.__name__ = wrapped.__qualname__ = name
    inner = traits_of(hook)
    # A hook that rounds once more divides after that.
    averages = inner.only_averages and inner.wire_dtype is None
    return hook_traits(only_averages=averages, wire_dtype=dtype)(comm_hook(wrapped))


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Let ``hook`` see the gradients as float16, and convert its result back.

    Args:
        hook: Any hook, say ``powerSGD_hook``; its bucket's buffer and gradients have dtype ``torch.float16``.

    Returns:
        A hook with the same state.

    Raises:
        ArgumentTypeError: ``hook`` cannot be called.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
        >>> from torchdist_ref.parallel import GradBucket
        >>> bucket = GradBucket(buffer=torch.tensor([1.0001]))
        >>> fp16_compress_wrapper(noop_hook)(None, bucket).wait()
        tensor([1.])

    Elsewhere:
        None in MPI and NCCL; in JAX, casts to ``float16`` and back around a function of the gradients.
    """
    return _wrapper(torch.float16, hook, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Let ``hook`` see the gradients as bfloat16, and convert its result back.

    Args:
        hook: Any hook; its bucket's buffer and gradients have dtype ``torch.bfloat16``.

    Returns:
        A hook with the same state.

    Raises:
        ArgumentTypeError: ``hook`` cannot be called.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper
        >>> from torchdist_ref.parallel import GradBucket
        >>> bucket = GradBucket(buffer=torch.tensor([1.001]))
        >>> bf16_compress_wrapper(noop_hook)(None, bucket).wait()
        tensor([1.])

    Elsewhere:
        None in MPI and NCCL; in JAX, casts to ``bfloat16`` and back around a function of the gradients.
    """
    return _wrapper(torch.bfloat16, hook, "bf16_compress_wrapper_hook")


@hook_traits(keeps_buffer=True)
@comm_hook
def noop_hook(_: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Exchange nothing: every rank keeps its own gradients, so replicas drift apart.

    A step with this hook costs what it would cost on an infinitely fast link. If that is hardly less than with the real
    hook, no other hook helps. Gradients are packed into buckets as always, but not copied back: they are unchanged.

    Args:
        _: Any state; not used.
        bucket: The gradients.

    Returns:
        A finished Future of the bucket's buffer, unchanged.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
        >>> from torchdist_ref.parallel import GradBucket
        >>> noop_hook(None, GradBucket(buffer=torch.ones(2))).wait()
        tensor([1., 1.])

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


class PostLocalSGDState:
    """Groups of `post_localSGD_hook`, and the step at which the second replaces the first.

    Args:
        process_group: The group for the first steps; None for the default group.
        subgroup: The group for the later ones, one that this rank is in. None for the ranks of this host, of which each
            has a GPU; their group is made with the first of those steps.
        start_localSGD_iter: Number of steps over ``process_group``.
        post_local_gradient_allreduce: Whether later steps are averaged at all. Default True.

    Raises:
        ArgumentError: Later steps are to be averaged, and there is neither a subgroup nor a GPU.

    Example:
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
        >>> state = PostLocalSGDState(None, None, start_localSGD_iter=100, post_local_gradient_allreduce=False)
        >>> state.iter
        0

    Elsewhere:
        None in MPI, NCCL and JAX.
    """

    __slots__ = ("iter", "post_local_gradient_allreduce", "process_group", "start_localSGD_iter", "subgroup")

    def __init__(
        self,
        process_group: Any,
        subgroup: Any,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if not isinstance(start_localSGD_iter, int):
            raise ArgumentTypeError(explain("PostLocalSGDState", "start_localSGD_iter", "an int", start_localSGD_iter))
        if subgroup is None and post_local_gradient_allreduce and not torch.accelerator.device_count():
            hint = "Make one of the ranks of each host with new_group, or pass post_local_gradient_allreduce=False."
            raise ArgumentError(explain("PostLocalSGDState", "subgroup", "a group", None, hint=hint))
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step when its last bucket is launched."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("Local SGD begins after %d steps.", self.iter)


@comm_hook
def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average over all ranks for the first steps, then over the subgroup, or not at all.

    A model averager averages the replicas now and then, after the optimizer's step (T. Lin, S. Stich, K. K. Patel,
    M. Jaggi, *Don't Use Large Mini-Batches, Use Local SGD*, ICLR 2020).

    Args:
        state: The groups, and the step at which one replaces the other.
        bucket: The gradients; averaged in place.

    Returns:
        A Future of the bucket's buffer, with the average over this step's group.

    Raises:
        DistBackendError: A rank died, aborted, or did not call in time. The Future raises the error of a call that has
            begun.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        ...     PostLocalSGDState, post_localSGD_hook)
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     state = PostLocalSGDState(None, None, 1, post_local_gradient_allreduce=False)
        ...     steps = [dist.GradBucket(buffer=torch.tensor([4.0 * rank])) for _ in range(2)]
        ...     return [post_localSGD_hook(state, bucket).wait().item() for bucket in steps]
        >>> run(program, 2)
        [[2.0, 0.0], [2.0, 4.0]]

    Elsewhere:
        An all-reduce on a communicator of one host in MPI and NCCL; ``jax.lax.pmean`` over one of two mesh axes in JAX.
    """
    if not hasattr(state, "start_localSGD_iter"):
        raise ArgumentTypeError(explain("post_localSGD_hook", "state", "a PostLocalSGDState", state))
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return HookGroup(state.process_group, bucket).average(bucket)
    if not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    if state.subgroup is None:
        state.subgroup, _ = new_subgroups()
    return HookGroup(state.subgroup, bucket).average(bucket)


class BuiltinCommHookType(Enum):
    """Hooks of ``DistributedDataParallel._register_builtin_comm_hook``, by torch's names; torch's members work too.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        ...     model(torch.tensor([[4.0 * rank]])).sum().backward()
        ...     return model.module.weight.grad.item()
        >>> run(program, 2)
        [2.0, 2.0]
    """

    ALLREDUCE = 1
    FP16_COMPRESS = 2


def builtin_hook(kind: Any) -> Callable[..., Any]:
    """Return the hook of a member of `BuiltinCommHookType`, ours or torch's.

    Raises:
        ArgumentTypeError: It is no such member.
    """
    hooks = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}
    if type(kind).__name__ != "BuiltinCommHookType":
        hint = "A function goes to register_comm_hook(state, hook)."
        expected = "a member of BuiltinCommHookType"
        raise ArgumentTypeError(explain("_register_builtin_comm_hook", "comm_hook_type", expected, kind, hint=hint))
    return hooks[kind.name]
