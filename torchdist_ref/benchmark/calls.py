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
from unittest import mock

import torch

from torchdist_ref import groups
from torchdist_ref.benchmark import competitors, report
from torchdist_ref.benchmark.harness import AddOption, Harness, Settings, among, at_least, many
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.rounds import Action, RankContext, Result
from torchdist_ref.groups.world import default_group

NBYTES = 64
PUBLIC, BACKEND = "public", "backend"
TORCH, ADDED, WITHOUT = "torch", "torchdist_ref after torch", "torchdist_ref without torch"
# Statements of fresh interpreters, in order; each is timed by itself.
PROGRAMS = (
    {TORCH: "import torch", ADDED: "torch._import_device_backends(); import torchdist_ref"},
    {WITHOUT: "import torchdist_ref"},
)


def add_options(add: AddOption) -> None:
    """Add the options of the command."""
    ops = ",".join(op for op in OPERATIONS if op != "sendrecv")
    add("--ops", default=ops, type=among(OPERATIONS), help="operations")
    add("--worlds", default="1,2", type=many(at_least(1)), help="numbers of ranks")
    add("--repetitions", default=15, type=at_least(1), help="rounds")
    add("--calls", default=300, type=at_least(1), help="calls a round")
    add("--imports", default=5, type=at_least(1), help="rounds of imports")


def measure(context: RankContext, settings: Settings) -> None:
    """Measure all operations on one rank. Reports a result for each."""
    competitors.join(["ref"], context)
    for op in settings.ops:
        actions = zip((PUBLIC, BACKEND), _public_and_backend(op, context), strict=True)
        turns = {name: partial(context.timed, action, settings.calls, loop=True) for name, action in actions}
        context.compare({"op": op, "world": context.world}, turns, settings.repetitions)
    competitors.leave()


def _public_and_backend(op: str, context: RankContext) -> tuple[Action, Action]:
    """Return the public call, and the same calls of the backend."""
    operation, group = OPERATIONS[op], default_group()
    buffers = operation.buffers(context.rank, context.world, NBYTES, torch.float32)
    operation.load(buffers)
    public = operation.bind(groups, None, buffers)
    backend = group.backend
    # Without it, calls of lists go another way than through `submit`.
    with mock.patch.object(backend, "submit_repeated", return_value=None):
        with mock.patch.object(backend, "submit", wraps=backend.submit) as submit:
            public()
    submitted = [call.args for call in submit.call_args_list]
    if len(submitted) == 1:
        (arguments,) = submitted
        return public, lambda: backend.submit(*arguments)
    return public, lambda: [backend.submit(*arguments) for arguments in submitted]


def imports(repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of each import in fresh interpreters, in turns; a first round fills the caches."""
    first, second = PROGRAMS
    rounds = [_in_fresh_interpreter(first) | _in_fresh_interpreter(second) for _ in range(repetitions + 1)][1:]
    return {what: [each[what] for each in rounds] for what in rounds[0]}


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
    for world in settings.worlds:
        harness.head(f"{world} rank{'s' * (world > 1)}")
        harness.run(partial(measure, settings=settings), world)
    harness.head("imports")
    harness.results.append(Result({}, imports(settings.imports)))


def public_api(result: Result) -> float:
    """Return the median over the rounds of the microseconds that the public API adds."""
    pairs = zip(result.samples[PUBLIC], result.samples[BACKEND], strict=True)
    return median(result.counted([1e6 * (whole - own) for whole, own in pairs]))


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table of calls, and that of imports."""
    added = report.figure("public API us", (PUBLIC, BACKEND), public_api)
    cells = [report.cell("op"), report.cell("world", "ranks")]
    calls = [*cells, report.time(PUBLIC, "us"), report.time(BACKEND, "us"), added]
    imported = [(what, each.median(what)) for each in results if not each.cell for what in each.samples]
    loads = report.table([("import", lambda row: row[0]), ("ms", lambda row: report.show_time(row[1], "ms"))], imported)
    return f"{report.table(calls, filter(lambda each: each.cell, results))}\n\n{loads}"
