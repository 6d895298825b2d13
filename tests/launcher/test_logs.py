"""Log files: the same files with the same content as torch's, whole lines on the console, and failure records."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.elastic.multiprocessing as theirs
from torchdist_ref.elastic.multiprocessing import errors

from torchdist_ref.launcher import LaunchConfig, child_failures, elastic_launch, logs
from torchdist_ref.launcher.worker import LineRelay

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys
rank = int(os.environ["LOCAL_RANK"])
print(f"out {rank} apple")
print(f"error {rank} pear", file=sys.stderr)
print(f"more {rank ** 3}")
"""
RECORDED = """
import os, sys
from torchdist_ref.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("no data on rank 1")

main()
"""


def launch(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "torchdist_ref.launch", "--nproc-per-node", "2", *options, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def files(folder: Path) -> dict[str, str]:
    """Return the content of each file, by its path below the folder of the job, whose name is random."""
    found = [path for path in (folder / "logs").rglob("*") if path.is_file()]
    return {str(Path(*path.relative_to(folder / "logs").parts[1:])): path.read_text() for path in found}


@pytest.mark.parametrize(
    ("options", "console", "written"),
    [
        (["-r", "3"], "", {"0/stdout.log", "0/stderr.log", "1/stdout.log", "1/stderr.log"}),
        (["-r", "0:1"], "01 0", {"0/stdout.log"}),
        (["-t", "1:1"], "01 01", {"1/stdout.log"}),
        (
            ["-t", "3", "--local-ranks-filter", "1"],
            "1 1",
            {"0/stdout.log", "0/stderr.log", "1/stdout.log", "1/stderr.log"},
        ),
        (["--local-ranks-filter", "0"], "0 0", set()),
    ],
)
def test_redirects_and_tee(options: list[str], console: str, written: set[str], tmp_path: Path) -> None:
    result = launch(tmp_path, SCRIPT, "--log-dir", "logs", *options)
    content = {
        "stdout.log": lambda rank: f"out {rank} apple\nmore {rank**3}\n",
        "stderr.log": lambda rank: f"error {rank} pear\n",
    }
    assert files(tmp_path) == {f"attempt_0/{path}": content[path[2:]](int(path[0])) for path in written}
    errors = {line.split()[-2] for line in result.stderr.splitlines()}
    shown = {line.split()[-2] for line in result.stdout.splitlines() if "out" in line}
    expected = {"": ("", ""), "01 0": ("1", "01")}.get(console) or tuple(console.split())
    assert (shown, errors) == (set(expected[0]), set(expected[1])), result


def test_teed_lines_have_torchs_prefix_and_filters_copy_them(tmp_path: Path) -> None:
    result = launch(
        tmp_path, SCRIPT, "--log-dir", "logs", "-t", "3", "--duplicate-stdout-filters", "apple,nothing", "--role", "r"
    )
    assert sorted(result.stdout.splitlines()) == ["[r0]:more 0", "[r0]:out 0 apple", "[r1]:more 1", "[r1]:out 1 apple"]
    copied = files(tmp_path)["attempt_0/filtered_stdout.log"].splitlines()
    assert sorted(copied) == ["[r0]:out 0 apple", "[r1]:out 1 apple"]


def test_each_attempt_has_a_folder(tmp_path: Path) -> None:
    script = "import os; print(os.environ['TORCHELASTIC_RESTART_COUNT']); raise SystemExit(3)"
    result = launch(
        tmp_path, script, "--log-dir", "logs", "-r", "1", "--max-restarts", "1", "--rdzv-id", "x", "--master-port=0"
    )
    assert result.returncode == 3
    found = files(tmp_path)
    assert any(found[path] == "1\n" for path in found if path.startswith("attempt_1/"))
    assert next((tmp_path / "logs").iterdir()).name.startswith("x_")


def test_lines_of_many_ranks_are_whole_on_the_console_and_in_files(tmp_path: Path) -> None:
    script = "import os\nfor i in range(5000): print(os.environ['RANK'] * 40, i)"
    lines = launch(tmp_path, script, "--log-dir", "logs", "-t", "1").stdout.splitlines()
    expected = [f"{str(rank) * 40} {i}" for rank in range(2) for i in range(5000)]
    assert sorted(lines) == sorted(f"[default{line[0]}]:{line}" for line in expected)
    assert files(tmp_path)["attempt_0/1/stdout.log"].splitlines() == expected[5000:]


@pytest.mark.parametrize("library", ["torchdist_ref.elastic", "torch.distributed.elastic"])
def test_the_last_output_is_the_first_failure(library: str, python_with_torch: str, tmp_path: Path) -> None:
    python = ["--no-python", python_with_torch] if library.startswith("torch.") else []
    result = launch(tmp_path, RECORDED.replace("torchdist_ref.elastic", library), *python)
    head, _, report = result.stderr.partition("torchdist_ref.launch: the job failed; first failure:\n")
    rows = dict(line.strip().split(":", 1) for line in report.splitlines()[:6] if ":" in line)
    rows = {name.strip(): value.strip() for name, value in rows.items()}
    assert rows["rank"] == "1 (local_rank: 1)" and rows["host"] == os.uname().nodename
    assert rows["exitcode"].startswith("1 (pid: ") and "rank 1 (process " in head
    assert report.endswith("ValueError: no data on rank 1\n") and "in main" in report
    assert result.returncode == 1


def test_the_report_of_a_killed_rank_names_the_signal(tmp_path: Path) -> None:
    result = launch(tmp_path, "import os\nos.kill(os.getpid(), 11)")
    assert "killed by SIGSEGV (-11) (pid: " in result.stderr.splitlines()[-3]
    assert "Signal 11 (SIGSEGV) received by PID" in result.stderr.splitlines()[-1]


class TestBesideTorch:
    """The same calls as torch's give the same values."""

    @pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:3,1:0,2:1,3:2"])
    def test_streams(self, text: str) -> None:
        assert logs.Std.from_str(text) == theirs.Std.from_str(text)

    @pytest.mark.parametrize("text", ["4", "0:4", "a", "", "0:1,"])
    def test_wrong_streams(self, text: str) -> None:
        for kind in (logs.Std, theirs.Std):
            with pytest.raises(ValueError):
                kind.from_str(text)

    @pytest.mark.parametrize("value", [3, {1: 2}, {0: 1, 5: 3}])
    def test_map(self, value: Any) -> None:
        ours, torchs = (
            module.to_map(
                {rank: module.Std(v) for rank, v in value.items()} if isinstance(value, dict) else module.Std(value), 3
            )
            for module in (logs, theirs)
        )
        assert ours == torchs

    @pytest.mark.parametrize("redirects", [0, 1, 3, {0: 2}])
    @pytest.mark.parametrize("tee", [0, 2, {1: 3}])
    @pytest.mark.parametrize("shown", [None, {1}])
    def test_paths(self, redirects: Any, tee: Any, shown: set[int] | None, tmp_path: Path) -> None:
        found = []
        for module in (logs, theirs):
            std = [
                {rank: module.Std(v) for rank, v in value.items()} if isinstance(value, dict) else module.Std(value)
                for value in (redirects, tee)
            ]
            envs = {rank: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"} for rank in range(3)}
            specs = module.DefaultLogsSpecs(str(tmp_path / module.__name__), *std, shown)
            destination = vars(specs.reify(envs))
            run = next((tmp_path / module.__name__).iterdir())
            assert run.name.startswith("job_")
            text = json.dumps([destination, envs]).replace(str(run), "RUN")
            found.append(json.loads(text))
        assert found[0] == found[1]

    @pytest.mark.parametrize("exitcode", [1, -9, 255])
    @pytest.mark.parametrize(
        "content", [None, {"message": {"message": "m", "extraInfo": {"py_callstack": "s", "timestamp": "7"}}}]
    )
    def test_process_failures(self, exitcode: int, content: Any, tmp_path: Path) -> None:
        path = tmp_path / "error.json"
        if content:
            path.write_text(json.dumps(content))
        before = int(time.time())
        ours, torchs = (module.ProcessFailure(1, 42, exitcode, str(path)) for module in (errors, theirs.errors))
        names = [
            "error_file",
            *(["message"] if content or exitcode < 0 else []),
            *(["error_file_data"] if content else []),
        ]
        for name in names:
            assert getattr(ours, name) == getattr(torchs, name), name
        assert ours.signal_name() == torchs.signal_name()
        between = range(7, 8) if content else range(before, int(time.time()) + 1)
        assert ours.timestamp in between and torchs.timestamp in between

    @pytest.mark.parametrize("content", ["", '{"message": {"mess', "[]", '{"message": {}}', '"text"'])
    def test_an_incomplete_record_counts_as_none(self, content: str, tmp_path: Path) -> None:
        """A disk may become full while torch's `record` writes."""
        path = tmp_path / "error.json"
        path.write_text(content)
        with_part, without = errors.ProcessFailure(1, 42, 3, str(path)), errors.ProcessFailure(1, 42, 3, "")
        assert (with_part.error_file, with_part.message) == (without.error_file, without.message)
        assert with_part.error_file == "<N/A>" and "traceback" in with_part.message

    def test_a_record_has_torchs_layout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise RuntimeError("seven")

        found = []
        for module in (errors, theirs.errors):
            path = tmp_path / module.__name__
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
            with pytest.raises(RuntimeError):
                module.record(fail)()
            found.append(json.loads(path.read_text())["message"])
        ours, torchs = found
        assert ours["message"] == torchs["message"] == "RuntimeError: seven"
        assert ours["extraInfo"].keys() == torchs["extraInfo"].keys() and "in fail" in ours["extraInfo"]["py_callstack"]

    @pytest.mark.parametrize("code", [0, 3])
    def test_record_of_a_system_exit(self, code: int) -> None:
        for module in (errors, theirs.errors):
            if code:
                with pytest.raises(SystemExit):
                    module.record(sys.exit)(code)
            else:
                assert module.record(sys.exit)(code) is None

    def test_a_failed_child_hands_on_its_record(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        child = tmp_path / "child.json"
        child.write_text('{"message": {"message": "m", "extraInfo": {"py_callstack": "s", "timestamp": "7"}}}')
        found = []
        for module in (errors, theirs.errors):
            path = tmp_path / module.__name__
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

            def fail(module: Any = module) -> None:
                failure = module.ProcessFailure(0, 42, 5, str(child))
                raise module.ChildFailedError("job", {3: failure})

            with pytest.raises(module.ChildFailedError, match="rank"):
                module.record(fail)()
            found.append(json.loads(path.read_text()))
        assert found[0] == found[1] and found[0]["message"]["errorCode"] == 5

    def test_a_record_that_is_removed_with_its_job_is_handed_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once the failure of the child was lost in a FileNotFoundError."""
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "parent.json"))
        config = LaunchConfig(1, 1, 1, start_method="fork", monitor_interval=0.01)
        with pytest.raises(errors.ChildFailedError, match="error_file: <N/A>") as caught:
            errors.record(elastic_launch(config, errors.record(int)))("seven")
        assert "invalid literal for int" in str(caught.value.failures[0].error_file_data)
        content = json.loads((tmp_path / "parent.json").read_text())["message"]
        assert content["message"].startswith("ValueError: invalid literal") and content["errorCode"] == 1


def test_errors_are_torchs_too_where_torchs_are_imported() -> None:
    error = child_failures.as_torchs(child_failures.SignalException, "api")("stop", signal.SIGTERM)
    assert isinstance(error, child_failures.SignalException) and isinstance(error, theirs.SignalException)
    assert error.sigval == signal.SIGTERM


def test_an_unfinished_line_that_was_shown_goes_on_where_it_stood() -> None:
    sink = io.BytesIO()
    relay = LineRelay(sink, b"[1] ")
    relay.feed(b"one\nsecond")
    assert relay.is_held
    relay.show_rest()
    assert not relay.is_held and sink.getvalue() == b"[1] one\n[1] second"
    relay.feed(b" half")
    assert relay.is_held
    relay.show_rest()
    relay.feed(b", end\nthird\n")
    assert not relay.is_held and sink.getvalue() == b"[1] one\n[1] second half, end\n[1] third\n"
    relay.feed(b"last")
    relay.show_rest()
    relay.finish()
    assert sink.getvalue().endswith(b"third\n[1] last\n")
