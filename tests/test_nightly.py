"""The nightly run records what each step printed last, and on which commit, and fails if a step does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import nightly
from tests.nightly import Step


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "nightly.json").write_text("[]")
    (tmp_path / "file").write_text("1")
    identity = ("-c", "user.name=n", "-c", "user.email=e@x")
    for arguments in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "one")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "RECORD", tmp_path / "docs" / "nightly.json")
    steps = {
        "good": Step("one that passes", ("-c", "print('begun'); print('3 of 3 done')")),
        "bad": Step(
            "one that fails", ("-c", "import os; print(os.environ['WHY']); raise SystemExit(1)"), {"WHY": "so"}
        ),
        "browser": Step("one without its program", ("-c", ""), {}, ("no-such-program-here",)),
    }
    monkeypatch.setattr(nightly, "STEPS", steps)
    return tmp_path


def test_each_step_has_a_row_with_its_last_line_and_commit(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert nightly.main([]) == 1
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True).stdout.strip()
    found = [(row.step, row.passed, row.result, row.commit) for row in nightly.rows()]
    assert found == [("good", True, "3 of 3 done", head), ("bad", False, "so", head)]
    printed = capfd.readouterr().out
    assert "browser: not run, there is no no-such-program-here" in printed and "1 of 3 steps failed: bad" in printed


def test_a_repeated_step_replaces_its_row(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nightly.main([])
    monkeypatch.setitem(nightly.STEPS, "bad", Step("one that is mended", ("-c", "print('mended')")))
    assert nightly.main(["bad"]) == 0
    assert [(row.step, row.result) for row in nightly.rows()] == [("good", "3 of 3 done"), ("bad", "mended")]


def test_a_working_tree_with_changes_is_not_recorded(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (clone / "file").write_text("2")
    assert nightly.main(["good"]) == 0
    assert nightly.rows() == [] and "not recorded" in capfd.readouterr().out
