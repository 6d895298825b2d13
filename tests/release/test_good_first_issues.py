"""Good first issues: each has a title, a place to look at, and a test that fails, since its task is not done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import pages
from tests.release.scripts import ROOT

FOLDER = ROOT / ".github" / "good_first_issues"
ISSUES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")


def test_each_has_a_title_and_existing_places() -> None:
    listed = re.findall(r"^\| \[\d\d\]\((.+?)\)", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [path.name for path in ISSUES] and ISSUES
    for path in ISSUES:
        text = path.read_text(encoding="utf-8")
        assert re.match(r'---\ntitle: "[^"]{10,90}"\nlabels: \[good first issue, help wanted\]\n---\n', text), path.name
        places = re.findall(r"`(torchdist_ref/[\w/]+(?:\.py)?)`", text)
        assert places and all((ROOT / place).exists() for place in places), (path.name, places)


@pytest.mark.long
def test_each_test_fails_by_an_assertion_or_a_missing_option(tmp_path: Path) -> None:
    """Slow, some seconds: one new pytest for all of them, since tests of strangers may change the process."""
    for path in ISSUES:
        [block] = [block for block in pages.blocks(path) if block.language == "python"]
        (tmp_path / f"test_{path.stem}.py").write_text(block.text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "--rootdir", str(tmp_path), "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "400"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, env=environment)
    failed = re.findall(r"^FAILED test_(\w+)\.py::\S+(?: - )?(.*)$", done.stdout, re.MULTILINE)
    assert {name for name, _ in failed} == {path.stem for path in ISSUES}, done.stdout[-3000:]
    for name, reason in failed:
        assert re.match(r"assert |AssertionError|SystemExit|Failed: DID NOT RAISE", reason), (name, reason)
    assert "PASSED" not in done.stdout and "ERROR" not in done.stdout, done.stdout[-3000:]
