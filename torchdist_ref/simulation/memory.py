"""Memory that a simulated world needs, estimated, and memory that this machine has left.

A run that does not fit would be ended by the operating system, without a word, after minutes of work.
"""

from __future__ import annotations

from pathlib import Path

from torchdist_ref.simulation.world import CELLS
from torchdist_ref.transports.segment import EAGER_BYTES, window_for

_RANK_BYTES, _PAIR_BYTES = 512 * 1024, 1024
"""Memory of a rank besides its staging buffer (the stack of its thread, the group, compiled calls), and of a rank for
each rank that it knows. Measured with 64 to 1,024 ranks, Python 3.11, 2026-11-29."""
_CGROUP = "sys/fs/cgroup/"


def needed_bytes(world_size: int) -> int:
    """Return the memory that so many ranks need for the default group and collectives of large tensors, in bytes.

    The tensors of the program come on top of it.

    >>> needed_bytes(64) >> 20, needed_bytes(1024) >> 30, needed_bytes(16384) >> 30
    (164, 3, 296)
    """
    staging = CELLS * (window_for(world_size) + EAGER_BYTES)
    return world_size * (_RANK_BYTES + staging + world_size * _PAIR_BYTES)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that this machine and its container have left, in bytes; None if the system does not say it.

    Args:
        root: Directory with the files of the system.
    """
    found = [_machine(root), _container(root)]
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def _machine(root: Path) -> int | None:
    lines = _read(root / "proc/meminfo").splitlines()
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "")
    return int(kib) * 1024 if kib.isdecimal() else None


def _container(root: Path) -> int | None:
    limit, used = (_read(root / _CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    if not (limit.isdecimal() and used.isdecimal()):
        return None
    # Pages of files count as used, and are given back on demand.
    fields = dict(line.split() for line in _read(root / _CGROUP / "memory.stat").splitlines())
    return max(0, int(limit) - int(used) + int(fields.get("inactive_file", 0)))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
