"""The rank that failed first is named, with its exception, though ranks that failed because of it end earlier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchdist_ref.errors import DistBackendError, GroupAbortedError, RankDiedError
from torchdist_ref.processes import failure_record

ROOT = Path(__file__).parents[2]
# Rank 1 ends last: only then do the others end that wait for it.
SCRIPT = """
import atexit, os, select
import torch
import torchdist_ref as dist
from torchdist_ref.processes.linux_calls import pidfd_open

dist.init_process_group("ref")
rank, pids = dist.get_rank(), [None] * 3
dist.all_gather_object(pids, os.getpid())

def wait_for_the_others():
    for pid in (pids[0], pids[2]):
        poll = select.poll()
        poll.register(pidfd_open(pid))
        assert poll.poll(30_000), "the others wait for the end of rank 1"

if rank == 1:
    atexit.register(wait_for_the_others)
    raise ValueError("the data of rank 1 are missing")
dist.all_reduce(torch.ones(1))
"""

# Rank 0 fails because of rank 1 and ends while rank 1 prints its traceback.
PRINTS_LAST = """
import os, select, sys
from pathlib import Path
from torchdist_ref.processes import failure_record
from torchdist_ref.processes.linux_calls import pidfd_open

record = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
fifo = str(record.parents[1] / "pid")
try:
    os.mkfifo(fifo)
except FileExistsError:
    pass
if os.environ["RANK"] == "0":
    Path(fifo).write_text(str(os.getpid()))
    while not (record.parents[1] / "1" / record.name).exists():
        select.select([], [], [], 0.001)
    sys.exit(3)
other = pidfd_open(int(Path(fifo).read_text()))
sys.stderr.write("Traceback\\n")
failure_record.write(ValueError("boom"))
assert select.select([other], [], [], 30)[0], "rank 0 ends"
sys.stderr.write("ValueError: boom\\n")
sys.exit(1)
"""


def recorded(path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> failure_record.FailureRecord | None:
    monkeypatch.setenv(failure_record.ERROR_FILE, str(path))
    failure_record.write(error)
    return failure_record.read(path)


def test_a_record_has_the_format_of_torchs_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    record = recorded(path, monkeypatch, ValueError("no data"))
    assert record is not None and record.message == "ValueError: no data"
    written = json.loads(path.read_text())["message"]
    assert written["message"] == "ValueError: no data"
    assert int(written["extraInfo"]["timestamp"]) > 1_700_000_000
    assert "ValueError: no data" in written["extraInfo"]["py_callstack"]
    assert [one.name for one in tmp_path.iterdir()] == ["error.json"]


def test_the_first_record_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "error.json", monkeypatch, ValueError("first"))
    record = recorded(tmp_path / "error.json", monkeypatch, ValueError("second"))
    assert record is not None and record.message == "ValueError: first"


@pytest.mark.parametrize("kind", [GroupAbortedError, RankDiedError])
def test_what_another_rank_has_caused_is_not_recorded(
    kind: type[DistBackendError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recorded(tmp_path / "error.json", monkeypatch, kind("rank 1 failed")) is None
    wrapped = RuntimeError("the hook failed")
    wrapped.__cause__ = kind("rank 1 failed")
    assert recorded(tmp_path / "error.json", monkeypatch, wrapped) is None


def test_without_a_launcher_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(failure_record.ERROR_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    failure_record.write(ValueError("no data"))
    assert list(tmp_path.iterdir()) == []


class Unprintable(Exception):
    def __str__(self) -> str:
        raise LookupError


def test_an_exception_without_a_text_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorded(tmp_path / "error.json", monkeypatch, Unprintable())
    assert record is not None and record.message == "Unprintable: its text cannot be read: LookupError"


def test_the_others_are_told_though_nothing_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(failure_record, "write", lambda error: 1 // 0)
    failure_record.on_uncaught(told.append)
    sys.excepthook(ValueError, error := ValueError("no data"), None)
    assert told == [error]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": "text"}', '{"message": {}}'])
def test_a_broken_record_is_no_record(text: str, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(text)
    assert failure_record.read(tmp_path / "error.json") is None


# A launcher that waits as long as a busy machine takes for the rank that has caused the failure of another one.
LAUNCHER_WITH_A_LONG_TIMEOUT = """
import sys
from torchdist_ref.launch import command_line
from torchdist_ref.launcher import supervision

supervision.CAUSE_SECONDS = 60.0
sys.exit(command_line(sys.argv[1:]))
"""


def launch(
    script: str, ranks: int, folder: Path, python: str = sys.executable
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a script of which rank 1 fails first; return how it ended and the line of the launcher that blames a rank."""
    (folder / "script.py").write_text(script)
    result = subprocess.run(
        [python, "-c", LAUNCHER_WITH_A_LONG_TIMEOUT, "--nproc-per-node", str(ranks), "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    named = [line for line in result.stderr.splitlines() if line.startswith("torchdist_ref.launch: rank")]
    assert len(named) == 1 and named[0].startswith("torchdist_ref.launch: rank 1 (process ")
    return result, named[0]


def test_launcher_and_survivors_name_the_rank_that_failed_first(python_with_torch: str, tmp_path: Path) -> None:
    result, named = launch(SCRIPT, 3, tmp_path, python_with_torch)
    assert named.endswith("exited with code 1: ValueError: the data of rank 1 are missing")
    quoted = "its program ended with ValueError: the data of rank 1 are missing"
    survivors = [line for line in result.stderr.splitlines() if "GroupAbortedError: call" in line]
    assert len(survivors) == 2 and all(quoted in line for line in survivors)
    assert result.returncode == 1


def test_the_traceback_of_the_rank_that_failed_first_precedes_the_launchers_line(tmp_path: Path) -> None:
    """Once that line was written as soon as a rank ended because of it, in the middle of the traceback."""
    result, named = launch(PRINTS_LAST, 2, tmp_path)
    assert result.stderr.startswith(f"Traceback\nValueError: boom\n{named}\n") and "exited with code 1" in named


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the record of this process, which our launcher seems to have started."""
    monkeypatch.setenv(failure_record.ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.setenv(failure_record.LAUNCH_ID, "x")
    return tmp_path / "error.json"


def test_a_process_that_answers_no_request_any_more_leaves_no_notes(launched: Path) -> None:
    """Once they remained, in the user's folder for logs."""
    failure_record.announce_dump_signal(10)
    assert failure_record.read_notes(launched) == failure_record.Notes(os.getpid(), 10)
    failure_record.announce_dump_signal(0)
    assert failure_record.read_notes(launched) == failure_record.Notes()
    assert not list(launched.parent.iterdir())


def test_notes_say_that_another_rank_is_the_cause_until_the_launcher_discards_them(launched: Path) -> None:
    failure_record.announce_dump_signal(12)
    failure_record.write(RankDiedError("rank 1 died"))
    failure_record.announce_dump_signal(0)
    assert failure_record.read_notes(launched) == failure_record.Notes(is_consequence=True)
    assert failure_record.read(launched) is None
    failure_record.discard_notes(launched)
    failure_record.discard_notes(launched)
    assert not list(launched.parent.iterdir())


@pytest.mark.parametrize("text", ["", "7", '{"pid": 3}', '{"pid": "x", "dump_signal": 10, "is_consequence": true}'])
def test_broken_notes_are_none(text: str, launched: Path) -> None:
    Path(f"{launched}.notes").write_text(text)
    assert failure_record.read_notes(launched) == failure_record.Notes()
