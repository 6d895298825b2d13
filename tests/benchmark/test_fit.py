"""Fit of a network and its predictions: the search finds known numbers, and both commands run and write their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchdist_ref.benchmark import fit
from torchdist_ref.benchmark.__main__ import main
from torchdist_ref.benchmark.modeled import recorded
from torchdist_ref.benchmark.rounds import Result
from torchdist_ref.schedules import Network

SIZES = (4, 1_000, 100_000, 10_000_000)


def test_the_search_finds_the_numbers_of_a_network() -> None:
    def simulate(network: Network, calls: Sequence[int]) -> list[float]:
        return [network.overhead + nbytes * network.copy for nbytes in calls]

    there = Network(overhead=3e-5, copy=2e-10)
    measured = dict(zip(SIZES, simulate(there, SIZES), strict=True))
    found = fit.fitted(Network(overhead=5e-6, copy=1e-9, gamma=0.5), ("overhead", "copy"), measured, simulate)
    assert (found.overhead, found.copy) == pytest.approx((3e-5, 2e-10), rel=0.01)
    assert found.gamma == 0.5


def test_the_tables_of_predictions() -> None:
    calls = [
        Result({"link": "TCP", "op": "reduce", "nbytes": size}, {"ref": [1.0], "simulated": [time]})
        for size, time in ((4096, 1.25), (8192, 0.5))
    ]
    step = Result({"link": "TCP", "model": "mlp", "hook": "none"}, {"ref": [0.002], "simulated": [0.003]})
    found = recorded([*calls, step])
    assert found["simulated_calls"]["header"][2:] == ["4 KiB", "8 KiB"]
    assert found["simulated_calls"]["rows"] == [["TCP", "reduce", "+25%", "-50%"]]
    assert found["simulated_calls"]["values"] == {"median": "38%", "largest": "50%"}
    assert found["simulated_steps"]["rows"] == [["TCP", "mlp", "none", "2.00", "3.00", "+50%"]]


def test_fit_writes_a_network_that_predict_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit, "ITERATIONS", 1)
    path, predictions = tmp_path / "fit.json", tmp_path / "predictions.json"
    brief = ["--sizes", "64K", "--repetitions", "1", "--seconds", "0.001"]
    assert main(["fit", *brief, "--json", str(path)]) == 0
    assert Network.from_file(path).overlap is False
    steps = ["--models", "tiny", "--hooks", "none", "--links", "shared memory"]
    assert main(["predict", *brief, "--ops", "reduce", *steps, "--fit", str(path), "--json", str(predictions)]) == 0
    tables = json.loads(predictions.read_text())["tables"]
    assert [row[:2] for row in tables["simulated_calls"]["rows"]] == [["shared memory", "reduce"]]
    assert [row[:3] for row in tables["simulated_steps"]["rows"]] == [["shared memory", "tiny", "none"]]
    assert "overhead = " in capsys.readouterr().out
