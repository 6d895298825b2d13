"""``benchmark ddp``: a step of training under our DistributedDataParallel and torch's, by model and hook.

Columns: the step without DDP, torch's DDP on its Gloo, ours on `ref` and on `gloo`; then ours over torch's, and the
time that DDP adds to a local step over the time that torch's adds. Less than 1 is better. One thread a rank. ``~``:
other processes used the processors.

A step is forward and backward, with the exchange of gradients; no optimizer. Memory is measured in ranks of their own,
one contestant each.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import nn

from torchdist_ref.benchmark.ddp_models import GLOO, HOOKS, LOCAL, MODELS, REF, TORCH, wrap
from torchdist_ref.benchmark.harness import Harness, Option, Settings, among, at_least
from torchdist_ref.benchmark.report import columns, show_millis, show_number
from torchdist_ref.benchmark.rounds import Action, RankContext, Result, calls_in_a_row, durations, library, take_turns

SIDES = (TORCH, REF, GLOO)
OURS = (REF, GLOO)
# Untimed steps: buckets are rebuilt after the first, PowerSGD compresses from the third.
WARM_UP_STEPS = 4
MEMORY_STEPS = WARM_UP_STEPS + 4
CALIBRATION_STEPS = 2


def _hooks(command: str, option: str, text: str) -> tuple[str, ...]:
    """Split a list of hooks, whose names have commas."""
    found: tuple[str, ...] = among(HOOKS, ";")(command, option, ";".join(HOOKS) if text == "all" else text)
    return found


OPTIONS = {
    "models": Option("mlp,resnet18", f"of {', '.join(MODELS)}", among(MODELS)),
    "hooks": Option("all", f"separated by ';', of {'; '.join(HOOKS)}", _hooks),
    "world": Option(2, "ranks", at_least(1)),
    "repetitions": Option(9, "rounds", at_least(1)),
    "seconds": Option(0.15, "of each round"),
    "zeroed": Option(False, "gradients are None before each step, as after zero_grad"),
    "memory": Option(False, "measure memory in place of time"),
}


def measure(context: RankContext, settings: Settings) -> None:
    """Measure all models and hooks on one rank. Reports a result for each, and a number after each round."""
    torch.set_num_threads(1)
    groups = make_groups(context, settings.sides)
    for model in settings.models:
        for hook in settings.hooks:
            gc.collect()
            context.report(_result(context, settings, groups, model, hook))
    library.destroy_process_group()


def make_groups(context: RankContext, sides: Sequence[str]) -> dict[str, Any]:
    """Return the group of all ranks of each side, and make the default group."""
    ranks: Any = {"rank": context.rank, "world_size": context.world}
    library.init_process_group("ref", init_method=f"file://{context.folder}/ours", **ranks)
    make = {
        TORCH: lambda: torch_distributed.new_group(backend="gloo"),
        REF: lambda: library.group.WORLD,
        GLOO: lambda: library.new_group(backend="gloo"),
    }
    return {side: make[side]() for side in sides if side in make}


def _result(context: RankContext, settings: Settings, groups: Mapping[str, Any], model: str, hook: str) -> Result:
    def timed(step: Action, calls: int) -> list[float]:
        return durations(context.exchange(calls_in_a_row(step, calls, context.wait)), calls)

    turns = {}
    for side in settings.sides:
        step = make_step(model, side, groups.get(side), hook, settings.zeroed)
        calls_in_a_row(step, WARM_UP_STEPS, context.wait)
        calls = context.calls(partial(timed, step, CALIBRATION_STEPS), settings.seconds)
        turns[side] = partial(timed, step, calls)
    samples, disturbed = take_turns(context, turns, settings.repetitions, context.report)
    parameters = sum(1 for _ in MODELS[model]()[0].parameters())
    return Result({"model": model, "hook": hook}, samples, disturbed, {"parameters": parameters})


def make_step(name: str, side: str, group: Any, hook: str, zeroed: bool) -> Action:
    """Return one step of training. Gradients are kept and added to, or set to None before each step."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    wrapped: nn.Module = wrap(model, side, group, HOOKS[hook])

    def step() -> None:
        if zeroed:
            wrapped.zero_grad()
        wrapped(batch).square().mean().backward()

    return step


def memory(context: RankContext, settings: Settings, model: str, hook: str, side: str) -> None:
    """Report the largest share of memory (PSS) of all ranks after each of some steps, in bytes."""
    torch.set_num_threads(1)
    step = make_step(model, side, make_groups(context, SIDES)[side], hook, settings.zeroed)
    largest = 0
    for _ in range(MEMORY_STEPS):
        step()
        context.wait()
        largest = max(largest, sum(context.exchange(pss())))
    library.destroy_process_group()
    context.report(Result({"model": model, "hook": hook, "side": side}, {}, more={"pss_bytes": largest}))
    context.report(1)


def pss() -> int:
    """Return this process's share of memory in bytes, shared pages divided; 0 where the system has no such figure."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def excess(result: Result, side: str) -> float:
    """Return the time that one side adds to a local step over the time that torch's DDP adds.

    >>> excess(Result({}, {"local": [1, 1], "ref": [2, 2], "torch:gloo": [3, 4]}, [False] * 2), "ref")
    0.4
    """
    return over_local(result, side) / over_local(result, TORCH)


def over_local(result: Result, side: str) -> float:
    """Return the seconds that one side adds to a local step."""
    return result.median(side) - result.median(LOCAL)


def run(harness: Harness) -> None:
    """Measure times, or memory in ranks of their own for each case."""
    settings = harness.settings
    if harness.compares_checkouts:
        settings.sides = [REF]
    else:
        from torchdist_ref import torch_private

        # torch's DDP loads the compiler, which takes seconds: once, before ranks are forked.
        torch_private.COMPILER.get()
        settings.sides = [LOCAL, *SIDES]
    cases = [(model, hook) for model in settings.models for hook in settings.hooks]
    harness.begin(len(cases) * (len(SIDES) if settings.memory else settings.repetitions))
    if not settings.memory:
        harness.run(partial(measure, settings=settings), settings.world)
        return
    for model, hook in cases:
        for side in SIDES:
            program = partial(memory, settings=settings, model=model, hook=hook, side=side)
            harness.run(program, settings.world)


def entries(harness: Harness) -> list[dict[str, Any]]:
    """Return the results."""
    return [{**each.cell, **each.more} if harness.settings.memory else each.entry() for each in harness.results]


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table of times or memory."""
    rows = (_memory_rows if harness.settings.memory else _time_rows)(results)
    unit = "MiB" if harness.settings.memory else "ms"
    sides = SIDES if harness.settings.memory else (LOCAL, *SIDES)
    titles = ["model", "hook", *(f"{side} {unit}" for side in sides), *(f"{side} / torch" for side in OURS)]
    if not harness.settings.memory:
        titles += [*(f"excess {side} / torch" for side in OURS), *(f"{side} us/parameter" for side in OURS)]
    return columns(titles, rows, left=2)


def _time_rows(results: Sequence[Result]) -> list[list[str]]:
    """Return milliseconds a step, ratios, and microseconds that DDP adds for each parameter."""
    rows = []
    for each in results:
        mark = "~" if each.noisy else ""
        cells = [each.cell["model"], each.cell["hook"]]
        cells += [show_millis(each.median(side)) + mark for side in (LOCAL, *SIDES)]
        cells += [show_number(each.median(side) / each.median(TORCH)) for side in OURS]
        cells += [show_number(excess(each, side)) for side in OURS]
        cells += [show_number(over_local(each, side) / each.more["parameters"] * 1e6) for side in OURS]
        rows.append(cells)
    return rows


def _memory_rows(results: Sequence[Result]) -> list[list[str]]:
    """Return MiB of all ranks together, and ours over torch's."""
    cases: dict[tuple[str, str], dict[str, int]] = {}
    for each in results:
        cases.setdefault((each.cell["model"], each.cell["hook"]), {})[each.cell["side"]] = each.more["pss_bytes"]
    return [
        [*case, *(f"{size / 2**20:,.1f}" for size in sizes.values())]
        + [f"{sizes[side] / sizes[TORCH]:.3f}" for side in OURS if side in sizes]
        for case, sizes in cases.items()
    ]
