"""A bucket that holds one sparse gradient as it is: what embeddings with ``sparse=True`` send instead of a flat buffer.

Ranks touch different rows, so sparse gradients fit neither a flat buffer nor each other: each parameter has a bucket
to itself, which takes its place in the order of all buckets, passes the hook, and never becomes dense. How sparse
tensors are summed is `backends.sparse`; which parameters have such a bucket is seen in the module, by `construction`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from torchdist_ref.errors import DistError
from torchdist_ref.parallel.bucket import GradBucket
from torchdist_ref.parallel.options import Entry


class SparseBucket:
    """One parameter's gradient on its way: to the reducer the same as a `storage.Bucket`.

    Args:
        index: Place in the order of communication.
        member: Index of the parameter, as the reducer counts it.
        entry: The parameter, and its name for error messages.
        is_last: Whether this is the last bucket of the iteration.
    """

    def __init__(self, index: int, member: int, entry: Entry, is_last: bool) -> None:
        self.index = index
        self.members = [member]
        self.entry = entry
        self.is_last = is_last
        self.length = entry.parameter.numel()
        self.reset()

    def reset(self) -> None:
        """Await the gradient again."""
        self.waiting = 1
        self.started: Any = None
        self.sent: GradBucket | None = None

    def travel(self, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
        """Gradients are shown as they are: to divide or round them is left to whoever gets the bucket."""

    def take(self, place: int) -> None:
        """Look at what autograd left.

        Raises:
            DistError: The gradient is dense, though a sparse one was announced.
        """
        gradient = self.entry.parameter.grad
        if gradient is not None and not gradient.is_sparse:
            raise DistError(
                f"DistributedDataParallel: parameter {self.entry.name!r} of an embedding with sparse=True got a dense "
                "gradient. Use it in that embedding only, or build the embedding with sparse=False."
            )

    def offer(self) -> GradBucket:
        """The bucket as a hook sees it: a copy of the gradient, with no rows where there is none."""
        gradient = self.entry.parameter.grad
        return self._shown(self._nothing() if gradient is None else gradient.detach().clone())

    def shadow(self) -> GradBucket:
        """A bucket without rows in this one's place: what a rank without inputs contributes."""
        return self._shown(self._nothing())

    def _shown(self, gradient: torch.Tensor) -> GradBucket:
        self.sent = GradBucket(self.index, gradient, None, [self.entry.parameter], self.is_last)
        return self.sent

    def _nothing(self) -> torch.Tensor:
        # Like those of the other ranks: whole rows.
        parameter = self.entry.parameter
        nowhere = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        rows = parameter.new_empty((0, *parameter.shape[1:]))
        return torch.sparse_coo_tensor(nowhere, rows, parameter.shape, is_coalesced=True, check_invariants=False)

    def give(self, value: torch.Tensor, untouched: Collection[int] = (), unchanged: bool = False) -> None:
        """Make the exchanged ``value`` the gradient, unless it is to be left as it is, or is that already."""
        parameter = self.entry.parameter
        if self.members[0] not in untouched and not (unchanged and parameter.grad is not None):
            parameter.grad = value.detach().to(parameter.dtype)
