"""Flight recorder: private, bounded, whole files; written on failure, on a signal, on request, where one has asked."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.calls import AllReduce, Barrier
from torchdist_ref.debug import __main__ as command
from torchdist_ref.debug import flight_recorder, report
from torchdist_ref.debug.dumps import Dumps, Event, GroupCalls, RankDump, read_directory, read_file
from torchdist_ref.debug.verdict import Verdict, find_verdict
from torchdist_ref.processes import failure_record
from torchdist_ref.recorder import RecordedGroup, Recorder, include
from torchdist_ref.testing import RankError, fill, run

ROOT = Path(__file__).parents[2]

VARIABLES = (
    failure_record.DIRECTORY_VARIABLE,
    *failure_record.PREFIX_VARIABLES,
    *failure_record.ON_FAILURE_VARIABLES,
)

# A rank that another one fails has to write its dump before it is stopped.


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def wait_for_file(path: Path) -> None:
    while not path.exists():
        select.select([], [], [], 0.001)


def test_a_dump_is_private_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    run(lambda rank: flight_recorder.dump(folder), 2, ranks="processes")
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank1.json"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_readers_see_a_whole_dump_or_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank0.json"
    flight_recorder.write_privately(path, "former")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left on device")))
    with pytest.raises(OSError, match="no space"):
        flight_recorder.write_privately(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["rank0.json"] and path.read_text() == "former"


def test_a_link_in_the_way_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".rank0.json.{os.getpid()}.{threading.get_ident()}").symlink_to(victim)
    flight_recorder.write_privately(tmp_path / "rank0.json", "new")
    assert victim.read_text() == "precious" and (tmp_path / "rank0.json").read_text() == "new"


def test_a_default_directory_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = flight_recorder.path_of(3)
    assert path.parents[2] == tmp_path and path.name == "rank3.json"
    path.parents[1].chmod(0o777)
    with pytest.raises(PermissionError):
        flight_recorder.path_of(3)
    path.parent.rmdir()
    path.parents[1].rmdir()
    path.parents[1].symlink_to("/")
    with pytest.raises((PermissionError, FileExistsError)):
        flight_recorder.path_of(3)


def test_a_dump_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MAX_EVENTS", 50)
    recorders = [Recorder(1000) for _ in range(5)]
    for index, recorder in enumerate(recorders):
        include(recorder, RecordedGroup(f"g{index}", "ref", (71,), 0, 1.0))
        shapes = tuple((torch.float32, (2,)) for _ in range(10_000))
        for number in range(100):
            entry = recorder.begin((number, 0), AllReduce(), (shapes, ()))
            recorder.fail(entry, RuntimeError("x" * 100_000))
    content = flight_recorder.snapshot(71, "y" * 100_000)
    events = [group["events"] for group in content["groups"]]
    assert [len(each) for each in events] == [10] * 5
    assert all(event["number"][0] >= 90 for each in events for event in each)
    assert len(json.dumps(content)) < 50 * 4_000 + 100_000


def fails(rank: int) -> None:
    dist.all_reduce(fill(rank, (2 + rank,)))


PLACES: dict[str, Callable[[Path], tuple[dict[str, str], str]]] = {
    "our directory": lambda folder: ({"TORCHDIST_REF_FLIGHT_RECORDER_DIR": str(folder)}, "rank{}.json"),
    "torch's prefix": lambda folder: ({"TORCH_FR_DUMP_TEMP_FILE": f"{folder}/trace_"}, "trace_{}"),
    "NCCL's prefix": lambda folder: ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{folder}/nccl_rank_"}, "nccl_rank_{}"),
    "forbidden": lambda folder: (
        {"TORCHDIST_REF_FLIGHT_RECORDER_DIR": str(folder), "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        "",
    ),
    "nothing": lambda folder: ({}, ""),
}


@pytest.mark.parametrize("name", PLACES)
def test_failures_are_dumped_where_the_environment_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, pattern = PLACES[name](tmp_path)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(RankError):
        run(fails, 2, ranks="processes")
    assert {path.name for path in tmp_path.iterdir()} == ({pattern.format(0), pattern.format(1)} if pattern else set())
    if pattern:
        assert list(read_directory(tmp_path).ranks) == [0, 1]


DIES = """
import os, select, signal, torch, torchdist_ref as dist
dist.init_process_group("ref")
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
# The launcher asks for a dump when it has seen the death; nothing else writes one before the next call.
while not os.path.exists("dumps/rank0.json"):
    select.select([], [], [], 0.001)
dist.all_reduce(torch.ones(4))
"""


LATE = """
import datetime, threading, torch, torchdist_ref as dist
dist.init_process_group("ref")
def load_batch():
    dist.send(torch.ones(1), 0) or threading.Event().wait(60)
if dist.get_rank() == 1:
    load_batch()
dist.recv(torch.ones(1), 1)
dist.all_reduce(torch.ones(4), async_op=True).wait(datetime.timedelta(seconds=0.3))
"""


# The launcher, which gives dumps more than half a second: a busy machine may not run a rank in that time.
LAUNCHER = """
import sys
from torchdist_ref.launch import command_line
from torchdist_ref.launcher import supervision
supervision.DUMP_SECONDS = 4.0
sys.exit(command_line())
"""


def launched(script: str, folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Verdict]:
    """Run a script on ranks under the launcher; return how it ended, and the verdict on the dumps."""
    (folder / "script.py").write_text(script)
    environment = {**os.environ, failure_record.DIRECTORY_VARIABLE: str(folder / "dumps"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAUNCHER, "--nproc-per-node=2", *options, "script.py"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return result, find_verdict(read_directory(folder / "dumps"))


def test_survivors_have_time_for_their_dumps_under_the_launcher(python_with_torch: str, tmp_path: Path) -> None:
    """Once the launcher stopped them before they had written anything."""
    result, _ = launched(DIES, tmp_path, "--no-python", python_with_torch)
    assert result.returncode == 137 and "was killed by SIGKILL" in result.stderr
    assert list(read_directory(tmp_path / "dumps").ranks) == [0]


def test_the_launcher_asks_the_rank_that_the_others_waited_for(python_with_torch: str, tmp_path: Path) -> None:
    """Once it was stopped without a dump, so that the verdict could not show where it was."""
    result, found = launched(LATE, tmp_path, "--no-python", python_with_torch)
    assert result.returncode == 1 and "RankStalledError" in result.stderr
    assert (found.kind, found.ranks) == ("behind", (1,))
    assert found.sentence.endswith("rank 1 has made no call on it and is at script.py:5 in load_batch.")


def test_groups_may_be_registered_while_dumps_are_written() -> None:
    """Once `dictionary changed size during iteration` took the place of the call's error."""
    recorders = [Recorder(2) for _ in range(2000)]
    group = RecordedGroup("many", "ref", (12345,), 0, 1.0)
    for each in recorders[:1000]:
        include(each, group)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as executor:
            job = executor.submit(lambda: [include(each, group) for each in recorders])
            while not job.done():
                flight_recorder.of_rank(0)
            job.result()
    finally:
        sys.setswitchinterval(interval)


def test_the_first_failure_is_kept_when_later_calls_only_follow_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failure_record.DIRECTORY_VARIABLE, str(tmp_path))

    def program(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3):
            with pytest.raises(dist.DistBackendError):
                dist.all_reduce(fill(rank, (3,)))

    with pytest.raises(RankError):
        run(program, 2, ranks="processes")
    found = read_file(tmp_path / "rank0.json")
    assert found.error.startswith("RankDiedError")
    assert [event.state for event in found.groups[0].events] == ["completed", "failed"]


def test_a_dump_has_the_exception_that_the_programs_own_was_raised_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failure_record.DIRECTORY_VARIABLE, str(tmp_path))

    def program(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(fill(rank, (3,)))
        except dist.RankDiedError as error:
            own = KeyError("no checkpoint")
            own.__cause__ = error
            flight_recorder.dump_failure(own, rank)

    with pytest.raises(RankError):
        run(program, 2, ranks="processes")
    found = read_file(tmp_path / "rank0.json")
    assert found.error == "KeyError: 'no checkpoint'"
    assert found.error_cause.startswith("RankDiedError: ") and "rank 1 died" in found.error_cause


def test_a_rank_that_is_blocked_in_c_answers_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failure_record.DIRECTORY_VARIABLE, str(tmp_path / "dumps"))
    read_end, write_end = os.pipe()

    def program(rank: int) -> bytes:
        if rank == 0:
            (tmp_path / "pid").write_text(str(os.getpid()))
            dist.barrier()
            return os.read(read_end, 1)
        dist.barrier()
        [line] = flight_recorder.request([int((tmp_path / "pid").read_text())])
        assert line.endswith(": asked")
        wait_for_file(tmp_path / "dumps" / "rank0.json")
        os.write(write_end, b"y")
        return b"y"

    assert run(program, 2, ranks="processes") == [b"y", b"y"]
    found = read_file(tmp_path / "dumps" / "rank0.json")
    assert found.reason == "signal SIGUSR2" and "program" in [function for function, _, _ in found.program]


def test_processes_that_the_signal_would_end_are_not_asked() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        [line, missing] = flight_recorder.request([process.pid, 1 << 30])
        process.communicate(b"\n")
        assert process.returncode == 0
    assert "does not listen" in line and "No such file" in missing


def test_a_request_of_a_stopped_rank_says_how_to_continue_it() -> None:
    """Once such a rank left no dump, and nothing said why."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGUSR2, lambda number, frame: None)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    _, status = os.waitpid(pid, os.WUNTRACED)
    try:
        assert os.WIFSTOPPED(status)
        expected = f"{pid}: asked, but it is stopped and answers once 'kill -CONT {pid}' has continued it"
        assert list(flight_recorder.request([pid])) == [expected]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_the_signal_is_given_back_and_not_taken_from_the_program(caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: int) -> list[bool]:
        listening = []
        for mine in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGUSR2, mine)
            dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
            names = [thread.name for thread in threading.enumerate()]
            listening.append(flight_recorder.SignalListener.name in names)
            dist.destroy_process_group()
            assert signal.getsignal(signal.SIGUSR2) is mine
            assert signal.set_wakeup_fd(-1) == -1
            assert flight_recorder.SignalListener.name not in [thread.name for thread in threading.enumerate()]
        return listening

    assert run(program, 1, ranks="processes", init=False) == [[True, False]]


def test_with_an_event_loop_the_program_still_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failure_record.DIRECTORY_VARIABLE, str(tmp_path))
    write, written = flight_recorder.write_privately, threading.Event()

    def write_and_tell(path: Path, text: str) -> None:
        write(path, text)
        if path == tmp_path / "rank0.json" and path.exists():
            written.set()

    monkeypatch.setattr(flight_recorder, "write_privately", write_and_tell)

    def program(rank: int) -> bool:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        former = signal.set_wakeup_fd(write_end)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert os.read(read_end, 1) == bytes([signal.SIGUSR2])
        signal.set_wakeup_fd(former)
        return written.wait(10.0)

    assert run(program, 1, ranks="processes") == [True]


def test_with_an_event_loop_a_request_during_a_dump_is_answered_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the handler of the second signal waited for the first one's dump, which it had interrupted, for ever."""
    monkeypatch.setenv(failure_record.DIRECTORY_VARIABLE, str(tmp_path))
    snapshot, asked, answered = flight_recorder.snapshot, list[int](), threading.Event()

    def ask_again(rank: int, *arguments: Any) -> Any:
        if not asked:
            asked.append(rank)
            os.kill(os.getpid(), signal.SIGUSR2)
        elif threading.current_thread() is not threading.main_thread():
            answered.set()
        return snapshot(rank, *arguments)

    def program(rank: int) -> bool:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        former = signal.set_wakeup_fd(write_end)
        flight_recorder.dump()
        signal.set_wakeup_fd(former)
        os.close(read_end)
        return answered.wait(10.0)

    monkeypatch.setattr(flight_recorder, "snapshot", ask_again)
    assert run(program, 1, ranks="processes", timeout=20.0) == [True]


@pytest.mark.parametrize(
    ("text", "number"),
    [("SIGUSR1", signal.SIGUSR1), ("usr1", signal.SIGUSR1), ("10", 10), ("0", None), ("", None), ("SIGNOT", None)],
)
def test_the_variable_names_the_signal(text: str, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flight_recorder.SIGNAL_VARIABLE, text)
    assert flight_recorder.signal_number() == number


def test_groups_that_are_gone_are_not_dumped() -> None:
    def program(rank: int) -> list[str]:
        group = dist.new_group(group_desc="gone") if rank >= 0 else None
        dist.destroy_process_group(group)
        del group
        return [each["name"] for each in flight_recorder.snapshot(rank, "")["groups"] if each["backend"] != "store"]

    assert run(program, 2, ranks="processes") == [["world"]] * 2


# ---- the command


def test_the_command_prints_verdict_and_table_and_writes_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(failure_record.DIRECTORY_VARIABLE, str(tmp_path))

    def program(rank: int) -> None:
        for _ in range(2):
            dist.barrier()
        works = [dist.all_reduce(fill(rank, (3,)), async_op=True) for _ in range(4)]
        [work.wait() for work in works if work is not None]
        fails(rank)

    with pytest.raises(RankError):
        run(program, 2, ranks="processes")
    (tmp_path / "notes.txt").write_text("not a dump")
    capsys.readouterr()
    for _ in range(2):
        assert command.main([str(tmp_path)]) == 0
        sentence, _, heading, _, *rows = capsys.readouterr().out.splitlines()
        assert sentence.startswith(
            "Ranks 0 and 1 made different calls as call 6 of group 'world': rank 0 made all_reduce"
        )
        assert heading.split("  ")[0] == "rank" and "not completed" in heading
        assert [row.split()[0] for row in rows[:2]] == ["0", "1"] and not rows[2], "init is complete on all ranks"
        assert "6 all_reduce(reduction=sum) of float32 [3]" in rows[1] and "failed: MismatchError" in rows[1]
        assert "Not read: notes.txt: not a dump of a flight recorder" in "\n".join(rows)
        assert rows[-1] == f"Trace for https://ui.perfetto.dev: {tmp_path / 'trace.json'}"
    # The initialization and the program's calls.
    check_trace(json.loads((tmp_path / "trace.json").read_text()), ranks=2, calls=1 + 7)
    # As with `| head`.
    reader, writer = os.pipe()
    os.close(reader)
    shown = subprocess.run(
        [sys.executable, "-m", "torchdist_ref.debug", str(tmp_path)], stdout=writer, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writer)
    assert (shown.returncode, shown.stderr) == (0, b"")


def check_trace(trace: dict[str, list[dict[str, object]]], ranks: int, calls: int) -> None:
    """Check the Trace Event Format: complete events with times that nest or follow in each thread, and metadata."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    events = trace["traceEvents"]
    named = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}  # type: ignore[index]
    assert named == {(rank, f"rank {rank}") for rank in range(ranks)}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == ranks * calls and len(complete) + len(threads) + ranks == len(events)
    ends: dict[object, float] = {}
    for event in complete:
        start, duration, thread = event["ts"], event["dur"], (event["pid"], event["tid"])
        assert isinstance(start, float) and isinstance(duration, float) and isinstance(event["name"], str)
        assert thread in threads and start >= ends.get(thread, 0.0) - 0.001 and duration >= 0
        ends[thread] = start + duration
    assert min(event["ts"] for event in complete) == 0  # type: ignore[type-var]


def test_a_trace_of_calls_at_the_same_time_has_few_threads_and_takes_little_time() -> None:
    def dump(times: list[tuple[int, int]]) -> Dumps:
        events = tuple(
            Event((number, 0), "all_reduce", "all_reduce", "", "completed", *time) for number, time in enumerate(times)
        )
        return Dumps({0: RankDump(0, "", (GroupCalls("a", (0,), events), GroupCalls("b", (0,), events[:1])))})

    def threads(times: list[tuple[int, int]]) -> list[object]:
        events = report.chrome_trace(dump(times))["traceEvents"]
        check_trace({"traceEvents": events, "displayTimeUnit": []}, ranks=1, calls=len(times) + 1)
        return [event["tid"] for event in events if event["ph"] == "X"]

    # Each call is on the first thread that is free; the last one is the other group's.
    assert threads([(1, 9), (2, 4), (3, 5), (4, 6), (5, 7), (6, 20), (9, 12)]) == [1, 2, 3, 2, 3, 2, 1, 4]
    crowd = dump([(start, 10**6) for start in range(1, 30_001)])
    began = process_time()
    assert len(report.chrome_trace(crowd)["traceEvents"]) == 1 + 2 * 30_001
    # A look at each thread for each call took 10 seconds.
    assert process_time() < began + 3.0


def test_the_command_asks_ranks_and_reports_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--request", str(1 << 30)]) == 0
    assert "No such file" in capsys.readouterr().out
    assert command.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("There is no dump to read.")
    with pytest.raises(SystemExit):
        command.main([str(tmp_path / "missing")])
    with pytest.raises(SystemExit):
        command.main([])


def test_a_rank_that_fails_to_write_its_dump_says_so_and_raises_the_calls_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(failure_record.DIRECTORY_VARIABLE, "/proc/no/such/place")
    with caplog.at_level(logging.WARNING, "torchdist_ref.debug"), pytest.raises(RankError, match="MismatchError"):
        run(fails, 2)
    assert [r.message for r in caplog.records if "flight recorder of rank 0" in r.message]


def test_a_call_is_recorded_without_a_function_of_python() -> None:
    recorder, call = Recorder(2), Barrier()
    entered: list[str] = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        entry = [(0, 0), call, ((), ()), 0.0, 0.0, ""]
        recorder.record(entry)
    finally:
        sys.setprofile(None)
    assert entered == []


def on_torchs_own_init(rank: int, folder: str, file: str) -> bool:
    torch.distributed.init_process_group("ref", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.distributed.all_reduce(fill(rank, (3,)))
    if rank == 0:
        torch.distributed.new_group([0])
        flight_recorder.dump(folder)
    else:
        torch.distributed.new_group([0])
        os.environ[failure_record.DIRECTORY_VARIABLE] = folder
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_for_file(Path(folder) / "rank1.json")
    torch.distributed.destroy_process_group()
    return signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_groups_of_torchs_own_init_are_recorded_and_dumped_on_a_signal(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    released = run(on_torchs_own_init, 2, str(folder), str(tmp_path / "store"), ranks="processes", init=False)
    assert released == [True, True]
    dumps = read_directory(folder).ranks
    assert sorted(dumps) == [0, 1]
    for rank, dumped in dumps.items():
        world, *others = [group for group in dumped.groups if not group.is_in_store]
        assert (world.name, world.members, world.events[0].op) == ("world", (0, 1), "all_reduce")
        assert [group.members for group in others] == ([(0,)] if rank == 0 else [])
        made = [(e.text, e.state) for group in dumped.groups if group.is_in_store for e in group.events]
        created = [("new_group(ranks=[0])", "completed")] if rank == 0 else []
        assert made == [("init_process_group(ranks=[0, 1])", "completed"), *created]


def test_a_process_that_can_start_no_thread_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it could not form a group, nor stop listening."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    before, listener = set(os.listdir("/proc/self/fd")), flight_recorder.SignalListener()
    with caplog.at_level("WARNING"):
        listener.start()
    assert "no answer to SIGUSR2: can't start new thread" in caplog.text
    # Some of other tests may have been closed meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= before and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    listener.stop()
