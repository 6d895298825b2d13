"""RemoteModule, from torch: its calls travel by torch's RPC, of which this library has no other form."""

from __future__ import annotations

from typing import Any

from torchdist_ref.nn.theirs import torchs

__all__ = ["RemoteModule"]


def __getattr__(name: str) -> Any:
    return torchs("api.remote_module", name, __all__)
