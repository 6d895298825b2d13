"""Optimizers of several ranks: one that divides its state among them, and one that averages models periodically.

Each wraps an optimizer of ``torch.optim``, which does the arithmetic. Do not add averaging here: it is in
`torchdist_ref.algorithms.model_averaging`. ``DistributedOptimizer`` is torch's own, since it uses torch's RPC, and so
are torch's optimizers that step during backward; `torch_paths` serves their paths.
"""

from __future__ import annotations

import importlib
from typing import Any

from torchdist_ref.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from torchdist_ref.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]

_TORCHS_OWN = {
    "DistributedOptimizer": "optimizer",
    "_NamedOptimizer": "named_optimizer",
    "_apply_optimizer_in_backward": "apply_optimizer_in_backward",
    "_get_in_backward_optimizers": "apply_optimizer_in_backward",
    "as_functional_optim": "utils",
}


def __getattr__(name: str) -> Any:
    if name not in _TORCHS_OWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"torchdist_ref.optim.{_TORCHS_OWN[name]}"), name)
