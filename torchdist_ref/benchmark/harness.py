"""Harness of all benchmarks: it reads the settings, starts ranks, shows progress, keeps results and writes the report.

A command is a module with its `OPTIONS` and two functions. ``run(harness)`` measures, with `Harness.run`; what each
rank runs reports headings, numbers and results. ``show(harness, results)`` returns the tables of results. A command may
also have ``entries(harness)``, the list for the JSON file, and ``finish(harness)``, which draws pictures at the end.
`checkouts` replaces `Harness.run` by one on several checkouts.

Each option of a command names its default, its help, and a function that checks what was typed.

Ranks of an older library load this file too, since the settings come with their program: what starts ranks is imported
where it is used. Do not add here: what is measured, or options of one command.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torchdist_ref.benchmark import competitors, report
from torchdist_ref.benchmark.rounds import RankContext
from torchdist_ref.errors import ArgumentError, UnsupportedError, explain

# From the command's name, the option's and what was typed to the setting.
Check = Callable[[str, str, Any], Any]


@dataclass(frozen=True)
class Option:
    """Option of a command.

    Attributes:
        default: Default as it would be typed, whose type is the option's; False for a flag, None for no text.
        help: Help, to which the default is added.
        check: Function that returns the setting. Default: as typed.
        metavar: Form of the value in the help. Default: by its type.
        alias: Former name, which is still accepted.
    """

    default: Any
    help: str
    check: Check | None = None
    metavar: str = ""
    alias: str = ""

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add the option to a parser."""
        if self.default is False:
            names = [f"--{each}" for each in (name, self.alias) if each]
            parser.add_argument(*names, action="store_true", help=self.help)
            return
        kind = str if self.default is None else type(self.default)
        text = "A,B,..." if name.endswith("s") else name.upper()
        metavar = self.metavar or {str: text, int: "N", float: "S"}[kind]
        shown = self.help if self.default is None else f"{self.help} (%(default)s)"
        parser.add_argument(f"--{name}", default=self.default, type=kind, metavar=metavar, help=shown)


class Settings(argparse.Namespace):
    """Settings of a command by the names of its options, and ``benchmark``, its name."""

    def as_json(self) -> dict[str, Any]:
        """Return the settings that are part of a report."""
        left_out = ("benchmark", "json", "plot")
        return {name: _plain(value) for name, value in vars(self).items() if name not in left_out}


def _plain(value: Any) -> Any:
    """Return a setting for JSON: of links, their attributes."""
    return list(map(_plain, value)) if isinstance(value, list | tuple) else getattr(value, "__dict__", value)


def checked(options: Mapping[str, Option], typed: argparse.Namespace) -> Settings:
    """Return the settings for what was typed.

    Raises:
        ArgumentError: An option has a wrong value.
    """
    settings = Settings(**vars(typed))
    for name, option in options.items():
        value = getattr(typed, name.replace("-", "_"))
        if option.check and value is not None:
            setattr(settings, name.replace("-", "_"), option.check(f"benchmark {typed.benchmark}", f"--{name}", value))
    return settings


def among(known: Iterable[str], separator: str = ",") -> Check:
    """Return the check of a list of known names.

    >>> among(["reduce", "barrier", "gather"])("benchmark", "--ops", "barrier,reduce")
    ('barrier', 'reduce')
    """
    names = list(known)

    def check(command: str, option: str, text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(separator)))
        if unknown := [name for name in found if name not in names]:
            raise ArgumentError(explain(command, option, f"among {', '.join(names)}", unknown[0]))
        return found

    return check


def texts(command: str, option: str, text: str) -> tuple[str, ...]:
    """Split a list."""
    return tuple(dict.fromkeys(text.split(",")))


def numbers(command: str, option: str, text: str) -> tuple[int, ...]:
    """Split a list of positive numbers, and sort them."""
    if not all(part.isdigit() and int(part) > 0 for part in text.split(",")):
        raise ArgumentError(explain(command, option, "positive numbers, with commas between", text))
    return tuple(sorted(map(int, text.split(","))))


def size(command: str, option: str, text: str) -> int:
    """Return bytes."""
    return report.parse_size(text)


def sizes(command: str, option: str, text: str) -> tuple[int, ...]:
    """Split a list of sizes in bytes."""
    return tuple(map(report.parse_size, text.split(",")))


def at_least(least: int) -> Check:
    """Return the check of a number that must not be less."""

    def check(command: str, option: str, number: int) -> int:
        if number < least:
            raise ArgumentError(explain(command, option, f"at least {least}", number))
        return number

    return check


def file(command: str, option: str, path: str) -> str:
    """Check that a file can be written, before minutes of measuring."""
    target = Path(path)
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ArgumentError(explain(command, option, "a file that can be written, in a folder that exists", path))
    return path


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
        program: Callable[[RankContext], Any],
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
        from torchdist_ref.benchmark import ranks
        from torchdist_ref.testing import namespaces

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
            case competitors.LeftOut():
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
        found, left_out = competitors.available(self.settings.backends, forked)
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
        entries = getattr(self.command, "entries", None)
        return list(entries(self)) if entries else [each.entry() for each in self.results]

    def summary(self) -> dict[str, Any]:
        """Return further keys of the report."""
        return {}
