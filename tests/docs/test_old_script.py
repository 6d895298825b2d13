"""The script of the page "Run a script written for torch 1.13" runs as it stands, and prints what the page says."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.docs import pages
from tests.ports import reserve_port

FOLDER = pages.DOCS / "how-to"


@pytest.mark.parametrize("backend", ["gloo", "ref"])
def test_it_trains_on_processes_that_it_spawns(
    backend: str, python_with_torch: str, tmp_path: os.PathLike[str]
) -> None:
    source = (FOLDER / "train_1_13.py").read_text(encoding="utf-8")
    assert source.count('"gloo"') == 1
    script = os.path.join(tmp_path, "train_1_13.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(source.replace('"gloo"', f'"{backend}"'))
    answer = subprocess.run(
        [python_with_torch, script],
        env={**os.environ, "MASTER_PORT": str(reserve_port()), "PYTHONPATH": str(pages.ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert answer.returncode == 0, answer.stderr
    shown = [block.text for block in pages.blocks(FOLDER / "run_an_old_script.md") if block.language == "text"]
    assert answer.stdout == shown[0].partition("\n")[2]
