"""`processes.control`: children end with their parent, receive signals as a group, and are reaped last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.process_ends import all_ended
from torchdist_ref.processes import control as processes

ROOT = Path(__file__).parents[2]
SLEEP = ["sleep", "1000"]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_wait_returns_the_status_and_does_not_reap() -> None:
    child = processes.spawn(python("raise SystemExit(7)"))
    assert child.wait(20) == 7 == child.status
    # A zombie still has its process id.
    os.kill(child.pid, 0)
    child.reap()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    assert child.wait() == 7


def test_wait_returns_none_after_a_timeout() -> None:
    child = processes.spawn(SLEEP)
    assert child.wait(0) is None and child.wait(0.01) is None
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.reap()


def test_pidfd_is_readable_after_the_end_and_closed_by_reap() -> None:
    child = processes.spawn(SLEEP)
    descriptor = child.descriptor
    child.terminate(20)
    assert child.status == -signal.SIGTERM
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_terminate_kills_a_child_that_ignores_sigterm() -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
    child = processes.spawn(python(code), stdout=subprocess.PIPE)
    assert child.pipes[0].readline() == b"ready\n"
    child.terminate(0.1)
    assert child.status == -signal.SIGKILL
    assert child.pipes[0].closed


@pytest.mark.parametrize("new_session", [False, True])
def test_signals_reach_the_processes_that_a_child_started(new_session: bool) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); input()"
    child = processes.spawn(python(code), new_session=new_session, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    grandchild = int(child.pipes[1].readline())
    assert os.getpgid(child.pid) == child.pid
    assert (os.getsid(child.pid) == child.pid) is new_session
    child.signal(signal.SIGKILL)
    child.reap()
    assert all_ended([grandchild])


def test_setup_runs_in_the_child_before_the_command(tmp_path: Path) -> None:
    child = processes.spawn(python("import os; print(os.getcwd())"), setup=lambda: os.chdir(tmp_path), stdout=-1)
    assert child.pipes[0].read().decode().strip() == str(tmp_path)
    child.reap()


@pytest.mark.parametrize(("options", "ends"), [("", True), (", new_session=True", False)])
def test_a_spawned_child_is_killed_with_its_parent(options: str, ends: bool) -> None:
    code = (
        "import os; from torchdist_ref.processes.control import spawn\n"
        f"child = spawn({SLEEP}, stdout=-3, stderr=-3{options})\nprint(child.pid, flush=True); os._exit(0)"
    )
    result = subprocess.run(python(code), cwd=ROOT, stdout=subprocess.PIPE, timeout=60)
    pid = int(result.stdout)
    if not ends:
        os.kill(pid, signal.SIGKILL)
    assert all_ended([pid])


def test_a_forked_child_is_killed_with_its_parent() -> None:
    code = (
        "import os, signal; from torchdist_ref.processes.control import fork\n"
        "print(fork(signal.pause).pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run(python(code), cwd=ROOT, stdout=subprocess.PIPE, timeout=60)
    assert all_ended([int(result.stdout)])


def test_an_exception_in_a_forked_child_does_not_return_into_the_parents_code() -> None:
    def fail() -> None:
        os.close(2)
        raise ValueError("in the child")

    child = processes.fork(fail)  # type: ignore[arg-type]
    assert child.wait() == 1
    child.reap()


def test_a_forked_child_does_not_finalize_the_parents_garbage() -> None:
    # In the child a collection is due at the first allocation after the fork.
    code = """
        import gc, os
        from torchdist_ref.processes.control import fork

        class Garbage:
            def __init__(self):
                self.itself = self

            def __del__(self):
                if os.getpid() != parent:
                    os._exit(7)

        def child():
            gc.collect()
            os._exit(3)

        parent = os.getpid()
        gc.collect()
        gc.disable()
        garbage = [Garbage() for _ in range(100)]
        del garbage
        os.register_at_fork(after_in_child=lambda: gc.set_threshold(1))
        gc.enable()
        child = fork(child)
        gc.disable()
        print(child.wait())
    """
    result = subprocess.run(python(textwrap.dedent(code)), cwd=ROOT, stdout=subprocess.PIPE, timeout=60)
    assert result.stdout == b"3\n"


def test_a_forked_child_leads_a_process_group() -> None:
    child = processes.fork(lambda: os._exit(3 if os.getpgid(0) == os.getpid() else 4))
    assert child.wait() == 3
    child.reap()


def test_an_interrupt_is_deferred_to_the_end_of_the_block() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), processes.deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_through_a_socket() -> None:
    with processes.signal_socket([signal.SIGTERM, signal.SIGHUP]) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.recv(64) == bytes([signal.SIGHUP])
        with pytest.raises(BlockingIOError):
            signals.recv(64)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_ignored_by_nohup_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with processes.signal_socket([signal.SIGHUP]) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(BlockingIOError):
                signals.recv(64)
    finally:
        signal.signal(signal.SIGHUP, former)


def test_signal_socket_outside_the_main_thread() -> None:
    handlers = []

    def enter() -> None:
        with processes.signal_socket([signal.SIGTERM]):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]


def test_names_of_unknown_signals() -> None:
    assert processes.describe_exit(0) == "exited with code 0"
    assert processes.describe_exit(-40) == "was killed by signal 40"


def test_processes_does_not_import_torch() -> None:
    code = "import sys, torchdist_ref.processes.control; print('torch' in sys.modules)"
    assert subprocess.run(python(code), cwd=ROOT, capture_output=True, text=True).stdout == "False\n"
