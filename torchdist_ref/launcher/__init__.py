"""Launching ranks: `api` from a program, ``python -m torchdist_ref.launch`` from a command line, and their parts.

The rule of this package: import the standard library, `torchdist_ref.errors` and `torchdist_ref.stores`, never torch.
A launcher lives as long as the job and should cost a few megabytes. Each file holds one part; what ranks say to each
other is not here but in the stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchdist_ref.launcher.api import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]


def __getattr__(name: str) -> Any:
    # The command line does without them, and stays as long as its job.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchdist_ref.launcher import api

    return getattr(api, name)
