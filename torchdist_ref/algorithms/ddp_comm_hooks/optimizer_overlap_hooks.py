"""Hooks that DDP or torch's optimizers register: optimizer steps inside backward, and sums of mixed precision.

While autograd computes gradients of the first layers, the parameters of the last ones are updated: the optimizer's time
overlaps with backward, and with `_apply_optim_in_backward_hook` gradients need not be kept. A parameter whose gradient
is complete is not used by backward any more, so it may change. The names are torch's, underscores too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.futures import Future

from torchdist_ref.algorithms.bucket import GradBucket
from torchdist_ref.algorithms.ddp_comm_hooks.hook_support import Hook, HookGroup, comm_hook, single_tensor
from torchdist_ref.algorithms.division import average
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.torch_internals import torch_private

autograd = torch_private.AUTOGRAD.bind()

__all__: list[str] = []


class _OptimizerHookState:
    """Optimizer that `_hook_then_optimizer` runs, and its parameters.

    Args:
        functional_optim: Has a method ``step_param(parameter, gradient)``, as torch's functional optimizers do.
        params: The parameters to update. Default None: all.

    Raises:
        ArgumentError: There is no such method.
    """

    __slots__ = ["functional_optimizer", "params_to_optimize"]

    def __init__(self, functional_optim: Any, params: Any = None) -> None:
        if not hasattr(functional_optim, "step_param"):
            expected = "an optimizer with a method step_param(parameter, gradient)"
            got = type(functional_optim).__name__
            raise ArgumentError(explain("_OptimizerHookState", "functional_optim", expected, got))
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)

    def step(self, bucket: GradBucket) -> None:
        """Update the parameters of one bucket with its gradients."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self.params_to_optimize is None or parameter in self.params_to_optimize:
                self.functional_optimizer.step_param(parameter, gradient)


def _hook_then_optimizer(hook: Hook, optimizer_state: _OptimizerHookState) -> Hook:
    """Return a hook that runs ``hook``, and then updates the bucket's parameters.

    Args:
        hook: Any hook.
        optimizer_state: The optimizer.

    Returns:
        A hook with the same state.

    Example:
        >>> from torchdist_ref.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
        >>> class Descent:
        ...     def step_param(self, parameter, gradient):
        ...         parameter.data -= 0.5 * gradient
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> bucket = GradBucket(buffer=torch.tensor([1.0, 2.0]), parameters=[weight])
        >>> _hook_then_optimizer(noop_hook, _OptimizerHookState(Descent()))(None, bucket).wait()
        tensor([1., 2.])
        >>> weight.tolist()
        [0.5, 0.0]
    """

    def hook_then_optimizer_wrapper(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        def step(done: Future[torch.Tensor]) -> torch.Tensor:
            value, buffer = done.value(), bucket.buffer()
            # Some hooks return their result in other memory than the buffer.
            if value.data_ptr() != buffer.data_ptr():
                buffer.copy_(value.reshape(-1))
            optimizer_state.step(bucket)
            return buffer

        return hook(state, bucket).then(step)

    return comm_hook(hook_then_optimizer_wrapper)


def _apply_optim_in_backward_hook(gradient_is_bucket_view: bool) -> Hook:
    """Return the hook for parameters that carry optimizers, set by torch's ``_apply_optimizer_in_backward``.

    DDP registers it when it finds such parameters. Their gradients are None after backward.

    Args:
        gradient_is_bucket_view: As given to DDP.

    Returns:
        A hook whose state is a weak reference to the DDP.
    """
    finished: list[GradBucket] = []

    def clear_gradients() -> None:
        for bucket in finished:
            for parameter in _with_optimizers(bucket):
                parameter.grad = None
        finished.clear()

    def apply_optim_in_backward_hook(hook_state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        if not finished:
            # DDP copies gradients out in a callback that it queues later than this one. A callback that is queued by a
            # callback runs after all others, so the gradients are cleared after that copy.
            autograd.queue_callback(lambda: autograd.queue_callback(clear_gradients))
        finished.append(bucket)

        def step(done: Future[torch.Tensor]) -> torch.Tensor:
            done.value()
            _step_own_optimizers(bucket, gradient_is_bucket_view)
            return bucket.buffer()

        return HookGroup(hook_state().process_group, bucket).average(bucket).then(step)

    return comm_hook(apply_optim_in_backward_hook)


def _with_optimizers(bucket: GradBucket) -> list[torch.Tensor]:
    return [parameter for parameter in bucket.parameters() if hasattr(parameter, "_in_backward_optimizers")]


def _step_own_optimizers(bucket: GradBucket, gradient_is_bucket_view: bool) -> None:
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        if optimizers and not gradient_is_bucket_view:
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()


@dataclass
class _AllreduceUpcastHookState:
    """State of the hook of ``mixed_precision``.

    Attributes:
        ddp_weakref: A weak reference to the DDP; its group and its `mixed_precision` are used.
        upcast_stream: Accepted for compatibility; nothing runs on it.
        wait_for_stream_enqueued: Accepted for compatibility.
    """

    ddp_weakref: Any
    upcast_stream: Any = None
    wait_for_stream_enqueued: bool = False


@comm_hook
def _reducer_allreduce_and_upcast_hook(
    hook_state: _AllreduceUpcastHookState, bucket: GradBucket
) -> Future[torch.Tensor]:
    """Average gradients in the dtype ``reduce_dtype``: summed first, then divided. DDP registers it itself.

    Args:
        hook_state: Refers to the DDP.
        bucket: The gradients, in ``param_dtype``.

    Returns:
        A Future of the average, in ``reduce_dtype``; the reducer converts it to full precision.
    """
    ddp = hook_state.ddp_weakref()
    config = ddp.mixed_precision
    group = HookGroup(ddp.process_group, bucket)
    summand = bucket.buffer().to(config.reduce_dtype or config.param_dtype or bucket.buffer().dtype)
    return group.start_sum(summand).then(lambda done: average(single_tensor(done), group.divisor))
