"""`benchmark hooks`: counted bytes against the formulas, errors against plain arithmetic, and pictures.

The models are real ones, so that most tests here take some tenths of a second, and those that go through all hooks, run
the command or draw take one or two.
"""

from __future__ import annotations

import importlib.util
import json
import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from torchdist_ref import groups
from torchdist_ref.benchmark import hooks, hooks_results
from torchdist_ref.benchmark.__main__ import main
from torchdist_ref.benchmark.harness import Harness
from torchdist_ref.benchmark.hooks import CONTESTANTS, Trainee, rate, sent_since
from torchdist_ref.benchmark.hooks_results import HookResult, from_json, select
from torchdist_ref.benchmark.training import EXACT_STEPS, HOOKS, LOCAL_STEPS, TASKS, Digits, Text, source
from torchdist_ref.testing import namespaces, run

# The convolutional network: 10 and 512, 32 and 144, 16 and 9 are the sides of its matrices, 58 numbers are biases.
MATRICES = ((10, 512), (32, 144), (16, 9))
NUMBERS, BIASES = 9930, 58


def by_hand(name: str, world: int) -> float:
    """Bytes a step on the digits, one bucket, written out."""
    summed = 2 * (world - 1) / world
    worth = {1: MATRICES, 2: MATRICES, 4: MATRICES[:2]}
    factors = {
        rank: BIASES + sum((n + m) * rank for n, m in some) + sum(n * m for n, m in MATRICES if (n, m) not in some)
        for rank, some in worth.items()
    }
    return {
        "none": 4 * NUMBERS * summed,
        "allreduce": 4 * NUMBERS * summed,
        "noop": 0.0,
        "fp16": 2 * NUMBERS * summed,
        "bf16": 2 * NUMBERS * summed,
        "powersgd-1": 4 * factors[1] * summed,
        "powersgd-2": 4 * factors[2] * summed,
        "powersgd-4": 4 * factors[4] * summed,
        "fp16-powersgd-2": 2 * factors[2] * summed,
        "bf16-powersgd-2": 2 * factors[2] * summed,
        "batched-powersgd-1": 4 * 2 * 100 * summed,
        "quantize-tensor": (world - 1) * (NUMBERS + 8),
        "quantize-channel": (world - 1) * 20 * (512 + 8),
        "local-sgd": 4 * NUMBERS * summed / LOCAL_STEPS,
    }[name]


def numel(bucket: list[torch.Size]) -> int:
    return sum(shape.numel() for shape in bucket)


def factors(shape: torch.Size, rank: int) -> int:
    """Numbers of PowerSGD's factors, where they are less than half of the matrix; else those of the tensor."""
    n, m = shape[0], shape.numel() // shape[0]
    r = min(n, m, rank)
    return (n + m) * r if len(shape) > 1 and 2 * (n + m) * r < n * m else n * m


def by_shapes(name: str, buckets: list[list[torch.Size]]) -> float:
    """Bytes a step from the shapes in each bucket, on two ranks."""
    return {
        "none": sum(4 * numel(bucket) for bucket in buckets),
        "powersgd-2": sum(4 * factors(shape, 2) for bucket in buckets for shape in bucket),
        # A bucket is one square matrix, and has two factors of its side.
        "batched-powersgd-1": sum(4 * 2 * math.ceil(math.sqrt(numel(bucket))) for bucket in buckets),
        # Padded rows of 512 bytes with a scale and a zero each.
        "quantize-channel": sum(math.ceil(numel(bucket) / 512) * (512 + 8) for bucket in buckets),
    }[name]


def sent(trainee: Trainee, steps: int = 1) -> float:
    """Bytes that a trainee sends in a step, after those that every hook averages exactly."""
    for _ in range(EXACT_STEPS):
        trainee.step(trainee.batch())
    begin = perf_counter()
    for _ in range(steps):
        trainee.step(trainee.batch())
    return sent_since(trainee.group, begin) / steps


@pytest.mark.parametrize("world", [2, 3])
def test_every_hook_sends_what_its_formula_says(world: int) -> None:
    def program(rank: int) -> dict[str, float]:
        task = Digits()
        return {
            name: sent(Trainee(task, HOOKS[name], groups.new_group()), HOOKS[name].every or 1) for name in CONTESTANTS
        }

    for found in run(program, world):
        assert found == pytest.approx({name: by_hand(name, world) for name in CONTESTANTS}, rel=1e-12)


def test_on_gloo_the_same_is_counted() -> None:
    def program(rank: int) -> list[float]:
        return [sent(Trainee(Digits(), HOOKS[name])) for name in ("fp16", "quantize-channel")]

    assert run(program, 2, backend="gloo")[0] == [by_hand("fp16", 2), by_hand("quantize-channel", 2)]


def test_every_hook_sends_what_its_formula_says_of_several_buckets() -> None:
    def program(rank: int) -> list[tuple[str, float, list[list[torch.Size]]]]:
        task, found = Text(), []
        for name in ("none", "powersgd-2", "batched-powersgd-1", "quantize-channel"):
            trainee = Trainee(task, HOOKS[name])
            nbytes, reducer = sent(trainee), trainee.model.reducer
            shapes = [[reducer.parameters[member].shape for member in members] for members in reducer.assignment]
            found.append((name, nbytes, shapes))
        return found

    for name, nbytes, buckets in run(program, 2)[0]:
        assert len(buckets) > 2 and nbytes == by_shapes(name, buckets), name


def halves(gradients: list[Tensor]) -> Tensor:
    return (gradients[0].half() / 2 + gradients[1].half() / 2).float()


def levels(gradients: list[Tensor]) -> Tensor:
    def rounded(x: Tensor) -> Tensor:
        low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
        scale = (high - low) / 255
        zero = round(-low / scale)
        return (torch.round(x / scale) + zero).clamp(0, 255).sub(zero) * scale

    return sum(map(rounded, gradients), torch.zeros(())) / 2


def relative_error(got: Tensor, gradients: list[Tensor]) -> float:
    exact = torch.stack(gradients).double().mean(0)
    return float((got.double() - exact).norm() / exact.norm())


def error_and_gradients(rank: int, name: str, steps: int = EXACT_STEPS) -> tuple[float, list[Tensor], list[torch.Size]]:
    """The error that a trainee reports after some steps, and the gradients of both ranks from the plain model."""
    task = Digits()
    trainee = Trainee(task, HOOKS[name])
    for _ in range(steps):
        trainee.step(trainee.batch())
    plain = task.model()
    plain.load_state_dict(trainee.model.module.state_dict())

    def gradient(inputs: Tensor, targets: Tensor) -> Tensor:
        parts = torch.autograd.grad(task.loss(plain(inputs), targets), list(plain.parameters()))
        return torch.cat([part.flatten() for part in parts])

    gradients = [gradient(*task.batch(steps, r, 2)) for r in range(2)]

    def exchange(value: Any) -> list[Any]:
        gathered: list[Any] = [None, None]
        groups.all_gather_object(gathered, value)
        return gathered

    return trainee.error(exchange), gradients, [parameter.shape for parameter in plain.parameters()]


@pytest.mark.parametrize(("name", "formula"), [("fp16", halves), ("quantize-tensor", levels)])
def test_the_error_is_that_of_plain_arithmetic(name: str, formula: Callable[[list[Tensor]], Tensor]) -> None:
    error, gradients, _ = run(error_and_gradients, 2, name)[0]
    assert error == pytest.approx(relative_error(formula(gradients), gradients), rel=1e-3)


@pytest.mark.parametrize(("name", "steps"), [("noop", 0), ("local-sgd", EXACT_STEPS)])
def test_error_without_averaging_is_that_of_local_gradients(name: str, steps: int) -> None:
    for rank, (error, gradients, _) in enumerate(run(error_and_gradients, 2, name, steps)):
        assert error == pytest.approx(relative_error(gradients[rank], gradients), rel=1e-5)


@pytest.mark.parametrize("name", ["none", "allreduce"])
def test_an_exact_average_has_no_error(name: str) -> None:
    assert run(error_and_gradients, 2, name)[0][0] < 1e-6


def least(mean: Tensor, shapes: list[torch.Size], rank: int) -> float:
    """The relative error of the best approximation of this rank, where it is worth it: Eckart and Young's theorem."""
    lost, start = 0.0, 0
    for shape in shapes:
        n, m = shape[0], shape.numel() // shape[0]
        if len(shape) > 1 and 2 * (n + m) * rank < n * m:
            lost += float(torch.linalg.svdvals(mean[start : start + n * m].view(n, m))[rank:].square().sum())
        start += shape.numel()
    return float((lost / float(mean.square().sum())) ** 0.5)


def test_error_of_powersgd_is_at_least_that_of_the_best_factors_of_its_rank() -> None:
    errors = []
    for rank in (1, 2, 4):
        error, gradients, shapes = run(error_and_gradients, 2, f"powersgd-{rank}")[0]
        assert least(torch.stack(gradients).double().mean(0), shapes, rank) <= error * 1.0001 < 1.0001
        errors.append(error)
    assert errors[0] > errors[2] > 0


@pytest.mark.parametrize("name", TASKS)
def test_models_and_batches_are_reproducible_and_keep_the_random_state(name: str) -> None:
    before = torch.get_rng_state()
    one, other = TASKS[name](), TASKS[name]()
    for a, b in zip(one.model().parameters(), other.model().parameters(), strict=True):
        assert torch.equal(a, b)
    parts = [one.batch(7, rank, 2)[0] for rank in range(2)]
    assert torch.equal(other.batch(7, 0, 2)[0], parts[0])
    assert not torch.equal(parts[0], parts[1]) and not torch.equal(one.batch(8, 0, 2)[0], parts[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_text_is_the_standard_library_and_targets_are_next_characters() -> None:
    inputs, targets = Text().batch(0, 0, 2)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0].tolist()).decode() in source()
    assert "def " in source() and len(source()) == 1_000_000


def test_transformer_is_causal() -> None:
    model = Text().model()
    text = torch.arange(10)[None]
    changed = text.clone()
    changed[0, 6:] = 99
    same = (model(text) == model(changed)).all(-1)[0]
    assert same.tolist() == [True] * 6 + [False] * 4


@pytest.mark.long
def test_both_tasks_learn() -> None:
    def program(rank: int) -> list[tuple[float, float]]:
        found = []
        for name, steps in (("digits", 30), ("text", 12)):
            trainee = Trainee(TASKS[name](), HOOKS["none"])
            losses = [float(trainee.step(trainee.batch())) for _ in range(steps)]
            found.append((losses[0], losses[-1]))
        return found

    assert all(last < 0.8 * first for first, last in run(program, 2)[0])


def test_local_models_are_equal_after_every_fourth_step() -> None:
    def program(rank: int) -> list[Tensor]:
        trainee = Trainee(Digits(), HOOKS["local-sgd"])
        weights = []
        for _ in range(LOCAL_STEPS):
            trainee.step(trainee.batch())
            weights.append(torch.cat([p.detach().flatten() for p in trainee.model.parameters()]))
        return weights

    one, other = run(program, 2)
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [True, True, False, True]


def test_the_spans_of_a_step_follow_each_other() -> None:
    def program(rank: int) -> list[Any]:
        trainee = Trainee(Text(), HOOKS["powersgd-1"])
        for _ in range(EXACT_STEPS):
            trainee.step(trainee.batch())
        return trainee.spans()

    spans = run(program, 2)[0]
    computing = [span for span in spans if span[0] == "compute"]
    assert [what for _, what, _, _ in computing] == ["forward", "backward", "wait", "optimizer"]
    assert all(a[3] <= b[2] for a, b in pairwise(computing))
    buckets, calls = ([span for span in spans if span[0] == row] for row in ("buckets", "calls"))
    assert [what for _, what, _, _ in buckets] == [f"bucket {i}" for i in range(len(buckets))] and len(buckets) > 2
    assert len(calls) == 2 * len(buckets)
    assert all(0 <= begin <= end for _, _, begin, end in spans)


def result(hook: str = "none", link: str = "fast", times: float = 1.0, **changes: Any) -> HookResult:
    seconds = [0.5 * times, 0.010 * times, 0.012 * times, 0.011 * times]
    spans = [("compute", "backward", 0.0, 0.01)]
    spans += [("buckets", "bucket 0", 0.002, 0.01), ("buckets", "bucket 1", 0.004, 0.009)]
    plain = HookResult(
        "text",
        "ref",
        link,
        hook,
        2,
        1000,
        4000.0,
        None,
        [0.25, 0.35],
        seconds,
        [4.0, 3.0, 2.5, 2.25],
        turn=1,
        spans=spans,
    )
    return replace(plain, **changes)


def test_the_table_shows_hooks_beside_the_first_one_on_each_link() -> None:
    ones = [result(), result("fp16", times=2.0, sent_bytes=2000.0, error=[3e-4])]
    assert hooks_results.table([*ones, *(one.on("1mbit", 1e6) for one in ones)]) == (
        "text: 1,000 parameters, 2 ranks on ref\n"
        "hook  bytes  x less   error  fast ms  x none  1mbit (modeled) ms  x none   loss\n"
        "none  4,000    1.00     0.3     11.0    1.00                43.0    1.00  2.250\n"
        "fp16  2,000    2.00  0.0003     22.0    2.00                38.0    0.88  2.250"
    )
    assert hooks_results.table(ones, ratios=False).splitlines()[1] == "hook  bytes  x less   error  fast ms   loss"


def test_a_result_comes_back_from_its_report() -> None:
    one = result(wire_bytes=4321.5)
    assert from_json(json.loads(json.dumps(one.entry()))) == one
    assert select([one, result("fp16")], hook="fp16", link="fast") == [result("fp16")]
    assert one.clock == pytest.approx([0.5, 0.51, 0.522, 0.533])


def test_the_same_results_draw_the_same_pictures(tmp_path: Path) -> None:
    results = [result(), result("fp16", sent_bytes=2000.0), result("noop", link="100mbit", sent_bytes=0.0)]
    for name in ("a", "b"):
        hooks_results.plot(str(tmp_path / f"{name}.svg"), results)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert all(words in drawn for words in ("loss, 100mbit", "time of a step", "2,000 B", "fp16"))
    line = hooks_results.timelines(results)
    assert line == hooks_results.timelines(results) and line.count("backward: 0 s to 10 ms") == 3


def test_spans_that_overlap_have_bars_of_different_heights() -> None:
    drawn = hooks_results.timelines([result()])
    heights = {
        line.split("y='")[1].split("'")[0] for line in drawn.split("<rect")[1:] if "bucket" in line.split("</rect>")[0]
    }
    assert len(heights) == 2


def test_of_many_curves_those_that_differ_are_drawn(tmp_path: Path) -> None:
    hooks_results.plot(str(tmp_path / "a.svg"), [result(name) for name in CONTESTANTS])
    _, _, curves = (tmp_path / "a.svg").read_text().partition("loss, fast")
    assert "powersgd-1" in curves and "powersgd-2" not in curves


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--hooks", "gzip"], "--hooks"),
        (["--tasks", "chess"], "--tasks"),
        (["--links", "string"], "--links"),
        (["--links", "0mbit"], "--links"),
        (["--backends", "torch:gloo"], "--backends"),
        (["--turns", "1"], "--turns"),
        (["--world", "1"], "--world"),
    ],
)
def test_wrong_options_are_named(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", *options]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.long
def test_the_command_measures_models_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "out.json", tmp_path / "plot.svg", tmp_path / "steps.svg"]
    wanted = [
        "--tasks",
        "digits",
        "--hooks",
        "none,fp16,powersgd-1",
        "--links",
        "fast,100mbit",
        # The former spelling of --modeled.
        "--modelled",
        "--quick",
    ]
    outputs = ["--json", str(files[0]), "--plot", str(files[1]), "--timeline", str(files[2])]
    assert main(["hooks", "--quick", *wanted, *outputs]) == 0
    printed = capsys.readouterr()
    assert "digits on gloo, fast ..." in printed.err
    assert "100mbit is modeled, as asked" in printed.out and "3,124" in printed.out
    report = json.loads(files[0].read_text())
    found = [from_json(entry) for entry in report["results"]]
    assert len(found) == 3 * 2 * 2 and report["date"] and report["machine"]["processor"]
    assert all(one.sent_bytes == by_hand(one.hook, 2) and len(one.seconds) == 12 for one in found)
    assert {one.link for one in found if one.modeled} == {"100mbit"}
    assert all("<svg" in path.read_text() for path in files[1:])


@pytest.mark.long
@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_on_a_slow_link_bytes_take_the_time_that_the_rate_allows() -> None:
    settings = Namespace(tasks=("digits",), backends=("ref", "gloo"), hooks=("none", "noop"), turns=2, world=2)
    harness = Harness(hooks, settings)
    assert hooks.on_link(harness, "10mbit") == ""
    results: list[HookResult] = harness.results
    assert len(results) == 4
    for backend in ("ref", "gloo"):
        full, nothing = select(results, backend=backend)
        assert full.step > 0.4 * 8 * full.sent_bytes / 10e6
        assert full.wire_bytes is not None and full.wire_bytes > full.sent_bytes
        assert (nothing.wire_bytes or 0.0) < 0.1 * full.wire_bytes


def test_link_that_cannot_be_made_is_modeled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(namespaces, "missing", lambda: "there is no cable")
    wanted = ["--tasks", "digits", "--hooks", "none", "--links", "10mbit", "--backends", "ref", "--turns", "2"]
    assert main(["hooks", *wanted]) == 0
    printed = capsys.readouterr().out
    assert "10mbit is modeled, " in printed and "there is no cable" in printed and "10mbit (modeled) ms" in printed


def test_a_task_that_lacks_its_data_is_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sklearn" else find(name))
    assert main(["hooks", "--tasks", "digits", "--links", "fast", "--backends", "ref"]) == 1
    assert "digits is left out: needs scikit-learn" in capsys.readouterr().err


def test_rates_of_links_are_parsed_like_those_of_tc() -> None:
    assert [rate(text) for text in ("2kbit", "1.5mbit", "fast")] == [2000.0, 1.5e6, None]
    assert hooks.links("fast,1.5Mbit,fast") == ("fast", "1.5mbit")
    with pytest.raises(ArgumentTypeError, match="100mbit"):
        rate("fastest")
