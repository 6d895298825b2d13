"""Brief runs of `benchmark ddp` on a tiny model. The measured figures are not compared here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchdist_ref.benchmark.__main__ import main, parse
from torchdist_ref.benchmark.ddp import NAMES, excess, over_local, pss
from torchdist_ref.benchmark.rounds import Result
from torchdist_ref.benchmark.training import MODELS

# torch's DDP loads the compiler: some 2 s, once.
BRIEF = ["ddp", "--models", "tiny", "--repetitions", "2", "--seconds", "0.001"]


@pytest.mark.parametrize(
    "hooks", ["none,fp16,powersgd-4", pytest.param(",".join(NAMES.split()), marks=pytest.mark.long)]
)
def test_hooks_on_every_side(hooks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    # Three hooks, four sides each: a second.
    assert main([*BRIEF, "--hooks", hooks, "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert [result["hook"] for result in results] == hooks.split(",")
    assert all(set(r["samples"]) == {"local", "torch:gloo", "ref", "gloo"} for r in results)
    assert all(len(times) == 2 and min(times) > 0 for r in results for times in r["samples"].values())
    table = capsys.readouterr().out
    assert "excess ref / torch" in table and "powersgd-4" in table


@pytest.mark.long
def test_memory_of_each_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main([*BRIEF, "--hooks", "none", "--memory", "--json", str(out)]) == 0
    (result,) = json.loads(out.read_text())["results"]
    assert set(result["samples"]) == {"torch:gloo", "ref", "gloo"} and result["unit"] == "bytes"
    assert min(size for sizes in result["samples"].values() for size in sizes) > 1 << 20
    printed = capsys.readouterr().out
    assert "gloo MiB" in printed and "gloo / torch" in printed and "excess" not in printed


def test_unknown_hook_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BRIEF, "--hooks", "fp17"]) == 1
    assert "fp17" in capsys.readouterr().err


def test_former_names_of_hooks_are_understood() -> None:
    given = ["--hooks", "none;none, views;fp16 wrapper;powerSGD 4"]
    assert parse(["ddp", *given]).hooks == ("none", "none-views", "fp16-wrapper", "powersgd-4")
    assert parse(["ddp", "--hooks", "none,powersgd-1"]).hooks == ("none", "powersgd-1")


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
