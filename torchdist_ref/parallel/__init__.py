"""Training on several ranks: DistributedDataParallel and the buckets in which gradients travel.

The path of a gradient reads in this order: `distributed_data_parallel` (the module that a user
wraps around a model), `reducer` (which gradient is ready, which bucket goes), `exchange` (a hook is
called and waited for), `bucket` (what the hook sees). Names load on first use, so that a hook can
import `GradBucket` without loading the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchdist_ref.parallel.bucket import GradBucket
    from torchdist_ref.parallel.distributed_data_parallel import DistributedDataParallel
    from torchdist_ref.parallel.precision import MixedPrecision

__all__ = ["DistributedDataParallel", "GradBucket", "MixedPrecision"]

_HOMES = {"DistributedDataParallel": "distributed_data_parallel", "GradBucket": "bucket", "MixedPrecision": "precision"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
