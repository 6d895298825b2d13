"""Memory of the cgroup of a job: whether the kernel has killed a process because the memory was used up.

The kernel counts such kills for each cgroup (cgroups(7)). Workers are in the cgroup of their launcher. Do not add
limits here: containers and schedulers set them.
"""

from __future__ import annotations

import re
from pathlib import Path

_CURE = "Give the job more memory, or start fewer ranks on this host."


class OutOfMemoryKills:
    """Count of the processes that the kernel has killed in a cgroup for lack of memory, since the construction.

    Args:
        root: Folder that has the system's ``proc`` and ``sys``. Default: the real ones.
    """

    def __init__(self, root: str = "/") -> None:
        self._file = _counter(Path(root))
        self._before = self._count()

    def explain_kill(self) -> str:
        """Return a sentence on whether the memory was the cause of a SIGKILL; empty if the kernel does not count."""
        count = self._count()
        if count is None or self._before is None:
            return ""
        if kills := count - self._before:
            return f"The kernel's out-of-memory killer has ended {kills} of the job's processes. {_CURE}"
        return "The kernel has counted no out-of-memory kill in the job's cgroup: a process has sent the signal."

    def _count(self) -> int | None:
        try:
            found = re.search(r"^oom_kill (\d+)$", self._file.read_text(), re.MULTILINE) if self._file else None
        except OSError:
            return None
        return int(found[1]) if found else None


def _counter(root: Path) -> Path | None:
    """Return the file with the counter: of the memory controller of version 1 if it is mounted, else of version 2."""
    try:
        lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    mounted = root / "sys/fs/cgroup"
    candidates = [
        (mounted / "memory", path, "memory.oom_control") for _, names, path in lines if "memory" in names.split(",")
    ]
    candidates += [(mounted, path, "memory.events") for number, _, path in lines if number == "0"]
    # A container may see its own cgroup as the root, whatever the path is called.
    files = [base / below / name for base, path, name in candidates for below in (path.lstrip("/"), "")]
    return next((file for file in files if file.is_file()), None)
