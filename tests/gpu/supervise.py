"""Subprocesses with a time limit, and the events that they write as they go.

A process that crashes or hangs loses nothing that it has written. Its whole process group is killed at the limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TAIL_CHARACTERS = 4000


class Events:
    """File of events, one JSON object a line, each written at once.

    Args:
        path: File; created if missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def write(self, **event: Any) -> None:
        """Append one event."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return all complete events; a last line that a crash has cut off is left out."""
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found


@dataclass
class Ended:
    """End of a process.

    Attributes:
        code: Exit code; negative for a signal.
        timed_out: Whether it was killed at its limit.
        seconds: Time that it ran.
        tail: Last characters of its output.
    """

    code: int
    timed_out: bool
    seconds: float
    tail: str

    @property
    def why(self) -> str:
        """Description of an end that was not a success; empty after exit code 0."""
        if self.timed_out:
            return f"killed at its limit after {self.seconds:.0f} s"
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return f"exit code {self.code}" if self.code else ""


def run(command: Sequence[str], seconds: float, environment: dict[str, str] | None = None) -> Ended:
    """Run a command from the root of the repository; kill its process group at the limit."""
    started, timed_out = time.monotonic(), False
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        # Without this, asking for a device makes it unusable in forked ranks.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **settings, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            # Also after an end in time: a crash may have left ranks behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - TAIL_CHARACTERS))
        tail = output.read().decode(errors="replace")
    return Ended(process.returncode, timed_out, round(time.monotonic() - started, 3), tail)
