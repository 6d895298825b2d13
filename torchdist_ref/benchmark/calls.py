"""``benchmark calls``: the library's own cost besides its backend: of a call, and of an import.

A call is made through the public function, and as that function passes it to the backend; the difference is the cost
of the public API. Both are made back to back on every rank, in turns. Imports are timed in fresh interpreters: torch,
without other packages' backends; in the same interpreter after it, what this library adds; and this library without
torch. The addition is that of a user: torch's search of the installed packages for backends, which registers ``ref``,
and ``import torchdist_ref``. It is read off one clock: the difference of two imports of torch has ten times its size
as noise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.backends.base import Backend, BackendWrapper
from torchdist_ref.benchmark import competitors
from torchdist_ref.benchmark.harness import Harness, Option, Settings, among, at_least, numbers
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.report import columns, show_micros, show_millis
from torchdist_ref.benchmark.rounds import Action, RankContext, Result, calls_in_a_row, take_turns
from torchdist_ref.groups.world import default_group
from torchdist_ref.work import Work

NBYTES = 64
PUBLIC, BACKEND = "public", "backend"
TORCH, ADDED, WITHOUT = "torch", "torchdist_ref after torch", "torchdist_ref without torch"
# Statements of fresh interpreters, in order; each is timed by itself.
PROGRAMS = (
    {TORCH: "import torch", ADDED: "torch._import_device_backends(); import torchdist_ref"},
    {WITHOUT: "import torchdist_ref"},
)
OPTIONS = {
    "ops": Option(",".join(op for op in OPERATIONS if op != "sendrecv"), "operations", among(OPERATIONS)),
    "worlds": Option("1,2", "numbers of ranks", numbers),
    "repetitions": Option(15, "rounds", at_least(1)),
    "calls": Option(300, "calls a round", at_least(1)),
    "imports": Option(5, "rounds of imports", at_least(1)),
}


class SubmitRecorder(BackendWrapper):
    """Backend that records the arguments of `submit`, and submits them to another."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.submitted: list[tuple[Any, ...]] = []

    def submit(self, *arguments: Any) -> Work:
        """Record, and submit."""
        self.submitted.append(arguments)
        return self.wrapped.submit(*arguments)


def measure(context: RankContext, settings: Settings) -> None:
    """Measure all operations on one rank. Reports a result for each."""
    competitors.join(["ref"], context)
    for op in settings.ops:
        actions = dict(zip((PUBLIC, BACKEND), _public_and_backend(op, context), strict=True))
        turns = {name: partial(_mean_call, action, settings.calls, context) for name, action in actions.items()}
        samples, _ = take_turns(context, turns, settings.repetitions)
        context.report(Result({"op": op, "world": context.world}, samples))
        context.report(1)
    competitors.leave()


def _public_and_backend(op: str, context: RankContext) -> tuple[Action, Action]:
    """Return the public call, and the same calls of the backend."""
    operation, group = OPERATIONS[op], default_group()
    buffers = operation.buffers(context.rank, context.world, NBYTES, torch.float32)
    operation.load(buffers)
    public = operation.bind(groups, None, buffers)
    backend, recorder = group.backend, SubmitRecorder(group.backend)
    group.backend = recorder
    try:
        public()
    finally:
        group.backend = backend
    if len(recorder.submitted) == 1:
        (arguments,) = recorder.submitted
        return public, lambda: backend.submit(*arguments)
    return public, lambda: [backend.submit(*arguments) for arguments in recorder.submitted]


def _mean_call(action: Action, calls: int, context: RankContext) -> list[float]:
    ((begin, end),) = calls_in_a_row(action, calls, context.wait)
    return [(end - begin) / calls]


def imports(repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of each import in fresh interpreters, in turns; a first round fills the caches."""
    rounds = [[_in_fresh_interpreter(program) for program in PROGRAMS] for _ in range(repetitions + 1)][1:]
    return {
        what: [each[number][what] for each in rounds] for number, program in enumerate(PROGRAMS) for what in program
    }


def _in_fresh_interpreter(program: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds of each statement; torch does not load other backends at its start."""
    timed = [f"a = perf_counter(); {statement}; print(perf_counter() - a)" for statement in program.values()]
    code = "\n".join(["from time import perf_counter", *timed])
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return dict(zip(program, map(float, process.stdout.split()), strict=True))


def run(harness: Harness) -> None:
    """Measure for each number of ranks, and imports, whose result has no cell."""
    settings = harness.settings
    harness.begin(len(settings.worlds) * len(settings.ops))
    for world in settings.worlds:
        harness.bar.heading(f"{world} rank{'s' * (world > 1)}")
        harness.run(partial(measure, settings=settings), world)
    harness.bar.heading("imports")
    harness.results.append(Result({}, imports(settings.imports)))


def public_api(result: Result) -> float:
    """Return the median over the rounds of the seconds that the public API adds."""
    return median(whole - own for whole, own in zip(result.samples[PUBLIC], result.samples[BACKEND], strict=True))


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table of calls, in microseconds, and that of imports, in milliseconds."""
    rows = [
        [each.cell["op"], str(each.cell["world"])]
        + [show_micros(seconds) for seconds in (each.median(PUBLIC), each.median(BACKEND), public_api(each))]
        for each in results
        if each.cell
    ]
    table = columns(["", "ranks", "whole us", "backend us", "public API us"], rows)
    loaded = [each for each in results if not each.cell]
    imported = [[what, show_millis(each.median(what))] for each in loaded for what in each.samples]
    return f"{table}\n\n{columns(['import', 'ms'], imported)}"


def entries(harness: Harness) -> list[dict[str, Any]]:
    """Return an entry for each operation, and one for imports."""
    return [
        {**each.cell, **each.samples, "public_api": public_api(each)} if each.cell else {"imports": each.samples}
        for each in harness.results
    ]
