"""``benchmark hooks``: what each DDP communication hook sends, gets wrong and takes, while a model learns.

Two models: a small convolutional network on handwritten digits (scikit-learn's), and a character transformer on the
standard library's own sources. Links: ``fast`` is this machine's own; a rate such as ``100mbit`` puts the ranks on two
hosts (network namespaces; needs root and iproute2) with a cable of that rate between them. Where that can't be done,
times on that link are modelled from bytes and marked so.

hooks: HOOKS
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torchdist_ref.backends import registry
from torchdist_ref.benchmark import (
    competitors,
    hooks_links,
    hooks_measure,
    hooks_plot,
    hooks_table,
    hooks_tasks,
    hooks_timeline,
    plot,
    report,
)
from torchdist_ref.benchmark.hooks_contestants import CONTESTANTS
from torchdist_ref.benchmark.hooks_links import FAST, Link
from torchdist_ref.benchmark.hooks_measure import Settings
from torchdist_ref.benchmark.hooks_results import Result, select
from torchdist_ref.benchmark.progress import Progress
from torchdist_ref.errors import ArgumentError, explain

_LIST = "A,B,..."
_TURNS, _QUICK = 10, 3

__doc__ = (__doc__ or "").replace("HOOKS", ", ".join(CONTESTANTS))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("--hooks", default=",".join(CONTESTANTS), metavar=_LIST, help="which hooks (default: all)")
    parser.add_argument("--tasks", default=",".join(hooks_tasks.TASKS), metavar=_LIST, help="models (%(default)s)")
    parser.add_argument("--backends", default="ref,gloo", metavar=_LIST, help="backends (%(default)s)")
    parser.add_argument(
        "--links", default=f"{FAST},1gbit,100mbit", metavar=_LIST, help=f"{FAST}, or rates (%(default)s)"
    )
    parser.add_argument("--world", type=int, default=2, metavar="N", help="ranks (%(default)s)")
    parser.add_argument(
        "--turns",
        type=int,
        default=_TURNS,
        metavar="N",
        help=f"of {hooks_measure.TURN} steps for each hook; the first isn't counted (%(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK} turns: to look at, not to rely on")
    parser.add_argument("--modelled", action="store_true", help="compute slow links, even if they can be had")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw time, error and loss")
    parser.add_argument("--timeline", metavar="FILE.svg", help="draw one step of each hook")


def main(options: argparse.Namespace) -> int:
    """Measure, and print a table for each task and backend."""
    settings, notes = _settings(options)
    show = _Show(settings, notes)
    try:
        for link in settings.links:
            show.measure(link, options.modelled)
    finally:
        show.finish()
        _keep(options, settings, show)
    return 0


def _settings(options: argparse.Namespace) -> tuple[Settings, list[str]]:
    names, left_out = competitors.split(options.backends.split(","), forked=True)
    if not names or not set(names) <= set(registry.names()):
        expected = "backends of this library, whose groups DDP takes: ref or gloo"
        raise ArgumentError(explain("benchmark hooks", "--backends", expected, options.backends))
    hooks = _known("--hooks", options.hooks, CONTESTANTS)
    tasks = _known("--tasks", options.tasks, hooks_tasks.TASKS)
    turns = _QUICK if options.quick else options.turns
    if options.world < 2 or turns < 2:
        raise ArgumentError("benchmark hooks: --world must be at least 2 and --turns at least 2.")
    notes = [str(each) for each in left_out]
    notes += [f"{task} is left out: {why}" for task in tasks if (why := hooks_tasks.missing(task))]
    there = tuple(task for task in tasks if not hooks_tasks.missing(task))
    if not there:
        raise ArgumentError(f"benchmark hooks: no task is left to learn. {' '.join(notes)}")
    links = tuple(map(hooks_links.parse, dict.fromkeys(options.links.split(","))))
    return Settings(there, tuple(names), links, hooks, turns, options.world), notes


def _known(option: str, text: str, among: Sequence[str] | dict[str, Any]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in among]:
        raise ArgumentError(explain("benchmark hooks", option, f"among {', '.join(among)}", unknown[0]))
    return names


class _Show:
    """Hears rank 0: moves the bar, and keeps results until a task's table can be printed."""

    def __init__(self, settings: Settings, notes: list[str]) -> None:
        self.results: list[Result] = []
        self.notes = notes
        self._settings = settings
        self._progress = Progress(settings.rounds())
        for note in notes:
            print(note, flush=True)

    def measure(self, link: Link, modelled: bool) -> None:
        """All on one link; if it can't be had, or is not to be, as a model."""
        why = "as asked" if modelled and link.bits_per_second else hooks_links.obstacle(link)
        if not why:
            hooks_measure.on_link(self._settings, link, self.hear)
            return
        self._note(f"{link.name} is modelled, {why}: the step on the fast link, and the time that its bytes take.")
        if not select(self.results, link=FAST):
            hooks_measure.on_link(self._settings, Link(FAST), self.hear)
        self.results += [result.on(link) for result in select(self.results, link=FAST)]
        for _ in range(self._settings.rounds() // len(self._settings.links)):
            self._progress.advance()

    def hear(self, event: Any) -> None:
        """A result, the number of a round, or words."""
        match event:
            case Result():
                self.results.append(event)
            case competitors.LeftOut():
                self._note(str(event))
            case int():
                self._progress.advance()
            case str():
                self._progress.heading(event)

    def finish(self) -> None:
        """Print the tables of what there is."""
        self._progress.clear()
        for task in self._settings.tasks:
            for backend in self._settings.backends:
                if found := select(self.results, task=task, backend=backend):
                    print(hooks_table.show(found), end="\n\n", flush=True)
        if self.results:
            print(hooks_table.LEGEND)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._progress.clear()
        print(text, flush=True)


def _keep(options: argparse.Namespace, settings: Settings, show: _Show) -> None:
    """Write what was asked for; after a Ctrl-C, of what there is."""
    if options.json and show.results:
        entries = [result.as_json() for result in show.results]
        report.write(options.json, report.report("hooks", asdict(settings), entries, show.notes))
        print(f"wrote {options.json}")
    if options.timeline and show.results:
        hooks_timeline.write(options.timeline, show.results)
        print(f"wrote {options.timeline}")
    if options.plot and show.results:
        if plot.available():
            hooks_plot.draw(options.plot, show.results)
            print(f"wrote {options.plot}")
        else:
            print("no plot: matplotlib is not installed (pip install matplotlib)")
