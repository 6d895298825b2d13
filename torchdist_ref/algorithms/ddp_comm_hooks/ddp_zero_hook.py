"""Hooks that update a `ZeroRedundancyOptimizer` inside DDP's backward.

Each parameter belongs to one rank. When a bucket's gradients are exchanged, its owners run the optimizer's step and
broadcast the updated parameters. `hook_with_zero_step` broadcasts when all gradients are exchanged,
`hook_with_zero_step_interleaved` one bucket behind the gradients. Every collective is called on the thread that runs
backward, in the same order on all ranks, so both work on every backend. Do not add the arithmetic of optimizers here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.futures import Future

from torchdist_ref.algorithms.bucket import GradBucket
from torchdist_ref.algorithms.ddp_comm_hooks.hook_support import Hook, comm_hook
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


class ShardedOptimizer(Protocol):
    """Interface of an optimizer for the hooks; `torchdist_ref.optim.ZeroRedundancyOptimizer` has it."""

    overlap_with_ddp: bool
    rank: int
    world_size: int

    @property
    def assigned(self) -> bool:
        """Whether parameters have owners."""

    def assign(self, params_per_rank: Sequence[Sequence[torch.Tensor]]) -> None:
        """Give each rank its parameters."""

    def owner(self, parameter: torch.Tensor) -> int:
        """Return the rank that updates a parameter."""

    def step_with(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Update some parameters with given gradients."""

    def share(self, parameters: Iterable[torch.Tensor]) -> list[Any]:
        """Start to send parameters from their owners to all ranks."""


def hook_with_zero_step(hook: Hook, ddp: Any, zero: ShardedOptimizer, shard_buckets: bool = False) -> Hook:
    """Return a hook that runs ``hook``, and updates parameters when the last bucket is launched.

    While later buckets are exchanged, each rank updates its parameters of the earlier ones; when all are updated,
    parameters are broadcast. The first two iterations (three with ``static_graph=True``) update nothing, because DDP's
    buckets are not final. Suits links that are slow compared to backward.

    Args:
        hook: Any hook, say ``allreduce_hook``.
        ddp: The DistributedDataParallel on which the result will be registered.
        zero: A `ZeroRedundancyOptimizer` made with ``overlap_with_ddp=True``.
        shard_buckets: Divide each bucket's parameters among the ranks, by size. Default False: whole buckets, in turn.

    Returns:
        A hook with the same state.

    Raises:
        ArgumentError: ``zero`` was made with ``overlap_with_ddp=False``.
        ArgumentTypeError: ``hook`` cannot be called, or ``zero`` is another kind of optimizer.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        >>> from torchdist_ref.optim import ZeroRedundancyOptimizer
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     ddp = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     torch.nn.init.ones_(ddp.module.weight)
        ...     zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.5)
        ...     ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
        ...     weights = []
        ...     for _ in range(4):
        ...         ddp(torch.tensor([[rank + 0.5]])).sum().backward()
        ...         weights.append(ddp.module.weight.item())
        ...         ddp.zero_grad()
        ...     return weights
        >>> run(program, 2)
        [[1.0, 1.0, 0.5, 0.0], [1.0, 1.0, 0.5, 0.0]]

    Elsewhere:
        None in MPI and NCCL; in JAX, ``jax.jit`` with an optimizer state that is sharded over the data axis.
    """
    _check("hook_with_zero_step", hook, zero)
    step = _BucketwiseStep(ddp, zero, shard_buckets)

    def hook_with_zero_fn(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        future = hook(state, bucket)
        if step.ready(bucket):
            step.launched.append((bucket, future))
            if bucket.is_last():
                buckets = [launched for launched, _ in step.launched]
                while step.launched:
                    step.update()
                for one in buckets:
                    step.broadcast(one)
                step.wait()
        return future

    return comm_hook(hook_with_zero_fn)


def hook_with_zero_step_interleaved(hook: Hook, ddp: Any, zero: ShardedOptimizer, shard_buckets: bool = False) -> Hook:
    """Return a hook that runs ``hook``, and updates the parameters of the previous bucket, while backward continues.

    With each bucket that is launched, the hook waits for the previous one, updates its parameters and broadcasts them.
    Otherwise like `hook_with_zero_step`. Suits fast links.

    Args:
        hook: A hook that makes its collectives when it is called, as the default ones do. PowerSGD makes them on a
            thread of its own, so their order would be undefined.
        ddp: The DistributedDataParallel on which the result will be registered.
        zero: A `ZeroRedundancyOptimizer` made with ``overlap_with_ddp=True``.
        shard_buckets: Divide each bucket's parameters among the ranks, by size. Default False: whole buckets, in turn.

    Returns:
        A hook with the same state.

    Raises:
        ArgumentError: ``zero`` was made with ``overlap_with_ddp=False``.
        ArgumentTypeError: ``hook`` cannot be called, or ``zero`` is another kind of optimizer.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
        >>> from torchdist_ref.optim import ZeroRedundancyOptimizer
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     ddp = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     torch.nn.init.ones_(ddp.module.weight)
        ...     zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.5)
        ...     hook = ddp_zero_hook.hook_with_zero_step_interleaved(default_hooks.allreduce_hook, ddp, zero)
        ...     ddp.register_comm_hook(None, hook)
        ...     for _ in range(3):
        ...         ddp.zero_grad()
        ...         ddp(torch.tensor([[rank + 0.5]])).sum().backward()
        ...     return ddp.module.weight.item()
        >>> run(program, 2)
        [0.5, 0.5]

    Elsewhere:
        None in MPI and NCCL; in JAX, ``jax.jit`` with an optimizer state that is sharded over the data axis.
    """
    _check("hook_with_zero_step_interleaved", hook, zero)
    step = _BucketwiseStep(ddp, zero, shard_buckets)

    def hook_with_zero_interleaved_fn(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        future = hook(state, bucket)
        if step.ready(bucket):
            step.launched.append((bucket, future))
            while len(step.launched) > (0 if bucket.is_last() else 1):
                step.broadcast(step.update())
            if bucket.is_last():
                step.wait()
        return future

    return comm_hook(hook_with_zero_interleaved_fn)


class _BucketwiseStep:
    """One optimizer step, bucket by bucket; the two hooks call its parts in different orders."""

    def __init__(self, ddp: Any, zero: ShardedOptimizer, shard_buckets: bool) -> None:
        self.ddp, self.zero, self.shard_buckets = ddp, zero, shard_buckets
        self.launched: list[tuple[GradBucket, Future[torch.Tensor]]] = []
        self._seen: list[list[torch.Tensor]] = []
        self._broadcasts: list[Any] = []

    def ready(self, bucket: GradBucket) -> bool:
        """Return whether parameters have owners; record buckets until they are final and assign owners then."""
        if self.zero.assigned:
            if bucket.index() == 0:
                # An iteration that failed may have left buckets and broadcasts behind.
                self.launched.clear()
                self._broadcasts.clear()
            return True
        if bucket.index() == 0:
            self._seen = []
        if self.ddp._has_rebuilt_buckets:  # noqa: SLF001 (torch's name)
            self._seen.append(list(bucket.parameters()))
            if bucket.is_last():
                self.zero.assign(self._division())
        return False

    def _division(self) -> list[list[torch.Tensor]]:
        """Return each rank's parameters: the next part (a bucket, or one parameter) goes to the rank with least."""
        parts = [[p] for one in self._seen for p in one] if self.shard_buckets else self._seen
        owned: list[list[torch.Tensor]] = [[] for _ in range(self.zero.world_size)]
        for part in parts:
            min(owned, key=lambda mine: sum(p.numel() for p in mine)).extend(part)
        return owned

    def update(self) -> GradBucket:
        """Wait for the oldest bucket's gradients, and update this rank's parameters of it."""
        bucket, future = self.launched.pop(0)
        value = future.wait()
        if value.data_ptr() != bucket.buffer().data_ptr():
            bucket.set_buffer(value.reshape(-1))
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        mine = {parameter: gradient for parameter, gradient in pairs if self.zero.owner(parameter) == self.zero.rank}
        if mine:
            self.zero.step_with(mine)
        return bucket

    def broadcast(self, bucket: GradBucket) -> None:
        """Start to send the bucket's parameters from their owners to all."""
        self._broadcasts += self.zero.share(bucket.parameters())

    def wait(self) -> None:
        """Wait for all broadcasts."""
        for work in self._broadcasts:
            work.wait()
        self._broadcasts.clear()


def _check(operation: str, hook: Any, zero: Any) -> None:
    if not callable(hook):
        raise ArgumentTypeError(explain(operation, "hook", "a communication hook", hook))
    if not hasattr(zero, "step_with"):
        expected = "a ZeroRedundancyOptimizer of torchdist_ref.optim"
        raise ArgumentTypeError(explain(operation, "zero", expected, type(zero).__name__))
    if not zero.overlap_with_ddp:
        raise ArgumentError(explain(operation, "zero", "made with overlap_with_ddp=True", "overlap_with_ddp=False"))
