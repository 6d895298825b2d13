"""``benchmark ddp``: a step of training under our DistributedDataParallel and torch's, by model and hook.

Columns: the step without DDP, torch's DDP on its Gloo, ours on `ref` and on `gloo`; then ours over torch's, and the
time that DDP adds to a local step over the time that torch's adds. Less than 1 is better. One thread a rank. ``~``:
other processes used the processors.

A step is forward and backward, with the exchange of gradients; no optimizer. Memory is measured in ranks of their own,
one contestant each.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from torchdist_ref.benchmark import competitors
from torchdist_ref.benchmark.harness import AddOption, Harness, Settings, among, at_least
from torchdist_ref.benchmark.report import cell, figure, ratio, table, time
from torchdist_ref.benchmark.rounds import Action, RankContext, Result, Turn, calls_in_a_row
from torchdist_ref.benchmark.training import GLOO, HOOKS, LOCAL, MODELS, REF, TORCH, wrap

SIDES = (TORCH, REF, GLOO)
OURS = (REF, GLOO)
NAMES = "none none-views allreduce fp16 bf16 fp16-wrapper bf16-wrapper noop noop-views powersgd-1 powersgd-2 powersgd-4"
# Untimed steps: buckets are rebuilt after the first, PowerSGD compresses from the third.
WARM_UP_STEPS = 4
MEMORY_STEPS = WARM_UP_STEPS + 4
CALIBRATION_STEPS = 2


def _hooks(text: str) -> tuple[str, ...]:
    """Split a list of hooks. In former names of hooks there were spaces and commas, and semicolons between them."""
    text = re.sub(r",? (\w+)", r"-\1", text.lower()).replace(";", ",")
    return among(NAMES.split())(",".join(NAMES.split()) if text == "all" else text)


def add_options(add: AddOption) -> None:
    """Add the options of the command."""
    add("--models", default="mlp,resnet18", type=among(MODELS), help=f"of {', '.join(MODELS)}")
    add("--hooks", default="all", type=_hooks, help=f"of {', '.join(NAMES.split())}")
    add("--world", default=2, type=at_least(1), help="ranks")
    add("--repetitions", default=9, type=at_least(1), help="rounds")
    add("--seconds", default=0.15, type=float, help="of each round")
    add("--zeroed", action="store_true", help="gradients are None before each step, as after zero_grad")
    add("--memory", action="store_true", help="measure memory in place of time")


def measure(context: RankContext, settings: Settings) -> None:
    """Measure all models and hooks on one rank. Reports a result for each."""
    groups = {each.name: each.group for each in competitors.join(settings.sides, context)}
    sides = groups if context.sides > 1 else (LOCAL, *groups)
    for model in settings.models:
        parameters = sum(1 for _ in MODELS[model]()[0].parameters())
        for hook in settings.hooks:
            context.report(f"{model}, {hook}")
            gc.collect()
            turns = {side: _turn(context, settings, groups.get(side), model, hook, side) for side in sides}
            context.compare({"model": model, "hook": hook}, turns, settings.repetitions, parameters=parameters)
    competitors.leave()


def _turn(context: RankContext, settings: Settings, group: Any, model: str, hook: str, side: str) -> Turn:
    """Return the turn of a side: some steps in a row, and the time of one."""
    step = make_step(model, side, group, hook, settings.zeroed)
    calls_in_a_row(step, WARM_UP_STEPS, context.wait)
    timed = partial(context.timed, step, loop=True)
    return partial(timed, context.calls(partial(timed, CALIBRATION_STEPS), settings.seconds))


def make_step(name: str, side: str, group: Any, hook: str, zeroed: bool) -> Action:
    """Return one step of training. Gradients are kept and added to, or set to None before each step."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    wrapped = wrap(model, side, group, HOOKS[hook])

    def step() -> None:
        if zeroed:
            wrapped.zero_grad()
        wrapped(batch).square().mean().backward()

    return step


def memory(context: RankContext, settings: Settings, model: str, hook: str, side: str) -> int:
    """Return the largest share of memory (PSS) of all ranks after each of some steps, in bytes."""
    groups = {each.name: each.group for each in competitors.join(SIDES, context)}
    step = make_step(model, side, groups[side], hook, settings.zeroed)
    largest = 0
    for _ in range(MEMORY_STEPS):
        step()
        context.wait()
        largest = max(largest, sum(context.exchange(pss())))
    competitors.leave()
    return largest


def pss() -> int:
    """Return this process's share of memory in bytes, shared pages divided."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def over_local(result: Result, side: str) -> float:
    """Return the seconds that one side adds to a local step."""
    return result.median(side) - result.median(LOCAL)


def excess(result: Result, side: str) -> float:
    """Return the time that one side adds to a local step over the time that torch's DDP adds.

    >>> excess(Result({}, {"local": [1, 1], "ref": [2, 2], "torch:gloo": [3, 4]}, [False] * 2), "ref")
    0.4
    """
    return over_local(result, side) / over_local(result, TORCH)


def over_local_each(result: Result, side: str) -> float:
    """Return the microseconds that one side adds to a local step for each parameter."""
    return over_local(result, side) / int(result.more["parameters"]) * 1e6


# Titles and figures of what DDP adds.
ADDED = {"excess {} / torch": excess, "{} us/parameter": over_local_each}


def run(harness: Harness) -> None:
    """Measure times, or memory in ranks of their own for each case."""
    settings = harness.settings
    settings.sides = [REF] if harness.against else SIDES
    if not harness.against:
        from torchdist_ref.torch_internals import torch_private

        # torch's DDP loads the compiler, which takes seconds: once, before ranks are forked.
        torch_private.COMPILER.get()
    if not settings.memory:
        harness.run(partial(measure, settings=settings), settings.world)
        return
    for model, hook in product(settings.models, settings.hooks):
        harness.head(f"{model}, {hook}")
        program = partial(memory, settings=settings, model=model, hook=hook)
        found = {side: harness.run(partial(program, side=side), settings.world)[:1] for side in SIDES}
        harness.results.append(Result({"model": model, "hook": hook}, found, more={"unit": "bytes"}))


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table of times or memory."""
    memory = harness.settings.memory
    columns = [cell("model", "model"), cell("hook", "hook")]
    columns += [time(side, "MiB") for side in SIDES] if memory else [time(side, "ms") for side in (LOCAL, *SIDES)]
    columns += [ratio(f"{side} / torch", side, TORCH) for side in OURS]
    for title, value in {} if memory else ADDED.items():
        columns += [figure(title.format(side), (side, TORCH, LOCAL), partial(value, side=side)) for side in OURS]
    return table(columns, results, left=2)
