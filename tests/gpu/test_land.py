"""A report becomes the site's data; one without a device, or that was interrupted, does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.capabilities import table
from tests.gpu import __main__ as command
from tests.gpu import land, parts, report
from tests.gpu.test_parts import empty

CELLS = {"barrier": {"plain": "yes", "unequal": "no blocks", "subgroup": "yes"}}


def full() -> dict[str, Any]:
    """Return a planted report with one part of each kind."""
    item, row = parts.item, {"event": "end", "op": "all_reduce", "size_bytes": 1024, "world": 2, "backend": "ref"}
    cell = {"ranks": 2, "output": "[rank 0] 5\n"}
    return empty() | {
        "parts": [
            report.part("tests", [item("a::one", "passed", 1.0), item("a::two", "crashed", 0.0, "SIGSEGV\nat x")], 2.0),
            report.part(
                "capabilities", [item("ref", "passed")], 1.0, cells={"ref": CELLS, "nccl": "not measured: one"}
            ),
            report.part(
                "collectives", [item("ref", "passed")], 1.0, rows=[{**row, "seconds": 5e-6}, {"event": "missing"}]
            ),
            report.part(
                "tutorials on ref",
                [
                    item("02_some, cell 1", "passed", 0.1, "", **cell),
                    item("02_some, cell 2", "skipped", 0.1, "needs CPU tensors\ntrace", **cell),
                    item("03_other", "skipped", 0.0, "about gloo alone"),
                ],
                1.0,
            ),
        ]
    }


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for docs/."""
    kept = table.kept()
    for module, name in ((table, "FILE"), (land, "SUMMARY"), (land, "OUTPUTS")):
        monkeypatch.setattr(module, name, tmp_path / getattr(module, name).name)
    for module in (table, land):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    table.save(kept)
    return tmp_path


def landed(site: Path, made: Any) -> int:
    (site / "report").write_text(json.dumps(made))
    return command.main(["--land", str(site / "report")])


def test_a_report_becomes_cells_a_summary_and_outputs(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = table.kept()
    assert report.problems(full()) == [] and landed(site, full()) == 0
    assert capsys.readouterr().out == "wrote capabilities.json, gpu.json and gpu_tutorials.json\n"
    cells = table.kept()
    assert cells["cpu"] == before["cpu"] and cells["date"] == before["date"]
    assert cells["cuda"]["ref"] == CELLS and cells["cuda"]["nccl"] == "not measured: one"
    assert cells["cuda"]["gloo"] == before["cuda"]["gloo"]
    assert cells["cuda_run"] == "2026-11-22 with torch 2.11.0+cu130 on 2 x Planted GPU"
    kept = json.loads((site / "gpu.json").read_text())
    assert kept["stamp"] == cells["cuda_run"] and kept["machine"] == full()["machine"] and kept["commit"] == "abc"
    tests, _, collectives, tutorials = kept["parts"]
    assert tests["counts"] == {"passed": 1, "crashed": 1}
    assert tests["failures"] == {"a::two": "crashed: SIGSEGV\nat x"}
    assert [row["op"] for row in collectives["rows"]] == ["all_reduce"]
    assert tutorials["skips"] == {"about gloo alone": 1, "needs CPU tensors": 1}
    shown = json.loads((site / "gpu_tutorials.json").read_text())["tutorials on ref"]
    assert shown == {
        "02_some": {
            "cell 1": {"ranks": 2, "outcome": "passed", "output": "[rank 0] 5\n"},
            "cell 2": {"ranks": 2, "outcome": "skipped", "output": "[rank 0] 5\n"},
        }
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu"}, "it was made without a CUDA device"),
        ({"machine": full()["machine"] | {"devices": []}}, "it was made without a CUDA device"),
        ({"complete": False}, "the run was interrupted"),
        ({"schema": 7}, "the schema is not 1"),
        ({"machine": {}}, "machine.torch is missing"),
        ({"parts": [{"name": "x"}]}, "a part has no items"),
        ({"parts": [report.part("x", [parts.item("y", "fine")], 1.0)]}, "an item of x has no outcome"),
    ],
)
def test_what_is_no_report_of_a_device_changes_nothing(
    site: Path, change: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = table.FILE.read_bytes()
    assert landed(site, full() | change) == 1
    assert reason in capsys.readouterr().err
    assert table.FILE.read_bytes() == before and not land.SUMMARY.exists() and not land.OUTPUTS.exists()


def test_a_file_that_is_not_json_is_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "report").write_text("{")
    assert command.main(["--land", str(site / "report")]) == 1 and "cannot be read" in capsys.readouterr().err


def test_the_page_shows_a_landed_report_and_says_in_one_line_that_there_is_none() -> None:
    import site_directives

    made = full()
    shown = "\n".join(node.astext() for node in site_directives.gpu_report(land.summary(made), land.outputs(made)))
    for part in (
        "Run on 2026-11-22 with torch 2.11.0+cu130 on 2 x Planted GPU",
        "a::two: crashed: SIGSEGV",
        "1 skipped: needs CPU tensors",
        "all_reduce\n\n1024\n\n2\n\nref\n\n5.0",
        "[rank 0] 5",
    ):
        assert part in shown, shown
    # Whether a run has been landed or not, the page exists; this holds until one has.
    if not site_directives.GPU.exists():
        directive = site_directives.GpuDirective.__new__(site_directives.GpuDirective)
        assert [node.astext() for node in directive.run()] == [site_directives.NO_GPU]
