"""DDP and `ZeroRedundancyOptimizer` together: parameters are updated, and sent to all ranks, inside backward.

Each parameter belongs to one rank. When a bucket's gradients are exchanged, its owners take the optimizer's step, and
broadcast what they have updated. Two hooks differ in when: `hook_with_zero_step` sends parameters once all gradients
are there, `hook_with_zero_step_interleaved` one bucket behind the gradients. Every call is made on the thread that runs
backward, in an order that is the same on all ranks, so both work on every backend. Don't add what an optimizer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.futures import Future

from torchdist_ref.algorithms.ddp_comm_hooks.peers import comm_hook
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain
from torchdist_ref.parallel.bucket import GradBucket

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


class Sharded(Protocol):
    """What the hooks ask of an optimizer; `torchdist_ref.optim.ZeroRedundancyOptimizer` has it."""

    overlap_with_ddp: bool
    rank: int
    world_size: int

    @property
    def assigned(self) -> bool: ...

    def assign(self, params_per_rank: Sequence[Sequence[torch.Tensor]]) -> None: ...

    def owner(self, parameter: torch.Tensor) -> int: ...

    def step_with(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None: ...

    def share(self, parameters: Iterable[torch.Tensor]) -> list[Any]: ...


def hook_with_zero_step(hook: Hook, ddp: Any, zero: Sharded, shard_buckets: bool = False) -> Hook:
    """A hook that does what ``hook`` does, and updates parameters when the last bucket is on its way.

    While later buckets travel, each rank updates what it owns of the earlier ones; when all are updated, parameters are
    sent. In the first two iterations (three with ``static_graph=True``) nothing is updated, because DDP's buckets are
    known only then. Suits links that are slow compared to backward.

    Args:
        hook: Any hook, say ``allreduce_hook``.
        ddp: The DistributedDataParallel on which the result will be registered.
        zero: A `ZeroRedundancyOptimizer` made with ``overlap_with_ddp=True``.
        shard_buckets: Divide each bucket's parameters among the ranks, by size. Default False: whole buckets, in turn.

    Returns:
        A hook with the same state.

    Raises:
        ArgumentError: ``zero`` was made with ``overlap_with_ddp=False``.
        ArgumentTypeError: ``zero`` is another kind of optimizer.

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
    """
    step = _Step(ddp, zero, shard_buckets)

    def hook_with_zero_fn(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        future = hook(state, bucket)
        if step.ready(bucket):
            step.begun.append((bucket, future))
            if bucket.is_last():
                buckets = [begun for begun, _ in step.begun]
                while step.begun:
                    step.update()
                for one in buckets:
                    step.send(one)
                step.wait()
        return future

    return comm_hook(hook_with_zero_fn)


def hook_with_zero_step_interleaved(hook: Hook, ddp: Any, zero: Sharded, shard_buckets: bool = False) -> Hook:
    """A hook that does what ``hook`` does, and updates the parameters of the bucket before, while backward goes on.

    With each bucket that is launched, the one before is waited for, updated and sent. Otherwise like
    `hook_with_zero_step`. Suits fast links.

    Args:
        hook: A hook that makes its calls when it is called, as the default ones do; not one such as PowerSGD, whose
            calls on a thread of its own would get between.
        ddp: The DistributedDataParallel on which the result will be registered.
        zero: A `ZeroRedundancyOptimizer` made with ``overlap_with_ddp=True``.
        shard_buckets: Divide each bucket's parameters among the ranks, by size. Default False: whole buckets, in turn.

    Returns:
        A hook with the same state.

    Raises:
        ArgumentError: ``zero`` was made with ``overlap_with_ddp=False``.
        ArgumentTypeError: ``zero`` is another kind of optimizer.

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
    """
    step = _Step(ddp, zero, shard_buckets)

    def hook_with_zero_interleaved_fn(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        future = hook(state, bucket)
        if step.ready(bucket):
            step.begun.append((bucket, future))
            while len(step.begun) > (0 if bucket.is_last() else 1):
                step.send(step.update())
            if bucket.is_last():
                step.wait()
        return future

    return comm_hook(hook_with_zero_interleaved_fn)


class _Step:
    """One optimizer step, bucket by bucket; its parts are called in an order that the two hooks choose."""

    def __init__(self, ddp: Any, zero: Sharded, shard_buckets: bool) -> None:
        _check(zero)
        self.ddp, self.zero, self.shard_buckets = ddp, zero, shard_buckets
        self.begun: list[tuple[GradBucket, Future[torch.Tensor]]] = []
        self._seen: list[list[torch.Tensor]] = []
        self._sent: list[Any] = []

    def ready(self, bucket: GradBucket) -> bool:
        """Whether parameters have owners. Buckets are looked at until they are final and all are known."""
        if self.zero.assigned:
            if bucket.index() == 0:
                # What is left is of an iteration that failed.
                self.begun.clear()
                self._sent.clear()
            return True
        if bucket.index() == 0:
            self._seen = []
        if self.ddp._has_rebuilt_buckets:
            self._seen.append(list(bucket.parameters()))
            if bucket.is_last():
                self.zero.assign(self._owned())
        return False

    def _owned(self) -> list[list[torch.Tensor]]:
        """For each rank its parameters: the next part (a bucket, or one parameter) goes to whoever has least."""
        parts = [[p] for one in self._seen for p in one] if self.shard_buckets else self._seen
        owned: list[list[torch.Tensor]] = [[] for _ in range(self.zero.world_size)]
        for part in parts:
            min(owned, key=lambda mine: sum(p.numel() for p in mine)).extend(part)
        return owned

    def update(self) -> GradBucket:
        """Wait for the oldest bucket's gradients, and step with what this rank owns of it."""
        bucket, future = self.begun.pop(0)
        value = future.wait()
        if value.data_ptr() != bucket.buffer().data_ptr():
            bucket.set_buffer(value.reshape(-1))
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        mine = {parameter: gradient for parameter, gradient in pairs if self.zero.owner(parameter) == self.zero.rank}
        if mine:
            self.zero.step_with(mine)
        return bucket

    def send(self, bucket: GradBucket) -> None:
        """Begin to send the bucket's parameters from their owners to all."""
        self._sent += self.zero.share(bucket.parameters())

    def wait(self) -> None:
        """Until everything that was sent is there."""
        for work in self._sent:
            work.wait()
        self._sent.clear()


def _check(zero: Any) -> None:
    if not hasattr(zero, "step_with"):
        expected = "a ZeroRedundancyOptimizer of torchdist_ref.optim"
        raise ArgumentTypeError(explain("hook_with_zero_step", "zero", expected, type(zero).__name__))
    if not zero.overlap_with_ddp:
        expected = "made with overlap_with_ddp=True"
        raise ArgumentError(explain("hook_with_zero_step", "zero", expected, "overlap_with_ddp=False"))
