"""Launcher in a terminal: ranks may read from it, receive Ctrl-C once, and share the launcher's session.

Input that is no terminal goes to rank 0.
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
rank, line, session = os.environ["RANK"], sys.stdin.readline(), os.getsid(0) == os.getsid(os.getppid())
print(f"{rank}: {line!r}, launcher's session {session}, own group {os.getpgid(0) == os.getpid()}", flush=True)
signal.sigwait([signal.SIGINT])
print(f"rank {rank} received it", flush=True)
try:
    os.open("/dev/tty", os.O_RDWR)
except OSError:
    print(f"no terminal that could stop it, no more signals {not signal.sigpending()}", flush=True)
"""

DEBUGGED = """
import os
if os.environ["RANK"] == "1":
    value = 17
    breakpoint()
    print("the debugger has set", value)
"""

PROMPT = """
import os, select
if os.environ["RANK"] == "1":
    print("the name is", input("name? "), flush=True)
else:
    while not os.path.exists("asked"):
        select.select([], [], [], 0.001)
    print("loss 0.5", flush=True)
"""


def read_until(terminal: int, text: str, times: int) -> str:
    """Return the terminal's output up to the given number of occurrences of a text. A stopped rank prints nothing."""
    shown = ""
    while shown.count(text) < times:
        readable, _, _ = select.select([terminal], [], [], 20)
        assert readable, f"nothing came after {shown!r}"
        shown += os.read(terminal, 1 << 12).decode()
    return shown


def launch_in_a_terminal(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Launch `script.py` of a folder on two ranks; return the launcher, and the end of its terminal that we hold."""
    ours, theirs = pty.openpty()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torchdist_ref.launch", "--nproc-per-node", "2", "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        preexec_fn=lambda: os.login_tty(theirs),
    )
    os.close(theirs)
    return launcher, ours


def test_ranks_in_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher, ours = launch_in_a_terminal(tmp_path)
    try:
        os.write(ours, b"line\nline\n")
        shown = read_until(ours, "own group True", 2)
        for rank in range(2):
            assert f"{rank}: 'line\\n', launcher's session True, own group True" in shown
        os.write(ours, b"\x03")
        shown = read_until(ours, "no terminal that could stop it, no more signals True", 2)
        assert "got SIGINT: forwarding it to ranks 0, 1" in shown
        assert "rank 0 received it" in shown and "rank 1 received it" in shown
        assert launcher.wait(20) == 130
    finally:
        launcher.kill()
        launcher.wait()
        os.close(ours)


def test_a_debugger_stops_any_rank_at_a_terminal(tmp_path: Path) -> None:
    """Once only rank 0 had input, and a breakpoint ended the others with BdbQuit."""
    (tmp_path / "script.py").write_text(DEBUGGED)
    launcher, ours = launch_in_a_terminal(tmp_path)
    try:
        read_until(ours, "(Pdb) ", 1)
        os.write(ours, b"value = 17 * 17\nc\n")
        read_until(ours, "the debugger has set 289", 1)
        assert launcher.wait(20) == 0
    finally:
        launcher.kill()
        launcher.wait()
        os.close(ours)


def test_another_rank_does_not_write_into_a_prompt(tmp_path: Path) -> None:
    """Once the terminal showed "name? loss 0.5". The prompt is shown anew after the line of the other rank."""
    (tmp_path / "script.py").write_text(PROMPT)
    launcher, ours = launch_in_a_terminal(tmp_path)
    try:
        assert read_until(ours, "name? ", 1) == "name? "
        (tmp_path / "asked").touch()
        assert read_until(ours, "name? ", 1) == "\r\nloss 0.5\r\nname? "
        os.write(ours, b"x\n")
        read_until(ours, "the name is x\r\n", 1)
        assert launcher.wait(20) == 0
    finally:
        launcher.kill()
        launcher.wait()
        os.close(ours)


def test_other_input_goes_to_rank_0(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys; print(os.environ['RANK'], os.readlink('/proc/self/fd/0')[:4], sys.stdin.read().split())"
    )
    command = [sys.executable, "-m", "torchdist_ref.launch", "--nproc-per-node", "3", "script.py"]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, cwd=tmp_path, env=path, input="a b\nc", capture_output=True, text=True, timeout=60)
    assert sorted(ended.stdout.split("\n")) == ["", "0 pipe ['a', 'b', 'c']", "1 /dev []", "2 /dev []"], ended.stderr
