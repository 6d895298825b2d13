"""Agents of a job, each a process and optionally on a host of its own, and the lines that they and their workers write.

All write to one FIFO. So a test waits for a line, not for a time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdist_ref.processes.control import Child, die_with_parent
from torchdist_ref.testing.namespaces import Host

LIMIT_SECONDS = 20.0
MAIN = Path(__file__).with_name("agent_main.py")


@dataclass(frozen=True)
class Start:
    """Worker that has started, as it reports itself."""

    name: str
    pid: int
    rank: int
    local_rank: int
    world_size: int
    group_rank: int
    group_world_size: int
    role_rank: int
    role_world_size: int
    restarts: int
    address: str
    port: int
    token: str
    time: float

    @staticmethod
    def parse(line: str) -> Start:
        name, *numbers, address, port, token = line.split()[1:]
        return Start(name, *map(int, numbers), address, int(port), token, time.monotonic())


class Agents:
    """Agents of one job. Leave the block to end all of them.

    Args:
        folder: Folder for the FIFO.
        hosts: Hosts on which the agents run. Default: all on this one.
        **settings: Settings of all agents; see `agent_main`.
    """

    def __init__(self, folder: Path, hosts: Sequence[Host] = (), **settings: Any) -> None:
        self._hosts = hosts
        self._pipe = str(folder / "lines")
        os.mkfifo(self._pipe)
        # Both ends are open, so that the reader never sees an end of file.
        self._descriptor = os.open(self._pipe, os.O_RDWR | os.O_NONBLOCK)
        defaults = {"run_id": "job", "min": 1, "max": 8, "restarts": 0, "join": 20.0, "last_call": 0.0, "port": 0}
        # A busy machine stops a process for longer than the library lets it be silent.
        defaults["silence"] = 20.0
        per_host = {"workers": 1, "node_rank": -1, "serves": None, "task": "wait"}
        address = hosts[0].ipv4 if hosts else "127.0.0.1"
        self._settings = defaults | per_host | {"host": address, "pipe": self._pipe} | settings
        self.processes: dict[str, Child] = {}
        self._started: list[Child] = []
        self._rest = ""
        self.lines: list[str] = []
        self._read = 0

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started:
            process.signal(signal.SIGKILL)
            process.reap()
        os.close(self._descriptor)

    def start(self, number: int, environment: dict[str, str] | None = None, **settings: Any) -> Child:
        """Start the agent ``host-NUMBER``."""
        name = settings.pop("name", f"host-{number}")
        given = self._settings | {"name": name} | settings
        names = {"TORCHDIST_REF_HOST_ID": name, "PYTHONPATH": str(MAIN.parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHDIST_REF_")}
        parent = os.getpid()

        def prepare() -> None:
            die_with_parent(parent)
            if self._hosts:
                self._hosts[number].enter()

        process = subprocess.Popen(
            [sys.executable, str(MAIN), json.dumps(given)],
            env=inherited | names | (environment or {}),
            preexec_fn=prepare,
            process_group=0,
        )
        process.returncode = 0
        self.processes[name] = Child(process.pid)
        self._started.append(self.processes[name])
        return self.processes[name]

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        """Send a signal to one agent's process alone."""
        os.kill(self.processes[name].pid, signum)

    def wait_for(self, accepted: Callable[[str], bool], count: int = 1) -> list[str]:
        """Return the next lines that are accepted."""
        deadline, found = time.monotonic() + LIMIT_SECONDS, list[str]()
        while True:
            while self._read < len(self.lines) and len(found) < count:
                line = self.lines[self._read]
                self._read += 1
                found += [line] if accepted(line) else []
            if len(found) == count:
                return found
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._descriptor], [], [], left)[0]:
                raise AssertionError("not reported in time; the lines:\n" + "\n".join(self.lines))
            *lines, self._rest = (self._rest + os.read(self._descriptor, 1 << 16).decode()).split("\n")
            self.lines += lines

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, which is looked at again whenever a line arrives, and 100 times a second."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "not so in time; the lines:\n" + "\n".join(self.lines)
            select.select([self._descriptor], [], [], 0.01)

    def starts(self, count: int) -> list[Start]:
        """Return the next workers that start, in rank order."""
        lines = self.wait_for(lambda line: line.startswith("start "), count)
        return sorted(map(Start.parse, lines), key=lambda start: start.rank)

    def log(self, text: str) -> str:
        """Return the next line of an agent that contains a text."""
        return self.wait_for(lambda line: line.startswith("log ") and text in line)[0]

    def ends(self, names: Iterable[str]) -> dict[str, tuple[int, str]]:
        """Return exit code and reason of agents."""
        names = list(names)
        lines = self.wait_for(lambda line: line.startswith("end "), len(names))
        found = {line.split()[1]: (int(line.split()[2]), " ".join(line.split()[4:])) for line in lines}
        assert sorted(found) == sorted(names)
        return found


def is_running(pid: int) -> bool:
    """Return whether a process runs. One that has ended may still be a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
