"""``benchmark store``: how many sets, gets and adds a second a server answers, and how long a barrier takes.

Each server has a process of its own, and so has each client. Our clients ask our server, torch's clients torch's, and
a bare Python echo of as many bytes is asked by clients as bare: what is left of the difference is what a store is.
torch's `set` does not wait for an answer, so its rate says how fast requests can be written; ours is acknowledged.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

from torchdist_ref.benchmark import report, table
from torchdist_ref.benchmark.crew import Place, go
from torchdist_ref.benchmark.progress import Progress
from torchdist_ref.benchmark.store_sides import ECHO, OPERATIONS, SIDES, Action, Client
from torchdist_ref.benchmark.timing import durations
from torchdist_ref.benchmark.units import show_micros, show_number
from torchdist_ref.errors import ArgumentError, explain

_BATCH = 8
_BARRIERS = 5
BARRIER = "barrier"


@dataclass(frozen=True)
class Settings:
    """What to measure: numbers of clients, rounds, and the seconds of each server's turn in a round."""

    clients: tuple[int, ...] = (1, 8, 64)
    repetitions: int = 5
    seconds: float = 0.3


@dataclass(frozen=True)
class Result:
    """One operation at one number of clients: for each side, one sample a round.

    Samples are calls a second, of all clients together; of barriers, seconds of one.
    """

    operation: str
    clients: int
    samples: Mapping[str, Sequence[float]]

    def value(self, side: str) -> float:
        """The median over the rounds."""
        return median(self.samples[side])

    def ratio(self, of: str, to: str) -> float:
        """The median of same-round ratios."""
        return median(x / y for x, y in zip(self.samples[of], self.samples[to], strict=True))


def measure(place: Place, settings: Settings) -> None:
    """What each rank does: the first are servers, the others clients. Reports results."""
    names = list(SIDES)
    port, close = SIDES[names[place.rank]][0]() if place.rank < len(names) else (0, _nothing)
    ports = place.exchange(port)
    number = place.rank - len(names)
    mine = {name: SIDES[name][1](ports[i], f"client {number}") for i, name in enumerate(names)} if number >= 0 else {}
    for clients in settings.clients:
        active = mine if 0 <= number < clients else {}
        for operation in OPERATIONS:
            place.report(_rates(place, settings, active, operation, clients))
        place.report(_barriers(place, settings, active, clients))
    place.exchange(None)
    close()


def _nothing() -> None:
    """A client has no server to close."""


def _rates(place: Place, settings: Settings, mine: Mapping[str, Client], operation: str, clients: int) -> Result:
    samples: dict[str, list[float]] = {name: [] for name in SIDES}
    for turn in range(settings.repetitions):
        for name in _rotated(list(SIDES), turn):
            place.exchange(None)
            rate = _rate(mine[name].actions[operation], settings.seconds) if mine else 0.0
            samples[name].append(sum(place.exchange(rate)))
    return Result(operation, clients, samples)


def _rate(action: Action, seconds: float) -> float:
    """Calls a second of one client, over at least so many seconds."""
    calls, begin = 0, perf_counter()
    while (passed := perf_counter() - begin) < seconds:
        for _ in range(_BATCH):
            action()
        calls += _BATCH
    return calls / passed


def _barriers(place: Place, settings: Settings, mine: Mapping[str, Client], clients: int) -> Result:
    sides = [name for name in SIDES if name != ECHO]
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(settings.repetitions):
        for name in _rotated(sides, turn):
            place.exchange(None)
            times = place.exchange(_meet(mine[name], f"{clients}/{turn}", clients) if mine else [])
            samples[name].append(durations([each for each in times if each], _BARRIERS)[0])
    return Result(BARRIER, clients, samples)


def _meet(client: Client, key: str, clients: int) -> list[tuple[float, float]]:
    """Some barriers in a row, after one that gets everybody there."""
    assert client.barrier is not None
    client.barrier(f"barrier/{key}/first", clients)
    begin = perf_counter()
    for number in range(_BARRIERS):
        client.barrier(f"barrier/{key}/{number}", clients)
    return [(begin, perf_counter())]


def _rotated(names: list[str], turn: int) -> list[str]:
    first = turn % len(names)
    return names[first:] + names[:first]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    defaults = Settings()
    listed = ",".join(map(str, defaults.clients))
    parser.add_argument("--clients", default=listed, metavar="N,M,...", help="numbers of clients (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=defaults.repetitions, metavar="N", help="rounds")
    parser.add_argument("--seconds", type=float, default=defaults.seconds, metavar="S", help="of a server's turn")


def main(options: argparse.Namespace) -> int:
    """Measure and print."""
    settings = Settings(clients_of(options.clients), options.repetitions, options.seconds)
    results: list[Result] = []
    progress = Progress(len(settings.clients) * (len(OPERATIONS) + 1))

    def hear(result: Any) -> None:
        results.append(result)
        progress.heading(f"{result.clients} clients")
        progress.advance(result.operation)

    go(lambda place: measure(place, settings), len(SIDES) + max(settings.clients), hear)
    progress.clear()
    print(show(results))
    if options.json:
        report.write(options.json, report.report("store", asdict(settings), [_entry(result) for result in results]))
        print(f"wrote {options.json}")
    return 0


def clients_of(text: str) -> tuple[int, ...]:
    """Return the numbers of clients in ascending order.

    Raises:
        ArgumentError: The text holds something else.
    """
    if not all(part.isdigit() and int(part) > 0 for part in text.split(",")):
        raise ArgumentError(explain("benchmark store", "--clients", "numbers of clients, with commas between", text))
    return tuple(sorted(map(int, text.split(","))))


def _entry(result: Result) -> dict[str, Any]:
    unit = "seconds" if result.operation == BARRIER else "calls_per_second"
    return {
        "operation": result.operation,
        "clients": result.clients,
        "unit": unit,
        "samples": {side: list(samples) for side, samples in result.samples.items()},
        "medians": {side: result.value(side) for side in result.samples},
    }


def show(results: Sequence[Result]) -> str:
    """Both tables: rates, then barriers."""
    ours, theirs, _ = SIDES
    rates = [
        [
            result.operation,
            str(result.clients),
            *(show_number(result.value(side)) for side in SIDES),
            show_number(result.ratio(ours, theirs)),
            show_number(result.ratio(ECHO, ours)),
        ]
        for result in results
        if result.operation != BARRIER
    ]
    barriers = [
        [
            BARRIER,
            str(result.clients),
            show_micros(result.value(ours)),
            show_micros(result.value(theirs)),
            show_number(result.ratio(ours, theirs)),
        ]
        for result in results
        if result.operation == BARRIER
    ]
    titles = ["", "clients", f"{ours} /s", f"{theirs} /s", f"{ECHO} /s", f"rate / {theirs}", f"time / {ECHO}"]
    return "\n\n".join(
        [
            table.columns(titles, rates),
            "torch's set is not acknowledged; ours is.",
            table.columns(["", "clients", f"{ours} us", f"{theirs} us", f"time / {theirs}"], barriers),
        ]
    )
