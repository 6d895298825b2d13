"""Nothing is left behind: processes that left their rank's group or session, ports and temporary files.

Each job starts one process in one of several ways to escape, and ends in one of several ways. The escaped process
holds a pipe open, to which its rank has written the store's port: the end of file shows that both have ended.

Of all pairs of a way to escape and a way to end, each way occurs with the hardest of the others: a daemon that ignores
signals, an end by success, and a kill of the launcher, after which its guard does the work.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.ports import reserve_port
from tests.process_ends import all_ended
from torchdist_ref.elastic.attempt import Assignment
from torchdist_ref.launcher import orphans
from torchdist_ref.launcher.local_workers import LocalWorkers, WorkerSettings

ROOT = Path(__file__).parents[2]
ESCAPES = {
    "child": "subprocess.Popen(sleep, pass_fds=[fd])",
    "group": "subprocess.Popen(sleep, pass_fds=[fd], process_group=0)",
    "session": "subprocess.Popen(sleep, pass_fds=[fd], start_new_session=True)",
    "daemon": "daemon(sleep, os.environ)",
    "daemon without environment": "daemon(sleep, {})",
    "deaf daemon": "daemon(['env', '--ignore-signal', *sleep], os.environ)",
}
# Python does not notice a signal that comes right before a system call that waits without end.
WAIT = "while True: time.sleep(0.1)"
ENDS: dict[str, tuple[str, Callable[[subprocess.Popen[str]], None] | None]] = {
    "success": ("", None),
    "failure": ("sys.exit(3)", None),
    "crash": ("os.kill(os.getpid(), 11)", None),
    "SIGINT": (WAIT, lambda launcher: launcher.send_signal(signal.SIGINT)),
    "SIGTERM": (WAIT, lambda launcher: launcher.send_signal(signal.SIGTERM)),
    "SIGKILL": (WAIT, lambda launcher: launcher.kill()),
}
SCRIPT = """
import os, signal, subprocess, sys, time
sleep = ["sleep", "1000"]

def daemon(command, environment):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvpe(command[0], command, {**environment, "PATH": os.environ["PATH"]})
        os._exit(0)
    os.wait()

fd = os.open(sys.argv[1], os.O_WRONLY)
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 1)
os.dup2(null, 2)
if os.environ["RANK"] == "1":
    os.set_inheritable(fd, True)
    ESCAPE
    os.write(fd, b"ready " + os.environ["MASTER_PORT"].encode() + b"\\n")
    END
else:
    os.write(fd, b"up\\n")
    IDLE
"""
# The kernel has no parent to hand an orphan to once the launcher is killed; the guard finds it by its environment.
WAYS = [
    (escape, end)
    for escape in ESCAPES
    for end in ENDS
    if (escape == "deaf daemon" or end in ("success", "SIGKILL"))
    and (escape, end) != ("daemon without environment", "SIGKILL")
]


@pytest.mark.parametrize(("escape", "end"), WAYS)
def test_nothing_is_left(escape: str, end: str, tmp_path: Path) -> None:
    code, act = ENDS[end]
    script = SCRIPT.replace("IDLE", WAIT if code else "pass")
    (tmp_path / "script.py").write_text(script.replace("ESCAPE", ESCAPES[escape]).replace("END", code))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    # A port of the kernel's choice may be a client's, as soon as the launcher has ended.
    options = ["--nproc-per-node", "2", "--master-port", str(reserve_port()), "--no-python"]
    command = [sys.executable, "-m", "torchdist_ref.launch", *options, sys.executable]
    launcher = subprocess.Popen(
        [*command, "script.py", str(fifo)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with open(reader, "rb", 0) as pipe:
        lines = read(pipe)
        # Python may swallow an interrupt while it starts.
        while b"ready" not in lines or (act and b"up" not in lines):
            lines += read(pipe)
        port = int(lines.partition(b"ready ")[2].split()[0])
        if act:
            act(launcher)
        while (more := read(pipe)) == b"up\n":
            continue
        assert more == b"", "the process that escaped has not ended"
    # The guard of a killed launcher does not hold this pipe.
    launcher.communicate(timeout=20)
    await_empty(temporary)
    with socket.create_server(("127.0.0.1", port)):
        pass


def read(pipe: object) -> bytes:
    while True:
        readable, _, _ = select.select([pipe], [], [], 30)
        assert readable, "nothing was written, and the pipe is open"
        # The first worker may have ended before the second one opens the pipe: it is readable then, and empty.
        with suppress(BlockingIOError):
            return os.read(pipe.fileno(), 100)  # type: ignore[attr-defined]


def await_empty(folder: Path) -> None:
    """Wait for the guard, which removes the folder of a killed launcher after the processes."""
    all_ended(orphans_of(folder))
    assert list(folder.iterdir()) == []


def orphans_of(folder: Path) -> list[int]:
    wanted = f"TMPDIR={folder}".encode()
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal() and wanted in environ(each)]


def environ(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def test_a_program_keeps_its_own_children() -> None:
    """Only descendants of a launcher's own process are all the job's."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as own:
        quiet = "stdout=s.DEVNULL, stderr=s.DEVNULL, start_new_session=True"
        daemon = f"import subprocess as s; print(s.Popen(['sleep', '1000'], {quiet}).pid)"
        with LocalWorkers(WorkerSettings(escape_function, [daemon])) as workers:
            pid = int(workers.run(Assignment([0], 1, "127.0.0.1", 1)).return_values[0])
            assert orphans.reap(pid) or not alive(pid)
        assert own.poll() is None
        own.kill()


def escape_function(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_marked_processes_are_found_by_their_initial_environment() -> None:
    mark = uuid.uuid4().hex
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, orphans.MARK: mark}) as process:
        # The environment is that of this process until the child has called exec.
        while b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            pass
        assert orphans.marked(mark) == [process.pid] and orphans.marked(uuid.uuid4().hex) == []
        assert orphans.end_all(lambda: orphans.marked(mark)) == []


def test_descendants_spare_a_process_and_all_below_it() -> None:
    program = "import subprocess, sys; subprocess.Popen(['sleep', '1000']); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        below = orphans.descendants(process.pid)
        assert len(below) == 1
        found = orphans.descendants(os.getpid())
        assert {process.pid, *below} <= set(found)
        assert not {process.pid, *below} & set(orphans.descendants(os.getpid(), {process.pid}))
        os.kill(below[0], signal.SIGKILL)
