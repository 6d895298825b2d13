"""Outcome of a call that should fail, as a value that a rank can return, and time-outs that pass soon or never."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torchdist_ref as dist

# Longer than any test may take: a rank that learns of a failure only at this time-out is reported as one that hangs.
NEVER = timedelta(hours=1)


def failing(call: Callable[[], object]) -> tuple[str, str]:
    """Return the type and text of the error that a call raises, which is not that of the default group's time-out."""
    if dist.is_initialized():
        dist.set_timeout(NEVER)
    try:
        call()
    except dist.DistError as error:
        return type(error).__name__, str(error)
    return "", "no error"


def set_timeout(group: Any, seconds: float) -> None:
    """Set the time-out of a group of `ref` on this rank.

    Given at its creation, a short one would be that of the ranks' connection too, for which a busy machine needs more.
    """
    group.backend.link.timeout = seconds
