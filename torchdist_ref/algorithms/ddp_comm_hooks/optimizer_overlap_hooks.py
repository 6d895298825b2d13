"""Optimizer steps inside backward: a bucket's parameters are updated as soon as its gradients are exchanged.

While autograd still works on the layers before, the parameters of the layers behind take their step: the optimizer's
time is hidden, and with `_apply_optim_in_backward_hook` gradients need not be kept. When a parameter's gradient is
complete, backward has no more use for the parameter, so it may change. The names are torch's, underscores too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.futures import Future

from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import average
from torchdist_ref.algorithms.ddp_comm_hooks.peers import Peers, comm_hook
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.parallel.bucket import GradBucket

__all__: list[str] = []

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


class _OptimizerHookState:
    """An optimizer that `_hook_then_optimizer` runs, and on what.

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
    """A hook that does what ``hook`` does, and then updates the bucket's parameters.

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
            # Some hooks leave their result in memory of its own.
            if value.data_ptr() != buffer.data_ptr():
                buffer.copy_(value.reshape(-1))
            optimizer_state.step(bucket)
            return buffer

        return hook(state, bucket).then(step)

    return comm_hook(hook_then_optimizer_wrapper)


def _apply_optim_in_backward_hook(gradient_is_bucket_view: bool) -> Hook:
    """The hook for parameters that carry optimizers of their own, as ``_apply_optimizer_in_backward`` leaves them.

    DDP registers it when it finds such parameters. Their gradients are None after backward.

    Args:
        gradient_is_bucket_view: As given to DDP.

    Returns:
        A hook whose state is a weak reference to the DDP.
    """
    forgetting: list[GradBucket] = []

    def forget() -> None:
        for bucket in forgetting:
            for parameter in _with_optimizers(bucket):
                parameter.grad = None
        forgetting.clear()

    def apply_optim_in_backward_hook(hook_state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        if not forgetting:
            # Queued twice, to come after DDP itself, which hands gradients out in a callback that it queues later.
            Variable._execution_engine.queue_callback(lambda: Variable._execution_engine.queue_callback(forget))
        forgetting.append(bucket)

        def step(done: Future[torch.Tensor]) -> torch.Tensor:
            done.value()
            _step_own_optimizers(bucket, gradient_is_bucket_view)
            return bucket.buffer()

        return average(Peers(hook_state().process_group, bucket), bucket).then(step)

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
