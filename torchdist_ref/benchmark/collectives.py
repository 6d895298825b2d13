"""``benchmark collectives``: every operation, at every size, on every backend, side by side.

`measure` runs on each rank: for each operation and size it makes one set of tensors for all contestants, checks each
one's result, and times them in turns. The rest of the file is the command around it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

from torchdist_ref.benchmark import competitors, limit, report
from torchdist_ref.benchmark.harness import Harness, Option, Settings, among, at_least, file, size, sizes, texts
from torchdist_ref.benchmark.operations import OPERATIONS, Buffers, Make, MeasuredOperation
from torchdist_ref.benchmark.report import show_micros, show_number, show_size
from torchdist_ref.benchmark.rounds import (
    Action,
    RankContext,
    Result,
    calls_apart,
    calls_in_a_row,
    durations,
    own_clock,
    shared_out,
    take_turns,
)
from torchdist_ref.errors import ArgumentError, DistBackendError, UnsupportedError, explain

# Contestants that are bounds: the least cost with staging, and the least with direct reads of peers' tensors.
LIMIT, DIRECT = "limit", "direct"
BOUNDS = (LIMIT, DIRECT)
# Bytes. A whole buffer of one element for each rank may be larger than the size that was asked for.
SPARE_BYTES = 4096
# Up to this size a check after the timing costs next to nothing.
MAX_CHECKED_AGAIN_BYTES = 1 << 20
CALIBRATION_CALLS = 3
# One untimed call precedes every four timed ones: another backend has just used the processors.
CALLS_PER_WARM_UP_CALL = 4
PLOT_COLUMNS = 3


def _dtype(command: str, option: str, name: str) -> str:
    """Check the name of a dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype == torch.bool:
        raise ArgumentError(explain(command, option, "a dtype of torch that can be added", name))
    return name


def _device(command: str, option: str, name: str) -> str:
    """Check the device."""
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.device_count()):
        raise ArgumentError(explain(command, option, "cpu, or cuda where there is such a device", name))
    return name


OPTIONS = {
    "ops": Option(",".join(OPERATIONS), "operations", among(OPERATIONS)),
    "sizes": Option("4,1K,64K,1M,16M", "bytes of the whole buffer", sizes),
    "backends": Option("ref,gloo", "ref, registered (ref on registered buffers), gloo, mpi, torch:gloo, mpi4py", texts),
    "world": Option(2, "ranks", at_least(2)),
    "repetitions": Option(9, "rounds", at_least(1)),
    "seconds": Option(0.05, "length of a backend's turn"),
    "loop": Option(False, "calls back to back, not each from a common start line"),
    "dtype": Option("float32", "of the tensors", _dtype),
    "device": Option("cpu", "of the tensors: cpu or cuda; ranks share the devices", _device),
    "window": Option(None, "of the limit column (the backend's)", size),
    "namespaces": Option(False, "half the ranks on a host of their own (needs root)"),
    "against": Option(None, "backend that the others are compared with (the last one)"),
    "plot": Option(None, "draw time over size", file, "FILE.svg"),
}


def cases(settings: Settings) -> list[tuple[MeasuredOperation, int]]:
    """Return every operation at every size; those that move no bytes once."""
    found = [OPERATIONS[op] for op in settings.ops]
    return [(op, size) for op in found for size in (settings.sizes if op.sized else (0,))]


def measure(context: RankContext, settings: Settings) -> None:
    """Measure all cases on one rank. Reports the names of operations, and results."""
    bounds: dict[str, limit.Stages] = {}
    if settings.device == "cuda":
        torch.cuda.set_device(context.rank % torch.cuda.device_count())
    elif context.sides == 1:
        bounds[LIMIT] = limit.Stages(context.memory, settings.window, len(os.sched_getaffinity(0)))
    if competitors.REGISTERED in settings.backends:
        behind = context.memory[settings.world * settings.window :]
        bounds[DIRECT] = limit.Tensors(behind, _tensor_bytes(settings), settings.window)
    contestants = competitors.join(settings.backends, context)
    try:
        for operation, size in cases(settings):
            context.report(operation.name)
            context.report(Case(context, settings, operation, size).result(contestants, bounds))
            context.report(1)
    finally:
        competitors.leave()


def _tensor_bytes(settings: Settings) -> int:
    """Return the bytes of a rank's tensors in shared memory: source and result of the largest size."""
    return 2 * (max(settings.sizes) + SPARE_BYTES) if competitors.REGISTERED in settings.backends else 0


class Case:
    """One operation at one size, on one rank."""

    def __init__(self, context: RankContext, settings: Settings, operation: MeasuredOperation, size: int) -> None:
        self.context, self.settings, self.operation, self.size = context, settings, operation, size
        self.dtype = getattr(torch, settings.dtype)
        self.buffers = self._buffers(None)
        self.nbytes = self.buffers.whole * self.dtype.itemsize

    def _buffers(self, make: Make | None) -> Buffers:
        make = make or partial(_empty, self.settings.device)
        return self.operation.buffers(self.context.rank, self.context.world, self.size, self.dtype, make)

    def result(self, contestants: Sequence[competitors.Competitor], bounds: Mapping[str, limit.Stages]) -> Result:
        """Check, time, check again."""
        actions: dict[str, Action] = {}
        missing: dict[str, str] = {}
        buffers = {each.name: self._buffers(each.make) if each.make else self.buffers for each in contestants}
        for each in contestants:
            action = self.operation.bind(each.api, each.group, buffers[each.name])
            action = partial(_finish_on_device, action) if self.settings.device == "cuda" else action
            try:
                self.check(each.name, action, buffers[each.name])
            except UnsupportedError as error:
                if self.context.sides > 1:
                    # The other sides would wait for its turns.
                    raise
                missing[each.name] = str(error)
            else:
                actions[each.name] = action
        checked = dict(actions)
        if self.operation.sized:
            actions |= {name: self._bound(stages) for name, stages in bounds.items()}
        calls = {name: self._calls(action) for name, action in actions.items()}
        turns = {name: partial(self._turn, action, calls[name], name in BOUNDS) for name, action in actions.items()}
        samples, disturbed = take_turns(self.context, turns, self.settings.repetitions)
        if self.nbytes <= MAX_CHECKED_AGAIN_BYTES:
            for name, action in checked.items():
                self.check(name, action, buffers[name])
        cell = {"op": self.operation.name, "size_bytes": self.nbytes, "world": self.context.world}
        return Result(cell, samples, disturbed, {"calls": calls, "missing": missing})

    def _bound(self, stages: limit.Stages) -> Action:
        make = stages.maker(self.context.rank) if isinstance(stages, limit.Tensors) else None
        return limit.bind(self.operation, self._buffers(make) if make else self.buffers, stages)

    def check(self, name: str, action: Action, b: Buffers) -> None:
        """Call once and compare every element."""
        self.operation.load(b)
        action()
        expected = self.operation.answer(b)
        if expected is not None and not torch.equal(b.result.cpu(), expected):
            wrong = int((b.result.cpu() != expected).nonzero()[0])
            raise DistBackendError(
                f"benchmark: {self.operation.name} of {show_size(self.nbytes)} on {name!r} is wrong on rank {b.rank}: "
                f"element {wrong} of {expected.numel()} is {b.result[wrong]} and should be {expected[wrong]}."
            )
        # Sums of zeros stay zeros, however often they are summed.
        b.source.zero_()
        b.result.zero_()

    def _turn(self, action: Action, calls: int, bound: bool) -> list[float]:
        """Time a contestant's calls of one round; of a bound, whose ranks do not wait, the least time of its work."""
        context, loop = self.context, self.settings.loop
        parts, repeat = self.operation.messages * (calls if loop else 1), calls_in_a_row if loop else calls_apart
        clock, figure = (own_clock(context.world), shared_out) if bound else (perf_counter, durations)
        calls_apart(action, -(-calls // CALLS_PER_WARM_UP_CALL), context.wait)
        times = repeat(action, calls, context.wait, clock)
        return [median(figure(context.exchange(times), parts))]

    def _calls(self, action: Action) -> int:
        """Return the number of calls of a turn, the same on all ranks."""

        def first() -> list[float]:
            return durations(self.context.exchange(calls_apart(action, CALIBRATION_CALLS, self.context.wait)))

        return self.context.calls(first, self.settings.seconds)


def _empty(device: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device=device)


def _finish_on_device(action: Action) -> None:
    """Call, and wait for the device: a call may return before its work is done."""
    action()
    torch.cuda.synchronize()


def run(harness: Harness) -> None:
    """Measure; print a table for each operation as soon as it is complete."""
    from torchdist_ref.transports.segment import window_for

    settings = harness.settings
    settings.backends = harness.choose_backends(forked=False)
    mpi = bool(competitors.UNDER_MPIEXEC.keys() & set(settings.backends))
    if settings.against and settings.against not in settings.backends:
        expected = f"one of {', '.join(settings.backends)}"
        raise ArgumentError(explain("benchmark", "--against", expected, settings.against))
    if settings.device != "cpu" and competitors.REGISTERED in settings.backends:
        raise ArgumentError("benchmark: registered buffers are in the host's memory; leave out --device.")
    if settings.namespaces and mpi:
        raise ArgumentError("benchmark: --namespaces is for forked ranks, and those of MPI are started by mpiexec.")
    settings.window = settings.window or window_for(settings.world)
    harness.begin(len(cases(settings)))
    harness.shows_parts = not harness.compares_checkouts
    extra = settings.world * (settings.window + _tensor_bytes(settings))
    harness.run(partial(measure, settings=settings), settings.world, extra, hosts=settings.namespaces, mpi=mpi)


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table of one or more operations."""
    settings = harness.settings
    missing = results[0].more["missing"]
    names = [name for name in settings.backends if name in missing or any(name in each.samples for each in results)]
    against = settings.against if settings.against in names else names[-1]
    reasons = [f"{name} has no {results[0].cell['op']}: {reason}" for name, reason in missing.items()]
    harness.notes += reasons
    return "\n".join([table(results, names, against) + "\n", *reasons])


def finish(harness: Harness) -> None:
    """Print the remark on noise, and draw the plot."""
    if any(result.noisy for result in harness.results):
        print("~: other processes used the processors in most rounds; run it again when the machine is quiet.")
    if harness.settings.plot:
        plot(harness.settings.plot, harness.results, harness.settings.backends)


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


def entries(harness: Harness) -> list[dict[str, Any]]:
    """Return one flat entry for each result and contestant."""
    return [entry for result in harness.results for entry in result_entries(result)]


def result_entries(result: Result) -> list[dict[str, Any]]:
    """Return one flat entry of a report for each contestant."""
    return [
        {
            **result.cell,
            "backend": name,
            "seconds": result.median(name),
            "algorithm_bytes_per_second": algorithm_bandwidth(result, name),
            "bus_bytes_per_second": bus_bandwidth(result, name),
            "quartiles_seconds": quartiles(result.counted(samples)),
            "times_longer_than": {other: result.ratio(name, other) for other in result.samples if other != name},
            "quartiles_times_longer_than": {
                other: quartiles(result.ratios(name, other)) for other in result.samples if other != name
            },
            "calls_per_sample": result.more["calls"][name],
            "samples_seconds": list(samples),
            "disturbed": list(result.disturbed),
            "noisy": result.noisy,
        }
        for name, samples in result.samples.items()
    ]


def table(results: Sequence[Result], names: Sequence[str], against: str) -> str:
    """Return the table of one or more operations: the bounds, then the contestants side by side.

    Args:
        results: What was measured.
        names: The contestants, in the order of their columns, without the bounds.
        against: Contestant that the others are compared with: ``x gloo`` is how many times faster.

    Returns:
        Lines of text: microseconds a call; algorithm and bus bandwidth in GB/s; how many times faster than `against`,
        and how many times the bound (see `bound_of`). ``~`` marks times that were taken beside other processes.
    """
    bounds = [bound for bound in BOUNDS if any(bound in result.samples for result in results)]
    titles = ["op", "size", *(f"{bound} us" for bound in bounds)]
    for name in names:
        titles += [f"{name} us", "GB/s", "bus", *([f"x {against}"] if name != against else [])]
        titles += [f"/ {bound}" for bound in bound_of(name, bounds)]
    return report.columns(titles, [_line(result, names, against, bounds) for result in results])


def bound_of(name: str, bounds: Sequence[str]) -> list[str]:
    """Return the bound of a contestant, if it was measured: with registered buffers there is no staging.

    >>> bound_of("registered", ["limit", "direct"]), bound_of("gloo", ["limit", "direct"]), bound_of("ref", [])
    (['direct'], ['limit'], [])
    """
    return [bound for bound in bounds if bound == (DIRECT if name == "registered" else LIMIT)]


def _line(result: Result, names: Sequence[str], against: str, bounds: Sequence[str]) -> list[str]:
    size = result.cell["size_bytes"]
    cells = [result.cell["op"], show_size(size) if size else "-", *(_time(result, bound) for bound in bounds)]
    for name in names:
        there = name in result.samples and size
        both = (algorithm_bandwidth(result, name), bus_bandwidth(result, name)) if there else ()
        cells += [_time(result, name), *([show_number(each / 1e9) for each in both] or ["-", "-"])]
        pairs = [(against, name)] if name != against else []
        pairs += [(name, bound) for bound in bound_of(name, bounds)]
        cells += [show_number(result.ratio(*pair)) if set(pair) <= set(result.samples) else "-" for pair in pairs]
    return cells


def _time(result: Result, name: str) -> str:
    return show_micros(result.median(name)) + ("~" if result.noisy else "") if name in result.samples else "-"


def plot(path: str, results: Sequence[Result], names: Sequence[str]) -> None:
    """Draw time over size, one panel for each operation, as SVG; equal results give equal files.

    Args:
        path: File to write.
        results: What was measured. Operations without sizes are left out.
        names: The contestants, in the order of their colors.
    """
    sized = [result for result in results if result.cell["size_bytes"]]
    ops = dict.fromkeys(result.cell["op"] for result in sized)
    panels = [(partial(_panel, names), [each for each in sized if each.cell["op"] == op]) for op in ops]
    rows = [panels[begin : begin + PLOT_COLUMNS] for begin in range(0, len(panels), PLOT_COLUMNS)]
    report.draw(path, rows, (4.2, 3.2))


def _panel(names: Sequence[str], panel: Any, results: Sequence[Result]) -> None:
    for name in (*names, *BOUNDS):
        there = [result for result in results if name in result.samples]
        style = {"linestyle": ":", "color": "gray"} if name in BOUNDS else {"marker": "o", "markersize": 3}
        if there:
            micros = [result.median(name) * 1e6 for result in there]
            panel.plot([result.cell["size_bytes"] for result in there], micros, label=name, **style)
    sizes = [result.cell["size_bytes"] for result in results]
    panel.set_title("{op}, {world} ranks".format_map(results[0].cell), fontsize=10)
    panel.set(xscale="log", yscale="log", ylabel="microseconds a call")
    panel.set_xticks(sizes, list(map(show_size, sizes)), rotation=45, fontsize=7)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
