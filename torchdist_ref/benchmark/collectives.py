"""``benchmark collectives``: every operation, at every size, on every backend, side by side.

`measure` is what each rank does: for each operation and size it makes one set of tensors for all contestants, checks
each one's result, and times them in rounds in which each has its turn and the first is another each time. The rest of
the file is the command around it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from torchdist_ref.benchmark import competitors, limit, mpi_crew, plot, report, table
from torchdist_ref.benchmark.crew import Place, go
from torchdist_ref.benchmark.hosts import on_hosts
from torchdist_ref.benchmark.operations import OPERATIONS, Action, Buffers, Make, Operation
from torchdist_ref.benchmark.progress import Progress
from torchdist_ref.benchmark.results import BOUNDS, DIRECT, LIMIT, Row
from torchdist_ref.benchmark.timing import (
    Strangers,
    apart,
    calls_for,
    durations,
    in_a_row,
    own_clock,
    own_time,
    shared_out,
    undisturbed,
)
from torchdist_ref.benchmark.units import parse_size, show_size
from torchdist_ref.errors import ArgumentError, DistBackendError, UnsupportedError, explain
from torchdist_ref.transports.segment_layout import window_for

# A whole buffer of one element for each rank may be larger than the size that was asked for.
_SPARE = 4096
# Up to here a check after the timing costs next to nothing.
_CHECK_AGAIN = 1 << 20
# So many calls say how many are timed, and one before so many of those is not: others have just had the processors.
_FIRST, _WARM = 3, 4
_LIST = "A,B,..."


@dataclass(frozen=True)
class Settings:
    """What to measure, and how.

    Attributes:
        ops: Operations.
        sizes: Bytes of the whole buffer.
        backends: Backends, as in ``--backends``.
        world: Ranks.
        repetitions: Rounds.
        seconds: How long one backend's turn in a round takes, for calls that are shorter.
        loop: Whether calls are made back to back, and not each from the start line.
        dtype: Of the tensors.
        window: Bytes that the limit lays out at once.
        namespaces: Whether the two halves of the ranks are on hosts of their own (see `hosts`).
    """

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    backends: tuple[str, ...]
    world: int = 2
    repetitions: int = 9
    seconds: float = 0.05
    loop: bool = False
    dtype: str = "float32"
    window: int = limit.WINDOW
    namespaces: bool = False

    def cases(self) -> list[tuple[Operation, int]]:
        """Every operation at every size; those that move no bytes once."""
        found = [OPERATIONS[op] for op in self.ops]
        return [(op, size) for op in found for size in (self.sizes if op.sized else (0,))]


def measure(place: Place, settings: Settings) -> None:
    """What each rank does. Reports the names of operations, and rows."""
    stages = limit.Stages(place.circle.memory, settings.window, len(os.sched_getaffinity(0)))
    bounds = {
        LIMIT: stages,
        **({DIRECT: _tensors(place, settings)} if competitors.REGISTERED in settings.backends else {}),
    }
    contestants = competitors.join(settings.backends, place)
    try:
        for operation, size in settings.cases():
            place.report(operation.name)
            row = _Case(place, settings, operation, size).row(contestants, bounds)
            place.report(row)
    finally:
        competitors.leave()


def _tensors(place: Place, settings: Settings) -> limit.Tensors:
    """Room for all ranks' tensors behind the stages: what is read and what is written, of the largest size."""
    return limit.Tensors(place.circle.memory[settings.world * settings.window :], _room(settings), settings.window)


def _room(settings: Settings) -> int:
    return 2 * (max(settings.sizes) + _SPARE) if competitors.REGISTERED in settings.backends else 0


class _Case:
    """One operation at one size, on one rank."""

    def __init__(self, place: Place, settings: Settings, operation: Operation, size: int) -> None:
        self.place, self.settings, self.operation, self.size = place, settings, operation, size
        self.dtype = getattr(torch, settings.dtype)
        self.buffers = self._made_by(None)
        self.nbytes = self.buffers.whole * self.dtype.itemsize
        self.time = in_a_row if settings.loop else apart

    def _made_by(self, make: Make | None) -> Buffers:
        return self.operation.buffers(self.place.rank, self.place.world, self.size, self.dtype, make)

    def row(self, contestants: Sequence[competitors.Competitor], bounds: Mapping[str, limit.Stages]) -> Row | None:
        """Check, time, check again. Rank 0 gets the row."""
        actions, missing = {}, {}
        tensors = {
            backend.name: self._made_by(backend.make) if backend.make else self.buffers for backend in contestants
        }
        for backend in contestants:
            action = self.operation.bind(backend.api, backend.group, tensors[backend.name])
            try:
                self._check(backend.name, action, tensors[backend.name])
            except UnsupportedError as error:
                missing[backend.name] = str(error)
            else:
                actions[backend.name] = action
        checked = dict(actions)
        if self.operation.sized:
            actions |= {name: self._bound(stages) for name, stages in bounds.items()}
        samples, calls, disturbed = self._rounds(actions)
        if self.nbytes <= _CHECK_AGAIN:
            for name, action in checked.items():
                self._check(name, action, tensors[name])
        return Row(self.operation.name, self.nbytes, self.place.world, samples, calls, disturbed, missing)

    def _bound(self, stages: limit.Stages) -> Action:
        if isinstance(stages, limit.Tensors):
            return limit.bind(self.operation, self._made_by(stages.maker(self.place.rank)), stages)
        return limit.bind(self.operation, self.buffers, stages)

    def _check(self, name: str, action: Action, b: Buffers) -> None:
        """Call once and compare every element."""
        self.operation.load(b)
        action()
        answer = self.operation.answer(b)
        if answer is not None and not torch.equal(b.result, answer):
            wrong = int((b.result != answer).nonzero()[0])
            raise DistBackendError(
                f"benchmark: {self.operation.name} of {show_size(self.nbytes)} on {name!r} is wrong on rank {b.rank}: "
                f"element {wrong} of {answer.numel()} is {b.result[wrong]} and should be {answer[wrong]}."
            )
        # Sums of zeros stay zeros, however often they are summed.
        b.source.zero_()
        b.result.zero_()

    def _rounds(self, actions: dict[str, Action]) -> tuple[dict[str, list[float]], dict[str, int], list[bool]]:
        names, strangers, disturbed = list(actions), Strangers(), []
        calls = {name: self._calls(actions[name]) for name in names}
        samples: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self.settings.repetitions):
            first = turn % max(1, len(names))
            strangers.mark()
            used = own_time()
            for name in names[first:] + names[:first]:
                samples[name].append(median(self._turn(actions[name], calls[name], name in BOUNDS)))
            disturbed.append(strangers.disturbed(sum(self.place.exchange(own_time() - used))))
        return samples, calls, disturbed

    def _turn(self, action: Action, calls: int, bound: bool) -> list[float]:
        """One contestant's calls in one round; of a bound, whose ranks don't wait, how long its work takes at least."""
        place, parts = self.place, self.operation.messages * (calls if self.settings.loop else 1)
        clock, figure = (own_clock(place.world), shared_out) if bound else (perf_counter, durations)
        with undisturbed():
            apart(action, -(-calls // _WARM), place.line_up)
            times = self.time(action, calls, place.line_up, clock)
        return figure(place.exchange(times), parts)

    def _calls(self, action: Action) -> int:
        """How many calls a turn has; all ranks find the same number, having seen the same times."""
        first = durations(self.place.exchange(apart(action, _FIRST, self.place.line_up)))
        return calls_for([min(first)], self.settings.seconds)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--ops", default=",".join(OPERATIONS), help="operations (default: all)", metavar=_LIST)
    parser.add_argument("--sizes", default="4,1K,64K,1M,16M", metavar=_LIST, help="bytes of the whole buffer")
    parser.add_argument(
        "--backends",
        default="ref,gloo",
        metavar=_LIST,
        help="ref, registered (ref on registered buffers), gloo, mpi, torch:gloo, mpi4py (%(default)s)",
    )
    parser.add_argument("--world", type=int, default=2, metavar="N", help="ranks (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=9, metavar="N", help="rounds (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.05, metavar="S", help="length of a backend's turn (%(default)s)"
    )
    parser.add_argument("--loop", action="store_true", help="calls back to back, not each from a common start line")
    parser.add_argument("--dtype", default="float32", help="of the tensors (%(default)s)")
    parser.add_argument("--window", type=parse_size, help="of the limit column (the backend's)")
    parser.add_argument("--namespaces", action="store_true", help="half the ranks on a host of their own (needs root)")
    parser.add_argument("--against", metavar="BACKEND", help="what the others are compared with (the last backend)")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw time over size")


def main(options: argparse.Namespace) -> int:
    """Measure, and print a table for each operation as soon as it is there."""
    names, left_out = competitors.split(options.backends.split(","))
    settings = settings_of(options, names)
    show = _Show(settings, options.against)
    for each in left_out:
        show.hear(each)
    try:
        start = mpi_crew.go if competitors.UNDER_MPIEXEC.keys() & set(settings.backends) else go
        extra = settings.world * (settings.window + _room(settings))
        with on_hosts(partial(measure, settings=settings), settings.namespaces) as program:
            start(program, settings.world, show.hear, extra=extra)
    finally:
        show.finish()
        _keep(options, settings, show.rows, show.notes)
    return 0


def settings_of(options: argparse.Namespace, names: Sequence[str]) -> Settings:
    """Return the settings that the options ask for.

    Raises:
        ArgumentError: An option has a wrong value.
    """
    ops = tuple(options.ops.split(","))
    if unknown := [op for op in ops if op not in OPERATIONS]:
        raise ArgumentError(explain("benchmark", "--ops", f"among {', '.join(OPERATIONS)}", unknown[0]))
    if not names:
        raise ArgumentError("benchmark: no backend is left to measure; see --backends.")
    if options.against and options.against not in names:
        raise ArgumentError(explain("benchmark", "--against", f"one of {', '.join(names)}", options.against))
    if options.world < 2 or options.repetitions < 1:
        raise ArgumentError("benchmark: --world must be at least 2 and --repetitions at least 1.")
    if options.namespaces and competitors.UNDER_MPIEXEC.keys() & set(names):
        raise ArgumentError("benchmark: --namespaces is for forked ranks, and those of MPI are started by mpiexec.")
    dtype = getattr(torch, options.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype == torch.bool:
        raise ArgumentError(explain("benchmark", "--dtype", "a dtype of torch that can be added", options.dtype))
    return Settings(
        ops,
        tuple(map(parse_size, options.sizes.split(","))),
        tuple(names),
        options.world,
        options.repetitions,
        options.seconds,
        options.loop,
        options.dtype,
        options.window or window_for(options.world),
        options.namespaces,
    )


class _Show:
    """Hears rank 0: moves the bar, and prints the table of an operation when the next one begins."""

    def __init__(self, settings: Settings, against: str | None) -> None:
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.names = list(settings.backends)
        self._against = against
        self._progress = Progress(len(settings.cases()))
        self._waiting: list[Row] = []

    def hear(self, event: Any) -> None:
        """A row, the name of the operation that comes next, or of a backend that won't come."""
        match event:
            case Row():
                self.rows.append(event)
                self._waiting.append(event)
                self._progress.advance(show_size(event.size))
            case competitors.LeftOut():
                self.names = [name for name in self.names if name != event.name]
                self._note(str(event))
            case str():
                if self._waiting and self._waiting[0].op != event:
                    self._print()
                self._progress.heading(event)

    def finish(self) -> None:
        """Print what is left."""
        if self._waiting:
            self._print()
        self._progress.clear()
        if any(row.noisy for row in self.rows):
            print("~: other processes used the processors in most rounds; run it again when the machine is quiet.")

    def _print(self) -> None:
        against = self._against if self._against in self.names else self.names[-1]
        self._progress.clear()
        print(table.collectives(self._waiting, self.names, against), end="\n\n", flush=True)
        for name, reason in self._waiting[0].missing.items():
            self._note(f"{name} has no {self._waiting[0].op}: {reason}")
        self._waiting.clear()

    def _note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)


def _keep(options: argparse.Namespace, settings: Settings, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Write what was asked for; after a Ctrl-C, of what there is."""
    if options.json and rows:
        entries = [entry for row in rows for entry in row.as_json()]
        report.write(options.json, report.report("collectives", asdict(settings), entries, notes))
        print(f"wrote {options.json}")
    if options.plot and rows:
        if plot.available():
            plot.draw(options.plot, rows, settings.backends)
            print(f"wrote {options.plot}")
        else:
            print("no plot: matplotlib is not installed (pip install matplotlib)")
