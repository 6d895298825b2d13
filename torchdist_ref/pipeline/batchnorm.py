"""Batch normalization in a pipeline: running statistics of whole batches, computed micro-batch by micro-batch.

Do not add other layers here: no other layer of torch's depends on the size of the batch.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.pipeline.checkpoint import is_recomputing
from torchdist_ref.torch_internals import torch_private

__all__ = ["DeferredBatchNorm"]

M = TypeVar("M", bound=nn.Module)

_BatchNorm: Any = torch_private.BATCH_NORM.get()


class DeferredBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch normalization with running statistics of whole batches.

    In training each micro-batch is normalized by its own statistics, since those of the batch are not known yet. They
    are summed up, and after the last micro-batch the running statistics are updated once, as without a pipeline. Only
    the variance differs: it is not corrected for the size of the batch.

    Args:
        num_features: The size of the second dimension.
        eps: Added to the variance. Default: 1e-5.
        momentum: Weight of a new batch in the running statistics; None: the average of all batches. Default: 0.1.
        affine: Whether there are weights and biases. Default: True.
        chunks: The number of micro-batches in a batch. Default: 1.

    Example:
        >>> import torch
        >>> from torchdist_ref.pipeline.sync.batchnorm import DeferredBatchNorm
        >>> layer = DeferredBatchNorm(1, momentum=1.0, chunks=2)
        >>> for value in (1.0, 3.0):
        ...     layer(torch.full((2, 1), value)) is None
        False
        False
        >>> layer.running_mean, layer.running_var
        (tensor([2.]), tensor([1.]))

    Elsewhere:
        None in MPI, NCCL and JAX. The package ``torchgpipe`` has a class of this name.
    """

    sum: Tensor
    sum_squares: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, chunks: int = 1
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.register_buffer("sum", torch.zeros_like(self.running_mean))
        self.register_buffer("sum_squares", torch.zeros_like(self.running_var))
        self.counter = 0
        self.tracked = 0
        self.chunks = chunks

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            expected = "a tensor of at least 2 dimensions"
            raise ArgumentError(explain("DeferredBatchNorm", "input", expected, list(input.shape)))

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a micro-batch.

        Args:
            input: Tensor of shape ``(batch, num_features, ...)``.

        Returns:
            A tensor of the same shape.

        Raises:
            ArgumentError: The tensor has fewer than two dimensions.
        """
        self._check_input_dim(input)
        if not self.training:
            return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        if not is_recomputing():
            self._track(input.detach())
        return batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _track(self, input: Tensor) -> None:
        """Add a micro-batch to the sums, and update the running statistics after the last one."""
        others = [0, *range(2, input.dim())]
        self.sum += input.sum(others)
        self.sum_squares += (input**2).sum(others)
        self.counter += input.numel() // input.shape[1]
        self.tracked += 1
        if self.tracked == self.chunks:
            self._update_running_statistics()

    def _update_running_statistics(self) -> None:
        self.num_batches_tracked += 1
        part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        mean = self.sum / self.counter
        self.running_mean.lerp_(mean, part)
        self.running_var.lerp_(self.sum_squares / self.counter - mean**2, part)
        self.sum.zero_()
        self.sum_squares.zero_()
        self.counter = self.tracked = 0

    @classmethod
    def convert_deferred_batch_norm(cls, module: M, chunks: int = 1) -> M:
        """Replace batch normalization by this class, everywhere in a model.

        Args:
            module: The model.
            chunks: The number of micro-batches in a batch.

        Returns:
            The model, or its replacement if it is a batch normalization itself.
        """
        if isinstance(module, DeferredBatchNorm) and module.chunks == chunks:
            return module
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            return cls._replacement_of(module, chunks)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_deferred_batch_norm(child, chunks))
        return module

    @classmethod
    def _replacement_of(cls, norm: Any, chunks: int) -> DeferredBatchNorm:
        new: DeferredBatchNorm = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, chunks)
        for name, value in [*norm.named_parameters(), *norm.named_buffers()]:
            setattr(new, name, value)
        new.sum, new.sum_squares = torch.zeros_like(new.running_mean), torch.zeros_like(new.running_var)
        new.train(norm.training)
        return new
