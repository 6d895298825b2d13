"""Differentiable collectives, for use inside a model.

`functional` has the functions, which are exported here too; `gradients` has their gradients. Remote modules are
torch's own, since they use torch's RPC; `torch_paths` serves their paths.
"""

from __future__ import annotations

import importlib
from typing import Any

from torchdist_ref.nn.functional import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)

__all__ = [
    "RemoteModule",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def __getattr__(name: str) -> Any:
    if name != "RemoteModule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("torchdist_ref.nn.api.remote_module").RemoteModule
