"""``benchmark collectives``: every operation, at every size, on every backend, side by side.

`measure` runs on each rank: for each operation and size it makes one set of tensors for all contestants, checks each
one's result, and times them in turns. The rest of the file is the command around it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from statistics import median, quantiles
from typing import Any

import torch

from torchdist_ref.benchmark import competitors, limit, report, rounds
from torchdist_ref.benchmark.harness import AddOption, Harness, Settings, among, at_least, many, plot_file
from torchdist_ref.benchmark.limit import BOUNDS, DIRECT, LIMIT
from torchdist_ref.benchmark.operations import OPERATIONS, Buffers, Make, MeasuredOperation
from torchdist_ref.benchmark.rounds import Action, RankContext, Result
from torchdist_ref.errors import ArgumentError, DistBackendError, UnsupportedError, explain

# Bytes. A whole buffer of one element for each rank may be larger than the size that was asked for.
SPARE_BYTES = 4096
# Up to this size a check after the timing costs next to nothing.
MAX_CHECKED_AGAIN_BYTES = 1 << 20
CALIBRATION_CALLS = 3
# One untimed call precedes every four timed ones: another backend has just used the processors.
CALLS_PER_WARM_UP_CALL = 4
PLOT_COLUMNS = 3
DTYPES = [name for name, found in vars(torch).items() if isinstance(found, torch.dtype) and found != torch.bool]
Contestant = competitors.Competitor | limit.Stages


def add_options(add: AddOption) -> None:
    """Add the options of the command."""
    known = "ref, registered (ref on registered buffers), gloo, mpi, torch:gloo, mpi4py"
    add("--ops", default=",".join(OPERATIONS), type=among(OPERATIONS), help="operations")
    add("--sizes", default="4,1K,64K,1M,16M", type=many(report.parse_size), help="bytes of the whole buffer")
    add("--backends", default="ref,gloo", type=many(str), help=known)
    add("--world", default=2, type=at_least(2), help="ranks")
    add("--repetitions", default=9, type=at_least(1), help="rounds")
    add("--seconds", default=0.05, type=float, help="length of a backend's turn")
    add("--loop", action="store_true", help="calls back to back, not each from a common start line")
    add("--dtype", default="float32", choices=DTYPES, metavar="DTYPE", help="of the tensors")
    add("--device", default="cpu", help="type of the tensors' device, such as cpu or cuda; ranks share the devices")
    add("--window", type=report.parse_size, help="of the limit column (by default the backend's)")
    hosts = "put equal parts of the ranks on so many hosts (2 without a number; needs root)"
    add("--namespaces", nargs="?", const=2, default=0, type=at_least(2), metavar="HOSTS", help=hosts)
    add("--against", help="backend that the others are compared with (by default the last one)")
    add("--plot", type=plot_file, metavar="FILE.svg", help="draw time over size")


def measure(context: RankContext, settings: Settings) -> None:
    """Measure all cases on one rank. Reports the names of operations, and results."""
    if settings.device != "cpu":
        torch.accelerator.set_device_index(context.rank % torch.accelerator.device_count())
    contestants: list[Contestant] = [*competitors.join(settings.backends, context)]
    if settings.device == "cpu" and context.sides == 1:
        memory = context.shared_memory(context.world * settings.window)
        contestants.append(limit.Stages(memory, settings.window, len(os.sched_getaffinity(0))))
    if competitors.REGISTERED in settings.backends:
        # Source and result of the largest size.
        capacity = 2 * (max(settings.sizes) + SPARE_BYTES)
        memory = context.shared_memory(context.world * capacity)
        contestants.append(limit.Tensors(memory, capacity, settings.window, context.rank))
    for op in settings.ops:
        context.report(op)
        for size in settings.sizes if OPERATIONS[op].sized else (0,):
            Case(context, settings, OPERATIONS[op], size).compare(contestants)
    competitors.leave()


class Case:
    """One operation at one size, on one rank."""

    def __init__(self, context: RankContext, settings: Settings, operation: MeasuredOperation, size: int) -> None:
        self.context, self.settings, self.operation, self.size = context, settings, operation, size
        self.dtype = getattr(torch, settings.dtype)
        self.buffers = self._buffers(partial(torch.empty, device=settings.device))
        self.nbytes = self.buffers.whole * self.dtype.itemsize

    def _buffers(self, make: Make) -> Buffers:
        return self.operation.buffers(self.context.rank, self.context.world, self.size, self.dtype, make)

    def compare(self, contestants: Sequence[Contestant]) -> None:
        """Check, time, check again, and report the result. Bounds, whose results are garbage, are not checked."""
        context, settings = self.context, self.settings
        actions: dict[str, tuple[Action, Buffers]] = {}
        missing: dict[str, str] = {}
        for each in contestants:
            if each.name in BOUNDS and not self.operation.sized:
                continue
            buffers = self._buffers(each.make) if each.make else self.buffers
            action = each.bind(self.operation, buffers)
            action = partial(_finish_on_device, action) if settings.device != "cpu" else action
            try:
                if each.name not in BOUNDS:
                    self.check(each.name, action, buffers)
                actions[each.name] = action, buffers
            except UnsupportedError as error:
                if context.sides > 1:
                    # The other sides would wait for its turns.
                    raise
                missing[each.name] = str(error)
        first = {name: partial(context.timed, action, CALIBRATION_CALLS) for name, (action, _) in actions.items()}
        calls = {name: context.calls(turn, settings.seconds) for name, turn in first.items()}
        turns = {name: partial(self._turn, each, calls[name], name in BOUNDS) for name, (each, _) in actions.items()}
        samples, disturbed = rounds.take_turns(context, turns, settings.repetitions)
        for name, (action, buffers) in actions.items():
            if name not in BOUNDS and self.nbytes <= MAX_CHECKED_AGAIN_BYTES:
                self.check(name, action, buffers)
        where = {"op": self.operation.name, "size_bytes": self.nbytes, "world": context.world}
        context.report(Result(where, samples, disturbed, {"calls": calls, "missing": missing}))

    def check(self, name: str, action: Action, b: Buffers) -> None:
        """Call once and compare every element."""
        self.operation.load(b)
        action()
        expected = self.operation.answer(b)
        if expected is not None and not torch.equal(b.result.cpu(), expected):
            wrong = int((b.result.cpu() != expected).nonzero()[0])
            raise DistBackendError(
                f"benchmark: {self.operation.name} of {report.show_size(self.nbytes)} on {name!r} is wrong on rank "
                f"{b.rank}: element {wrong} of {expected.numel()} is {b.result[wrong]} and should be {expected[wrong]}."
            )
        # Sums of zeros stay zeros, however often they are summed.
        b.source.zero_()
        b.result.zero_()

    def _turn(self, action: Action, calls: int, bound: bool) -> list[float]:
        """Return the median of a contestant's calls of one round."""
        rounds.calls_apart(action, -(-calls // CALLS_PER_WARM_UP_CALL), self.context.wait)
        times = self.context.timed(action, calls, self.settings.loop, bound)
        return [median(times) / self.operation.messages]


def _finish_on_device(action: Action) -> None:
    """Call, and wait for the device: a call may return before its work is done."""
    action()
    torch.accelerator.synchronize()


def run(harness: Harness) -> None:
    """Measure; print a table for each operation as soon as it is complete."""
    from torchdist_ref.torch_internals import accelerators
    from torchdist_ref.transports.segment import window_for

    settings = harness.settings
    settings.backends = harness.choose_backends(forked=False)
    mpi = bool(competitors.UNDER_MPIEXEC.keys() & set(settings.backends))
    if settings.against and settings.against not in settings.backends:
        expected = f"one of {', '.join(settings.backends)}"
        raise ArgumentError(explain("benchmark", "--against", expected, settings.against))
    if settings.device not in ("cpu", accelerators.current_type()):
        raise ArgumentError(f"benchmark: --device {settings.device} needs a machine with such a device.")
    if settings.device != "cpu" and competitors.REGISTERED in settings.backends:
        raise ArgumentError("benchmark: registered buffers are in the host's memory; leave out --device.")
    if settings.namespaces and mpi:
        raise ArgumentError("benchmark: --namespaces is for forked ranks, and those of MPI are started by mpiexec.")
    settings.window = settings.window or window_for(settings.world)
    harness.shows_parts = not harness.against
    if settings.namespaces > settings.world:
        raise ArgumentError(
            explain("benchmark", "--namespaces", f"at most --world {settings.world}", settings.namespaces)
        )
    cable = inf if settings.namespaces else None
    harness.run(partial(measure, settings=settings), settings.world, mpi, cable, settings.namespaces)


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table of one or more operations."""
    settings = harness.settings
    missing = results[0].more["missing"]
    names = [name for name in settings.backends if name in missing or any(name in each.samples for each in results)]
    against = settings.against if settings.against in names else names[-1]
    reasons = [f"{name} has no {results[0].cell['op']}: {reason}" for name, reason in missing.items()]
    harness.notes += reasons
    return "\n".join([table(results, names, against) + "\n", *reasons])


def algorithm_bandwidth(result: Result, name: str) -> float:
    """Return bytes of the whole buffer a second."""
    return float(result.cell["size_bytes"] / result.median(name))


def bus_bandwidth(result: Result, name: str) -> float:
    """Return the algorithm bandwidth times nccl-tests' factor."""
    return algorithm_bandwidth(result, name) * OPERATIONS[result.cell["op"]].factor(result.cell["world"])


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the two values between which the middle half lies.

    >>> quartiles([1, 2, 3, 4, 5]), quartiles([7.0])
    ([2.0, 4.0], [7.0, 7.0])
    """
    return quantiles(values, n=4, method="inclusive")[::2] if len(values) > 1 else [values[0], values[0]]


def entries(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one flat entry of a report for each result and contestant."""
    return [_entry(result, name) for result in results for name in result.samples]


def _entry(result: Result, name: str) -> dict[str, Any]:
    others = [other for other in result.samples if other != name]
    return {
        **result.cell,
        "backend": name,
        "seconds": result.median(name),
        "algorithm_bytes_per_second": algorithm_bandwidth(result, name),
        "bus_bytes_per_second": bus_bandwidth(result, name),
        "quartiles_seconds": quartiles(result.counted(result.samples[name])),
        "times_longer_than": {other: result.ratio(name, other) for other in others},
        "quartiles_times_longer_than": {other: quartiles(result.ratios(name, other)) for other in others},
        "calls_per_sample": result.more["calls"][name],
        "samples_seconds": list(result.samples[name]),
        "disturbed": list(result.disturbed),
        "noisy": result.noisy,
    }


def table(results: Sequence[Result], names: Sequence[str], against: str) -> str:
    """Return the table of one or more operations: the bounds, then the contestants side by side.

    Args:
        results: What was measured.
        names: The contestants, in the order of their columns, without the bounds.
        against: Contestant that the others are compared with: ``x gloo`` is how many times faster.

    Returns:
        Lines of text: microseconds a call; algorithm and bus bandwidth in GB/s; how many times faster than `against`,
        and how many times the bound. ``~`` marks times that were taken beside other processes.
    """
    bounds = [bound for bound in BOUNDS if any(bound in result.samples for result in results)]
    columns = [report.cell("op", "op"), ("size", _size), *(report.time(bound, "us") for bound in bounds)]
    for name in names:
        columns += [report.time(name, "us"), _bandwidth("GB/s", name, algorithm_bandwidth)]
        columns += [_bandwidth("bus", name, bus_bandwidth)]
        columns += [report.ratio(f"x {against}", against, name)] if name != against else []
        # With registered buffers there is no staging.
        bound = DIRECT if name == competitors.REGISTERED else LIMIT
        columns += [report.ratio(f"/ {bound}", name, bound)] if bound in bounds else []
    return report.table(columns, results)


def _size(result: Result) -> str:
    return report.show_size(result.cell["size_bytes"]) if result.cell["size_bytes"] else "-"


def _bandwidth(title: str, name: str, of: Callable[[Result, str], float]) -> report.Column:
    """Return a column in GB/s, "-" for operations without bytes."""
    _, text = report.figure(title, [name], lambda result: of(result, name) / 1e9)
    return title, lambda result: text(result) if result.cell["size_bytes"] else "-"


def plot(path: str, results: Sequence[Result]) -> None:
    """Draw time over size, one panel for each operation, as SVG; equal results give equal files.

    Args:
        path: File to write.
        results: What was measured. Operations without sizes are left out.
    """
    sized = [result for result in results if result.cell["size_bytes"]]
    panels = [(_panel, found) for op in OPERATIONS if (found := [each for each in sized if each.cell["op"] == op])]
    rows = [panels[begin : begin + PLOT_COLUMNS] for begin in range(0, len(panels), PLOT_COLUMNS)]
    report.draw(path, rows, (4.2, 3.2))


def _panel(panel: Any, results: Sequence[Result]) -> None:
    for name in dict.fromkeys(name for result in results for name in result.samples):
        there = [result for result in results if name in result.samples]
        style = {"linestyle": ":", "color": "gray"} if name in BOUNDS else {"marker": "o", "markersize": 3}
        micros = [result.median(name) * 1e6 for result in there]
        panel.plot([result.cell["size_bytes"] for result in there], micros, label=name, **style)
    sizes = [result.cell["size_bytes"] for result in results]
    title = "{op}, {world} ranks".format_map(results[0].cell)
    report.finish(panel, title, 8, xscale="log", yscale="log", ylabel="microseconds a call")
    panel.set_xticks(sizes, list(map(report.show_size, sizes)), rotation=45, fontsize=7)
    panel.minorticks_off()
