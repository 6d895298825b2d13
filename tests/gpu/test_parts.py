"""Parts of a GPU run: crashes and hangs are survived and reported, and a machine without a GPU gives a valid report."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import on_sim
from tests.gpu import __main__ as command
from tests.gpu import collectives, land, parts, report, supervise
from tests.gpu.test_cells import written
from tests.process_ends import all_ended
from torchdist_ref.benchmark import ranks
from torchdist_ref.benchmark.rounds import Result

PLANTED = """
import os, threading
import pytest
pytestmark = pytest.mark.gpu

def test_first():
    assert 3 * 7 == 21

def test_that_crashes():
    os.abort()

def test_that_fails():
    assert 3 * 7 == 22

@pytest.mark.timeout(30)
def test_that_hangs():
    threading.Event().wait()

def test_that_is_skipped():
    pytest.skip("no reason")

def test_last():
    pass
"""


@pytest.fixture
def loaded(python_with_torch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the parts start a Python that has torch loaded."""
    monkeypatch.setattr(sys, "executable", python_with_torch)


def outcomes(part: dict[str, Any]) -> dict[str, str]:
    return {item["name"].rpartition("::")[2]: item["outcome"] for item in part["items"]}


@pytest.mark.long
@pytest.mark.usefixtures("loaded")
def test_a_crash_and_a_hang_cost_one_test_each(tmp_path: Path) -> None:
    # Some seconds: pytest starts three times, and one test hangs for some.
    (tmp_path / "test_planted.py").write_text(PLANTED)
    setting = parts.Setting("cpu", 0, tests=[str(tmp_path / "test_planted.py")], test_seconds=5.0)
    found = parts.marked(setting, time.monotonic() + 100)
    assert outcomes(found) == {
        "test_first": "passed",
        "test_that_crashes": "crashed",
        "test_that_fails": "failed",
        "test_that_hangs": "timed out",
        "test_that_is_skipped": "skipped",
        "test_last": "passed",
    }
    reasons = {item["name"].rpartition("::")[2]: item["reason"] for item in found["items"]}
    assert "SIGABRT" in reasons["test_that_crashes"] and "in test_that_hangs" in reasons["test_that_hangs"]
    assert "assert (3 * 7) == 22" in reasons["test_that_fails"] and "no reason" in reasons["test_that_is_skipped"]
    assert found["outcome"] == "failed"


@pytest.mark.usefixtures("loaded")
def test_a_file_that_cannot_be_collected_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("raise OSError('the driver is gone')  # mark.gpu")
    setting = parts.Setting("cpu", 0, tests=[str(tmp_path / "test_broken.py")])
    found = parts.marked(setting, time.monotonic() + 60)
    assert outcomes(found) == {"the other tests": "not run"} and "the driver is gone" in found["items"][0]["reason"]


@pytest.mark.usefixtures("loaded")
def test_a_crash_in_a_tutorial_spares_the_next(tmp_path: Path) -> None:
    bad = written(tmp_path, "print(1)", "import os; os.abort()", "2")
    good = written(tmp_path.joinpath("b") if tmp_path.joinpath("b").mkdir() else tmp_path / "b", "print(5 ** 2)")
    found = parts.tutorials("ref")(parts.Setting("cpu", 0, tutorials=[bad, good]), time.monotonic() + 60)
    assert [item["outcome"] for item in found["items"]] == ["passed", "crashed", "not run", "passed"]
    assert "SIGABRT" in found["items"][1]["reason"] and found["items"][3]["output"] == "25\n"


@pytest.mark.long
@pytest.mark.usefixtures("loaded")
def test_a_tutorial_is_killed_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some seconds: the limit. It counts from the end of the first cell: a busy machine needs longer to start.
    class Counted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            events = supervise.Events(Path(self.args[4]))  # type: ignore[index, arg-type]
            while timeout is not None and self.poll() is None and len(events.read()) < 3:
                select.select([], [], [], 0.01)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Counted)
    stuck = written(tmp_path, "print(1)", "import time\nwhile True: time.sleep(9)")
    found = parts.executed(stuck, "ref", "cpu", 2, 60.0, parts.LEAST_SECONDS)
    assert [item["outcome"] for item in found] == ["passed", "timed out"] and found[0]["output"] == "1\n"


def test_cells_that_need_more_ranks_are_told_from_failures_by_a_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = written(tmp_path, "1", "2")
    runs: list[tuple[str, str, int]] = []

    def executed(notebook: Path, backend: str, device: str, ranks: int, *limits: float) -> list[dict[str, Any]]:
        runs.append((backend, device, ranks))
        reasons = [f"written for 4 ranks, ran on 1\nError {device}"] * 2
        second = "failed" if device == "cuda" else "passed"
        return [parts.item(f"some, cell {n}", each, 0.0, reasons[n]) for n, each in enumerate(("failed", second))]

    monkeypatch.setattr(parts, "executed", executed)
    found = parts.of_notebook(notebook, "nccl", parts.Setting("cuda", 1), 60.0)
    assert runs == [("nccl", "cuda", 1), ("gloo", "cpu", 1)]
    assert [item["outcome"] for item in found] == ["skipped", "failed"]
    assert found[0]["reason"] == "needs more ranks: written for 4 ranks, ran on 1, and fails on the CPU too\nError cuda"


def test_notebooks_about_one_backend_say_so(tmp_path: Path) -> None:
    notebook = parts.TUTORIALS / "01_four_ranks_one_sum.ipynb"
    assert parts.unable(notebook, "nccl", parts.Setting("cuda", 2)) == "about ref alone"
    assert parts.unable(notebook, "ref", parts.Setting("cuda", 2)) == ""
    assert parts.unable(notebook, "nccl", parts.Setting("cpu", 0)) == "nccl needs CUDA tensors"
    assert parts.unable(notebook, "ref", parts.Setting("", 0)) == parts.NO_DEVICE
    streams = parts.TUTORIALS / "16_streams_and_events.ipynb"
    assert parts.unable(streams, "ref", parts.Setting("cuda", 2)) == "about simulated devices alone"
    assert [parts.unable(streams, "ref", parts.Setting(device, 0)) for device in ("sim", "cpu")] == ["", ""]


@pytest.mark.usefixtures("loaded")
def test_without_a_device_every_part_is_skipped_and_the_report_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some seconds: torch starts to look for devices, and pytest to report why each test is skipped.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.main(["--report", str(tmp_path / "out.json")]) == 0
    made = json.loads((tmp_path / "out.json").read_text())
    assert report.problems(made) == [] and made["complete"] and made["machine"]["torch"]
    assert [part["outcome"] for part in made["parts"]] == ["skipped"] * len(parts.PARTS)
    assert all(item["reason"] for part in made["parts"] for item in part["items"])
    assert len(made["parts"][0]["items"]) > 10
    assert land.refusals(made) == ["it was made without a CUDA device"]


ON_SIM = """
import pytest

@pytest.mark.sim
def test_on_devices():
    assert 3 * 7 == 21

def test_on_the_host():
    raise AssertionError("not about devices")
"""


@pytest.mark.usefixtures("loaded")
def test_on_simulated_devices_every_part_of_ref_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some seconds: pytest starts, and ranks for the table, the collectives and a notebook.
    if why := on_sim.missing():
        pytest.skip(why)
    (tmp_path / "test_planted.py").write_text(ON_SIM)
    summed = (
        "import torch, torchdist_ref as dist\ndist.init_process_group()\ndist.all_reduce(x := torch.ones(3))\nprint(x)"
    )
    written(tmp_path, "%load_ext torchdist_ref.notebook", f"%%spmd -n 2\n{summed}").rename(tmp_path / "small.ipynb")
    monkeypatch.setattr(parts, "TUTORIALS", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(supervise.ROOT))
    options = ["--device", "sim", "--tests", str(tmp_path / "test_planted.py"), "--tutorials", "small"]
    assert command.main(["--report", str(tmp_path / "out.json"), *options]) == 0
    made = json.loads((tmp_path / "out.json").read_text())
    assert report.problems(made) == [] and made["complete"] and made["device"] == "sim"
    found = {part["name"]: part for part in made["parts"]}
    assert [item["name"].rpartition("::")[2] for item in found["tests"]["items"]] == ["test_on_devices"]
    assert {name: part["outcome"] for name, part in found.items()} == {
        **dict.fromkeys(("tests", "capabilities", "collectives", "tutorials on ref"), "passed"),
        "tutorials on nccl": "skipped",
    }
    cell = found["tutorials on ref"]["items"][-1]
    assert "tensor([2., 2., 2.], device='sim:0')" in cell["output"], cell
    assert found["capabilities"]["cells"]["ref"]["all_reduce"]["plain"] == "yes"
    assert land.refusals(made) == ["it was made without a CUDA device"]


def test_a_part_that_raises_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(setting: Any, deadline: float) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(report, "begun", lambda device: empty() | {"machine": {**empty()["machine"], "devices": []}})
    monkeypatch.setattr(parts, "PARTS", {"one": (raises, 1.0), "two": (parts.tutorials("nccl"), 1.0)})
    assert command.main(["--report", str(tmp_path / "out.json"), "--parts", "one,two"]) == 1
    made = json.loads((tmp_path / "out.json").read_text())
    assert [part["outcome"] for part in made["parts"]] == ["failed", "skipped"] and report.problems(made) == []
    assert made["parts"][0]["reason"] == "OSError: no space left"


@pytest.mark.benchmark
def test_collectives_are_timed_on_ranks() -> None:
    setting = parts.Setting("cpu", 0, operations="all_reduce,barrier", sizes="1K")
    found = parts.collectives(setting, time.monotonic() + 100)
    assert [item["outcome"] for item in found["items"]] == ["passed", "skipped"], found["items"]
    assert [(row["op"], row["size_bytes"], row["world"]) for row in found["rows"]] == [
        ("all_reduce", 1024, 2),
        ("barrier", 0, 2),
    ]
    assert all(row["seconds"] > 0 for row in found["rows"])


def test_results_of_the_benchmark_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ranks, which would wait for each other on a busy machine."""
    wanted: list[Any] = []

    def run_ranks(program: Any, world: int, on_report: Any) -> None:
        settings = program.keywords["settings"]
        wanted.append((world, settings.ops, settings.sizes, settings.backends, settings.device))
        on_report(0, "all_reduce")
        more = {"calls": {"ref": 5, "limit": 5}, "missing": {"other": "no such thing"}}
        cell = {"op": "all_reduce", "size_bytes": 1024, "world": 2}
        on_report(0, Result(cell, {"ref": [3e-6, 5e-6, 4e-6], "limit": [1e-6] * 3}, (False,) * 3, more))
        on_report(0, 1)

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    collectives.main(str(tmp_path / "events"), "cpu", "2", "all_reduce", "1K", "ref")
    assert wanted == [(2, ("all_reduce",), (1024,), ("ref",), "cpu")]
    row, missing = supervise.Events(tmp_path / "events").read()
    assert row["backend"] == "ref" and row["seconds"] == 4e-6 and row["bus_bytes_per_second"] == 1024 / 4e-6
    assert missing == {"event": "missing", "op": "all_reduce", "backend": "other", "reason": "no such thing"}


@pytest.mark.long
def test_children_of_a_process_are_killed_at_its_limit() -> None:
    program = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read(); input()"
    )
    waits = f"{program.rpartition(';')[0]}\nimport threading; threading.Event().wait()"
    ended = supervise.run([sys.executable, "-c", waits], 5.0)
    # On a busy machine it ends later.
    assert ended.timed_out and ended.seconds >= 5.0 and ended.why == f"killed at its limit after {ended.seconds:.0f} s"
    assert all_ended([int(ended.tail)])


def test_a_cut_off_event_is_left_out(tmp_path: Path) -> None:
    events = supervise.Events(tmp_path / "events")
    events.write(event="start", name="ü")
    with events.path.open("a") as file:
        file.write('{"event": "en')
    assert events.read() == [{"event": "start", "name": "ü"}]


def empty() -> dict[str, Any]:
    """Return a valid report of a run on two devices, without parts."""
    machine = dict.fromkeys(report.FACTS, "1") | {"torch": "2.11.0+cu130", "devices": ["Planted GPU", "Planted GPU"]}
    return {
        "schema": report.SCHEMA,
        "date": "2026-11-22T10:00:00+00:00",
        "commit": "abc",
        "device": "cuda",
        "machine": machine,
        "complete": True,
        "seconds": 5.0,
        "parts": [],
    }
