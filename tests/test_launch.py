"""Launcher command: environment of the ranks, forwarded output, failures, signals, and no process left behind.

Most scripts do not import torch, so that a test takes a tenth of a second. Scripts that wait never end by
themselves: the end of the test shows that they were stopped.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import errors as torchs_errors

from tests.ports import reserve_port
from tests.process_ends import all_ended
from torchdist_ref import launch as run
from torchdist_ref.launcher.child_failures import ChildFailedError

ROOT = Path(__file__).parent.parent
# Not `signal.pause`: a signal between Python's last look for signals and that call would wake nobody.
WAIT = "import time\nwhile True: time.sleep(1)\n"
PRINT = "while True: print('x' * 1000)\n"
RANK = "import os, sys\nrank = int(os.environ['RANK'])\n"
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "torchdist_ref.launch", *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run a script to its end under the launcher."""

    def run(script: str, *options: str, args: tuple[str, ...] = (), feed: str = "") -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(script)
        return subprocess.run(
            command(*options, "script.py", *args),
            cwd=tmp_path,
            env=environment(),
            input=feed,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@contextlib.contextmanager
def running(folder: Path, first: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run a launcher whose two ranks have executed a first line, printed their process ids, and wait."""
    (folder / "script.py").write_text(f"import os, signal, sys\n{first}\nprint(os.getpid(), flush=True)\n{WAIT}")
    process = subprocess.Popen(
        command("--nproc-per-node", "2", *options, "script.py"),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        yield process, [int(process.stdout.readline()) for _ in range(2)]
    finally:
        process.kill()
        process.communicate()


def test_environment_of_each_rank(launch: Launch) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS".split()
    result = launch(f"import os; print(*[os.environ[name] for name in {names}])", "--nproc-per-node", "3")
    assert sorted(result.stdout.splitlines()) == [f"{rank} {rank} 3 3 0 127.0.0.1 1" for rank in range(3)]
    assert (result.returncode, result.stderr) == (0, "")


def test_rendezvous_through_the_launchers_store(launch: Launch) -> None:
    script = """
from torchdist_ref.rendezvous import rendezvous
store, rank, world = next(rendezvous("env://"))
store.set(f"square {rank}", str((rank + 2) ** 2))
print(rank, world, [int(store.get(f"square {other}")) for other in range(world)])
"""
    result = launch(script, "--nproc_per_node=3")
    assert sorted(result.stdout.splitlines()) == [f"{rank} 3 [4, 9, 16]" for rank in range(3)], result.stderr


def test_a_collective_under_the_launcher(launch: Launch, python_with_torch: str) -> None:
    script = """
import torchdist_ref as dist
from torchdist_ref.testing import fill
dist.init_process_group("ref")
tensor = fill(dist.get_rank(), (4,))
dist.all_reduce(tensor)
print(tensor.equal(fill(0, (4,)) + fill(1, (4,))))
dist.destroy_process_group()
"""
    result = launch(script, "--nproc-per-node", "2", "--no-python", python_with_torch)
    assert (result.stdout, result.returncode) == ("True\nTrue\n", 0), result.stderr


def test_arguments_of_the_script(launch: Launch) -> None:
    script = "import sys; print(sys.argv[1:], __name__)"
    result = launch(script, args=("--nproc-per-node", "9", "-m", "--", "x y"))
    assert result.stdout == "['--nproc-per-node', '9', '-m', '--', 'x y'] __main__\n"


def test_a_module_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "inner.py").write_text("import sys; print(__name__, sys.argv[1:])")
    result = subprocess.run(
        command("-m", "pack.inner", "--flag"), cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert result.stdout == "__main__ ['--flag']\n", result.stderr


def test_lines_of_different_ranks_stay_whole_and_in_order(launch: Launch) -> None:
    script = RANK + "for i in range(3000): print(rank, i, str(rank) * 50)"
    lines = launch(script, "--nproc-per-node", "3").stdout.splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(str(rank))]
        assert mine == [f"{rank} {i} {str(rank) * 50}" for i in range(3000)]
    assert len(lines) == 9000


def test_prefix_of_each_line(launch: Launch) -> None:
    script = RANK + "print('out', end=''); print('error', file=sys.stderr)"
    result = launch(script, "--nproc-per-node", "2", "--prefix")
    assert sorted(result.stdout.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert sorted(result.stderr.splitlines()) == ["[rank 0] error", "[rank 1] error"]


def test_lines_are_whole_beside_another_writer_of_the_pipe(launch: Launch, tmp_path: Path) -> None:
    """Once the launcher wrote pieces of 4 KiB, between which another process could write to the same pipe."""
    (tmp_path / "script.py").write_text(RANK + "os.write(1, b''.join(b'%d %d\\n' % (rank, i**3) for i in range(6000)))")
    # Each read of a pipe in packet mode returns what one write has written.
    reader, writer = os.pipe2(os.O_DIRECT)
    arguments = command("--nproc-per-node", "2", "script.py")
    with subprocess.Popen(arguments, cwd=tmp_path, env=environment(), stdout=writer):
        os.close(writer)
        with open(reader, "rb", 0) as pipe:
            packets = list(iter(lambda: pipe.read(1 << 16), b""))
    assert all(packet.endswith(b"\n") for packet in packets)
    for rank in (0, 1):
        mine = [line for line in b"".join(packets).splitlines() if line.startswith(b"%d " % rank)]
        assert mine == [b"%d %d" % (rank, i**3) for i in range(6000)]


def test_a_line_of_a_megabyte_is_whole(launch: Launch) -> None:
    """Once a line was cut after 64 KiB."""
    result = launch(
        RANK + "print(' '.join(f'{rank}{i**2}' for i in range(100_000)))", "--nproc-per-node", "2", "--prefix"
    )
    lines = [f"[rank {rank}] " + " ".join(f"{rank}{i**2}" for i in range(100_000)) for rank in (0, 1)]
    assert sorted(result.stdout.splitlines()) == lines


def test_a_terminal_that_does_not_block_loses_no_output(tmp_path: Path) -> None:
    """Once the first write that did not fit ended the output of all ranks."""
    (tmp_path / "script.py").write_text("print(*(i**3 for i in range(20_000)), sep='\\n')")
    ours, theirs = os.openpty()
    os.set_blocking(theirs, False)
    with subprocess.Popen(
        command("script.py"), cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, stdout=theirs
    ) as launcher:
        os.close(theirs)
        held, shown = array.array("i", [0]), b""
        while not held[0]:
            fcntl.ioctl(ours, termios.FIONREAD, held)
        # The other end reports an error once it is closed and empty.
        with contextlib.suppress(OSError):
            while data := os.read(ours, 1 << 16):
                shown += data
        assert launcher.wait(20) == 0
    os.close(ours)
    assert shown.decode().split() == [str(i**3) for i in range(20_000)]


# Run it with the two times of the launcher, in seconds, and its arguments.
WITH_OTHER_TIMES = """
import sys
from torchdist_ref.launch import command_line
from torchdist_ref.launcher import supervision, supervisor

supervision.DRAIN_SECONDS, supervisor.READER_SECONDS = map(float, sys.argv[1:3])
sys.exit(command_line(sys.argv[3:]))
"""


def test_an_unfinished_line_is_shown_though_a_process_holds_the_pipe(tmp_path: Path) -> None:
    """Once it was dropped with the pipe of a daemon, two seconds after the end of the ranks."""
    (tmp_path / "script.py").write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\nprint('no end', end='')"
    )
    arguments = [sys.executable, "-c", WITH_OTHER_TIMES, "0.05", "0.5", "script.py"]
    result = subprocess.run(arguments, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("no end\n", 0), result.stderr


def test_a_signal_loses_no_output_that_a_slow_reader_has_not_read(tmp_path: Path) -> None:
    """Once what the launcher could not write when a signal arrived was lost, from the middle of a line on."""
    (tmp_path / "script.py").write_text("i = 0\nwhile True:\n  print(i**2)\n  i += 1\n")
    arguments = [sys.executable, "-c", WITH_OTHER_TIMES, "2", "60", "script.py"]
    with subprocess.Popen(arguments, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE) as launcher:
        wait_until_full(launcher)
        launcher.terminate()
        lines = launcher.communicate(timeout=30)[0].decode().split("\n")
        assert launcher.returncode == 128 + signal.SIGTERM
    # The last line is that at which the rank ended.
    assert len(lines) > 1000 and lines[:-2] == [str(i**2) for i in range(len(lines) - 2)]


def test_rank_0_reads_the_launchers_input(launch: Launch) -> None:
    result = launch(RANK + "print(rank, repr(sys.stdin.read()))", "--nproc-per-node", "2", feed="words")
    assert sorted(result.stdout.splitlines()) == ["0 'words'", "1 ''"]


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [("sys.exit(7)", 7, "exited with code 7"), ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL")],
)
def test_the_first_failure_is_reported_and_stops_all_ranks(launch: Launch, end: str, code: int, words: str) -> None:
    result = launch(f"{RANK}if rank == 1: {end}\n{WAIT}", "--nproc-per-node", "3")
    (report,) = [
        line for line in result.stderr.splitlines() if line.startswith("torchdist_ref.launch: rank 1 (process ")
    ]
    assert report.endswith(f") {words}; stopping ranks 0, 2")
    assert result.returncode == code


WITH_THE_END_OF_A_CHILD_UNREAD = """
import signal, sys
from torchdist_ref.launch import command_line
from torchdist_ref.launcher.supervisor import Interrupts

begin = Interrupts.__init__


def begin_with_one(self, *arguments, **options):
    begin(self, *arguments, **options)
    signal.raise_signal(signal.SIGCHLD)


Interrupts.__init__ = begin_with_one
Interrupts.received = lambda self: b""
sys.exit(command_line(["script.py"]))
"""


def test_the_traceback_of_a_rank_precedes_the_launchers_line(tmp_path: Path) -> None:
    """Once the signal of the rank's own end kept the launcher from reading its last lines, in 140 of 1,000 runs."""
    (tmp_path / "script.py").write_text("raise ValueError('boom')")
    command = [sys.executable, "-c", WITH_THE_END_OF_A_CHILD_UNREAD]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    head, _, rest = done.stderr.partition("torchdist_ref.launch: ")
    assert (
        head.startswith("Traceback") and head.endswith("\nValueError: boom\n") and rest.startswith("rank 0 (process ")
    )


def test_the_report_has_the_end_of_redirected_standard_error(launch: Launch, tmp_path: Path) -> None:
    """Once it had neither, and asked to decorate the main function below a traceback that Python had printed."""
    script = f"{RANK}if rank == 1: raise ValueError('boom')\n{WAIT}"
    result = launch(script, "--nproc-per-node", "2", "--redirects", "1:3", "--log-dir", "logs")
    [line] = [each for each in result.stderr.splitlines() if each.startswith("  stderr    : ")]
    printed = (tmp_path / line.partition(": ")[2]).read_text()
    assert printed.endswith("ValueError: boom\n")
    expected = "\n  ".join(["the last lines of its standard error:", *printed.splitlines()])
    assert result.stderr.endswith(f"{line}\n  traceback : {expected}\n")


def test_the_report_asks_for_no_decorator_below_a_traceback(launch: Launch) -> None:
    result = launch("raise ValueError('boom')")
    assert result.stderr.endswith("  traceback : printed above, in the output of this rank\n")
    assert "To enable traceback: decorate" in launch("raise SystemExit(3)").stderr


def test_the_report_has_no_path_of_a_record_that_is_gone(launch: Launch, tmp_path: Path) -> None:
    script = "from torchdist_ref.processes import failure_record as r\nr.write(ValueError('boom'))\nraise SystemExit(1)"
    assert "  error_file: <N/A>\n  traceback : ValueError: boom\n" in launch(script).stderr
    [line] = [each for each in launch(script, "--log-dir", "logs").stderr.splitlines() if "error_file" in each]
    assert "boom" in (tmp_path / line.partition(": ")[2]).read_text()


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_time(launch: Launch) -> None:
    ready = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(f'ready {rank}', 'w')\n"
    await_other = "import time\nwhile not os.path.exists('ready 0'): time.sleep(0.01)\nsys.exit(3)\n"
    script = f"{RANK}if rank == 0:\n  {ready.replace(chr(10), chr(10) + '  ')}\nelse:\n  "
    result = launch(script + await_other.replace("\n", "\n  ") + "\n" + WAIT, "--nproc-per-node", "2", "--grace", "0.2")
    assert "rank 1" in result.stderr and "stopping rank 0\n" in result.stderr
    assert "torchdist_ref.launch: rank 0 did not stop within 0.2 s: killing\n" in result.stderr
    assert result.returncode == 3


INTERRUPTED = """
import signal, sys
from torchdist_ref.launch import command_line
from torchdist_ref.launcher.worker import LineRelay

feed = LineRelay.feed


def feed_when_a_signal_has_come(relay, data):
    LineRelay.feed = feed
    signal.raise_signal(signal.SIGTERM)
    feed(relay, data)


LineRelay.feed = feed_when_a_signal_has_come
sys.exit(command_line(["--nproc-per-node", "1", "script.py"]))
"""


def test_a_signal_loses_no_output_that_has_been_read(tmp_path: Path) -> None:
    """Once it interrupted the launcher between its read and its write: 4 KiB were gone, in 7 of 25 busy jobs."""
    # One write, which the launcher reads at once.
    (tmp_path / "script.py").write_text(
        f"import os\nos.write(1, ' '.join(map(str, range(5000))).encode() + b'\\n')\n{WAIT}"
    )
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(number) for number in range(5000)]
    assert done.returncode == 128 + signal.SIGTERM, done.stderr


@pytest.mark.parametrize(
    ("signum", "words"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, ""), (signal.SIGHUP, "")]
)
def test_signals_are_forwarded_to_every_rank(tmp_path: Path, signum: signal.Signals, words: str) -> None:
    with running(tmp_path, "") as (launcher, ranks):
        launcher.send_signal(signum)
        _, errors = launcher.communicate(timeout=20)
        assert launcher.returncode == 128 + signum
        assert f"got {signum.name}: forwarding it to ranks 0, 1" in errors
        assert errors.count(words) >= 2
        assert all_ended(ranks)


def test_exit_code_after_a_signal_that_ranks_handle(tmp_path: Path) -> None:
    with running(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))") as (launcher, _):
        launcher.terminate()
        assert launcher.wait(20) == 143


def test_a_second_signal_kills(tmp_path: Path) -> None:
    first = "signal.signal(signal.SIGINT, lambda *_: print('received', flush=True))"
    with running(tmp_path, first, "--grace", "1000") as (launcher, ranks):
        assert launcher.stdout
        launcher.send_signal(signal.SIGINT)
        assert [launcher.stdout.readline() for _ in range(2)] == ["received\n"] * 2
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(20) == 130
        assert all_ended(ranks)


def test_ranks_die_with_a_killed_launcher(tmp_path: Path) -> None:
    with running(tmp_path, "") as (launcher, ranks):
        launcher.kill()
        assert all_ended(ranks)


def test_processes_that_a_rank_started_are_killed(launch: Launch) -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=-3, stderr=-3).pid)"
    result = launch(script, "--nproc-per-node", "2")
    pids = [int(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0 and len(pids) == 2
    assert all_ended(pids)


def test_a_broken_pipe_ends_the_job_without_a_message(tmp_path: Path) -> None:
    first = "def write(*_):\n  while True: print('line')\nsignal.signal(signal.SIGUSR1, write)"
    with running(tmp_path, first) as (launcher, ranks):
        assert launcher.stdout and launcher.stderr
        launcher.stdout.close()
        # Of one rank only: the launcher may have ended the others once it has a line that nobody reads.
        os.kill(ranks[0], signal.SIGUSR1)
        assert launcher.wait(20) == 128 + signal.SIGPIPE
        assert launcher.stderr.read() == ""
        assert all_ended(ranks)
        launcher.stdout = None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nproc-per-node", "0", "x.py"], "must be a whole number of ranks, at least 1, got '0'"),
        (["--nproc-per-node", "-2", "x.py"], "must be a whole number of ranks, at least 1, got '-2'"),
        (["--nproc-per-node", "two", "x.py"], "must be a whole number of ranks, at least 1, got 'two'"),
        (["--grace", "-1", "x.py"], "must be a number of seconds, 0 or more, got '-1'"),
        (["--grace", "nan", "x.py"], "must be a number of seconds, 0 or more, got 'nan'"),
        (["--master-port", "70000", "x.py"], "must be a port number from 0 to 65535 (0: any free one), got '70000'"),
        (["missing.py"], "there is no script 'missing.py' in "),
        (["."], "the script '.' is a folder without a __main__.py"),
        (["-m", "missing.inner"], "there is no module 'missing.inner' on the path"),
        ([], "the following arguments are required: script\n"),
    ],
)
def test_wrong_options_are_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        run.main(options)
    assert raised.value.code == 2 and words in capfd.readouterr().err


def test_without_a_script_the_usage_is_shown(tmp_path: Path) -> None:
    result = subprocess.run(command(), cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert result.stderr.startswith(
        "usage: python -m torchdist_ref.launch [options] script [arguments of the script]\n"
    )
    assert result.stderr.endswith("--help lists the options.\n") and result.returncode == 2


def test_a_port_in_use_is_reported(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = launch("print('never')", "--master-port", str(port))
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("torchdist_ref.launch: ") and str(port) in result.stderr


def test_it_imports_neither_torch_nor_openssl(tmp_path: Path) -> None:
    """OpenSSL, which `hashlib` loads, would add a sixth to its memory."""
    (tmp_path / "script.py").write_text("")
    names = "{'torch', '_hashlib', '_ssl'}"
    code = (
        "import sys; from torchdist_ref.launch import command_line; command_line(['script.py']); "
        f"print({names} & sys.modules.keys())"
    )
    python = [sys.executable, "-c", code]
    result = subprocess.run(python, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr


def test_a_program_catches_a_failed_rank_and_keeps_its_own_children(tmp_path: Path) -> None:
    """Once `run.main` killed every child of the program, and returned 3, so that the program went on."""
    (tmp_path / "script.py").write_text(f"{RANK}if rank == 1: sys.exit(3)\n{WAIT}")
    with subprocess.Popen(["sleep", "1000"]) as own:
        try:
            with pytest.raises(torchs_errors.ChildFailedError) as caught:
                run.main(["--nproc-per-node", "2", str(tmp_path / "script.py")])
            assert own.poll() is None
        finally:
            own.kill()
    assert isinstance(caught.value, ChildFailedError)
    assert {rank: (each.local_rank, each.exitcode) for rank, each in caught.value.failures.items()} == {1: (1, 3)}
    assert run.main(["--nproc-per-node", "2", "--no-python", "true"]) is None


def test_a_failed_rank_is_caught_by_torchs_class_that_is_imported_later(tmp_path: Path) -> None:
    """The success before it imports no torch."""
    program = (
        "import sys\nfrom torchdist_ref import run\nrun.main(['--no-python', 'true'])\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n  run.main(['--no-python', 'false'])\nexcept Exception as error:\n"
        "  from torch.distributed.elastic.multiprocessing.errors import ChildFailedError\n"
        "  print(isinstance(error, ChildFailedError), *error.failures)"
    )
    python = [sys.executable, "-c", program]
    result = subprocess.run(python, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert result.stdout == "True 0\n", result.stderr


def test_all_ranks_are_restarted_when_one_fails(launch: Launch) -> None:
    script = (
        f"{RANK}count = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint(rank, count, flush=True)\n"
        f"if count == '2': sys.exit(0)\nif rank == 1: sys.exit(3)\n{WAIT}"
    )
    result = launch(script, "--nproc-per-node", "2", "--max-restarts", "5")
    assert result.returncode == 0
    assert result.stderr.count("rank 1 (process ") == 2
    assert result.stderr.splitlines()[-1] == "torchdist_ref.launch: restarting all ranks (2 of 5)"
    assert result.stdout.splitlines()[-1][2:] == "2"


def test_ranks_may_stop_by_themselves_when_nobody_reads_the_launchers_messages(tmp_path: Path) -> None:
    """Once the launcher's own message to a pipe without a reader killed them at once, and the exit code was 1."""
    (tmp_path / "script.py").write_text(
        "import signal, sys, time\n"
        "def stop(*_): open('saved', 'w').close(); sys.exit(4)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "open('ready', 'w').close()\n"
        "while True: time.sleep(0.05)\n"
    )
    reader, writer = os.pipe()
    with subprocess.Popen(command("script.py"), cwd=tmp_path, env=environment(), stderr=writer) as launcher:
        os.close(writer)
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.close(reader)
        launcher.send_signal(signal.SIGTERM)
        try:
            assert launcher.wait(20) == 128 + signal.SIGTERM
        finally:
            launcher.kill()
    assert (tmp_path / "saved").exists()


def test_a_full_disk_ends_the_output_and_not_the_job(tmp_path: Path) -> None:
    """Once it counted as a script that cannot be executed, and the ranks were killed."""
    script = "import os\nprint('x' * 100_000, flush=True)\nopen('rank ' + os.environ['RANK'], 'w').close()"
    (tmp_path / "script.py").write_text(script)
    with open("/dev/full", "w") as full:
        arguments = command("--nproc-per-node", "2", "script.py")
        result = subprocess.run(
            arguments, cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=30
        )
    line = "torchdist_ref.launch: stopped forwarding output of the workers: No space left on device\n"
    assert (result.returncode, result.stderr) == (0, line)
    assert (tmp_path / "rank 0").exists() and (tmp_path / "rank 1").exists()


@pytest.mark.parametrize(
    ("signum", "errors"), [(signal.SIGTERM, subprocess.DEVNULL), (signal.SIGINT, subprocess.STDOUT)]
)
def test_a_signal_is_handled_while_nobody_reads_the_output(signum: signal.Signals, errors: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRINT)
    arguments = command("--nproc-per-node", "2", str(script))
    with subprocess.Popen(
        arguments, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=errors
    ) as launcher:
        wait_until_full(launcher)
        launcher.send_signal(signum)
        try:
            assert launcher.wait(10) == 128 + signum
        finally:
            launcher.kill()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_print_as_they_end_do_not_hold_up_the_launcher(signum: signal.Signals, tmp_path: Path) -> None:
    """Once the launcher wrote to a reader that did not read, for ever, and saw neither their end nor its grace time.

    It gives a reader half a second.
    """
    handler = "def end(*_):\n for _ in range(300): print('x' * 1000, flush=True)\n os._exit(3)\n"
    with running(tmp_path, f"{handler}for each in (15, 2): signal.signal(each, end)") as (launcher, ranks):
        launcher.send_signal(signum)
        assert launcher.wait(20) == 128 + signum
        assert all_ended(ranks)


def test_an_agent_whose_output_nobody_reads_ends_with_the_job(tmp_path: Path) -> None:
    """Once it wrote its ranks' output for ever, and the first host waited five seconds for it.

    It gives a reader half a second.
    """
    (tmp_path / "script.py").write_text(f"{RANK}if rank == 0:\n  import time\n  while True: time.sleep(1)\n{PRINT}")
    with contextlib.ExitStack() as stack:
        launchers = []
        port, null = str(reserve_port()), subprocess.DEVNULL
        for number, output in enumerate((null, subprocess.PIPE)):
            arguments = command("--nnodes", "2", "--node-rank", str(number), "--master-port", port, "script.py")
            launcher = subprocess.Popen(arguments, cwd=tmp_path, env=environment(), stdout=output, stderr=null)
            launchers.append(stack.enter_context(launcher))
            stack.callback(launcher.kill)
        wait_until_full(launchers[1])
        launchers[0].send_signal(signal.SIGTERM)
        assert [launcher.wait(20) for launcher in launchers] == [128 + signal.SIGTERM, 1]


def wait_until_full(launcher: subprocess.Popen[bytes]) -> None:
    """Wait until nothing more fits into a launcher's pipe: short lines leave a part of some pages empty."""
    assert launcher.stdout is not None
    held, before, unchanged = array.array("i", [0]), 0, 0
    while not held[0] or unchanged < 30:
        before = held[0]
        fcntl.ioctl(launcher.stdout, termios.FIONREAD, held)
        unchanged = unchanged + 1 if held[0] == before else 0
        time.sleep(0.01)
