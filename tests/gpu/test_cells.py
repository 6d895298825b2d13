"""Notebooks run without Jupyter: outputs as in a notebook, and cells that fail, crash, hang or lack something."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import cells
from tests.gpu.supervise import ROOT, Events

# Every import of these fails in the runner and in its ranks.
ABSENT = ("IPython", "numpy", "matplotlib", "rich", "nbformat", "nbclient", "psutil", "hypothesis")
PROGRAM = (
    f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); from tests.gpu.cells import main; main(sys.argv[1:])"
)
SUM = "import torch, torchdist_ref as dist\ndist.init_process_group('ref')\nx = torch.full((2,), 3.0 + dist.get_rank())"


def written(folder: Path, *sources: str, tags: dict[int, list[str]] | None = None) -> Path:
    """Write a notebook with these code cells."""
    made = [
        {"cell_type": "code", "metadata": {"tags": (tags or {}).get(number, [])}, "source": source, "outputs": []}
        for number, source in enumerate(sources, 1)
    ]
    path = folder / "some.ipynb"
    path.write_text(json.dumps({"metadata": {}, "cells": [{"cell_type": "markdown", "source": "#"}, *made]}))
    return path


def ran(notebook: Path, *options: str, code: int = 0) -> list[dict[str, Any]]:
    """Run a notebook in a process without the absent packages; return the events of its cells."""
    path = notebook.with_suffix(".events")
    command = [sys.executable, "-c", PROGRAM, str(notebook), str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    return Events(path).read()


def ends(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "end"]


def test_cells_of_ranks_magics_and_values_need_no_jupyter(tmp_path: Path) -> None:
    # Over a second: a rank server with torch starts.
    notebook = written(
        tmp_path,
        "%load_ext torchdist_ref.notebook",
        f"%%spmd -n 4\n{SUM}",
        "%%spmd --ranks 1\nclass Picture:\n    _repr_svg_ = lambda self: '<svg/>'\n"
        "dist.all_reduce(x); display(Picture()); x",
        "name = 'x'\nfor rank in range(2):\n    %spmd_get {name}.tolist() --rank {rank} --to got\nprint(got)\n'end'",
        "%%spmd\n1 / rank if (rank := dist.get_rank()) else rank",
        "1 / 0",
        "raise KeyError('meant')",
        "import numpy as np",
        "np.ones(2)",
        "display(2 ** 5)",
        tags={7: ["raises-exception"]},
    )
    found = ends(ran(notebook, "--ranks", "2"))
    assert [each["outcome"] for each in found] == [*["passed"] * 5, "failed", "passed", "skipped", "skipped", "passed"]
    assert [each["ranks"] for each in found[:5]] == [0, 2, 2, 0, 2]
    assert re.sub(r"<.*Picture.*> \[", "[", found[2]["output"]).splitlines() == [
        "[rank 1]",
        "[image/svg+xml]",
        "[rank 1] tensor([7., 7.])",
    ]
    assert found[3]["output"] == "[7.0, 7.0]\n'end'\n"
    assert 'File "<cell 6>", line 1' in found[5]["reason"] and "ZeroDivisionError" in found[5]["reason"]
    assert "KeyError: 'meant'" in found[6]["output"]
    assert found[7]["reason"] == "needs the package numpy" and found[8]["reason"] == "needs a cell that was skipped"
    assert found[9]["output"] == "32\n"


@pytest.mark.parametrize(
    ("absent", "trace", "wanted"),
    [
        (True, "RuntimeError: Numpy is not available", ("skipped", "needs the package numpy")),
        (False, "RuntimeError: Numpy is not available", ("failed", "RuntimeError: Numpy is not available")),
    ],
)
def test_a_cell_that_needs_numpy_is_skipped_without_it(
    absent: bool, trace: str, wanted: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's message names no module, so such cells failed."""
    monkeypatch.setattr(cells.importlib.util, "find_spec", lambda name: None if absent else name)
    assert cells.judged(trace, "tensor.numpy()", False, SimpleNamespace(world=0, asked=0)) == wanted


def test_a_crash_loses_no_cell_that_has_ended(tmp_path: Path) -> None:
    events = ran(written(tmp_path, "print(7 * 3)", "import os; os.abort()", "1"), code=-6)
    assert [event["event"] for event in events] == ["start", "end", "start"]
    assert events[1]["output"] == "21\n" and events[2]["number"] == 2


@pytest.mark.long
def test_a_cell_that_hangs_ends_the_process_with_its_stack(tmp_path: Path) -> None:
    # The limit; the cell before ends within it on a busy machine.
    notebook = written(tmp_path, "1", "import threading\ndef stuck():\n    threading.Event().wait()\nstuck()")
    command = [sys.executable, "-m", "tests.gpu.cells", str(notebook), str(tmp_path / "events"), "--cell-seconds", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "Timeout" in done.stderr and "in stuck" in done.stderr
    assert [event["event"] for event in Events(tmp_path / "events").read()] == ["start", "end", "start"]


@pytest.mark.long
def test_a_rank_that_hangs_fails_its_cell_alone(tmp_path: Path) -> None:
    # Some seconds: the time-out of the ranks. They start in the same cell, whose limit is long.
    wait = "%%spmd -n 2 --timeout 3\nimport os, threading\nif os.environ['RANK'] == '1':\n    threading.Event().wait()"
    found = ends(ran(written(tmp_path, "%load_ext torchdist_ref.notebook", wait, "5"), "--cell-seconds", "55"))
    assert [each["outcome"] for each in found] == ["passed", "failed", "passed"]
    assert "rank 1 did not answer within 3 s" in found[1]["reason"]


@pytest.mark.parametrize(("cell", "ranks"), [(12.0, 3.0), (60.0, 45.0)])
def test_ranks_that_hang_do_so_for_less_time_than_their_cell_has(cell: float, ranks: float) -> None:
    # Not made as usual, which takes the place of the main module.
    shell = object.__new__(cells.Shell)
    shell.asked = shell.world = 0
    shell._limit, shell._seconds = 2, cell
    assert shell._options("-n 4").split() == ["-n", "2", "--timeout", str(ranks)]
    assert "--timeout 7" in shell._options("--timeout 7") and str(ranks) not in shell._options("--timeout 7")


MIXED = "RuntimeError: Expected all tensors to be on the same device, but found cuda:0 and cpu"


@pytest.mark.parametrize(
    ("trace", "asked", "outcome", "reason"),
    [
        (f'File "<cell 2>", line 1\n{MIXED}', 2, "skipped", "needs CPU tensors"),
        (f'File "/a/torchdist_ref/work.py", line 1\n{MIXED}', 2, "failed", "File"),
        ("ValueError: rank 2 is not in the group", 4, "failed", "written for 4 ranks, ran on 2"),
        ("ModuleNotFoundError: No module named 'sklearn.datasets'", 2, "skipped", "needs the package sklearn.datasets"),
        ("ModuleNotFoundError: No module named 'torchdist_ref.gone'", 2, "failed", "ModuleNotFoundError"),
        ("NameError: name 'x' is not defined", 2, "failed", "NameError"),
    ],
)
def test_a_failure_is_told_from_what_the_machine_lacks(trace: str, asked: int, outcome: str, reason: str) -> None:
    found = cells.judged(trace, "%%spmd\nx", False, SimpleNamespace(world=2, asked=asked))
    assert found[0] == outcome and found[1].startswith(reason)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["01_four_ranks_one_sum", "02_collectives_by_pictures"])
def test_outputs_are_those_of_jupyter(name: str, tmp_path: Path) -> None:
    """Half a minute each: the tutorial runs twice, once in a kernel."""
    import nbclient
    import nbformat

    path = ROOT / "tutorials" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    theirs = [
        "".join(output.get("text") or output.get("data", {}).get("text/plain", "") + "\n" for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code" and "raises-exception" not in cell.metadata.get("tags", [])
    ]
    command = [sys.executable, "-m", "tests.gpu.cells", str(path), str(tmp_path / "events")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    tags = [tags for _, tags in cells.code_cells(path)]
    ours = [
        each["output"]
        for each, of in zip(ends(Events(tmp_path / "events").read()), tags, strict=True)
        if "raises-exception" not in of
    ]
    assert [plain(each) for each in ours] == [plain(each) for each in theirs]


def plain(output: str) -> str:
    """Remove what differs between runs (times, ports, process ids, addresses) and how values are wrapped."""
    output = re.sub(r"\[image/[^\]]*\]", "", output)
    output = re.sub(r"\d+(\.\d+)? ?(ms|µs|us|s)\b|0x[0-9a-f]+|\b\d{4,}\b", "#", output)
    return " ".join(output.split())
