"""Debug level of the process: OFF, INFO or DETAIL.

The level is state of the process, as in torch. It is read from TORCH_DISTRIBUTED_DEBUG on first use. Do not add the
effects of a level here: they belong to its users, such as `detail_level`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch.distributed.distributed_c10d import DebugLevel

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
_level: list[DebugLevel] = []


def get_debug_level() -> DebugLevel:
    """Return the debug level of this process.

    Returns:
        ``DebugLevel.OFF``, ``INFO`` or ``DETAIL``: the level that was set, else the value of
        ``TORCH_DISTRIBUTED_DEBUG`` at the first call, else OFF.

    Raises:
        ArgumentError: The variable has another value.

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
    if not _level:
        set_debug_level_from_env()
    return _level[0]


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of this process. Existing groups keep theirs.

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
    _level[:] = [level]


def set_debug_level_from_env() -> None:
    """Set the debug level to the value of ``TORCH_DISTRIBUTED_DEBUG``, in upper or lower case; OFF if it is not set.

    Raises:
        ArgumentError: The value is not OFF, INFO or DETAIL.

    Elsewhere:
        Variables of the implementation in MPI; ``NCCL_DEBUG`` in NCCL; ``JAX_LOGGING_LEVEL`` in JAX.
    """
    value = os.environ.get(_VARIABLE, "OFF")
    known: Mapping[str, DebugLevel] = DebugLevel.__members__
    if value.upper() not in known:
        hint = f"The value of {_VARIABLE} must be OFF, INFO, or DETAIL."
        raise ArgumentError(explain("set_debug_level_from_env", _VARIABLE, "OFF, INFO or DETAIL", value, hint=hint))
    set_debug_level(known[value.upper()])
