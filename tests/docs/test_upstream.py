"""Findings for torch and Gloo: each program prints, on the torch that is pinned, what the page shows."""

from __future__ import annotations

import re
import signal
import subprocess

import pytest
import torch

from tests.docs import pages

PAGE = pages.DOCS / "explanation" / "upstream.md"
SECTIONS = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
SHOWN = re.compile(r"^```\{literalinclude\} (\S+)$.*?^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PINNED = "2.13"


def test_each_finding_has_a_program_and_a_suggestion() -> None:
    names = []
    for section in SECTIONS:
        shown = SHOWN.search(section)
        assert shown is not None, section[:60]
        for part in ("Concerns: ", "Expected: ", "Suggestion: "):
            assert len(section.partition(f"\n{part}")[2].split("\n\n")[0]) > 8, (section[:60], part)
        names.append((PAGE.parent / shown[1]).resolve())
    assert sorted(names) == sorted((pages.DOCS / "upstream").glob("*.py"))


@pytest.mark.skipif(not torch.__version__.startswith(PINNED), reason=f"the page shows what torch {PINNED} prints")
@pytest.mark.parametrize("section", SECTIONS, ids=[section.split("\n")[0] for section in SECTIONS])
def test_the_program_prints_what_the_page_shows(section: str, python_with_torch: str) -> None:
    shown = SHOWN.search(section)
    assert shown is not None
    program = str((PAGE.parent / shown[1]).resolve())
    done = subprocess.run([python_with_torch, program], capture_output=True, text=True, timeout=100)
    if shown[2] == "(ends with SIGABRT)\n":
        assert -done.returncode == signal.SIGABRT or done.returncode == 128 + signal.SIGABRT, done.stderr
        assert "Received data size doesn't match expected size" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, shown[2]), done.stderr
