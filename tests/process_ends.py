"""Wait for the end of processes that are not children of the test."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable


def all_ended(pids: Iterable[int]) -> bool:
    """Return whether all processes end within seconds. A zombie has ended: its new parent may reap it much later."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            ended, _, _ = select.select([descriptor], [], [], 5)
            os.close(descriptor)
            if not ended:
                return False
    return True
