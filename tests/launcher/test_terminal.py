"""Launcher in a terminal: ranks may read from it, receive Ctrl-C once, and share the launcher's session."""

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


def read_until(terminal: int, text: str, times: int) -> str:
    """Return the terminal's output up to the given number of occurrences of a text. A stopped rank prints nothing."""
    shown = ""
    while shown.count(text) < times:
        readable, _, _ = select.select([terminal], [], [], 20)
        assert readable, f"nothing came after {shown!r}"
        shown += os.read(terminal, 1 << 12).decode()
    return shown


def test_ranks_in_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torchdist_ref.launch", "--nproc-per-node", "2", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        preexec_fn=lambda: os.login_tty(theirs),
    )
    os.close(theirs)
    try:
        os.write(ours, b"line\n")
        shown = read_until(ours, "own group True", 2)
        assert "0: 'line\\n', launcher's session True, own group True" in shown
        assert "1: '', launcher's session True, own group True" in shown
        os.write(ours, b"\x03")
        shown = read_until(ours, "no terminal that could stop it, no more signals True", 2)
        assert "got SIGINT: forwarding it to ranks 0, 1" in shown
        assert "rank 0 received it" in shown and "rank 1 received it" in shown
        assert launcher.wait(20) == 130
    finally:
        launcher.kill()
        launcher.wait()
        os.close(ours)
