"""What each rank of `benchmark ddp` does: steps of training, the contestants of one model and hook in turn.

A step is forward and backward, with the exchange of gradients; no optimizer. Contestants take turns in every round, so
a ratio compares what ran seconds apart. Memory is seen in ranks of their own, one contestant each.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as theirs
from torch import nn

from torchdist_ref import groups
from torchdist_ref.benchmark.crew import Place
from torchdist_ref.benchmark.ddp_models import GLOO, HOOKS, LOCAL, MODELS, REF, TORCH, wrap
from torchdist_ref.benchmark.timing import Strangers, calls_for, durations, in_a_row, own_time, undisturbed

# Steps before any is timed: buckets are rebuilt after the first, PowerSGD compresses from the third.
WARM_UP = 4


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    models: tuple[str, ...] = ("mlp", "resnet18")
    hooks: tuple[str, ...] = tuple(HOOKS)
    sides: tuple[str, ...] = (TORCH, REF, GLOO)
    world: int = 2
    repetitions: int = 9
    seconds: float = 0.15
    zeroed: bool = False


@dataclass(frozen=True)
class Result:
    """One model with one hook: by contestant, the seconds of a step in each round.

    >>> Result("mlp", "none", 4, {"local": [1, 1], "ref": [2, 2], "torch:gloo": [3, 4]}, [False] * 2).excess("ref")
    0.4
    """

    model: str
    hook: str
    parameters: int
    samples: Mapping[str, Sequence[float]]
    disturbed: Sequence[bool]

    @property
    def noisy(self) -> bool:
        """Whether most rounds were disturbed by other programs."""
        return 2 * sum(self.disturbed) > len(self.disturbed)

    def seconds(self, side: str) -> float:
        """The median time of a step."""
        kept = [x for x, bad in zip(self.samples[side], self.disturbed, strict=True) if self.noisy or not bad]
        return float(median(kept))

    def ratio(self, side: str, to: str = TORCH) -> float:
        """One contestant's median step over another's."""
        return self.seconds(side) / self.seconds(to)

    def over_local(self, side: str) -> float:
        """Seconds of a step more than without DDP."""
        return self.seconds(side) - self.seconds(LOCAL)

    def excess(self, side: str) -> float:
        """How much more than a local step it takes, over how much more torch's DDP does."""
        return self.over_local(side) / self.over_local(TORCH)


def measure(place: Place, settings: Settings) -> None:
    """All models and hooks. Reports a `Result` for each, and a number after each round."""
    torch.set_num_threads(1)
    found = meet(place)
    with undisturbed():
        for model in settings.models:
            for hook in settings.hooks:
                place.report(_section(place, settings, found, model, hook))
                gc.collect()
    leave()


def meet(place: Place) -> dict[str, Any]:
    """Every side's group of all ranks."""
    where = f"file://{place.folder}"
    theirs.init_process_group("gloo", init_method=f"{where}/theirs", rank=place.rank, world_size=place.world)
    groups.init_process_group("ref", init_method=f"{where}/ours", rank=place.rank, world_size=place.world)
    return {TORCH: theirs.group.WORLD, REF: groups.GroupMember.WORLD, GLOO: groups.new_group(backend="gloo")}


def leave() -> None:
    """Leave them."""
    groups.destroy_process_group()
    theirs.destroy_process_group()


def _section(place: Place, settings: Settings, found: Mapping[str, Any], model: str, hook: str) -> Result:
    steps = {side: stepper(model, side, found.get(side), hook, settings.zeroed) for side in (LOCAL, *settings.sides)}
    calls = {}
    for side, step in steps.items():
        in_a_row(step, WARM_UP, place.line_up)
        first = durations(place.exchange(in_a_row(step, 2, place.line_up)), 2)
        calls[side] = place.exchange(calls_for(first, settings.seconds))[0]
    samples: dict[str, list[float]] = {side: [] for side in steps}
    disturbed = []
    strangers = Strangers()
    for turn in range(settings.repetitions):
        strangers.mark()
        own = own_time()
        first_side = turn % len(steps)
        for side in [*steps][first_side:] + [*steps][:first_side]:
            times = in_a_row(steps[side], calls[side], place.line_up)
            samples[side] += durations(place.exchange(times), calls[side])
        disturbed.append(strangers.disturbed(sum(place.exchange(own_time() - own))))
        place.report(turn)
    return Result(model, hook, sum(1 for _ in MODELS[model]()[0].parameters()), samples, disturbed)


def stepper(name: str, side: str, group: Any, hook: str, zeroed: bool) -> Callable[[], None]:
    """One step of training, ready to be called. Gradients are kept and added to, or set to None before each step."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    wrapped: nn.Module = wrap(model, side, group, HOOKS[hook])

    def step() -> None:
        if zeroed:
            wrapped.zero_grad()
        wrapped(batch).square().mean().backward()

    return step


def memory(place: Place, settings: Settings, model: str, hook: str, side: str) -> int:
    """The largest share of memory (PSS) of all ranks, seen after each of some steps; bytes."""
    torch.set_num_threads(1)
    found = meet(place)
    step = stepper(model, side, found[side], hook, settings.zeroed)
    most = 0
    for _ in range(WARM_UP + 4):
        step()
        place.line_up()
        most = max(most, sum(place.exchange(pss())))
    leave()
    return most


def pss() -> int:
    """This process's share of memory: what is shared counts in parts. Bytes; 0 where the system doesn't tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
