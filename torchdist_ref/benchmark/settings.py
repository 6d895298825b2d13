"""Settings of a benchmark: the options of its command, checked, with lists split.

A command has a table of `Option`. Each names its default, its help, and a function that checks what was typed.
Do not add here: options of one command.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdist_ref.benchmark.report import parse_size
from torchdist_ref.errors import ArgumentError, explain

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
    return parse_size(text)


def sizes(command: str, option: str, text: str) -> tuple[int, ...]:
    """Split a list of sizes in bytes."""
    return tuple(map(parse_size, text.split(",")))


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
