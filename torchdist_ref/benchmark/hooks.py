"""``benchmark hooks``: bytes, errors, step times and losses of each DDP communication hook, while a model learns.

Two models: a small convolutional network on handwritten digits (scikit-learn's), and a character transformer on the
standard library's own sources. Links: ``fast`` is this machine's own; a rate such as ``100mbit`` puts the ranks on two
hosts (network namespaces; needs root and iproute2) with a cable of that rate between them. Where that can't be done,
times on that link are modeled from bytes and marked so.

All models of a round are alive at once and get the same batches; each step of a turn begins at the start line. Between
turns every model takes a step that isn't timed, in which its gradients are compared with exact ones.

hooks: HOOKS
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import Any

from torchdist_ref.backends import registry
from torchdist_ref.benchmark import competitors, hooks_pictures, hooks_results, hooks_watch
from torchdist_ref.benchmark.harness import Harness, Option, Settings, among, at_least, file, texts
from torchdist_ref.benchmark.hooks_results import HookResult, select
from torchdist_ref.benchmark.hooks_tasks import CONTESTANTS, LOCAL_STEPS, TASKS, missing
from torchdist_ref.benchmark.hooks_watch import FAST, BenchmarkLink, Span, Trainee, counted
from torchdist_ref.benchmark.rounds import RankContext, Times, durations, take_turns
from torchdist_ref.errors import ArgumentError, explain

# Steps of a turn: events of every few steps happen in each turn.
TURN_STEPS = LOCAL_STEPS
QUICK_TURNS = 3

OPTIONS = {
    "hooks": Option(",".join(CONTESTANTS), "hooks", among(CONTESTANTS)),
    "tasks": Option(",".join(TASKS), "models", among(TASKS)),
    "backends": Option("ref,gloo", "backends", texts),
    "links": Option(f"{FAST},1gbit,100mbit", f"{FAST}, or rates", hooks_watch.parse_links),
    "world": Option(2, "ranks", at_least(2)),
    "turns": Option(10, f"of {TURN_STEPS} steps for each hook; the first isn't counted", at_least(2)),
    "quick": Option(False, f"{QUICK_TURNS} turns: to look at, not to rely on"),
    "modeled": Option(False, "compute slow links, even if they can be made", alias="modelled"),
    "plot": Option(None, "draw time, error and loss", file, "FILE.svg"),
    "timeline": Option(None, "draw one step of each hook", file, "FILE.svg"),
}
__doc__ = (__doc__ or "").replace("HOOKS", ", ".join(CONTESTANTS))


@dataclass
class TraineeRecord:
    """Figures of one rank's trainee."""

    times: Times = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def measure(context: RankContext, settings: Settings, link: BenchmarkLink) -> None:
    """Measure on one rank. Reports headings, numbers of rounds, and results."""
    tasks = {name: TASKS[name]() for name in settings.tasks}
    try:
        for backend in competitors.join(settings.backends, context):
            for name, task in tasks.items():
                context.report(f"{name} on {backend.name}, {link.name}")
                trainees = [Trainee(task, CONTESTANTS[hook], backend.group) for hook in settings.hooks]
                records = _all_turns(context, trainees, settings.turns)
                for trainee, record in zip(trainees, records, strict=True):
                    context.report(_result(context, trainee, record, (name, backend.name, link.name)))
    finally:
        competitors.leave()


def _all_turns(context: RankContext, trainees: Sequence[Trainee], turns: int) -> list[TraineeRecord]:
    records = [TraineeRecord() for _ in trainees]
    pairs = list(zip(trainees, records, strict=True))
    contestants = {each.contestant.name: partial(_turn, context, each, record) for each, record in pairs}
    take_turns(context, contestants, turns, context.report)
    for trainee, record in pairs:
        context.wait()
        record.spans += trainee.spans()
    return records


def _turn(context: RankContext, trainee: Trainee, record: TraineeRecord) -> list[float]:
    batches = [trainee.batch() for _ in range(TURN_STEPS)]
    wire = _wire_bytes(context)
    with counted(trainee.group) as counter:
        for batch in batches:
            context.wait()
            begin = perf_counter()
            loss = trainee.step(batch)
            record.times.append((begin, perf_counter()))
            record.losses.append(float(loss))
    record.sent.append(counter.sent / TURN_STEPS)
    context.wait()
    record.wire.append(_wire_bytes(context) - wire)
    record.errors.append(trainee.error(context.exchange))
    return []


def _wire_bytes(context: RankContext) -> int:
    return hooks_watch.wire_bytes(context.host) if context.host else 0


def _result(context: RankContext, trainee: Trainee, record: TraineeRecord, where: tuple[str, str, str]) -> HookResult:
    """Combine the records of all ranks."""
    records = context.exchange(record)
    sent, wire = record.sent[1:], record.wire[1:]
    return HookResult(
        *where,
        trainee.contestant.name,
        context.world,
        parameters=sum(parameter.numel() for parameter in trainee.model.parameters()),
        expected_bytes=trainee.expected_bytes(),
        sent_bytes=fmean(sent),
        wire_bytes=fmean(wire) / TURN_STEPS if any(wire) else None,
        error=_mean([each.errors[1:] for each in records]),
        seconds=durations([each.times for each in records]),
        losses=_mean([each.losses for each in records]),
        turn=TURN_STEPS,
        spans=record.spans,
    )


def _mean(columns: Sequence[Sequence[float]]) -> list[float]:
    return list(map(fmean, zip(*columns, strict=True)))


def run(harness: Harness) -> None:
    """Measure on every link; one that can't be made, or is not to be, is modeled."""
    settings = harness.settings
    settings.backends = harness.choose_backends()
    if not set(settings.backends) <= set(registry.names()):
        expected = "backends of this library, whose groups DDP takes: ref or gloo"
        raise ArgumentError(explain("benchmark hooks", "--backends", expected, ",".join(settings.backends)))
    for task in settings.tasks:
        if why := missing(task):
            harness.note(f"{task} is left out: {why}")
    settings.tasks = [task for task in settings.tasks if not missing(task)]
    if not settings.tasks:
        raise ArgumentError(f"benchmark hooks: no task is left to learn. {' '.join(harness.notes)}")
    settings.turns = QUICK_TURNS if settings.quick else settings.turns
    rounds = len(settings.tasks) * len(settings.backends) * settings.turns
    harness.begin(rounds * len(settings.links))
    for link in settings.links:
        why = "as asked" if settings.modeled and link.bits_per_second else hooks_watch.obstacle(link)
        if not why:
            on_link(harness, link)
            continue
        harness.note(f"{link.name} is modeled, {why}: the step on the fast link, and the time that its bytes take.")
        if not select(harness.results, link=FAST):
            on_link(harness, BenchmarkLink(FAST))
        harness.results += [result.on(link) for result in select(harness.results, link=FAST)]
        for _ in range(rounds):
            harness.bar.advance()


def on_link(harness: Harness, link: BenchmarkLink) -> None:
    """Measure everything on one link, which is made first.

    Raises:
        UnsupportedError: The link can't be made.
        OSError: The link can't be made.
    """
    settings, rate = harness.settings, link.bits_per_second
    harness.run(partial(measure, settings=settings, link=link), settings.world, hosts=bool(rate), bits_per_second=rate)


def show(harness: Harness, results: Sequence[HookResult]) -> str:
    """Return a table for each task and backend."""
    cases = [(task, backend) for task in harness.settings.tasks for backend in harness.settings.backends]
    found = [select(results, task=task, backend=backend) for task, backend in cases]
    return "\n\n".join([*(hooks_results.table(each) for each in found if each), hooks_results.LEGEND])


def entries(harness: Harness) -> list[dict[str, Any]]:
    """Return the results."""
    return [result.as_json() for result in harness.results]


def finish(harness: Harness) -> None:
    """Draw the pictures that were asked for."""
    settings = harness.settings
    if settings.timeline:
        hooks_pictures.write_timelines(settings.timeline, harness.results)
        print(f"wrote {settings.timeline}")
    if settings.plot:
        hooks_pictures.plot(settings.plot, harness.results)
