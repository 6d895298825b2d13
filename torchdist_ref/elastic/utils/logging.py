"""Loggers whose level the environment sets."""

from __future__ import annotations

import logging
import os
import sys

from torchdist_ref.elastic.utils.log_level import get_log_level

__all__ = ["get_logger"]


def get_logger(name: str | None = None) -> logging.Logger:
    """Return a logger at the level that the environment variable LOGLEVEL names.

    Args:
        name: Its name. Default: that of the calling module.

    Returns:
        The logger.

    Example:
        >>> from torchdist_ref.elastic.utils.logging import get_logger
        >>> get_logger("my_launcher").name
        'my_launcher'
    """
    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__"))
    logger.setLevel(os.environ.get("LOGLEVEL", get_log_level()))
    return logger
