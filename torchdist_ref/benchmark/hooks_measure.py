"""The hook laboratory at work: on every link, backend and task, all hooks take turns, a few steps each.

`measure` is what each rank does. All trainees of a round are alive at once and see the same batches; a turn begins with
all ranks at the start line and so does each step of it. Between turns every trainee takes a step that isn't timed, in
which its gradients are compared with exact ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from torchdist_ref.benchmark import competitors, hooks_links, hooks_tasks
from torchdist_ref.benchmark.crew import Place, go
from torchdist_ref.benchmark.hooks_contestants import CONTESTANTS, LOCAL_STEPS
from torchdist_ref.benchmark.hooks_links import Link
from torchdist_ref.benchmark.hooks_results import Result
from torchdist_ref.benchmark.hooks_trainee import Trainee
from torchdist_ref.benchmark.hooks_watch import Span, counted
from torchdist_ref.benchmark.timing import Times, durations, undisturbed
from torchdist_ref.testing.namespaces import Host

# Steps of a turn: what happens every few steps happens in each.
TURN = LOCAL_STEPS


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        tasks: What the models learn.
        backends: Backends.
        links: What lies between the ranks.
        hooks: Which hooks.
        turns: How many turns each has; the first isn't counted.
        world: Ranks.
    """

    tasks: tuple[str, ...]
    backends: tuple[str, ...]
    links: tuple[Link, ...]
    hooks: tuple[str, ...]
    turns: int = 10
    world: int = 2

    def rounds(self) -> int:
        """How many times `on_link` reports that a round of turns is over, on all links."""
        return len(self.tasks) * len(self.backends) * len(self.links) * self.turns


@dataclass
class _Notes:
    """What a rank notes of its trainee."""

    times: Times = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def on_link(settings: Settings, link: Link, hear: Callable[[Any], None]) -> None:
    """Measure everything on one link, which is laid first; `hear` gets words, rounds and results.

    Raises:
        UnsupportedError: The link can't be laid.
        OSError: Neither.
    """
    with hooks_links.laid(link) as hosts:
        go(partial(measure, settings=settings, link=link, hosts=hosts), settings.world, hear)


def measure(place: Place, settings: Settings, link: Link, hosts: Sequence[Host]) -> None:
    """What each rank does. Reports headings, numbers of rounds, and results."""
    host = hooks_links.settle(hosts, place.rank, place.world)
    tasks = {name: hooks_tasks.TASKS[name]() for name in settings.tasks}
    try:
        for backend in competitors.join(settings.backends, place):
            for name, task in tasks.items():
                place.report(f"{name} on {backend.name}, {link.name}")
                trainees = [Trainee(task, CONTESTANTS[hook], backend.group) for hook in settings.hooks]
                for trainee, notes in zip(trainees, _Round(place, trainees, host).all(settings.turns), strict=True):
                    result = _result(place, trainee, notes, (name, backend.name, link.name))
                    place.report(result)
    finally:
        competitors.leave()


class _Round:
    """All trainees of one task, on one backend and link."""

    def __init__(self, place: Place, trainees: Sequence[Trainee], host: Host | None) -> None:
        self._place, self._host = place, host
        self._trainees = trainees
        self._notes = [_Notes() for _ in trainees]

    def all(self, turns: int) -> list[_Notes]:
        """Let them take their turns, the first another in each round."""
        order = list(zip(self._trainees, self._notes, strict=True))
        for turn in range(turns):
            first = turn % len(order)
            for trainee, notes in order[first:] + order[:first]:
                self._turn(trainee, notes)
            self._place.report(turn)
        for trainee, notes in order:
            self._place.line_up()
            notes.spans += trainee.spans()
        return self._notes

    def _turn(self, trainee: Trainee, notes: _Notes) -> None:
        batches = [trainee.batch() for _ in range(TURN)]
        wire = self._wire()
        with undisturbed(), counted(trainee.group) as ledger:
            for batch in batches:
                self._place.line_up()
                begin = perf_counter()
                loss = trainee.step(batch)
                notes.times.append((begin, perf_counter()))
                notes.losses.append(float(loss))
        notes.sent.append(ledger.sent / TURN)
        self._place.line_up()
        notes.wire.append(self._wire() - wire)
        notes.errors.append(trainee.error(self._place.exchange))

    def _wire(self) -> int:
        return 0 if self._host is None else hooks_links.on_the_wire(self._host)


def _result(place: Place, trainee: Trainee, notes: _Notes, where: tuple[str, str, str]) -> Result:
    """Put the notes of all ranks together."""
    everybodys = place.exchange(notes)
    task, backend, link = where
    sent, wire = notes.sent[1:], notes.wire[1:]
    return Result(
        task,
        backend,
        link,
        trainee.contestant.name,
        place.world,
        parameters=sum(parameter.numel() for parameter in trainee.model.parameters()),
        expected_bytes=trainee.owed(),
        sent_bytes=sum(sent) / len(sent),
        wire_bytes=sum(wire) / len(wire) / TURN if any(wire) else None,
        error=_mean([each.errors[1:] for each in everybodys]),
        seconds=durations([each.times for each in everybodys]),
        losses=_mean([each.losses for each in everybodys]),
        turn=TURN,
        spans=notes.spans,
    )


def _mean(columns: Sequence[Sequence[float]]) -> list[float]:
    return [sum(row) / len(row) for row in zip(*columns, strict=True)]
