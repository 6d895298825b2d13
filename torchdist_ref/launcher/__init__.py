"""Launcher of ranks: `api` for programs, ``python -m torchdist_ref.launch`` for the command line, and their parts.

Modules of this package import the standard library, `torchdist_ref.errors`, `torchdist_ref.processes.control` and
`torchdist_ref.stores`, never torch: a launcher lives as long as its job and should cost a few megabytes. Do not add
communication between ranks here: it belongs to the stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchdist_ref.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]


def __getattr__(name: str) -> Any:
    # The command line does not need `api`, and its process lives as long as the job.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchdist_ref.launcher import api

    return getattr(api, name)
