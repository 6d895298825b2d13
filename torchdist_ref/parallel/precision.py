"""Parameters in low precision from forward to the end of backward, in full precision in between: `mixed_precision`.

`LowPrecision.lower` puts a copy of fewer bits in each parameter's place before a forward pass, `restore` puts the full
one back: at the end of backward, or right after a forward pass that no backward follows. So optimizers and checkpoints
see full precision only. In which dtype gradients travel is the business of the hook in `mixed_precision_hooks`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from torchdist_ref.parallel.construction import mapped


@dataclass
class MixedPrecision:
    """Dtypes for `DistributedDataParallel(mixed_precision=...)`; only floating-point tensors are cast.

    Attributes:
        param_dtype: Of parameters and inputs in forward and backward. Default None: their own.
        reduce_dtype: In which gradients are summed over the ranks. Default None: ``param_dtype``.
        buffer_dtype: Of buffers, from construction on. Default None: their own.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


class LowPrecision:
    """The two copies of each parameter of a module.

    Args:
        module: The module that DDP wraps; its buffers are cast here, once.
        config: A `MixedPrecision`, or torch's.
        ignored: Names of parameters and buffers that are left alone.
    """

    def __init__(self, module: nn.Module, config: Any, ignored: Collection[str]) -> None:
        self.dtype: torch.dtype | None = config.param_dtype
        self.parameters = [p for n, p in module.named_parameters() if n not in ignored and p.is_floating_point()]
        self._full: list[torch.Tensor] | None = None
        self._expected = False
        for name, buffer in module.named_buffers():
            if name not in ignored and buffer.is_floating_point() and config.buffer_dtype is not None:
                buffer.data = buffer.to(config.buffer_dtype)

    @torch.no_grad()
    def lower(self) -> bool:
        """Put the low copies in place. Whether anything has changed: with it goes the node that delivers gradients."""
        if self.dtype is None or self._full is not None:
            return False
        self._full = [parameter.data for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.data = parameter.data.to(self.dtype)
            _recast(parameter)
        return True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the full copies back, and give gradients their dtype."""
        self._expected = False
        full, self._full = self._full, None
        for parameter, tensor in zip(self.parameters, full or (), strict=full is not None):
            parameter.data = tensor
            _recast(parameter)

    def restore_after_backward(self) -> None:
        """During backward: put the full copies back when it ends."""
        if not self._expected and self._full is not None:
            self._expected = True
            Variable._execution_engine.queue_callback(self.restore)

    def cast(self, value: Any) -> Any:
        """A copy of nested inputs with every floating-point tensor in the dtype of the parameters."""
        return value if self.dtype is None else mapped(value, self._cast_one)

    def _cast_one(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _recast(parameter: torch.Tensor) -> None:
    """A gradient that is there already has to have the parameter's dtype."""
    if parameter.grad is not None:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad = gradient.to(parameter.dtype)
