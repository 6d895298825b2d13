"""Memory of this process in huge pages, so that forks cost less.

A fork copies the page table of its parent, and parent and child then fault at each page that one of them writes. A
process that has loaded torch and the tests has 150,000 pages of 4 KiB, or 300 of 2 MiB: on a virtual machine a fork and
the end of its child took 22 ms of CPU with the small pages, 8 ms with the huge ones.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HUGE = 2 << 20
# madvise(2) of Linux 6.1; older kernels refuse it.
MADV_COLLAPSE = 25
# Private, writable and without a file: the heap and what allocators map.
PRIVATE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?$", re.MULTILINE)


class Forks:
    """Time that forks of this process take, from the construction on.

    Attributes:
        seconds: CPU time of this process in forks since its memory was last copied.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        os.register_at_fork(before=self._before, after_in_parent=self._after)

    def collapse_after(self, seconds: float, trim: Callable[[], object]) -> bool:
        """Trim and map memory by huge pages if forks have taken so long since; return whether they have."""
        if self.seconds < seconds:
            return False
        trim()
        collapse()
        self.seconds = 0.0
        return True

    def _before(self) -> None:
        self._start = time.thread_time()

    def _after(self) -> None:
        self.seconds += time.thread_time() - self._start


def collapse() -> int:
    """Map private memory of this process by huge pages, where the kernel can; return the number of them.

    What is mapped by a huge page already costs nothing. A fork splits the pages that the parent writes while the child
    lives, so this is worth repeating.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return sum(madvise(start, HUGE, MADV_COLLAPSE) == 0 for start in aligned())


def aligned() -> Iterator[int]:
    """Yield the address of each aligned part of private memory that a huge page could map."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for begin, end in PRIVATE.findall(maps):
        first = -(-int(begin, 16) // HUGE) * HUGE
        yield from range(first, int(end, 16) - HUGE + 1, HUGE)
