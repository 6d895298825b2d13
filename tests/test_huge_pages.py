"""Memory of the tests' process in huge pages."""

from __future__ import annotations

import mmap
import os

from tests import huge_pages


def test_every_part_is_private_writable_and_aligned() -> None:
    mapped = mmap.mmap(-1, 3 * huge_pages.HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared = mmap.mmap(-1, 3 * huge_pages.HUGE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    mapped[:] = shared[:] = bytes(range(256)) * (3 * huge_pages.HUGE // 256)
    parts = [*huge_pages.aligned()]
    assert parts and not any(part % huge_pages.HUGE for part in parts) and len(parts) == len({*parts})
    # What is in memory stays, and a kernel that refuses is no error.
    assert 0 <= huge_pages.collapse() <= len([*huge_pages.aligned()])
    assert mapped[:] == shared[:] == bytes(range(256)) * (3 * huge_pages.HUGE // 256)
    mapped.close()
    shared.close()


def test_memory_is_copied_once_forks_have_taken_long() -> None:
    forks, trimmed = huge_pages.Forks(), []
    assert forks.seconds == 0 and not forks.collapse_after(1e-9, lambda: trimmed.append(1))
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert forks.seconds > 0 and not forks.collapse_after(forks.seconds + 60, lambda: trimmed.append(2))
    assert forks.collapse_after(1e-9, lambda: trimmed.append(3)) and trimmed == [3] and forks.seconds == 0


LINES = (
    "7f00-7fff rw-p 00000000 00:00 0 ",
    "55d0-55ff rw-p 00000000 00:00 0                          [heap]",
    "7f00-7fff rw-s 00000000 00:01 2052                       /dev/zero (deleted)",
    "7f00-7fff r-xp 00000000 fe:00 4131                       /usr/lib/libc.so.6",
    "7ffc-7fff rw-p 00000000 00:00 0                          [stack]",
)


def test_shared_memory_files_and_the_stack_are_left_alone() -> None:
    assert [huge_pages.PRIVATE.fullmatch(line) is not None for line in LINES] == [True, True, False, False, False]
