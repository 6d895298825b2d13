"""Harness of all benchmarks: it starts ranks, shows their progress, keeps their results and writes the report.

A command is a module with its `OPTIONS` and three functions: ``run(harness)`` measures, with `Harness.run`; what each
rank runs reports headings, numbers and results. ``show(harness, results)`` returns the tables of results, and
``entries(harness)`` the list for the JSON file. If there is a ``finish(harness)``, it draws pictures at the end.
`checkouts` replaces `Harness.run` by one on several checkouts.

Do not add here: what is measured.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from torchdist_ref.backends.registry import names
from torchdist_ref.benchmark import competitors, ranks, report
from torchdist_ref.benchmark.competitors import LeftOut
from torchdist_ref.benchmark.settings import Settings
from torchdist_ref.errors import ArgumentError, UnsupportedError, explain
from torchdist_ref.testing import namespaces


class Harness:
    """Run of one command; creating it without the package `rich` raises UnsupportedError.

    Attributes:
        settings: Settings of the command.
        results: Results so far.
        notes: Remarks for the report, such as the reason why a backend was left out.
        bar: Progress bar.
        shows_parts: Whether tables are printed at each heading, and not only at the end.
    """

    compares_checkouts = False
    shows_parts = False

    def __init__(self, command: ModuleType, settings: Settings) -> None:
        report.check_rich()
        self.command, self.settings = command, settings
        self.results: list[Any] = []
        self.notes: list[str] = []
        self.bar = report.ProgressBar(1)
        self._shown = 0

    @property
    def name(self) -> str:
        """Name of the command in the report."""
        return str(self.settings.benchmark)

    def begin(self, steps: int) -> None:
        """Show a bar of so many steps: results, or numbers that ranks report."""
        self.bar = report.ProgressBar(steps)

    def run(
        self,
        program: ranks.Program,
        world: int,
        extra: int = 0,
        hosts: bool = False,
        bits_per_second: float | None = None,
        mpi: bool = False,
    ) -> list[Any]:
        """Run a program on ranks; return what each returns.

        Args:
            program: Function of each rank.
            world: Number of ranks.
            extra: Bytes of `RankContext.memory`.
            hosts: Whether each half of the ranks has a host of its own.
            bits_per_second: Rate of the cable between the hosts.
            mpi: Whether ``mpiexec`` starts the ranks, which return nothing.

        Raises:
            UnsupportedError: This machine has no network namespaces, or this process may not make them.
        """
        if mpi:
            ranks.run_mpi_ranks(program, world, self.on_report, extra)
            return []
        if hosts and (reason := namespaces.missing()):
            raise UnsupportedError(f"benchmark: ranks can't be put on two hosts: {reason}.")
        with namespaces.hosts(ranks.HOSTS, bits_per_second) if hosts else nullcontext(()) as pair:
            return ranks.run_ranks(program, world, self.on_report, extra=extra, hosts=pair)

    def on_report(self, side: int, event: Any) -> None:
        """Handle a heading, the number of a step, a backend that is left out, or a result."""
        match event:
            case str():
                if self.shows_parts and event != self.bar.text:
                    self._show_new()
                self.bar.heading(event)
            case int():
                self.bar.advance()
            case LeftOut():
                self.note(str(event))
            case _:
                self.results.append(event)

    def note(self, text: str) -> None:
        """Keep a remark, and print it."""
        self.notes.append(text)
        self.print(text)

    def print(self, text: str) -> None:
        """Print beside the bar."""
        self.bar.clear()
        print(text, flush=True)

    def choose_backends(self, forked: bool = True) -> list[str]:
        """Return the backends of ``--backends`` that may run here, and note those that can't.

        Raises:
            ArgumentError: A name is unknown, or none is left.
        """
        found, left_out = split(self.settings.backends, forked)
        for each in left_out:
            self.note(str(each))
        if not found:
            raise ArgumentError(f"benchmark {self.name}: no backend is left to measure; see --backends.")
        return found

    def measure(self) -> None:
        """Run the command; show and write its results, after a Ctrl-C those that there are."""
        try:
            self.command.run(self)
        finally:
            self.bar.clear()
            if self.results:
                self._show_new()
                content = report.report(self.name, self.settings.as_json(), self.entries(), self.notes)
                report.write(self.settings.json, content | self.summary())
                self.finish()

    def _show_new(self) -> None:
        """Print the tables of results that have not been shown."""
        if new := self.results[self._shown :]:
            self._shown = len(self.results)
            self.print(self.show(new))

    def show(self, results: list[Any]) -> str:
        """Return the tables of results."""
        return str(self.command.show(self, results))

    def finish(self) -> None:
        """Print remarks at the end, and draw pictures."""
        if finish := getattr(self.command, "finish", None):
            finish(self)

    def entries(self) -> list[Any]:
        """Return the results for the report."""
        return list(self.command.entries(self))

    def summary(self) -> dict[str, Any]:
        """Return further keys of the report."""
        return {}


def split(asked: tuple[str, ...] | list[str], forked: bool = False) -> tuple[list[str], list[LeftOut]]:
    """Return the names that may run here, and those that can't.

    Args:
        asked: Names as in ``--backends``.
        forked: Whether ranks are forked in any case, so that those of MPI can't be had.

    Raises:
        ArgumentError: A name is unknown.

    >>> split(["ref", "torch:gloo"])
    (['ref', 'torch:gloo'], [])
    """
    out = [LeftOut(name, reason) for name in dict.fromkeys(asked) if (reason := _obstacle(name, forked))]
    return [name for name in dict.fromkeys(asked) if name not in {each.name for each in out}], out


def _obstacle(name: str, forked: bool) -> str:
    if name == "torch:gloo":
        return "" if competitors.torch_has_gloo() else "this torch was built without Gloo"
    package = competitors.UNDER_MPIEXEC.get(name)
    if package and importlib.util.find_spec(package) is None:
        return f"needs the package {package}: pip install 'torchdist_ref[mpi]'"
    if package and forked:
        return "this benchmark forks its ranks, and MPI's are started by mpiexec"
    if package and not ranks.find_mpiexec():
        return "no mpiexec was found, which has to start the ranks"
    others = (competitors.MPI4PY, competitors.REGISTERED)
    if name in (*names(), *others):
        return ""
    if package:
        return "this version of torchdist_ref has no such backend yet"
    expected = f"among {', '.join(dict.fromkeys([*names(), others[1], *competitors.UNDER_MPIEXEC, 'torch:gloo']))}"
    raise ArgumentError(explain("benchmark", "--backends", expected, name))
