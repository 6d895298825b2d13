"""``benchmark predict``: real times beside those of a simulation of the same calls and training steps.

Two processes run collectives and DDP steps, over shared memory and over TCP; the same program then runs on simulated
ranks, with the network of `fit` or of a preset. Computation is measured in the simulation; calls take the time that the
network has for them. The fit has seen none of these sizes, and of the operations only three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from torchdist_ref.benchmark import competitors, modeled, report
from torchdist_ref.benchmark.harness import AddOption, Harness, Settings, among, at_least, many
from torchdist_ref.benchmark.modeled import TimedCall, TimedStep
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.rounds import RankContext, Result
from torchdist_ref.benchmark.training import HOOKS, MODELS
from torchdist_ref.schedules import Network

OPS = "all_reduce,reduce,broadcast,all_gather,reduce_scatter,all_to_all,gather,scatter"
NAMES = "none,allreduce,fp16,bf16,powersgd-2,noop"


def add_options(add: AddOption) -> None:
    """Add the options of the command."""
    add("--fit", metavar="FILE", help="the JSON file of benchmark fit; without it, numbers measured elsewhere")
    add("--links", default=",".join(modeled.LINKS), type=among(modeled.LINKS), help="of shared memory and TCP")
    add("--ops", default=OPS, type=among(OPERATIONS), help="operations")
    add("--sizes", default="64K,256K,1M,4M,16M", type=many(report.parse_size), help="bytes of the whole buffer")
    add("--models", default="mlp,resnet18", type=among(MODELS), help=f"of {', '.join(MODELS)}")
    add("--hooks", default=NAMES, type=among(HOOKS), help=f"of {', '.join(HOOKS)}")
    add("--repetitions", default=5, type=at_least(1), help="rounds")
    add("--seconds", default=0.02, type=float, help="of each turn")


def measure(context: RankContext, link: str, settings: Settings) -> None:
    """Measure calls and steps on one rank. Reports a result for each."""
    context.report(link)
    modeled.join(context, link)
    calls = [TimedCall(op, size) for op, size in product(settings.ops, settings.sizes)]
    modeled.time_calls(context, link, calls, settings.repetitions, settings.seconds)
    for model, hook in product(settings.models, settings.hooks):
        modeled.time_step(context, link, TimedStep(model, hook), settings.repetitions)
    competitors.leave()


def run(harness: Harness) -> None:
    """Measure, and simulate the same."""
    settings = harness.settings
    network = Network.from_file(settings.fit) if settings.fit else Network.preset("shared_memory", "tcp")
    modeled.on_links(harness, partial(measure, settings=settings), settings.links)
    found = harness.results[:]
    harness.results.clear()
    harness.head("simulation")
    harness.results += [modeled.with_simulated(each, simulated(network, each)) for each in found]
    harness.summary = {"tables": modeled.recorded(harness.results)}


def simulated(network: Network, result: Result) -> float:
    """Return the simulated seconds of what was measured."""
    cell = result.cell
    network = replace(network, hosts=modeled.hosts_of(cell["link"]))
    if "op" in cell:
        return modeled.simulated_calls(network, [TimedCall(cell["op"], cell["nbytes"])])[0]
    return modeled.simulated_step(network, TimedStep(cell["model"], cell["hook"]))


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return the tables of calls and steps."""
    return modeled.table(results)
