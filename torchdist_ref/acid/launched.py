"""Ranks of a check that a launcher starts, such as ``mpiexec``, for backends whose ranks cannot be forked.

The launcher starts a supervisor for each rank, ``python -m torchdist_ref.acid.launched FOLDER``. The supervisor forks
the process that makes the calls, and writes its process id and its exit code into the folder: a launcher reports one
code for all ranks, and some launchers end the other ranks once one
has died.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from torchdist_ref.acid.checks import CHECKS, Check
from torchdist_ref.acid.runs import ProgramEnds, Setting, be_rank

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_TASK = "task.json"


class LaunchedRanks:
    """Processes of the ranks of a check, started by a launcher.

    Args:
        check: Check.
        setting: Setting of the run; its `launcher` is the command.
        folder: Folder of the check.
    """

    def __init__(self, check: Check, setting: Setting, folder: str) -> None:
        self._folder = Path(folder)
        task = {"check": check.name, "setting": asdict(setting)}
        (self._folder / _TASK).write_text(json.dumps(task), encoding="utf-8")
        command = [word.replace("{world}", str(setting.world)) for word in setting.launcher.split()]
        # What the launcher says is shown where a rank has written nothing.
        with open(self._folder / "launcher", "wb") as output:
            self._process = subprocess.Popen(
                [*command, "-m", __name__, folder], stdout=output, stderr=output, start_new_session=True
            )

    def poll(self, rank: int) -> int | None:
        """Return the exit code of a rank, or that of the launcher if it has ended before; None while the rank runs."""
        launcher = self._process.poll()
        with suppress(FileNotFoundError, ValueError):
            return int((self._folder / f"ended-{rank}").read_text(encoding="utf-8"))
        return launcher or (None if launcher is None else 1)

    def pid(self, rank: int) -> int | None:
        """Return the process id of a rank, None if it has not begun."""
        with suppress(FileNotFoundError, ValueError):
            return int((self._folder / f"pid-{rank}").read_text(encoding="utf-8"))
        return None

    def kill(self, rank: int) -> None:
        """Kill the process of a rank, if it has begun."""
        if pid := self.pid(rank):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self, world: int) -> None:
        """End the launcher and whatever it has left."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for rank in range(world):
            if not (self._folder / f"ended-{rank}").exists():
                self.kill(rank)


def supervise(folder: str) -> int:
    """Fork the rank that the launcher's variables name, and record how it ends; return this process's exit code."""
    task = json.loads(Path(folder, _TASK).read_text(encoding="utf-8"))
    setting = Setting(**task["setting"])
    [rank] = [int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ][:1]
    for module in (*setting.modules, setting.api):
        import_module(module)
    [check] = [each for each in CHECKS if each.name == task["check"]]
    child = os.fork()
    if not child:
        be_rank(check, setting, rank, folder)
    _write(folder, f"pid-{rank}", child)
    _write(folder, f"ended-{rank}", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return 0


def _write(folder: str, name: str, number: int) -> None:
    path = Path(folder, f"{name}.part")
    path.write_text(str(number), encoding="utf-8")
    path.rename(Path(folder, name))


if __name__ == "__main__":
    try:
        sys.exit(supervise(sys.argv[1]))
    except ProgramEnds as end:
        sys.exit(end.code)
