"""Optimizers of several ranks: one that divides its state among them, and one that averages models periodically.

Each wraps an optimizer of ``torch.optim``, which does the arithmetic. Do not add averaging here: it is in
`torchdist_ref.algorithms.model_averaging`.
"""

from __future__ import annotations

from torchdist_ref.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from torchdist_ref.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]
