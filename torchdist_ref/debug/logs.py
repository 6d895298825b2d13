"""Levels, ranks and handler of this library's loggers.

Every package logs under its own name below `torchdist_ref`, such as `torchdist_ref.stores`. `TORCH_CPP_LOG_LEVEL` and
`TORCH_DISTRIBUTED_DEBUG` set the level together, as they do for torch's C++ code. If the program has not configured
logging, messages are written to stderr with the rank. Do not add messages here.
"""

from __future__ import annotations

import logging
import os
import sys

from torchdist_ref.debug.levels import DebugLevel, get_debug_level
from torchdist_ref.errors import known_rank

LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"
RANKS_VARIABLE = "TORCHDIST_REF_LOG_RANKS"
TRACE = 5
"""Level below DEBUG, for everything."""

_ROOT = logging.getLogger("torchdist_ref")
_LEVELS = {
    "FATAL": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
}
_NUMBERS = ("INFO", "WARNING", "ERROR", "FATAL")


class RankFilter(logging.Filter):
    """Filter that gives each record the attribute `rank`, and passes those of some ranks only.

    Add it to a handler of your own. Records from before initialization have the rank of the variable ``RANK``, else -1,
    and pass.

    Args:
        ranks: Global ranks whose records pass; None for all.

    >>> record = logging.LogRecord("torchdist_ref", logging.INFO, "", 0, "text", None, None)
    >>> RankFilter([0]).filter(record), record.rank
    (True, -1)
    """

    def __init__(self, ranks: list[int] | None = None) -> None:
        super().__init__()
        self._ranks = None if ranks is None else frozenset(ranks)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        rank = known_rank()
        if rank is None:
            text = os.environ.get("RANK", "")
            rank = int(text) if text.isdecimal() else -1
        record.rank = rank
        return self._ranks is None or rank < 0 or rank in self._ranks


def effective_level() -> int | None:
    """Return the level that the two variables ask for, or None if ``TORCH_CPP_LOG_LEVEL`` is not set or not known.

    >>> effective_level() is None
    True
    """
    text = os.environ.get(LEVEL_VARIABLE, "").strip().upper()
    level = _LEVELS.get(_NUMBERS[int(text)] if text in ("0", "1", "2", "3") else text)
    if level != logging.INFO:
        return level
    return {DebugLevel.OFF: logging.INFO, DebugLevel.INFO: logging.DEBUG}.get(get_debug_level(), TRACE)


def ranks_from_environment() -> list[int] | None:
    """Return the ranks that may log, from a list such as ``0,3``; None, which is all, if there is no such list."""
    parts = os.environ.get(RANKS_VARIABLE, "").split(",")
    return [int(part) for part in parts] if all(part.strip().isdecimal() for part in parts) else None


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler for programs that have not configured logging; silent for the others, whose handlers get the records."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s [rank %(rank)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to what is stderr now, unless the program has handlers of its own."""
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


handler = _OwnHandler()


def configure_logging() -> None:
    """Set level and handler as the environment asks; without its variables, leave Python's defaults."""
    level, ranks = effective_level(), ranks_from_environment()
    if level is None and ranks is None:
        _ROOT.removeHandler(handler)
        return
    if level is not None:
        logging.addLevelName(TRACE, "TRACE")
        _ROOT.setLevel(level)
    handler.filters[:] = [RankFilter(ranks)]
    _ROOT.addHandler(handler)
