"""``benchmark ddp``: a step of training under our DistributedDataParallel and torch's, by model and hook.

Columns: the step without DDP, torch's DDP on its Gloo, ours on `ref` and on `gloo`; then ours over torch's, and the
time that DDP adds to a local step over the time that torch's adds. Less than 1 is better. One thread a rank. ``~``:
other processes used the processors.

A step is forward and backward, with the exchange of gradients; no optimizer. Memory is measured in ranks of their own,
one contestant each.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import nn

from torchdist_ref import groups
from torchdist_ref.benchmark import harness, report
from torchdist_ref.benchmark.ddp_models import GLOO, HOOKS, LOCAL, MODELS, REF, TORCH, wrap
from torchdist_ref.benchmark.harness import Result, take_turns
from torchdist_ref.benchmark.ranks import RankContext, run_ranks
from torchdist_ref.benchmark.report import show_millis, show_number
from torchdist_ref.benchmark.timing import Action, calls_for, calls_in_a_row, durations, without_collector

SIDES = (TORCH, REF, GLOO)
OURS = (REF, GLOO)
# Untimed steps: buckets are rebuilt after the first, PowerSGD compresses from the third.
WARM_UP_STEPS = 4
MEMORY_STEPS = WARM_UP_STEPS + 4
Sizes = Mapping[tuple[str, str, str], int]


def measure(context: RankContext, settings: argparse.Namespace) -> None:
    """Measure all models and hooks on one rank. Reports a result for each, and a number after each round."""
    torch.set_num_threads(1)
    sides = make_groups(context)
    with without_collector():
        for model in settings.models:
            for hook in settings.hooks:
                context.report(_result(context, settings, sides, model, hook))
                gc.collect()
    destroy_groups()


def make_groups(context: RankContext) -> dict[str, Any]:
    """Return every side's group of all ranks."""
    where: str = f"file://{context.folder}"
    ranks: Any = {"rank": context.rank, "world_size": context.world}
    groups.init_process_group("ref", init_method=f"{where}/ours", **ranks)
    theirs = torch_distributed.new_group(backend="gloo")
    return {TORCH: theirs, REF: groups.GroupMember.WORLD, GLOO: groups.new_group(backend="gloo")}


def destroy_groups() -> None:
    """Destroy the groups of all sides."""
    groups.destroy_process_group()


def _result(
    context: RankContext, settings: argparse.Namespace, sides: Mapping[str, Any], model: str, hook: str
) -> Result:
    def timed(step: Action, calls: int) -> list[float]:
        return durations(context.exchange(calls_in_a_row(step, calls, context.wait)), calls)

    turns = {}
    for side in (LOCAL, *SIDES):
        step = make_step(model, side, sides.get(side), hook, settings.zeroed)
        calls_in_a_row(step, WARM_UP_STEPS, context.wait)
        calls = context.exchange(calls_for(timed(step, 2), settings.seconds))[0]
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


def memory(context: RankContext, settings: argparse.Namespace, model: str, hook: str, side: str) -> int:
    """Return the largest share of memory (PSS) of all ranks after each of some steps, in bytes."""
    torch.set_num_threads(1)
    step = make_step(model, side, make_groups(context)[side], hook, settings.zeroed)
    largest = 0
    for _ in range(MEMORY_STEPS):
        step()
        context.wait()
        largest = max(largest, sum(context.exchange(pss())))
    destroy_groups()
    return largest


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


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    harness.add_options(
        parser,
        models=("mlp,resnet18", f"of {', '.join(MODELS)}"),
        hooks=("all", f"separated by ';', of {'; '.join(HOOKS)}"),
        world=(2, "ranks"),
        repetitions=(9, "rounds"),
        seconds=(0.15, "of each round"),
        zeroed=(False, "gradients are None before each step, as after zero_grad"),
        memory=(False, "measure memory in place of time"),
    )


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with lists split.

    Raises:
        ArgumentError: An option has a wrong value.
    """
    hooks = ";".join(HOOKS) if options.hooks == "all" else options.hooks
    options.models = harness.names("benchmark ddp", "--models", options.models, MODELS)
    options.hooks = harness.names("benchmark ddp", "--hooks", hooks, HOOKS, ";")
    return options


def main(options: argparse.Namespace) -> int:
    """Measure and print."""
    # torch's DDP loads the compiler, which takes seconds: once, before ranks are forked.
    import torch._dynamo  # noqa: F401

    settings = checked(options)
    if options.memory:
        sizes = _memories(settings)
        print(show_memory(sizes, settings))
        entries = [{"model": m, "hook": h, "side": s, "pss_bytes": size} for (m, h, s), size in sizes.items()]
    else:
        bar = report.ProgressBar(len(settings.models) * len(settings.hooks) * settings.repetitions)
        results = harness.collect(partial(measure, settings=settings), settings.world, bar)
        print(show(results))
        entries = [result.entry() for result in results]
    report.write(options.json, report.report("ddp", harness.settings_of(settings), entries))
    return 0


def _memories(settings: argparse.Namespace) -> dict[tuple[str, str, str], int]:
    cases = [(m, h, s) for m in settings.models for h in settings.hooks for s in SIDES]
    bar, found = report.ProgressBar(len(cases)), {}
    for model, hook, side in cases:
        program = partial(memory, settings=settings, model=model, hook=hook, side=side)
        found[model, hook, side] = run_ranks(program, settings.world)[0]
        bar.advance()
    bar.clear()
    return found


def show(results: Sequence[Result]) -> str:
    """Return the table of times: milliseconds a step, ratios, and microseconds that DDP adds for each parameter."""
    titles = ["model", "hook", *(f"{side} ms" for side in (LOCAL, *SIDES)), *(f"{side} / torch" for side in OURS)]
    titles += [*(f"excess {side} / torch" for side in OURS), *(f"{side} us/parameter" for side in OURS)]
    rows = []
    for each in results:
        mark = "~" if each.noisy else ""
        cells = [each.cell["model"], each.cell["hook"]]
        cells += [show_millis(each.median(side)) + mark for side in (LOCAL, *SIDES)]
        cells += [show_number(each.median(side) / each.median(TORCH)) for side in OURS]
        cells += [show_number(excess(each, side)) for side in OURS]
        cells += [show_number(over_local(each, side) / each.more["parameters"] * 1e6) for side in OURS]
        rows.append(cells)
    return report.columns(titles, rows, left=2)


def show_memory(sizes: Sizes, settings: argparse.Namespace) -> str:
    """Return the table of memory: MiB of all ranks together, and ours over torch's."""
    rows = []
    for model in settings.models:
        for hook in settings.hooks:
            by_side = {side: sizes[model, hook, side] for side in SIDES}
            cells = [f"{size / 2**20:,.1f}" for size in by_side.values()]
            rows.append([model, hook, *cells, *(f"{by_side[side] / by_side[TORCH]:.3f}" for side in OURS)])
    titles = ["model", "hook", *(f"{side} MiB" for side in SIDES), *(f"{side} / torch" for side in OURS)]
    return report.columns(titles, rows, left=2)
