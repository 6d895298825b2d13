"""How much loggers say when nobody says how much."""

from __future__ import annotations

__all__ = ["get_log_level"]


def get_log_level() -> str:
    """Return the level of loggers for which LOGLEVEL is not set.

    Returns:
        ``"WARNING"``.

    Example:
        >>> from torchdist_ref.elastic.utils.log_level import get_log_level
        >>> get_log_level()
        'WARNING'
    """
    return "WARNING"
