"""RemoteModule, from torch: its calls travel by torch's RPC, of which this library has no other form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchdist_ref.nn.theirs import torchs

if TYPE_CHECKING:
    from torch.distributed.nn.api.remote_module import RemoteModule

__all__ = [
    "RemoteModule",
]


def __getattr__(name: str) -> Any:
    return torchs("api.remote_module", name, __all__)
