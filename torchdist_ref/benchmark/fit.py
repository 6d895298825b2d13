"""``benchmark fit``: the numbers of a simulation's network, measured on two ranks of this machine.

Broadcasts, sums and gathers of several sizes are timed on two processes: over shared memory, and over TCP between two
network namespaces, which needs root; elsewhere over the loopback interface. The fit is the `simulation.Network` with
which the same calls take as long on simulated ranks: least squares of the relative errors, one call as good as another.
`simulation.Network.from_file` reads the JSON file. `predict` compares other calls, other sizes and training steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import exp, log
from typing import Any

import torch

from torchdist_ref.benchmark import competitors, modeled, report
from torchdist_ref.benchmark.harness import AddOption, Harness, Settings, at_least, many
from torchdist_ref.benchmark.modeled import SHARED_MEMORY, TCP, TimedCall
from torchdist_ref.benchmark.rounds import RankContext, Result
from torchdist_ref.benchmark.training import REF
from torchdist_ref.schedules import Network

OPS = ("broadcast", "reduce", "all_reduce", "all_gather")
SIZES = "32K,128K,512K,2M,8M"
MIB = 1024 * 1024
START = Network(
    alpha=50e-6, beta=1 / 2e9, gamma=1 / 30e9, local_alpha=1e-6, local_beta=1 / 10e9, copy=1 / 15e9, overhead=6e-6,
    cache=4 * MIB, memory=1 / 10e9, overlap=False,
)  # fmt: skip
# Numbers that the calls over each link decide. Those of the first hold for the second too.
FITTED = {
    SHARED_MEMORY: ("overhead", "local_alpha", "local_beta", "copy", "gamma", "cache", "memory"),
    TCP: ("alpha", "beta"),
}
ITERATIONS = 8
# Part of a logarithm by which a number is changed to see what depends on it.
NUDGE = 0.05
# Weight of a number's distance from its start, in logarithms, beside that of relative errors: for numbers that the
# calls do not decide.
INERTIA = 0.02


def add_options(add: AddOption) -> None:
    """Add the options of the command."""
    add("--sizes", default=SIZES, type=many(report.parse_size), help="bytes of the whole buffer")
    add("--repetitions", default=7, type=at_least(1), help="rounds")
    add("--seconds", default=0.02, type=float, help="of each turn")


def measure(context: RankContext, link: str, settings: Settings) -> None:
    """Measure the calls on one rank. Reports a result for each."""
    context.report(link)
    modeled.join(context, link)
    calls = [TimedCall(op, size) for op in OPS for size in settings.sizes]
    modeled.time_calls(context, link, calls, settings.repetitions, settings.seconds)
    competitors.leave()


def run(harness: Harness) -> None:
    """Measure both links, and fit."""
    modeled.on_links(harness, partial(measure, settings=harness.settings))
    network, found = START, harness.results[:]
    harness.results.clear()
    for link, names in FITTED.items():
        harness.head(f"fit of {link}")
        there = [each for each in found if each.cell["link"] == link]
        calls = [TimedCall(each.cell["op"], each.cell["nbytes"]) for each in there]
        measured = dict(zip(calls, [each.median(REF) for each in there], strict=True))
        network = replace(network, hosts=modeled.hosts_of(link))
        network = fitted(network, names, measured, modeled.simulated_calls)
        seconds = modeled.simulated_calls(network, calls)
        harness.results += map(modeled.with_simulated, there, seconds)
    harness.summary = {"network": {name: value for name, value in asdict(network).items() if name != "hosts"}}


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the table of the calls, and the numbers."""
    numbers = [f"{name} = {value:.4g}" for name, value in harness.summary["network"].items()]
    return "\n".join([modeled.table(results), "", *numbers])


def fitted(
    start: Network,
    names: Sequence[str],
    measured: Mapping[Any, float],
    simulate: Callable[[Network, Sequence[Any]], list[float]],
) -> Network:
    """Return the network with which simulated calls take as long as measured ones: least squares of logarithms.

    Args:
        start: The network to begin with, which has all other numbers.
        names: The numbers to choose.
        measured: Seconds of calls.
        simulate: Function that returns the seconds of the calls with a network.
    """
    calls, wanted = [*measured], _logarithms(measured.values())
    first = _logarithms(getattr(start, name) for name in names)

    def network(at: torch.Tensor) -> Network:
        numbers: dict[str, Any] = {name: exp(value) for name, value in zip(names, at.tolist(), strict=True)}
        return replace(start, **numbers)

    def errors(at: torch.Tensor) -> torch.Tensor:
        predicted = _logarithms(simulate(network(at), calls))
        return torch.cat([predicted - wanted, INERTIA * (at - first)])

    at, damping = first, 0.1
    here = errors(at)
    for _ in range(ITERATIONS):
        nudged = [errors(at + NUDGE * unit) for unit in torch.eye(len(names), dtype=torch.float64)]
        slopes = torch.stack([(each - here) / NUDGE for each in nudged], dim=1)
        normal, toward = slopes.T @ slopes, slopes.T @ here
        # No number changes by more than a factor of e at a time.
        step = torch.linalg.solve(normal + damping * normal.diag().diag(), toward).clamp(-1.0, 1.0)
        there = errors(at - step)
        better = bool(there.square().sum() < here.square().sum())
        at, here = (at - step, there) if better else (at, here)
        damping *= 0.3 if better else 5.0
    return network(at)


def _logarithms(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor([log(value) for value in values], dtype=torch.float64)
