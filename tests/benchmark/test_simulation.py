"""Speed of a simulation: each run has a time for its start, its calls and its switches, and the table shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchdist_ref.benchmark import simulation
from torchdist_ref.benchmark.__main__ import main
from torchdist_ref.benchmark.rounds import Result


def test_the_table_has_rates() -> None:
    samples = {simulation.START: [0.5, 0.25, 0.125], simulation.CALL: [2e-4] * 3, simulation.SWITCH: [1e-5] * 3}
    table = simulation.show(None, [Result({"world": 64, "op": "all_reduce", "nbytes": 1 << 20}, samples)])  # type: ignore[arg-type]
    assert table.splitlines()[1].split() == ["64", "1", "MiB", "250.0", "ms", "5,000", "100,000"]


def test_the_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "simulation.json"
    assert (
        main(
            ["simulation", "--worlds", "2,3", "--sizes", "4", "--calls", "2", "--repetitions", "2", "--json", str(path)]
        )
        == 0
    )
    cells = json.loads(path.read_text())["results"]
    assert [(cell["world"], cell["nbytes"]) for cell in cells] == [(2, 4), (3, 4)]
    assert all(len(cell["samples"][name]) == 2 for cell in cells for name in cell["samples"])
    assert all(seconds > 0 for cell in cells for values in cell["samples"].values() for seconds in values)
    assert "ranks x calls/s" in capsys.readouterr().out
