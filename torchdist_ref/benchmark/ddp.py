"""``benchmark ddp``: a step of training under our DistributedDataParallel and torch's, by model and hook.

Columns: the step without DDP, torch's DDP on its Gloo, ours on `ref` and on `gloo`; then ours over torch's, and what
DDP adds to a local step over what torch's adds. Less than 1 is better. One thread a rank. ``~``: the processors were
busy with something else.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from torchdist_ref.benchmark import report, table
from torchdist_ref.benchmark.crew import go
from torchdist_ref.benchmark.ddp_measure import Result, Settings, measure, memory
from torchdist_ref.benchmark.ddp_models import HOOKS, LOCAL, MODELS, TORCH
from torchdist_ref.benchmark.progress import Progress
from torchdist_ref.benchmark.units import show_millis, show_number
from torchdist_ref.errors import ArgumentError, explain

Memories = Mapping[tuple[str, str, str], int]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    defaults = Settings()
    models = ",".join(defaults.models)
    parser.add_argument("--models", default=models, metavar="A,B,...", help=f"of {', '.join(MODELS)} (%(default)s)")
    parser.add_argument("--hooks", default="all", metavar="A;B;...", help=f"of: {'; '.join(HOOKS)} (%(default)s)")
    parser.add_argument("--world", type=int, default=defaults.world, metavar="N", help="ranks (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=defaults.repetitions, metavar="N", help="rounds")
    parser.add_argument("--seconds", type=float, default=defaults.seconds, metavar="S", help="of each round")
    parser.add_argument("--zeroed", action="store_true", help="gradients are None before each step, as after zero_grad")
    parser.add_argument("--memory", action="store_true", help="measure memory in place of time")


def main(options: argparse.Namespace) -> int:
    """Measure and print."""
    # torch's DDP loads the compiler, which takes seconds: once, before ranks are forked.
    import torch._dynamo  # noqa: F401

    settings = settings_of(options)
    results, memories = ([], _memories(settings)) if options.memory else (_times(settings), {})
    print(show_memory(memories, settings) if options.memory else show(results, settings.sides))
    if options.json:
        entries = [asdict(result) for result in results]
        entries += [{"model": m, "hook": h, "side": s, "pss_bytes": size} for (m, h, s), size in memories.items()]
        report.write(options.json, report.report("ddp", asdict(settings), entries))
        print(f"wrote {options.json}")
    return 0


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings that the options ask for.

    Raises:
        ArgumentError: An option has a wrong value.
    """
    hooks = tuple(HOOKS) if options.hooks == "all" else tuple(options.hooks.split(";"))
    settings = Settings(
        tuple(options.models.split(",")),
        hooks,
        Settings().sides,
        options.world,
        options.repetitions,
        options.seconds,
        options.zeroed,
    )
    for argument, known, given in (("models", MODELS, settings.models), ("hooks", HOOKS, settings.hooks)):
        if not set(given) <= set(known):
            raise ArgumentError(explain("benchmark ddp", argument, f"of {', '.join(known)}", given))
    return settings


def _times(settings: Settings) -> list[Result]:
    progress = Progress(len(settings.models) * len(settings.hooks) * settings.repetitions)
    results: list[Result] = []

    def hear(event: Any) -> None:
        if isinstance(event, Result):
            results.append(event)
        else:
            progress.advance()

    go(lambda place: measure(place, settings), settings.world, hear)
    progress.clear()
    return results


def _memories(settings: Settings) -> dict[tuple[str, str, str], int]:
    cases = [(m, h, s) for m in settings.models for h in settings.hooks for s in settings.sides]
    progress, found = Progress(len(cases)), {}
    for model, hook, side in cases:
        program = partial(memory, settings=settings, model=model, hook=hook, side=side)
        found[model, hook, side] = go(program, settings.world, lambda event: None)[0]
        progress.advance()
    progress.clear()
    return found


def show(results: Sequence[Result], sides: Sequence[str]) -> str:
    """The table of times: milliseconds a step, ratios, and microseconds that DDP adds for each parameter."""
    ours = [side for side in sides if side != TORCH]
    titles = ["model", "hook", *(f"{side} ms" for side in (LOCAL, *sides)), *(f"{side} / torch" for side in ours)]
    titles += [*(f"excess {side} / torch" for side in ours), *(f"{side} us/parameter" for side in ours)]
    return table.columns(titles, [_line(result, sides, ours) for result in results], left=2)


def _line(result: Result, sides: Sequence[str], ours: Sequence[str]) -> list[str]:
    mark = "~" if result.noisy else ""
    cells = [result.model, result.hook, *(show_millis(result.seconds(side)) + mark for side in (LOCAL, *sides))]
    cells += [show_number(result.ratio(side)) for side in ours] + [show_number(result.excess(side)) for side in ours]
    return cells + [show_number(result.over_local(side) / result.parameters * 1e6) for side in ours]


def show_memory(memories: Memories, settings: Settings) -> str:
    """The table of memory: MiB of all ranks together, and ours over torch's."""
    ours = [side for side in settings.sides if side != TORCH]
    rows = []
    for model in settings.models:
        for hook in settings.hooks:
            sizes = {side: memories[model, hook, side] for side in settings.sides}
            cells = [f"{sizes[side] / 2**20:,.1f}" for side in settings.sides]
            rows.append([model, hook, *cells, *(f"{sizes[side] / sizes[TORCH]:.3f}" for side in ours)])
    titles = ["model", "hook", *(f"{side} MiB" for side in settings.sides), *(f"{side} / torch" for side in ours)]
    return table.columns(titles, rows, left=2)
