"""What the tutorial on compression says is so: in the recording that it shows, and in a run of its own functions.

Bytes are exact; of times and errors the order is held, under loose bounds. The functions under test are the notebook's
own: its cells with the tags `start`, `model`, `factored` and `error` are read out of it and run here.
"""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

import pytest

from tests.docs import pages
from torchdist_ref.benchmark.hooks import CONTESTANTS
from torchdist_ref.benchmark.hooks_results import HookResult, from_json, select
from torchdist_ref.testing import run

NOTEBOOK = pages.ROOT / "tutorials" / "08_when_compression_pays.ipynb"
RECORDED = sorted((NOTEBOOK.parent / "hooks_measured").glob("*.json"))
AVERAGING = [hook for hook in CONTESTANTS if hook not in ("none", "noop", "local-sgd")]
WEIGHTS = {"text": 951_680, "digits": 9_930}


@pytest.fixture(scope="module")
def measured() -> list[HookResult]:
    return [from_json(entry) for path in RECORDED for entry in json.loads(path.read_text())["results"]]


def one(measured: list[HookResult], hook: str, link: str, task: str = "text", backend: str = "ref") -> HookResult:
    (found,) = select(measured, hook=hook, link=link, task=task, backend=backend)
    return found


def test_the_recording_is_of_every_hook_on_measured_links(measured: list[HookResult]) -> None:
    for task in WEIGHTS:
        for link in ("fast", "1gbit", "100mbit"):
            assert [result.hook for result in select(measured, task=task, backend="ref", link=link)] == [*CONTESTANTS]
            assert select(measured, task=task, backend="gloo", link=link)
    assert not any(result.modeled for result in measured)
    for path in RECORDED:
        report = json.loads(path.read_text())
        assert report["benchmark"] == "hooks" and report["date"] and report["machine"]["processor"]


def test_every_recorded_byte_is_that_of_the_formula(measured: list[HookResult]) -> None:
    # The recording has the formulas' results beside the bytes; today `tests/benchmark/test_hooks.py` has the formulas.
    entries = [entry for path in RECORDED for entry in json.loads(path.read_text())["results"]]
    assert all(entry["sent_bytes"] == entry["expected_bytes"] for entry in entries)
    for task, weights in WEIGHTS.items():
        assert one(measured, "none", "fast", task).sent_bytes == 4 * weights
        assert one(measured, "fp16", "fast", task).sent_bytes == 2 * weights
    assert one(measured, "powersgd-1", "fast").sent_bytes == 50_176
    slow = [result for result in measured if result.link != "fast" and result.sent_bytes > 100_000]
    assert slow and all(result.wire_bytes and 1 < result.wire_bytes / result.sent_bytes < 1.2 for result in slow)


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_at_100_megabits_a_second_it_pays_in_the_order_of_the_bytes(measured: list[HookResult], backend: str) -> None:
    none, half, factored, nothing = (
        one(measured, hook, "100mbit", backend=backend) for hook in ("none", "fp16", "powersgd-1", "noop")
    )
    assert 0.4 < half.ratio(none) < 0.75 and factored.ratio(none) < (0.15 if backend == "ref" else 0.25)
    assert factored.ratio(nothing) < 2.5


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_at_a_gigabit_a_second_factors_still_pay_for_the_large_model(measured: list[HookResult], backend: str) -> None:
    factored, none = (one(measured, hook, "1gbit", backend=backend) for hook in ("powersgd-1", "none"))
    assert factored.ratio(none) < 0.75


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_in_shared_memory_and_on_the_loopback_factors_take_longer_than_they_save(
    measured: list[HookResult], backend: str
) -> None:
    factored, none = (one(measured, hook, "fast", backend=backend) for hook in ("powersgd-1", "none"))
    assert 1.1 < factored.ratio(none) < 1.6


def test_in_shared_memory_no_hook_that_averages_is_faster_than_none(measured: list[HookResult]) -> None:
    none = one(measured, "none", "fast")
    assert all(one(measured, hook, "fast").ratio(none) > 0.95 for hook in AVERAGING)


def test_the_rule_of_thumb_puts_the_break_even_between_1_and_10_gigabits(measured: list[HookResult]) -> None:
    factored, none = (one(measured, hook, "fast") for hook in ("powersgd-1", "none"))
    rate = 8 * (none.sent_bytes - factored.sent_bytes) / (factored.step - none.step)
    assert 1e9 < rate < 1e10


def test_errors_are_in_the_order_that_is_told(measured: list[HookResult]) -> None:
    errors = {hook: one(measured, hook, "fast").mean_error for hook in CONTESTANTS}
    assert errors["none"] < 1e-6 < errors["fp16"] < 1e-3 < errors["bf16"] < 0.01
    assert errors["quantize-channel"] < errors["quantize-tensor"] < 0.2
    assert 0.2 < errors["powersgd-4"] < errors["powersgd-2"] < errors["powersgd-1"]


def test_at_100_megabits_a_second_factors_learn_sooner(measured: list[HookResult]) -> None:
    none, factored = (one(measured, hook, "100mbit") for hook in ("none", "powersgd-4"))
    then = next(number for number, seconds in enumerate(none.clock) if seconds > factored.clock[-1])
    assert then < len(none.losses) / 4
    assert mean(factored.losses[-4:]) < mean(none.losses[max(0, then - 4) : then])


def test_for_the_small_model_little_is_to_be_saved_and_factors_learn_less(measured: list[HookResult]) -> None:
    large, small = (
        one(measured, "none", "100mbit", task).step - one(measured, "noop", "100mbit", task).step for task in WEIGHTS
    )
    assert small < large / 20
    none = one(measured, "none", "1gbit", "digits")
    assert all(one(measured, hook, "1gbit", "digits").ratio(none) > 0.95 for hook in AVERAGING)
    ends = {hook: mean(one(measured, hook, "100mbit", "digits").losses[-4:]) for hook in ("none", "powersgd-1")}
    assert ends["powersgd-1"] > 1.5 * ends["none"]


def tutorial(rank: int) -> dict[str, Any]:
    """What the tutorial's cells define, on one rank."""
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if {"start", "model", "error"} & set(cell["metadata"].get("tags", [])):
            magic, program = "".join(cell["source"]).split("\n", 1)
            assert magic == "%%spmd -n 2"
            exec(program.replace('os.environ["RANK"]', str(rank)), names)
        if "factored" in cell["metadata"].get("tags", []):
            # The functions, not the run that follows them.
            program = "".join(cell["source"]).split("\n", 1)[1].partition("factored, optimizer =")[0]
            exec(program, names)
    return names


def try_out(rank: int) -> tuple[list[int], list[float]]:
    """Bytes without a hook and with factors of rank 1, and the mean errors of ranks 1 and 4."""
    names = tutorial(rank)
    made = [names["make_model"](), names["make_factored"](1)]
    errors = [names["mean_error"](*names["make_factored"](r), steps=10) for r in (1, 4)]
    return [names["measure"](*each, steps=4)[0] for each in made], errors


@pytest.mark.long
def test_the_notebooks_own_functions_find_the_bytes_and_the_order_of_errors() -> None:
    # 28 steps of the transformer on two processes: about two seconds.
    for sent, errors in run(try_out, 2, ranks="processes", timeout=90.0):
        assert sent == [4 * WEIGHTS["text"], 50_176]
        assert 1 > errors[0] > errors[1] > 0.05
