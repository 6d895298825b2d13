"""Runs share the files of the package: a fault is in one of them alone, and a run that writes to them is noticed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.mutants import __main__ as command
from tests.mutants.planting import Fault, plant

FAULT = Fault("a sum is a difference", "sums.py", "$left + $right", "$left - $right", "")


def test_a_fault_is_planted_in_one_of_the_copies_that_share_files(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "sums.py").write_text("total = one + two\n")
    shutil.copytree(tmp_path / "original", tmp_path / "run", copy_function=os.link)
    assert plant(FAULT, tmp_path / "run").read_text() == "total = one - two\n"
    assert (tmp_path / "original" / "sums.py").read_text() == "total = one + two\n"


@pytest.mark.parametrize("change", ["grown", "touched", "removed", "added"])
def test_a_file_that_a_run_changes_ends_the_session(change: str, tmp_path: Path) -> None:
    kept, changed = tmp_path / "kept.py", tmp_path / "changed.py"
    kept.touch()
    if change != "added":
        changed.touch()
    before = command.states(tmp_path)
    assert before == command.states(tmp_path)
    if change == "removed":
        changed.unlink()
    elif change == "touched":
        os.utime(changed, (1, 1))
    else:
        changed.write_text("more" if change == "grown" else "")
    assert {path for path, _ in before ^ command.states(tmp_path)} == {"changed.py"}
