"""The Python that has torch loaded runs a program as a new interpreter does, and ends as it ends."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from torchdist_ref.processes.linux_calls import pidfd_open

SHOW = """
import json, os, sys
held = [number for number in range(400) if os.path.exists(f"/proc/self/fd/{number}")]
print(json.dumps([__name__, sys.argv, os.getcwd(), os.environ["GIVEN"], held, sys.path[:2], sys.stdin.read()]))
print("torch" in sys.modules, any(each.startswith("torchdist_ref") for each in sys.modules), file=sys.stderr)
"""


PATHS = "import sys; print(sys.path[:2])"


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_a_program_has_the_arguments_and_files_that_were_given(
    how: str, python_with_torch: str, tmp_path: Path
) -> None:
    (tmp_path / "shown.py").write_text(SHOW)
    program = {"-c": ["-c", SHOW], "-m": ["-m", "shown"], "script": ["-u", "shown.py"]}[how]
    reader, first_writer = os.pipe()
    # A process with many files has files of high numbers.
    writer = fcntl.fcntl(first_writer, fcntl.F_DUPFD, 300)
    os.close(first_writer)
    done = subprocess.run(
        [python_with_torch, *program, "one", "-m"],
        cwd=tmp_path,
        env={**os.environ, "GIVEN": "some text", "PYTHONPATH": "/first"},
        input="words",
        capture_output=True,
        text=True,
        pass_fds=[writer],
        timeout=60,
    )
    os.close(reader)
    os.close(writer)
    first = {"-c": "-c", "-m": str(tmp_path / "shown.py"), "script": "shown.py"}[how]
    paths = {"-c": "", "-m": str(tmp_path), "script": str(tmp_path)}[how]
    wanted = [
        "__main__",
        [first, "one", "-m"],
        str(tmp_path),
        "some text",
        [0, 1, 2, writer],
        [paths, "/first"],
        "words",
    ]
    assert json.loads(done.stdout) == wanted
    assert (done.returncode, done.stderr) == (0, "True False\n")


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_its_folder_may_stay_off_the_path(how: str, python_with_torch: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(PATHS)
    program = {"-c": ["-c", PATHS], "-m": ["-m", "shown"], "script": ["shown.py"]}[how]
    # A module is found by its folder then.
    environment = {**os.environ, "PYTHONPATH": f"/first{os.pathsep}{tmp_path}"}
    command = [python_with_torch, "-P", *program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{['/first', str(tmp_path)]}\n", done.stderr


@pytest.mark.parametrize(
    ("end", "code", "errors"),
    [
        ("", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit(260)", 4, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("signal.raise_signal(15)", -15, None),
        ("signal.raise_signal(9)", -9, None),
    ],
)
def test_it_ends_as_the_program_does(end: str, code: int, errors: str | None, python_with_torch: str) -> None:
    program = f"import atexit, signal, sys; atexit.register(print, 'last'); print('first'); {end}"
    done = subprocess.run([python_with_torch, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    if errors is not None:
        assert done.stdout == "first\nlast\n"
        assert done.stderr.splitlines(keepends=True)[-1:] == errors.splitlines(keepends=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_reach_the_program(number: signal.Signals, python_with_torch: str) -> None:
    program = (
        "import os, signal\nsignal.signal(15, lambda *_: os._exit(5))\nsignal.signal(2, lambda *_: os._exit(6))\n"
        "import time\nprint(os.getpid(), flush=True)\nwhile True: time.sleep(0.05)"
    )
    with subprocess.Popen([python_with_torch, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        handle = pidfd_open(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.wait(60) == {signal.SIGTERM: 5, signal.SIGINT: 6, signal.SIGKILL: -9}[number]
        assert select.select([handle], [], [], 60)[0]
        os.close(handle)


def test_programs_share_no_state(python_with_torch: str) -> None:
    program = "import random, torch, builtins; print(hasattr(builtins, 'left'), random.random()); builtins.left = 1"
    done = [
        subprocess.run([python_with_torch, "-c", program], capture_output=True, text=True, timeout=60).stdout.split()
        for _ in range(2)
    ]
    assert [left for left, _ in done] == ["False", "False"] and done[0][1] != done[1][1]
