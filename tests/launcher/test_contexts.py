"""Processes of `start_processes` and `spawn`: results and log files as torch's, the first failure, none left."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.elastic.multiprocessing as theirs
import torch.multiprocessing
import torchdist_ref.elastic.multiprocessing as ours

from tests.elastic.agents import is_running
from tests.launcher import jobs
from torchdist_ref import multiprocessing as spawning
from torchdist_ref.errors import ArgumentError
from torchdist_ref.launcher import contexts, entrypoint, orphans, supervision, supervisor
from torchdist_ref.launcher.api import LaunchConfig, elastic_launch
from torchdist_ref.launcher.child_failures import ChildFailedError

signals_at_fork: list[signal.Signals] = []
os.register_at_fork(after_in_child=lambda: [os.kill(os.getpid(), signum) for signum in signals_at_fork] and None)

PROGRAM = "import os, sys; print('out', sys.argv[1], os.environ['A']); print('error', file=sys.stderr)"


def start(entrypoint: Any, *args: tuple[Any, ...], method: str = "fork", **options: Any) -> Any:
    envs: dict[int, dict[str, str]] = {rank: {} for rank in range(len(args))}
    specs = options.pop("specs", None) or ours.DefaultLogsSpecs()
    return ours.start_processes("job", entrypoint, dict(enumerate(args)), envs, specs, start_method=method, **options)


def files(folder: Path) -> dict[str, str]:
    """Return the content of each file, by its path below the folder of the job, whose name is random."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(Path(*path.relative_to(folder).parts[1:])): path.read_text() for path in found}


@pytest.fixture
def torchs_leftovers() -> Iterator[None]:
    """Restore the signal handlers that torch's contexts leave behind."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    former = {signum: signal.getsignal(signum) for signum in signals}
    yield
    for signum, handler in former.items():
        signal.signal(signum, handler)


# torch leaves the log files of commands open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("torchs_leftovers")
@pytest.mark.parametrize("entrypoint", [jobs.print_and_cube, sys.executable])
def test_results_and_log_files_equal_torchs(entrypoint: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    for name, module in (("theirs", theirs), ("ours", ours)):
        specs = module.DefaultLogsSpecs(str(tmp_path / name), redirects={0: ours.Std.ALL}, tee={1: ours.Std.OUT})
        args = {rank: (rank,) if callable(entrypoint) else ("-c", PROGRAM, rank) for rank in range(2)}
        envs = {rank: {"A": f"a{rank}"} for rank in range(2)}
        context = module.start_processes(
            "job", entrypoint, args, envs, specs, start_method="fork", duplicate_stdout_filters=["1 a1"]
        )
        result = context.wait(timeout=30, period=0.01)
        paths = [
            {rank: path and str(Path(path).relative_to(tmp_path / name).name) for rank, path in each.items()}
            for each in (result.stdouts, result.stderrs)
        ]
        found.append((result.return_values, result.failures, result.is_failed(), paths, files(tmp_path / name)))
        out, err = capfd.readouterr()
        assert out == "[job1]:out 1 a1\n" and err.count("error") == 1
    # torch may close its filtered file before the last lines of a short job; ours has all lines.
    assert found[1][4].pop("attempt_0/filtered_stdout.log") == "[job1]:out 1 a1\n"
    found[0][4].pop("attempt_0/filtered_stdout.log", None)
    assert found[0] == found[1]


@pytest.mark.parametrize(("job", "exitcode"), [(jobs.die_or_fail_of_it, -9), (jobs.fail_after_its_victim, 1)])
def test_the_first_failure_is_reported_though_others_fail_because_of_it(
    job: Any, exitcode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python and its traceback may take a busy machine longer than the half second that a user waits.
    monkeypatch.setattr(supervision, "CAUSE_SECONDS", 20.0)
    ends = os.pipe()
    context = start(job, (0, *ends), (1, *ends), (2, *ends))
    for end in ends:
        os.close(end)
    result = context.wait(30)
    ((rank, failure),) = result.failures.items()
    assert (rank, failure.local_rank, failure.exitcode, result.return_values) == (1, 1, exitcode, {})
    assert failure.pid == context.pids()[1] and isinstance(failure, theirs.ProcessFailure)
    assert ("Signal 9 (SIGKILL)" if exitcode < 0 else "slow to fail") in str(failure.message)
    assert not any(map(is_running, context.pids().values()))


def test_no_record_is_looked_for_while_all_processes_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand processes, the end of each would cost a thousand looks."""
    looked: list[Path] = []
    monkeypatch.setattr(supervisor, "read", looked.append)
    assert not start("true", (), (), ()).wait(30).is_failed() and looked == []


def test_a_failure_has_its_record() -> None:
    before = int(time.time())
    result = start(jobs.fail_on, (0, 1), (1, 1)).wait(30)
    failure = result.failures[1]
    assert failure.message["message"] == "ValueError: rank 1 has no data" and failure.exitcode == 1
    assert "in fail_on" in failure.message["extraInfo"]["py_callstack"]
    assert before <= failure.timestamp <= time.time() and Path(failure.error_file).is_file()
    assert ChildFailedError("job", result.failures).get_first_failure() == (1, failure)


@pytest.mark.parametrize("api", ["start_processes", "spawn", "elastic_launch"])
def test_a_signal_right_after_the_fork_is_not_lost(api: str) -> None:
    """Once a rank that was asked to stop before its first instruction was killed after 30 s."""
    signals_at_fork.append(signal.SIGTERM)
    try:
        if api == "start_processes":
            result = start(jobs.exit_on, (0, 7, 1)).wait(30)
            assert result.failures[0].exitcode == -signal.SIGTERM
        elif api == "spawn":
            with pytest.raises(spawning.ProcessExitedException, match="terminated with signal SIGTERM"):
                spawning.start_processes(jobs.exit_on, (7, 1), nprocs=1, start_method="fork")
        else:
            config = LaunchConfig(1, 1, 1, start_method="fork", max_restarts=0)
            with pytest.raises(ChildFailedError) as caught:
                elastic_launch(config, jobs.exit_on)(0, 7, 1)
            assert caught.value.failures[0].exitcode == -signal.SIGTERM
    finally:
        signals_at_fork.clear()


def test_other_processes_of_multiprocessing_do_not_take_the_end_of_a_rank() -> None:
    """Once `ChildProcessError` took the place of the rank's exit code."""
    context = start(os._exit, *[(3,)] * 8)
    result = context.wait(30)
    assert {failure.exitcode for failure in result.failures.values()} == {3}


def test_close_sends_its_signal_and_ends_all_that_was_started(tmp_path: Path) -> None:
    context = start(jobs.start_a_daemon_and_wait, (str(tmp_path / "0"),), (str(tmp_path / "1"),))
    while not all((tmp_path / name).exists() for name in "01"):
        assert context.wait(0.01) is None
    assert context.wait(0) is None and sorted(context.pids()) == [0, 1]
    daemons = [int((tmp_path / name).read_text()) for name in "01"]
    context.close(signal.SIGUSR1, timeout=20)
    context.close()
    assert {rank: failure.exitcode for rank, failure in context.wait().failures.items()} == {0: 40, 1: 41}
    assert not any(map(is_running, [*context.pids().values(), *daemons]))


def test_close_ends_processes_that_are_just_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it waited for their natural end: a signal interrupts `start` before there is a supervisor."""
    entered, go_on, guard = threading.Event(), threading.Event(), contexts.orphans.Guard

    def slow(mark: str, folder: str) -> orphans.Guard:
        entered.set()
        go_on.wait(30)
        return guard(mark, folder)

    asked, ask = threading.Event(), os.eventfd_write

    def noticed(descriptor: int, value: int) -> None:
        ask(descriptor, value)
        asked.set()

    monkeypatch.setattr(contexts.orphans, "Guard", slow)
    monkeypatch.setattr(contexts.os, "eventfd_write", noticed)
    context = contexts.SubprocessContext("job", "sleep", {0: ("1000",)}, {0: {}}, ours.DefaultLogsSpecs())
    starter, closer = threading.Thread(target=context.supervise), threading.Thread(target=context.close)
    starter.start()
    assert entered.wait(30)
    closer.start()
    was_asked = asked.wait(10)
    go_on.set()
    starter.join()
    if not was_asked:
        os.kill(context.pids()[0], signal.SIGKILL)
    closer.join()
    assert was_asked and context.wait().failures[0].exitcode == -signal.SIGTERM


def test_a_process_may_end_without_a_result(tmp_path: Path) -> None:
    assert start(os._exit, (0,)).wait(30).return_values == {0: None}
    assert entrypoint.run(tmp_path, 0, lambda: (pow, (2, 10))) == 0 and entrypoint.result(tmp_path, 0) == 1024
    # An earlier attempt's result is not that of an attempt without one.
    with pytest.raises(KeyboardInterrupt):
        entrypoint.run(tmp_path, 0, interrupted)
    assert entrypoint.result(tmp_path, 0) is None


def interrupted() -> Any:
    raise KeyboardInterrupt


def test_a_signal_to_this_process_raises_and_handlers_are_restored() -> None:
    former = signal.getsignal(signal.SIGTERM)
    context = start(jobs.wait_for_signal, ())
    with pytest.raises(theirs.SignalException) as caught:
        # In the block: on a busy machine the signal may come before the wait.
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        context.wait(30)
    assert caught.value.sigval == signal.SIGTERM and isinstance(caught.value, ours.SignalException)
    context.close(caught.value.sigval)
    assert signal.getsignal(signal.SIGTERM) is former and not is_running(context.pids()[0])


def test_wrong_calls() -> None:
    with pytest.raises(RuntimeError, match="envs, local rank mapping mismatch"):
        ours.start_processes("job", "true", {0: ()}, {1: {}}, ours.DefaultLogsSpecs())
    with pytest.raises(FileNotFoundError, match="no_such_program"):
        start("no_such_program", ())
    with pytest.raises(ArgumentError, match="cannot find context for 'thread'"):
        ours.start_processes("job", jobs.exit_on, {0: ()}, {0: {}}, ours.DefaultLogsSpecs(), start_method="thread")
    former = signal.getsignal(signal.SIGTERM)
    context = start("true", ())
    with pytest.raises(ValueError, match="started"):
        context.start()
    context.close()
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_new_interpreter_shares_queues_and_tensors() -> None:
    # It imports this module, and so torch: a second.
    queue, tensor = multiprocessing.get_context("spawn").Queue(), torch.zeros(3).share_memory_()
    assert spawning.spawn(jobs.put_and_fill, (queue, tensor), nprocs=1) is None
    assert queue.get(timeout=10) == "from 0" and tensor.tolist() == [0.0, 1.0, 4.0]


def test_spawn_raises_torchs_errors_for_the_first_process_that_failed() -> None:
    context = spawning.start_processes(jobs.fail_on, (1,), nprocs=2, join=False, start_method="fork")
    assert context is not None and len(context.pids()) == 2
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="rank 1 has no data") as raised:
        context.join()
    assert isinstance(raised.value, spawning.ProcessRaisedException) and raised.value.error_index == 1
    with pytest.raises(torch.multiprocessing.ProcessExitedException) as exited:
        spawning.start_processes(jobs.exit_on, (1, 5), nprocs=2, start_method="fork")
    error = exited.value
    assert str(error) == "process 1 terminated with exit code 5"
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, spawning.ProcessExitedException)
    assert (again.error_index, again.error_pid, again.exit_code) == (1, error.error_pid, 5)


def test_all_files_of_spawn_are_in_the_folder_that_its_guard_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    event = multiprocessing.get_context("fork").Event()
    context = spawning.start_processes(jobs.wait_for_event, (event,), nprocs=2, join=False, start_method="fork")
    assert context is not None and len(list(tmp_path.iterdir())) == 1
    event.set()
    assert context.join() and list(tmp_path.iterdir()) == []


def test_join_with_a_timeout_says_whether_all_have_ended() -> None:
    event = multiprocessing.get_context("fork").Event()
    context = spawning.start_processes(jobs.wait_for_event, (event,), nprocs=2, join=False, start_method="fork")
    assert context is not None and context.join(0.01) is False
    event.set()
    assert context.join() is True and context.join() is True


def test_a_context_that_can_start_no_process_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its thread ended by an error that nobody saw, and the caller waited for ever."""

    def fail() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with (
        monkeypatch.context() as patched,
        pytest.raises(BlockingIOError, match=r"no process can be started: .*\(ulimit -u\)"),
    ):
        patched.setattr(os, "fork", fail)
        start(os.getenv, ("RANK",))
    assert start(os.getenv, ("RANK",)).wait().return_values == {0: None}


def test_threads_that_close_at_once_close_each_descriptor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a thread that had waited and one that closed did both: the number could be another thread's file by then."""
    made, make = list[int](), os.eventfd
    monkeypatch.setattr(contexts.os, "eventfd", lambda *flags: made.append(make(*flags)) or made[-1])
    context = start(sys.executable, ("-c", "input()"))
    [descriptor], close, also = made, os.close, list[int]()

    def close_also(number: int) -> None:
        if number == descriptor and not also:
            also.append(number)
            context.close()
        close(number)

    monkeypatch.setattr(contexts.os, "close", close_also)
    context.close()
    assert also == [descriptor]
    with pytest.raises(OSError, match="Bad file descriptor"):
        close(descriptor)
