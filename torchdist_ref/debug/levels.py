"""Debug level of the process: OFF, INFO or DETAIL.

The level is torch's own, so that both libraries are at the same level, whichever sets it. torch reads
TORCH_DISTRIBUTED_DEBUG when it is imported. Do not add the effects of a level here: they belong to its users, such as
`backends.detail_level`.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed
from torch.distributed.distributed_c10d import DebugLevel

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
# torch's stubs leave out these functions.
_theirs: Any = torch.distributed


def get_debug_level() -> DebugLevel:
    """Return the debug level of this process.

    Returns:
        ``DebugLevel.OFF``, ``INFO`` or ``DETAIL``: the level that was set here or with torch's function, else the value
        of ``TORCH_DISTRIBUTED_DEBUG`` when torch was imported, else OFF.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.set_debug_level(dist.DebugLevel.INFO)
        >>> dist.get_debug_level() == dist.DebugLevel.INFO
        True
        >>> dist.set_debug_level(dist.DebugLevel.OFF)

    Elsewhere:
        ``MPI_T_cvar_read`` in MPI reads control variables of the implementation; ``NCCL_DEBUG`` in NCCL;
        ``jax_logging_level`` in JAX.
    """
    level: DebugLevel = _theirs.get_debug_level()
    return level


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of this process, torch's too. Existing groups keep theirs.

    Args:
        level: ``DebugLevel.OFF``, ``INFO`` or ``DETAIL``.

    Raises:
        ArgumentTypeError: `level` is not a DebugLevel.

    Elsewhere:
        ``MPI_T_cvar_write`` in MPI writes control variables of the implementation; ``NCCL_DEBUG`` in NCCL;
        ``jax_logging_level`` in JAX.
    """
    if not isinstance(level, DebugLevel):
        raise ArgumentTypeError(explain("set_debug_level", "level", "a DebugLevel", level))
    _theirs.set_debug_level(level)


def set_debug_level_from_env() -> None:
    """Set the debug level to the value of ``TORCH_DISTRIBUTED_DEBUG``, in upper or lower case; OFF if it is not set.

    Raises:
        ArgumentError: The value is not OFF, INFO or DETAIL.

    Elsewhere:
        Variables of the implementation in MPI; ``NCCL_DEBUG`` in NCCL; ``JAX_LOGGING_LEVEL`` in JAX.
    """
    value = os.environ.get(_VARIABLE, "OFF")
    if value.upper() not in DebugLevel.__members__:
        hint = f"The value of {_VARIABLE} must be OFF, INFO, or DETAIL."
        raise ArgumentError(explain("set_debug_level_from_env", _VARIABLE, "OFF, INFO or DETAIL", value, hint=hint))
    _theirs.set_debug_level_from_env()
