"""Optimizers of several ranks: one that shares out its state, and one that averages models now and then.

Each wraps an ordinary optimizer of ``torch.optim``, which does the arithmetic; here is only who updates what, and when
ranks tell each other. Averaging itself is in `torchdist_ref.algorithms.model_averaging`.
"""

from __future__ import annotations

from torchdist_ref.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from torchdist_ref.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]
