"""Optional modes of DDP: mixed precision, gradients averaged together late, and optimizers inside backward.

Each part is given the parameters that it needs and does not know the others, nor DDP. `LowPrecision` exchanges the data
of parameters around forward and backward. `DelayedParameters` averages one flat tensor that no hook receives.
`take_over_optimizers` removes the triggers of optimizers that a hook runs from then on. Do not add argument checks of
DDP here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from torchdist_ref import groups
from torchdist_ref.algorithms.bucket import split
from torchdist_ref.algorithms.division import Divisor, average
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, DistError, explain
from torchdist_ref.parallel.construction import OPERATION, mapped
from torchdist_ref.torch_internals import torch_private

autograd = torch_private.AUTOGRAD.bind()


@dataclass
class MixedPrecision:
    """Dtypes for `DistributedDataParallel(mixed_precision=...)`; only floating-point tensors are cast.

    Attributes:
        param_dtype: Dtype of parameters and inputs in forward and backward. Default None: their own.
        reduce_dtype: Dtype in which gradients are summed over the ranks. Default None: ``param_dtype``.
        buffer_dtype: Dtype of buffers, from construction on. Default None: their own.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


class LowPrecision:
    """Two copies of each parameter of a module, for ``mixed_precision``.

    Parameters are in low precision from forward to the end of backward and in full precision in between, so optimizers
    and checkpoints see full precision only.

    Args:
        module: The module that DDP wraps; its buffers are cast here, once.
        config: A `MixedPrecision`, or torch's.
        ignored: Names of parameters and buffers that are left alone.
    """

    def __init__(self, module: nn.Module, config: Any, ignored: Collection[str]) -> None:
        if not hasattr(config, "param_dtype"):
            expected = "a MixedPrecision, such as MixedPrecision(param_dtype=torch.bfloat16)"
            raise ArgumentTypeError(explain("DistributedDataParallel", "mixed_precision", expected, config))
        self.dtype: torch.dtype | None = config.param_dtype
        self.parameters = [p for n, p in module.named_parameters() if n not in ignored and p.is_floating_point()]
        self._full: list[torch.Tensor] | None = None
        self._restore_queued = False
        for name, buffer in module.named_buffers():
            if name not in ignored and buffer.is_floating_point() and config.buffer_dtype is not None:
                buffer.data = buffer.to(config.buffer_dtype)

    @torch.no_grad()
    def lower(self) -> bool:
        """Replace the parameters' data by low-precision copies.

        Returns:
            Whether anything has changed: with the dtype changes the node that accumulates gradients.
        """
        if self._restore_queued:
            # The last backward pass raised, so autograd did not run the callback that restores the parameters.
            self.restore()
        if self.dtype is None or self._full is not None:
            return False
        self._full = [parameter.data for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.data = parameter.data.to(self.dtype)
            _recast_gradient(parameter)
        return True

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the full-precision data, and convert gradients to its dtype."""
        self._restore_queued = False
        full, self._full = self._full, None
        for parameter, tensor in zip(self.parameters, full or (), strict=full is not None):
            parameter.data = tensor
            _recast_gradient(parameter)

    def restore_after_backward(self) -> None:
        """Queue `restore` for the end of the backward pass that is running."""
        if not self._restore_queued and self._full is not None:
            self._restore_queued = True
            autograd.queue_callback(self.restore)

    def cast(self, value: Any) -> Any:
        """Return a copy of nested inputs with every floating-point tensor in the dtype of the parameters."""
        return value if self.dtype is None else mapped(value, self._cast_one)

    def _cast_one(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _recast_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad = gradient.to(parameter.dtype)


class DelayedParameters:
    """Parameters of ``delay_all_reduce_named_params``, averaged together when the trigger's gradient is ready.

    The reducer ignores these parameters. Their ``.grad`` is in one buffer. The trigger's gradient launches its
    all_reduce, which is waited for at the end of backward.

    Args:
        named: Names and parameters, of one dtype and device.
        trigger: Parameter whose gradient launches the all_reduce; it has to come after theirs. May be one of them.
        group: Group that DDP was given.

    Attributes:
        chosen: Names with parameters, and the trigger.

    Raises:
        ArgumentError: The parameters do not fit into one buffer.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], trigger: torch.Tensor, group: Any) -> None:
        self.chosen = list(named), trigger
        self.names, self.parameters = zip(*self.chosen[0], strict=True)
        self.change_group(group)
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            expected = "parameters of one dtype on one device"
            raise ArgumentError(explain(OPERATION, "delay_all_reduce_named_params", expected, sorted(map(str, kinds))))
        self.buffer = torch.zeros_like(torch.cat([p.detach().reshape(-1) for p in self.parameters]))
        self.views = split(self.buffer, self.parameters)
        self._work: Any = None
        # Not a hook on the tensor's gradient: the trigger may itself be a delayed parameter, so its gradient has to be
        # accumulated in the buffer before the launch.
        trigger.register_post_accumulate_grad_hook(_weak_hook(self, DelayedParameters.all_reduce))
        for index, parameter in enumerate(self.parameters):
            if parameter is not trigger:
                parameter.register_post_accumulate_grad_hook(
                    _weak_hook(self, partial(DelayedParameters.check_order, index=index))
                )

    def change_group(self, group: Any) -> None:
        """Average over this group from now on."""
        self.group = group
        self.divisor = Divisor(groups.get_world_size(group))

    def point_gradients(self) -> None:
        """After forward, replace gradients that are None by zeros in the buffer, so that backward accumulates there."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    @torch.no_grad()
    def all_reduce(self) -> None:
        """Launch the average. A gradient that is a tensor of the user's own is moved into the buffer first."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view:
                view.copy_(parameter.grad) if parameter.grad is not None else view.zero_()
                parameter.grad = view
        self._work = groups.all_reduce(average(self.buffer, self.divisor), group=self.group, async_op=True)
        autograd.queue_callback(self._wait)

    def _wait(self) -> None:
        work, self._work = self._work, None
        work.wait()

    def check_order(self, index: int) -> None:
        """Raise if this gradient is ready after the launch, so that it would not be averaged."""
        if self._work is not None:
            raise DistError(
                f"{OPERATION}: the gradient of delayed parameter {self.names[index]!r} came after that of "
                f"param_to_hook_all_reduce (on rank {groups.get_rank(self.group)}), so it would not be averaged. "
                "Choose a parameter whose gradient comes last: one of the first layer."
            )


def _weak_hook(owner: DelayedParameters, method: Callable[[DelayedParameters], None]) -> Callable[[Any], None]:
    """Return a hook for autograd that calls ``method(owner)`` without keeping the owner alive."""
    reference = weakref.ref(owner)

    def hook(_: Any) -> None:
        found = reference()
        if found is not None:
            method(found)

    return hook


def take_over_optimizers(parameters: Iterable[torch.Tensor]) -> bool:
    """Remove the triggers of optimizers that parameters carry (torch's ``_apply_optimizer_in_backward``).

    Those optimizers would step on this rank's own gradient as soon as it is ready; a hook steps on the average instead.

    Returns:
        Whether some parameter carries an optimizer.
    """
    carriers = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    for parameter in carriers:
        for handle in _triggers(parameter):
            handle.remove()
    return bool(carriers)


def _triggers(parameter: torch.Tensor) -> Sequence[Any]:
    theirs = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return [] if theirs is None else theirs.param_to_optim_hook_handle_map.get(parameter, [])
