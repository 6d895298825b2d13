"""The record of test runs counts outcomes as pytest does, and a later run of a pair replaces the earlier one."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests import versions

RESULTS = """<testsuites><testsuite>
<testcase classname="a" name="one"/><testcase classname="a" name="two"><failure message="no"/></testcase>
<testcase classname="b" name="three"><skipped message="needs a CUDA device"/></testcase>
<testcase classname="b" name="four"><error message="fixture"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS)
    found = versions.summary([tmp_path / "results.xml"])
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"] == ["a.two", "b.four"]
    assert found["reasons"] == {"needs a CUDA device": 1}


def test_a_later_result_of_a_test_replaces_the_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS)
    (tmp_path / "again.xml").write_text('<testsuite><testcase classname="a" name="two"/></testsuite>')
    found = versions.summary([tmp_path / "results.xml", tmp_path / "again.xml"])
    assert (found["passed"], found["failed"], found["skipped"]) == (2, 1, 1) and found["failures"] == ["b.four"]


def test_folders_without_results_are_named() -> None:
    missing = versions.folders_without({"tests.groups.test_mesh", "tests.backends.test_nccl.TestNames", "a"})
    assert {"algorithms", "stores", "schedules"} <= set(missing) and not {"groups", "backends"} & set(missing)


def test_a_later_run_replaces_the_earlier_one(tmp_path: Path) -> None:
    record = tmp_path / "versions.json"
    old = [{"python": "3.9.1", "torch": "1.0"}, {"python": "3.11.1", "torch": torch.__version__, "passed": 7}]
    if versions.minor(versions.platform.python_version()) != "3.11":
        old[1]["python"] = versions.platform.python_version()
    record.write_text(json.dumps(old))
    (tmp_path / "results.xml").write_text(RESULTS)
    versions.add([tmp_path / "results.xml"], record)
    rows = json.loads(record.read_text())
    assert len(rows) == 2 and [row.get("passed") for row in rows if row["torch"] == torch.__version__] == [1]
