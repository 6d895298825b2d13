"""Harness of all benchmarks: options, rounds in which contestants take turns, and the samples that they yield.

`take_turns` runs on every rank: all contestants are alive at once, and in each round every one has a turn, the first
being another each time. So what slows down the machine slows down all, and a ratio is the median of the ratios within
rounds. `collect` runs in the parent: it starts the ranks, advances the bar, and returns their results.

Do not add here: what is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import process_time
from typing import Any

from torchdist_ref.benchmark.ranks import Program, RankContext, run_ranks
from torchdist_ref.benchmark.report import ProgressBar
from torchdist_ref.benchmark.timing import OtherProcesses, rotated
from torchdist_ref.errors import ArgumentError, explain

LIST = "A,B,..."
Turn = Callable[[], Sequence[float]]


@dataclass(frozen=True)
class Result:
    """Samples of one cell of a benchmark: one operation at one size, one model with one hook, and so on.

    All contestants have samples of the same rounds, and a round is disturbed or not for all of them. Where at least
    half of the rounds are undisturbed only those count; else all do, and the result is marked as noisy.

    Attributes:
        cell: Names of the cell's parts, and their values.
        samples: By contestant, one value a round; seconds, or rates of stores.
        disturbed: For each round, whether other processes used the processors; empty if that was not observed.
        more: Other facts about the cell.
    """

    cell: Mapping[str, Any]
    samples: Mapping[str, Sequence[float]]
    disturbed: Sequence[bool] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def noisy(self) -> bool:
        """Whether most rounds were disturbed."""
        return 2 * sum(self.disturbed) > len(self.disturbed)

    def counted(self, values: Sequence[float]) -> list[float]:
        """Return the values of the rounds that count."""
        if self.noisy or not self.disturbed:
            return list(values)
        return [value for value, bad in zip(values, self.disturbed, strict=True) if not bad]

    def median(self, name: str) -> float:
        """Return the median of a contestant's samples."""
        return float(median(self.counted(self.samples[name])))

    def ratios(self, of: str, to: str) -> list[float]:
        """Return one contestant's samples over another's of the same rounds."""
        return self.counted([x / y for x, y in zip(self.samples[of], self.samples[to], strict=True)])

    def ratio(self, of: str, to: str) -> float:
        """Return how many times longer one contestant takes than another: the median over rounds.

        >>> Result({"op": "barrier"}, {"a": [2, 8, 3], "b": [1, 2, 3]}).ratio("a", "b")
        2.0
        """
        return float(median(self.ratios(of, to)))

    def entry(self) -> dict[str, Any]:
        """Return a flat entry of a report."""
        samples = {name: list(values) for name, values in self.samples.items()}
        return {**self.cell, **self.more, "samples": samples, "disturbed": list(self.disturbed)}


def take_turns(
    context: RankContext, contestants: Mapping[str, Turn], rounds: int, after_round: Callable[[int], None] | None = None
) -> tuple[dict[str, list[float]], list[bool]]:
    """Let contestants take turns.

    Args:
        context: This rank.
        contestants: By name, a function that runs a turn and returns its samples. Called on all ranks alike.
        rounds: Number of rounds.
        after_round: Called with the number of each completed round.

    Returns:
        The samples by contestant, and for each round whether other processes disturbed it.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    disturbed, others = [], OtherProcesses()
    for turn in range(rounds):
        others.mark()
        used = process_time()
        for name in rotated([*contestants], turn):
            samples[name] += contestants[name]()
        disturbed.append(others.disturbed(sum(context.exchange(process_time() - used))))
        if after_round:
            after_round(turn)
    return samples, disturbed


def collect(
    program: Program, world: int, bar: ProgressBar, on_other: Callable[[Any], None] | None = None
) -> list[Result]:
    """Run a program on forked ranks, and return the results that it reports.

    A text that it reports is a heading of the bar, a number advances the bar, and the rest goes to `on_other`.
    """
    results: list[Result] = []

    def on_report(event: Any) -> None:
        match event:
            case Result():
                results.append(event)
            case str():
                bar.heading(event)
            case int():
                bar.advance()
            case _ if on_other:
                on_other(event)

    try:
        run_ranks(program, world, on_report)
    finally:
        bar.clear()
    return results


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as the settings of a report."""
    return {name: value for name, value in vars(options).items() if name not in ("benchmark", "json", "plot")}


def names(command: str, option: str, text: str, known: Iterable[str], separator: str = ",") -> tuple[str, ...]:
    """Split a list of names.

    Raises:
        ArgumentError: One is unknown.

    >>> names("benchmark", "--ops", "barrier,reduce", ["reduce", "barrier", "gather"])
    ('barrier', 'reduce')
    """
    found = tuple(dict.fromkeys(text.split(separator)))
    known = list(known)
    if unknown := [name for name in found if name not in known]:
        raise ArgumentError(explain(command, option, f"among {', '.join(known)}", unknown[0]))
    return found


def numbers(command: str, option: str, text: str) -> tuple[int, ...]:
    """Split a list of positive numbers, and sort them.

    Raises:
        ArgumentError: The text has something else.
    """
    if not all(part.isdigit() and int(part) > 0 for part in text.split(",")):
        raise ArgumentError(explain(command, option, "positive numbers, with commas between", text))
    return tuple(sorted(map(int, text.split(","))))


def check_least(command: str, options: argparse.Namespace, **least: int) -> None:
    """Check that options are not less than these numbers.

    Raises:
        ArgumentError: One is.
    """
    for name, number in least.items():
        if getattr(options, name) < number:
            raise ArgumentError(explain(command, f"--{name}", f"at least {number}", getattr(options, name)))


def add_options(parser: argparse.ArgumentParser, **options: tuple[Any, str]) -> None:
    """Add options, each with its default and its help; the default's type is the option's."""
    for name, (default, description) in options.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=description)
        else:
            kind = str if default is None else type(default)
            shown = description if default is None else f"{description} (%(default)s)"
            text = LIST if name.endswith("s") else name.upper()
            metavar = {str: text, int: "N", float: "S"}[kind]
            parser.add_argument(f"--{name}", default=default, type=kind, metavar=metavar, help=shown)
