"""Outcome of a call that should fail, as a value that a rank can return, and time-outs that pass soon."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torchdist_ref as dist


def failing(call: Callable[[], object]) -> tuple[str, str, float]:
    """Return the type and text of the error that a call raises, and the seconds until then."""
    start = time.monotonic()
    try:
        call()
    except dist.DistError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "no error", time.monotonic() - start


def set_timeout(group: Any, seconds: float) -> None:
    """Set the time-out of a group of `ref` on this rank.

    Given at its creation, a short one would be that of the ranks' connection too, for which a busy machine needs more.
    """
    group.backend.link.timeout = seconds
