"""The script of the page "Port a torchrun script" runs under each launcher of this machine, with one result."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs import pages

LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "ours": ["-m", "torchdist_ref.launch", "--nproc-per-node", "2"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_it_trains_under_each_launcher(launcher: str, python_with_torch: str, tmp_path: Path) -> None:
    page = pages.blocks(pages.DOCS / "how-to" / "port_a_torchrun_script.md")
    script = tmp_path / "train.py"
    script.write_text(next(block.text for block in page if block.language == "python") + "\n\nmain()\n")
    answer = subprocess.run(
        [python_with_torch, *LAUNCHERS[launcher], str(script)],
        env={**os.environ, "PYTHONPATH": str(pages.ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert answer.returncode == 0, answer.stderr
    # torchrun mixes what ranks print at the same time in one line.
    assert sorted(re.findall(r"rank \d \(local rank \d\)", answer.stdout)) == [
        f"rank {r} (local rank {r})" for r in range(2)
    ]
    losses = re.findall(r"loss (\d+\.\d\d)", answer.stdout)
    assert len(losses) == 2 and losses[0] == losses[1]
