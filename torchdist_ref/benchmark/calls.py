"""``benchmark calls``: what the library costs besides its backend: checking and passing on a call, and being imported.

A call is made twice over, through the public function and as that function hands it to the backend; the difference is
what the front door takes. Both are made back to back on every rank, in turns, and ranks wait for one another in each.
Imports are timed in fresh interpreters: torch, with no backend of others loaded; in the same interpreter after it, what
this library adds; and this library without torch. What it adds is counted as a user meets it: torch's search of the
installed packages for backends, which finds this one and has it register ``ref``, and ``import torchdist_ref``.
It is read off one clock, not the difference of two imports of torch, whose noise is ten times what is looked for.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.backends.base import Backend, BackendWrapper
from torchdist_ref.benchmark import competitors, report, table
from torchdist_ref.benchmark.crew import Place, go
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.progress import Progress
from torchdist_ref.benchmark.units import show_micros, show_millis
from torchdist_ref.groups.world import default_group
from torchdist_ref.work import Work

NBYTES = 64
TORCH, ADDED, WITHOUT = "torch", "torchdist_ref after torch", "torchdist_ref without torch"
# What fresh interpreters run, a statement after the other; each is timed by itself.
PROGRAMS = (
    {TORCH: "import torch", ADDED: "torch._import_device_backends(); import torchdist_ref"},
    {WITHOUT: "import torchdist_ref"},
)


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    ops: tuple[str, ...] = tuple(op for op in OPERATIONS if op != "sendrecv")
    worlds: tuple[int, ...] = (1, 2)
    repetitions: int = 15
    calls: int = 300


@dataclass(frozen=True)
class Result:
    """For one operation and number of ranks: seconds a call in each round, through the door and of the backend."""

    op: str
    world: int
    public: Sequence[float]
    backend: Sequence[float]

    @property
    def door(self) -> float:
        """The median of what the front door took in each round."""
        return median(whole - own for whole, own in zip(self.public, self.backend, strict=True))


class Spy(BackendWrapper):
    """Writes down what a backend is asked to do, and has it done."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.asked: list[tuple[Any, ...]] = []

    def submit(self, *asked: Any) -> Work:
        """See `Backend.submit`."""
        self.asked.append(asked)
        return self.wrapped.submit(*asked)


def measure(place: Place, settings: Settings) -> None:
    """What each rank does. Reports a result for each operation."""
    competitors.join(["ref"], place)
    for op in settings.ops:
        whole, own = _both(op, place)
        public: list[float] = []
        backend: list[float] = []
        for turn in range(settings.repetitions):
            pairs = [(whole, public), (own, backend)]
            for act, times in pairs if turn % 2 else pairs[::-1]:
                times.append(_a_call(act, settings.calls, place))
        place.report(Result(op, place.world, public, backend))
    competitors.leave()


def _both(op: str, place: Place) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The public call, and what it asks of the backend, as functions."""
    operation, group = OPERATIONS[op], default_group()
    buffers = operation.buffers(place.rank, place.world, NBYTES, torch.float32)
    operation.load(buffers)
    public = operation.bind(groups, None, buffers)
    backend, spy = group.backend, Spy(group.backend)
    group.backend = spy
    try:
        public()
    finally:
        group.backend = backend
    if len(spy.asked) == 1:
        (asked,) = spy.asked
        return public, lambda: backend.submit(*asked)
    return public, lambda: [backend.submit(*asked) for asked in spy.asked]


def _a_call(act: Callable[[], Any], calls: int, place: Place) -> float:
    place.line_up()
    begin = perf_counter()
    for _ in range(calls):
        act()
    return (perf_counter() - begin) / calls


def imports(repetitions: int) -> dict[str, list[float]]:
    """Seconds of each import in fresh interpreters, in turns. The first round is thrown away: it fills the caches."""
    rounds = [[_in_fresh_interpreter(program) for program in PROGRAMS] for _ in range(repetitions + 1)][1:]
    return {
        what: [each[number][what] for each in rounds] for number, program in enumerate(PROGRAMS) for what in program
    }


def _in_fresh_interpreter(program: Mapping[str, str]) -> dict[str, float]:
    """How many seconds each statement takes there. torch is kept from loading backends at its start by itself."""
    timed = [f"a = perf_counter(); {statement}; print(perf_counter() - a)" for statement in program.values()]
    code = "\n".join(["from time import perf_counter", *timed])
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return dict(zip(program, map(float, done.stdout.split()), strict=True))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    defaults = Settings()
    parser.add_argument("--ops", default=",".join(defaults.ops), metavar="A,B,...", help="operations (%(default)s)")
    parser.add_argument("--worlds", default="1,2", metavar="N,M,...", help="numbers of ranks (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=defaults.repetitions, metavar="N", help="rounds")
    parser.add_argument("--calls", type=int, default=defaults.calls, metavar="N", help="calls a round (%(default)s)")
    parser.add_argument("--imports", type=int, default=5, metavar="N", help="rounds of imports (%(default)s)")


def main(options: argparse.Namespace) -> int:
    """Measure and print."""
    worlds = tuple(int(world) for world in options.worlds.split(","))
    settings = Settings(tuple(options.ops.split(",")), worlds, options.repetitions, options.calls)
    progress, results = Progress(len(worlds) * len(settings.ops)), []

    def hear(result: Result) -> None:
        results.append(result)
        progress.advance()

    for world in worlds:
        progress.heading(f"{world} rank{'s' * (world > 1)}")
        go(lambda place: measure(place, settings), world, hear)
    progress.heading("imports")
    loaded = imports(options.imports)
    progress.clear()
    print(show(results), show_imports(loaded), sep="\n\n")
    if options.json:
        entries: list[Any] = [*(asdict(each) | {"door": each.door} for each in results), {"imports": loaded}]
        report.write(options.json, report.report("calls", asdict(settings), entries, []))
        print(f"wrote {options.json}")
    return 0


def show(results: Sequence[Result]) -> str:
    """The table of calls, in microseconds."""
    rows = [
        [
            each.op,
            str(each.world),
            show_micros(median(each.public)),
            show_micros(median(each.backend)),
            show_micros(each.door),
        ]
        for each in results
    ]
    return table.columns(["", "ranks", "whole us", "backend us", "door us"], rows)


def show_imports(loaded: Mapping[str, Sequence[float]]) -> str:
    """The table of imports, in milliseconds."""
    return table.columns(["import", "ms"], [[what, show_millis(median(seconds))] for what, seconds in loaded.items()])
