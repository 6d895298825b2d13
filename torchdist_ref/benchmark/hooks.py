"""``benchmark hooks``: bytes, errors, step times and losses of each DDP communication hook, while a model learns.

Two models: a small convolutional network on handwritten digits (scikit-learn's), and a character transformer on the
standard library's own sources. Links: ``fast`` is this machine's own; a rate such as ``100mbit`` puts the ranks on two
hosts (network namespaces; needs root and iproute2) with a cable of that rate between them. Where that can't be done,
times on that link are modelled from bytes and marked so.

All models of a round are alive at once and get the same batches; each step of a turn begins at the start line. Between
turns every model takes a step that isn't timed, in which its gradients are compared with exact ones.

hooks: HOOKS
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from torchdist_ref.backends import registry
from torchdist_ref.benchmark import competitors, harness, hooks_pictures, hooks_results, hooks_watch, report
from torchdist_ref.benchmark.harness import take_turns
from torchdist_ref.benchmark.hooks_results import HookResult, select
from torchdist_ref.benchmark.hooks_tasks import CONTESTANTS, LOCAL_STEPS, TASKS, missing
from torchdist_ref.benchmark.hooks_watch import FAST, BenchmarkLink, Span, Trainee, counted
from torchdist_ref.benchmark.ranks import RankContext, enter_host, run_ranks
from torchdist_ref.benchmark.timing import Times, durations, without_collector
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.testing.namespaces import Host

# Steps of a turn: events of every few steps happen in each turn.
TURN_STEPS = LOCAL_STEPS
QUICK_TURNS = 3

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


def on_link(settings: argparse.Namespace, link: BenchmarkLink, on_report: Callable[[Any], None]) -> None:
    """Measure everything on one link, which is made first; `on_report` gets headings, rounds and results.

    Raises:
        UnsupportedError: The link can't be made.
        OSError: The link can't be made.
    """
    with hooks_watch.hosts_of(link) as hosts:
        run_ranks(partial(measure, settings=settings, link=link, hosts=hosts), settings.world, on_report)


def measure(context: RankContext, settings: argparse.Namespace, link: BenchmarkLink, hosts: Sequence[Host]) -> None:
    """Measure on one rank. Reports headings, numbers of rounds, and results."""
    host = enter_host(hosts, context.rank, context.world)
    tasks = {name: TASKS[name]() for name in settings.tasks}
    try:
        for backend in competitors.join(settings.backends, context):
            for name, task in tasks.items():
                context.report(f"{name} on {backend.name}, {link.name}")
                trainees = [Trainee(task, CONTESTANTS[hook], backend.group) for hook in settings.hooks]
                records = _all_turns(context, trainees, host, settings.turns)
                for trainee, record in zip(trainees, records, strict=True):
                    context.report(_result(context, trainee, record, (name, backend.name, link.name)))
    finally:
        competitors.leave()


def _all_turns(context: RankContext, trainees: Sequence[Trainee], host: Host | None, turns: int) -> list[TraineeRecord]:
    records = [TraineeRecord() for _ in trainees]
    pairs = list(zip(trainees, records, strict=True))
    contestants = {each.contestant.name: partial(_turn, context, each, record, host) for each, record in pairs}
    take_turns(context, contestants, turns, context.report)
    for trainee, record in pairs:
        context.wait()
        record.spans += trainee.spans()
    return records


def _turn(context: RankContext, trainee: Trainee, record: TraineeRecord, host: Host | None) -> list[float]:
    batches = [trainee.batch() for _ in range(TURN_STEPS)]
    wire = hooks_watch.wire_bytes(host) if host else 0
    with without_collector(), counted(trainee.group) as counter:
        for batch in batches:
            context.wait()
            begin = perf_counter()
            loss = trainee.step(batch)
            record.times.append((begin, perf_counter()))
            record.losses.append(float(loss))
    record.sent.append(counter.sent / TURN_STEPS)
    context.wait()
    record.wire.append(hooks_watch.wire_bytes(host) - wire if host else 0)
    record.errors.append(trainee.error(context.exchange))
    return []


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
        sent_bytes=sum(sent) / len(sent),
        wire_bytes=sum(wire) / len(wire) / TURN_STEPS if any(wire) else None,
        error=_mean([each.errors[1:] for each in records]),
        seconds=durations([each.times for each in records]),
        losses=_mean([each.losses for each in records]),
        turn=TURN_STEPS,
        spans=record.spans,
    )


def _mean(columns: Sequence[Sequence[float]]) -> list[float]:
    return [sum(row) / len(row) for row in zip(*columns, strict=True)]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    harness.add_options(
        parser,
        hooks=(",".join(CONTESTANTS), "hooks"),
        tasks=(",".join(TASKS), "models"),
        backends=("ref,gloo", "backends"),
        links=(f"{FAST},1gbit,100mbit", f"{FAST}, or rates"),
        world=(2, "ranks"),
        turns=(10, f"of {TURN_STEPS} steps for each hook; the first isn't counted"),
        quick=(False, f"{QUICK_TURNS} turns: to look at, not to rely on"),
        modelled=(False, "compute slow links, even if they can be made"),
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="draw time, error and loss")
    parser.add_argument("--timeline", metavar="FILE.svg", help="draw one step of each hook")


def main(options: argparse.Namespace) -> int:
    """Measure, and print a table for each task and backend."""
    settings, notes = _checked(options)
    output = HookOutput(settings, notes)
    try:
        for link in settings.links:
            output.measure(link)
    finally:
        output.finish()
    return 0


def _checked(options: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    names, left_out = competitors.split(options.backends.split(","), forked=True)
    if not names or not set(names) <= set(registry.names()):
        expected = "backends of this library, whose groups DDP takes: ref or gloo"
        raise ArgumentError(explain("benchmark hooks", "--backends", expected, options.backends))
    hooks = harness.names("benchmark hooks", "--hooks", options.hooks, CONTESTANTS)
    tasks = harness.names("benchmark hooks", "--tasks", options.tasks, TASKS)
    turns = QUICK_TURNS if options.quick else options.turns
    harness.check_least("benchmark hooks", options, world=2, turns=2)
    notes = [str(each) for each in left_out]
    notes += [f"{task} is left out: {why}" for task in tasks if (why := missing(task))]
    there = tuple(task for task in tasks if not missing(task))
    if not there:
        raise ArgumentError(f"benchmark hooks: no task is left to learn. {' '.join(notes)}")
    links = tuple(map(hooks_watch.parse_link, dict.fromkeys(options.links.split(","))))
    lists = {"hooks": hooks, "tasks": there, "backends": tuple(names), "links": links, "turns": turns}
    return argparse.Namespace(**{**vars(options), **lists}), notes


class HookOutput:
    """Reader of rank 0's reports: advances the bar, and keeps results until a task's table can be printed."""

    def __init__(self, settings: argparse.Namespace, notes: list[str]) -> None:
        self.results: list[HookResult] = []
        self._settings, self._notes = settings, notes
        self._rounds = len(settings.tasks) * len(settings.backends) * settings.turns
        self._bar = report.ProgressBar(self._rounds * len(settings.links))
        for note in notes:
            print(note, flush=True)

    def measure(self, link: BenchmarkLink) -> None:
        """Measure on one link; if it can't be made, or is not to be, model it."""
        why = "as asked" if self._settings.modelled and link.bits_per_second else hooks_watch.obstacle(link)
        if not why:
            on_link(self._settings, link, self.on_report)
            return
        self._note(f"{link.name} is modelled, {why}: the step on the fast link, and the time that its bytes take.")
        if not select(self.results, link=FAST):
            on_link(self._settings, BenchmarkLink(FAST), self.on_report)
        self.results += [result.on(link) for result in select(self.results, link=FAST)]
        for _ in range(self._rounds):
            self._bar.advance()

    def on_report(self, event: Any) -> None:
        """Handle a result, the number of a round, or a heading."""
        match event:
            case HookResult():
                self.results.append(event)
            case competitors.LeftOut():
                self._note(str(event))
            case int():
                self._bar.advance()
            case str():
                self._bar.heading(event)

    def finish(self) -> None:
        """Print the tables, and write the files that were asked for; after a Ctrl-C, of what there is."""
        self._bar.clear()
        settings = self._settings
        for task in settings.tasks:
            for backend in settings.backends:
                if found := select(self.results, task=task, backend=backend):
                    print(hooks_results.table(found), end="\n\n", flush=True)
        if not self.results:
            return
        print(hooks_results.LEGEND)
        listed = harness.settings_of(settings) | {"links": [vars(link) for link in settings.links]}
        entries = [result.as_json() for result in self.results]
        report.write(settings.json, report.report("hooks", listed, entries, self._notes))
        if settings.timeline:
            hooks_pictures.write_timelines(settings.timeline, self.results)
            print(f"wrote {settings.timeline}")
        if settings.plot and report.matplotlib_available():
            hooks_pictures.plot(settings.plot, self.results)
            print(f"wrote {settings.plot}")

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._bar.clear()
        print(text, flush=True)
