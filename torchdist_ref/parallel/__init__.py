"""Data-parallel training: DistributedDataParallel, and the buckets in which gradients are communicated.

Read first `naive`, the same without buckets. Then the way of a gradient: `distributed_data_parallel` (the module around
the model), `reducer` (order), `storage` (memory), `exchange` (all_reduce or hook), `algorithms.bucket` (argument of
the hook) and `algorithms.division`. Names load on first use, so that a hook can import `GradBucket` without the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchdist_ref.algorithms.bucket import GradBucket
    from torchdist_ref.parallel.distributed_data_parallel import DistributedDataParallel
    from torchdist_ref.parallel.modes import MixedPrecision
    from torchdist_ref.parallel.naive import NaiveDataParallel

__all__ = ["DistributedDataParallel", "GradBucket", "MixedPrecision", "NaiveDataParallel"]

_HOMES = {
    "DistributedDataParallel": "torchdist_ref.parallel.distributed_data_parallel",
    "GradBucket": "torchdist_ref.algorithms.bucket",
    "MixedPrecision": "torchdist_ref.parallel.modes",
    "NaiveDataParallel": "torchdist_ref.parallel.naive",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
