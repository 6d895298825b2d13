"""Harness of all benchmarks: it starts ranks, shows progress, keeps results and writes the report.

A command is a module with `add_options`, which gets a parser's `add_argument`, and two functions. ``run(harness)``
measures, with `Harness.run`; what each rank runs reports headings, remarks and results.
``show(harness, results)`` returns the tables of results. A command may also have ``entries(results)``, the list for
the JSON file, and functions ``(path, results)`` that draw for the options of `PICTURES`. With ``--against-checkout``
the ranks run on several checkouts, and `checkouts` shows their results.

The functions before `Harness` check what was typed, as argparse's ``type=``.

Ranks of an older library load this file too, since the settings come with their program: what starts ranks is imported
where it is used. Do not add here: what is measured, or options of one command.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torchdist_ref.benchmark import checkouts, competitors, report
from torchdist_ref.benchmark.rounds import RankContext, Result
from torchdist_ref.errors import ArgumentError, DistError, UnsupportedError

T = TypeVar("T")
AddOption = Callable[..., Any]
Program = Callable[[RankContext], Any]
Settings = Namespace
# Options, and functions of commands, that draw into a file.
PICTURES = ("plot", "timeline")


def many(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return the function that splits a list, and reads its parts.

    >>> many(str)("ref,gloo,ref")
    ('ref', 'gloo')
    """

    def values(text: str) -> tuple[T, ...]:
        return tuple(dict.fromkeys(map(read, text.split(","))))

    return values


def among(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the function that splits a list of known names."""
    names = list(known)

    def name(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"expected names among {', '.join(names)}, got {text!r}")
        return text

    return many(name)


def at_least(least: int) -> Callable[[str], int]:
    """Return the function that reads a number that must not be less."""

    def number(text: str) -> int:
        if int(text) < least:
            raise ArgumentTypeError(f"expected at least {least}, got {text}")
        return int(text)

    return number


def file(path: str) -> str:
    """Check that a file can be written, before minutes of measuring."""
    target = Path(path)
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ArgumentTypeError(f"expected a file that can be written, in a folder that exists, got {path!r}")
    return path


def plot_file(path: str) -> str:
    """Check that a plot can be drawn and written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentTypeError("needs the package matplotlib: pip install matplotlib")
    return file(path)


def failures(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors of which the command line prints the message alone: these and others."""
    from torchdist_ref.testing import RankError

    return ArgumentError, DistError, RankError, *others


def add_common_options(name: str, add: AddOption) -> None:
    """Add the options that several commands have."""
    if name in checkouts.COMMANDS:
        text = "compare this checkout with an older one, which runs twice; a folder with a package torchdist_ref"
        add("--against-checkout", type=checkouts.folder, metavar="DIR", help=text)
    add("--json", type=file, metavar="FILE", help="write all samples, with the machine, versions and date")


class Harness:
    """Run of one command.

    Attributes:
        settings: Settings of the command, by the names of its options; ``benchmark`` is its name.
        against: Folder of the older checkout to compare with; None for none.
        results: Results so far.
        notes: Remarks for the report, such as the reason why a backend was left out.
        summary: Further entries of the report, by name.
        bar: Progress bar.
        shows_parts: Whether tables are printed at each heading, and not only at the end.
    """

    def __init__(self, command: ModuleType, settings: Settings) -> None:
        self.command, self.settings = command, settings
        self.against: str | None = getattr(settings, "against_checkout", None)
        self.results: list[Any] = []
        self.notes: list[str] = []
        self.summary: dict[str, Any] = {}
        self.bar = report.ProgressBar()
        self.shows_parts, self._shown, self._heading = False, 0, ""
        self._pending: list[list[Result]] = [[] for _ in checkouts.SIDES]

    def run(
        self, program: Program, world: int, mpi: bool = False, cable: float | None = None, count: int = 2
    ) -> list[Any]:
        """Run a program on ranks, and return what each returns; or on those of all checkouts at once.

        Args:
            program: Function of each rank.
            world: Number of ranks.
            mpi: Whether ``mpiexec`` starts the ranks, which return nothing.
            cable: Bits a second that each of several hosts sends, of which each has a part of the ranks; infinite for
                no limit. Default None: all ranks are on this machine itself.
            count: Number of these hosts. Default 2.

        Raises:
            UnsupportedError: This machine has no network namespaces, or this process may not make them.
        """
        from torchdist_ref.benchmark import ranks
        from torchdist_ref.testing import namespaces

        with ExitStack() as stack:
            hosts: Sequence[namespaces.Host] = ()
            if cable is not None:
                if reason := namespaces.missing():
                    raise UnsupportedError(f"benchmark: ranks can't be put on {count} hosts: {reason}.")
                hosts = stack.enter_context(namespaces.hosts(count, cable if isfinite(cable) else None))
            if self.against or mpi:
                sides = checkouts.folders(self.against)
                ranks.run_programs(program, world, self.on_report, sides, mpi, hosts)
                return []
            return ranks.run_ranks(program, world, self.on_report, hosts)

    def on_report(self, side: int, event: Any) -> None:
        """Handle a heading or a remark of the first side, or a result of any."""
        match event:
            case Result() if self.against:
                self._pending[side].append(event)
                while all(self._pending):
                    sides = [results.pop(0) for results in self._pending]
                    self.results += checkouts.merged(sides, "backends" in self.settings)
            case _ if side:
                pass
            case competitors.Note():
                self.note(event)
            case str():
                self.head(event)
            case (done, rounds):
                self.bar.show(self._heading, done, rounds)
            case _:
                self.results.append(event)

    def head(self, text: str) -> None:
        """Print the heading of a part, if it is another one, on standard error."""
        if text != self._heading:
            if self.shows_parts:
                self._show_new()
            self._heading = text
            self.bar.clear()
            print(f"{text} ...", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Keep a remark, and print it."""
        self.notes.append(text)
        self.bar.clear()
        print(text, flush=True)

    def choose_backends(self, forked: bool = True) -> list[str]:
        """Return the backends of ``--backends`` that may run here, and note those that can't.

        Raises:
            ArgumentError: A name is unknown, or none is left.
        """
        found, left_out = competitors.available(self.settings.backends, forked)
        if self.against:
            found = [name for name in found if name in checkouts.BACKENDS]
        for each in left_out:
            self.note(each)
        if not found:
            known = f", which compares {' and '.join(checkouts.BACKENDS)}" if self.against else ""
            raise ArgumentError(f"benchmark {self.settings.benchmark}{known}: no backend is left of --backends.")
        return found

    def measure(self) -> None:
        """Run the command; show and write its results, after a Ctrl-C those that there are."""
        try:
            self.command.run(self)
        finally:
            self.bar.clear()
            if self.results:
                self._show_new()
                if any(isinstance(each, Result) and each.noisy for each in self.results):
                    print("~: other processes used the processors in most rounds; repeat it on a quiet machine.")
                if self.settings.json:
                    self._write(self.settings.json)
                for name in PICTURES if not self.against else ():
                    if path := getattr(self.settings, name, None):
                        getattr(self.command, name)(path, self.results)
                        print(f"wrote {path}")

    def _show_new(self) -> None:
        """Print the tables of results that have not been shown."""
        if new := self.results[self._shown :]:
            self._shown = len(self.results)
            self.bar.clear()
            print(checkouts.show(new) if self.against else self.command.show(self, new), flush=True)

    def _write(self, path: str) -> None:
        """Write the report."""
        name, summary = self.settings.benchmark, self.summary
        entries = getattr(self.command, "entries", lambda results: [each.entry() for each in results])
        if self.against:
            name, entries, summary = f"{name} against checkout", checkouts.entries, checkouts.summary(self.results)
        content = report.report(name, vars(self.settings), entries(self.results), self.notes) | summary
        Path(path).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"wrote {path}")
