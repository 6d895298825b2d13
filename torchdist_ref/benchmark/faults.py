"""``benchmark faults``: how long from a rank's death, from calls that differ, from Ctrl-C, to the error on the others.

Every trial of a death has fresh processes. Ctrl-C is pressed on a rank that waits in a call. Only backends that compare
calls take part in the mismatches: on others, ranks that call different things hang, crash, or get wrong numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torchdist_ref.benchmark import competitors, report, table
from torchdist_ref.benchmark.fault_trials import MISMATCHES, PATIENCE, RECV, death, interrupt, mismatches
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.progress import Progress
from torchdist_ref.benchmark.units import parse_size, show_millis
from torchdist_ref.errors import ArgumentError, explain

WAITING, BUSY, MISMATCH, INTERRUPT = "others wait", "all busy", "mismatch", "Ctrl-C"
_COMPARES_CALLS = ("ref",)
_OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", RECV)
_MISMATCHES_A_TRIAL = 10
_TITLES = ("fault", "in", "backend", "median ms", "95 % ms", "worst ms", "late")


@dataclass(frozen=True)
class Result:
    """The distribution of one fault's times.

    Attributes:
        fault: Which kind.
        what: The operation, or what differs.
        backend: The backend.
        seconds: To the error, of every rank that should have one, in every trial; None where none came in time.
    """

    fault: str
    what: str
    backend: str
    seconds: Sequence[float | None]

    @property
    def known(self) -> list[float]:
        """The times that there are, ascending."""
        return sorted(seconds for seconds in self.seconds if seconds is not None)

    @property
    def late(self) -> int:
        """How many errors did not come in time."""
        return len(self.seconds) - len(self.known)

    def quantile(self, share: float) -> float:
        """The time that this share of the errors did not exceed.

        >>> Result(BUSY, "barrier", "ref", [0.3, 0.1, None, 0.2]).quantile(1.0)
        0.3
        """
        return self.known[min(len(self.known) - 1, int(share * len(self.known)))]

    def cells(self) -> list[str]:
        """A row of the table."""
        if not self.known:
            return [self.fault, self.what, self.backend, "-", "-", "-", f"{self.late} of {len(self.seconds)}"]
        figures = [median(self.known), self.quantile(0.95), self.known[-1]]
        late = f"{self.late} of {len(self.seconds)}"
        return [self.fault, self.what, self.backend, *map(show_millis, figures), late]


@dataclass(frozen=True)
class _Trial:
    """What to try, so many times."""

    fault: str
    what: str
    backend: str

    def run(self, trials: int, nbytes: int, world: int) -> Result:
        """Try it."""
        match self.fault:
            case "mismatch":
                found: list[float | None] = [*mismatches(self.backend, self.what, 2, trials * _MISMATCHES_A_TRIAL)]
            case "Ctrl-C":
                found = [interrupt(self.backend, self.what, nbytes) for _ in range(trials)]
            case _:
                found = [
                    seconds
                    for seed in range(trials)
                    for seconds in death(self.backend, self.what, nbytes, world, self.fault == BUSY, seed)
                ]
        return Result(self.fault, self.what, self.backend, found)


def _trials(ops: Sequence[str], backends: Sequence[str]) -> list[_Trial]:
    deaths = [
        _Trial(fault, op, name)
        for op in ops
        for fault in (WAITING, BUSY)
        for name in backends
        if (fault, op) != (BUSY, RECV)
    ]
    comparing = [name for name in backends if name in _COMPARES_CALLS]
    different = [_Trial(MISMATCH, kind, name) for kind in MISMATCHES for name in comparing]
    return deaths + different + [_Trial(INTERRUPT, op, name) for op in ops[:1] for name in backends]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--ops", default=",".join(_OPS), metavar="A,B,...", help="operations (%(default)s)")
    parser.add_argument("--backends", default="ref,gloo", metavar="A,B,...", help="backends (%(default)s)")
    parser.add_argument("--world", type=int, default=3, metavar="N", help="ranks (%(default)s)")
    parser.add_argument("--size", default="64K", metavar="BYTES", help="of the whole buffer (%(default)s)")
    parser.add_argument("--trials", type=int, default=10, metavar="N", help="of each kind (%(default)s)")


def main(options: argparse.Namespace) -> int:
    """Try, and print."""
    ops = options.ops.split(",")
    if unknown := [op for op in ops if op not in OPERATIONS and op != RECV]:
        raise ArgumentError(explain("benchmark faults", "--ops", f"among {', '.join([*OPERATIONS, RECV])}", unknown[0]))
    names, left_out = competitors.split(options.backends.split(","), forked=True)
    for each in left_out:
        print(each)
    size = _checked(options, names)
    results = _run(_trials(ops, names), options, size)
    print(table.columns(_TITLES, [result.cells() for result in results], left=3))
    print(f"late: no error within {PATIENCE:g} s")
    if options.json:
        settings = {"world": options.world, "trials": options.trials, "size": size}
        entries, notes = [_entry(result) for result in results], [str(each) for each in left_out]
        report.write(options.json, report.report("faults", settings, entries, notes))
        print(f"wrote {options.json}")
    return 0


def _checked(options: argparse.Namespace, names: Sequence[str]) -> int:
    """The size, where there is something to try."""
    if options.world < 2 or options.trials < 1:
        raise ArgumentError("benchmark faults: --world must be at least 2 and --trials at least 1.")
    if not names:
        raise ArgumentError("benchmark faults: no backend is left to try; see --backends.")
    return parse_size(options.size)


def _run(trials: Sequence[_Trial], options: argparse.Namespace, size: int) -> list[Result]:
    progress, results = Progress(len(trials)), []
    for trial in trials:
        progress.heading(f"{trial.fault}, {trial.what}")
        results.append(trial.run(options.trials, size, options.world))
        progress.advance(trial.backend)
    progress.clear()
    return results


def _entry(result: Result) -> dict[str, Any]:
    return {
        "fault": result.fault,
        "in": result.what,
        "backend": result.backend,
        "seconds": list(result.seconds),
        "late": result.late,
    }
