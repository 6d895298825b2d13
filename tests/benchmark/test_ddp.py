"""Brief runs of `benchmark ddp` on a tiny model. The measured figures are not compared here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchdist_ref.benchmark.__main__ import main
from torchdist_ref.benchmark.ddp import excess, over_local, pss
from torchdist_ref.benchmark.ddp_models import HOOKS, MODELS
from torchdist_ref.benchmark.rounds import Result

# torch's DDP loads the compiler: some 2 s, once.
BRIEF = ["ddp", "--models", "tiny", "--repetitions", "2", "--seconds", "0.001"]


def test_every_hook_on_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    # Twelve hooks, four sides each: some 4 s.
    assert main([*BRIEF, "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert [result["hook"] for result in results] == list(HOOKS)
    assert all(set(r["samples"]) == {"local", "torch:gloo", "ref", "gloo"} for r in results)
    assert all(len(times) == 2 and min(times) > 0 for r in results for times in r["samples"].values())
    table = capsys.readouterr().out
    assert "excess ref / torch" in table and "powerSGD 4" in table


def test_memory_of_each_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main([*BRIEF, "--hooks", "none", "--memory", "--json", str(out)]) == 0
    sizes = {r["side"]: r["pss_bytes"] for r in json.loads(out.read_text())["results"]}
    assert set(sizes) == {"torch:gloo", "ref", "gloo"} and min(sizes.values()) > 1 << 20
    assert "MiB" in capsys.readouterr().out


def test_unknown_hook_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BRIEF, "--hooks", "fp17"]) == 1
    assert "fp17" in capsys.readouterr().err


def test_figures_of_a_result() -> None:
    samples = {"local": [1.0, 1.0, 9.0], "torch:gloo": [3.0, 3.0, 9.0], "ref": [2.0, 2.0, 9.0]}
    result = Result({"model": "mlp", "hook": "none"}, samples, [False, False, True])
    assert (result.ratio("ref", "torch:gloo"), result.median("ref")) == (2 / 3, 2.0)
    assert (excess(result, "ref"), over_local(result, "ref")) == (0.5, 1.0)
    assert not result.noisy


def test_the_models_have_the_sizes_that_are_stated() -> None:
    sizes = {name: sum(p.numel() for p in make()[0].parameters()) for name, make in MODELS.items()}
    assert sizes == {"mlp": 9_292_930, "resnet18": 11_173_962, "tiny": 2_000}
    assert pss() >= 0
