"""The debug level: how much trouble the library takes to notice mistakes, and where it is set.

It is a fact about the process, as in torch, so it is module state: one variable, read from TORCH_DISTRIBUTED_DEBUG
when first asked for. What a level does is decided by who asks for it: `checked` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch.distributed.distributed_c10d import DebugLevel

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
_chosen: list[DebugLevel] = []


def get_debug_level() -> DebugLevel:
    """The debug level of this process.

    Returns:
        ``DebugLevel.OFF``, ``INFO`` or ``DETAIL``: what was set, else what ``TORCH_DISTRIBUTED_DEBUG`` said when this
        was first asked, else OFF.

    Raises:
        ArgumentError: The variable says something else.

    Example:
        >>> import torchdist_ref as dist
        >>> dist.set_debug_level(dist.DebugLevel.INFO)
        >>> dist.get_debug_level() == dist.DebugLevel.INFO
        True
        >>> dist.set_debug_level(dist.DebugLevel.OFF)
    """
    if not _chosen:
        set_debug_level_from_env()
    return _chosen[0]


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of this process. Groups that exist already stay as they are.

    Args:
        level: ``DebugLevel.OFF``, ``INFO`` or ``DETAIL``.

    Raises:
        ArgumentTypeError: Not a DebugLevel.
    """
    if not isinstance(level, DebugLevel):
        raise ArgumentTypeError(explain("set_debug_level", "level", "a DebugLevel", level))
    _chosen[:] = [level]


def set_debug_level_from_env() -> None:
    """Set the debug level to what ``TORCH_DISTRIBUTED_DEBUG`` says now, in any case; OFF if it is not set.

    Raises:
        ArgumentError: It says something else than OFF, INFO or DETAIL.
    """
    said = os.environ.get(_VARIABLE, "OFF")
    known: Mapping[str, DebugLevel] = DebugLevel.__members__
    if said.upper() not in known:
        hint = f"The value of {_VARIABLE} must be OFF, INFO, or DETAIL."
        raise ArgumentError(explain("set_debug_level_from_env", _VARIABLE, "OFF, INFO or DETAIL", said, hint=hint))
    set_debug_level(known[said.upper()])
