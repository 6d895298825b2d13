"""``benchmark hooks``: bytes, errors, step times and losses of each DDP communication hook, while a model learns.

Two models: a small convolutional network on handwritten digits (scikit-learn's), and a character transformer on the
standard library's own sources. Links: ``fast`` is this machine's own: shared memory for ``ref``, the loopback for
``gloo``. A rate such as ``100mbit`` puts the ranks on two hosts (network namespaces; needs root and iproute2) with a
cable of that rate between them. Where that can't be done, times on that link are modeled from bytes and marked so.

All models of a round are alive at once and get the same batches; each step of a turn begins at the start line. Between
turns every model takes a step that isn't timed, in which its gradients are compared with exact ones: a second backward
pass without DDP computes those, so that a hook cannot look better than it is.

hooks: HOOKS
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from torchdist_ref import groups, optim
from torchdist_ref.algorithms.model_averaging.averagers import PeriodicModelAverager
from torchdist_ref.benchmark import competitors, hooks_results
from torchdist_ref.benchmark.harness import AddOption, Harness, Settings, among, at_least, file, plot_file
from torchdist_ref.benchmark.hooks_results import HookResult, select
from torchdist_ref.benchmark.hooks_watch import Span, Spans, calls_since
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.rounds import RankContext, take_turns
from torchdist_ref.benchmark.training import HOOKS, LOCAL_STEPS, REF, TASKS, Batch, NamedHook, Task, missing, wrap
from torchdist_ref.errors import ArgumentError, UnsupportedError

BACKENDS = ("ref", "gloo")
CONTESTANTS = tuple(name for name in HOOKS if not name.endswith(("-views", "-wrapper")))
# MiB. Several buckets even in a small model, so that computation and communication can overlap.
BUCKET_MIB = 1.0
# Steps of a turn: events of every few steps happen in each turn.
TURN_STEPS = LOCAL_STEPS
QUICK_TURNS = 3
FAST = "fast"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
__doc__ = (__doc__ or "").replace("HOOKS", ", ".join(CONTESTANTS))


def rate(link: str) -> float | None:
    """Return the bits a second of a link by its name; None for this machine's own.

    >>> rate("1gbit")
    1000000000.0
    """
    found = _RATE.fullmatch(link)
    if link != FAST and (found is None or not float(found[1])):
        raise ArgumentTypeError(f"expected {FAST!r}, or rates such as 100mbit or 1gbit, got {link!r}")
    return float(found[1]) * _UNITS[found[2]] if found else None


def links(text: str) -> tuple[str, ...]:
    """Split a list of links."""
    found = tuple(dict.fromkeys(text.lower().split(",")))
    return found if list(map(rate, found)) else ()


def add_options(add: AddOption) -> None:
    """Add the options of the command."""
    add("--hooks", default=",".join(CONTESTANTS), type=among(CONTESTANTS), help="hooks")
    add("--tasks", default=",".join(TASKS), type=among(TASKS), help="models")
    add("--backends", default="ref,gloo", type=among(BACKENDS), help="backends, whose groups DDP takes")
    add("--links", default=f"{FAST},1gbit,100mbit", type=links, help=f"{FAST}, or rates")
    add("--world", default=2, type=at_least(2), help="ranks")
    add("--turns", default=10, type=at_least(2), help=f"of {TURN_STEPS} steps for each hook; the first isn't counted")
    add("--quick", action="store_true", help=f"{QUICK_TURNS} turns: to look at, not to rely on")
    add("--modeled", "--modelled", action="store_true", help="compute slow links, even if they can be made")
    add("--plot", type=plot_file, metavar="FILE.svg", help="draw time, error and loss")
    add("--timeline", type=file, metavar="FILE.svg", help="draw one step of each hook")


class Trainee:
    """Model under DDP, its hook, its optimizer, its progress, and the figures of its turns.

    Args:
        task: Task that it learns.
        hook: Hook.
        group: The group over which gradients are averaged; None for the default group.
    """

    def __init__(self, task: Task, hook: NamedHook, group: Any = None) -> None:
        self.task = task
        self.model = wrap(task.model(), REF, group, hook, bucket_cap_mb=BUCKET_MIB)
        self.group = self.model.process_group
        self.optimizer = self._own_optimizer = task.optimizer(self.model)
        if hook.every:
            averager = PeriodicModelAverager(hook.every, hook.every - 1, self.group)
            self.optimizer = optim.PostLocalSGDOptimizer(self._own_optimizer, averager)
        self._drawn = 0
        self._losses, self._errors = list[float](), list[float]()
        self._sent, self._wire = list[float](), list[float]()

    def batch(self) -> Batch:
        """Return the next batch, another one at each call."""
        self._drawn += 1
        return self.task.batch(self._drawn - 1, groups.get_rank(self.group), groups.get_world_size(self.group))

    def step(self, batch: Batch, part: Callable[[str], Any] = nullcontext) -> Tensor:
        """Take a step: forward, backward, optimizer, each a `part`. Return this rank's loss."""
        with part("forward"):
            self.optimizer.zero_grad()
            loss = self._loss(self.model, batch)
        with part("backward"):
            loss.backward()
        with part("optimizer"):
            self.optimizer.step()
        return loss.detach()

    def _loss(self, model: Any, batch: Batch) -> Tensor:
        inputs, targets = batch
        return self.task.loss(model(inputs), targets)

    def spans(self) -> list[Span]:
        """Take a step, and return its timeline."""
        with Spans(self.model) as spans:
            self.step(self.batch(), spans.part)
        return list(spans)

    def error(self, exchange: Callable[[Any], list[Any]]) -> float:
        """Take a step, and return the error of its gradients.

        Args:
            exchange: Function that gives every rank's value to every rank, without the group.

        Returns:
            ‖got - average‖ / ‖average‖ of all gradients together; the average is computed in double precision.
        """
        batch, weights = self.batch(), list(self.model.parameters())
        own = torch.autograd.grad(self._loss(self.model.module, batch), weights)
        gathered = exchange(torch.cat([part.flatten() for part in own]).numpy())
        exact = torch.stack([torch.from_numpy(each) for each in gathered]).double().mean(0)
        self.optimizer.zero_grad()
        self._loss(self.model, batch).backward()
        got = torch.cat([weight.grad.flatten() for weight in weights])
        self._own_optimizer.step()
        return float((got.double() - exact).norm() / exact.norm())

    def turn(self, context: RankContext) -> list[float]:
        """Return the seconds of the steps of a turn, and take one that isn't timed."""
        batches, losses = iter([self.batch() for _ in range(TURN_STEPS)]), list[Tensor]()
        wire, entered = wire_bytes(context.host), perf_counter()
        seconds = context.timed(lambda: losses.append(self.step(next(batches))), TURN_STEPS)
        self._sent.append(sent_since(self.group, entered) / TURN_STEPS)
        self._wire.append((wire_bytes(context.host) - wire) / TURN_STEPS)
        by_rank = context.exchange([*map(float, losses), self.error(context.exchange)])
        *means, error = map(fmean, zip(*by_rank, strict=True))
        self._losses += means
        self._errors.append(error)
        return seconds

    def result(self, context: RankContext, names: tuple[str, str, str, str], seconds: Sequence[float]) -> HookResult:
        """Take a step whose timeline is recorded, and return all figures.

        Args:
            context: This rank.
            names: Names of task, backend, link and hook.
            seconds: Seconds of the steps of all turns.
        """
        context.wait()
        return HookResult(
            *names,
            world=context.world,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            sent_bytes=fmean(self._sent[1:]),
            wire_bytes=fmean(self._wire[1:]) if any(self._wire[1:]) else None,
            error=self._errors[1:],
            seconds=seconds,
            losses=self._losses,
            turn=TURN_STEPS,
            spans=self.spans(),
        )


def sent_since(group: Any, begin: float) -> float:
    """Return the bytes of a group's calls since a moment.

    The convention is that of nccl-tests' bus bandwidth: the bytes that a rank has to send at the least for the
    operation, with any algorithm. So the figure is the same on every backend and link.

    >>> import torch, torchdist_ref as dist
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     group, begin = dist.new_group(), perf_counter()
    ...     dist.all_reduce(torch.zeros(1000), group=group)
    ...     dist.all_gather(list(torch.zeros(4, 1000)), torch.zeros(1000), group=group)
    ...     return sent_since(group, begin)
    >>> run(program, 4)[0] == 2 * 3 / 4 * 4000 + 3 * 4000
    True
    """
    calls = calls_since(group, begin)
    return sum(each.nbytes * OPERATIONS[each.call.op].factor(group.size()) for each in calls)


def wire_bytes(host: Any) -> int:
    """Return the bytes that a host sent over its cable so far, headers and acknowledgements included; 0 without one."""
    table = Path("/proc/thread-self/net/dev").read_text() if host else ""
    return sum(int(line.split()[9]) for line in table.splitlines() if line.strip().startswith(f"{host.interface}:"))


def measure(context: RankContext, settings: Settings, link: str) -> None:
    """Measure on one rank. Reports headings and results."""
    tasks = {name: TASKS[name]() for name in settings.tasks}
    for backend in competitors.join(settings.backends, context):
        for name, task in tasks.items():
            context.report(f"{name} on {backend.name}, {link}")
            trainees = {hook: Trainee(task, HOOKS[hook], backend.group) for hook in settings.hooks}
            turns = {hook: partial(each.turn, context) for hook, each in trainees.items()}
            seconds, _ = take_turns(context, turns, settings.turns)
            for hook, each in trainees.items():
                context.report(each.result(context, (name, backend.name, link, hook), seconds[hook]))
    competitors.leave()


def run(harness: Harness) -> None:
    """Measure on every link; one that can't be made, or is not to be, is modeled."""
    settings = harness.settings
    for task in settings.tasks:
        if why := missing(task):
            harness.note(f"{task} is left out: {why}")
    settings.tasks = [task for task in settings.tasks if not missing(task)]
    if not settings.tasks:
        raise ArgumentError(f"benchmark hooks: no task is left to learn. {' '.join(harness.notes)}")
    settings.turns = QUICK_TURNS if settings.quick else settings.turns
    for link in settings.links:
        why = "as asked" if settings.modeled and rate(link) else on_link(harness, link)
        if why:
            harness.note(f"{link} is modeled, {why}: the step on the fast link, and the time that its bytes take.")
            if not select(harness.results, link=FAST):
                on_link(harness, FAST)
            harness.results += [result.on(link, rate(link) or 0.0) for result in select(harness.results, link=FAST)]


def on_link(harness: Harness, link: str) -> str:
    """Measure everything on one link, which is made first; return why it can't be made, empty if it can."""
    try:
        harness.run(partial(measure, settings=harness.settings, link=link), harness.settings.world, cable=rate(link))
    except UnsupportedError as error:
        return str(error)
    return ""


def show(harness: Harness, results: Sequence[HookResult]) -> str:
    """Return a table for each task and backend."""
    cases = [(task, backend) for task in harness.settings.tasks for backend in harness.settings.backends]
    found = [select(results, task=task, backend=backend) for task, backend in cases]
    return "\n\n".join([*(hooks_results.table(each) for each in found if each), hooks_results.LEGEND])


plot, timeline = hooks_results.plot, hooks_results.timeline
