"""Examination of a reader's algorithm on the page of the workbench: verified, simulated and packed for the player.

This module runs in the browser, by Pyodide, beside `torchdist_ref.schedules` and `schedule_data`, unchanged. Do not add
here: imports of anything else.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

import schedule_data

from torchdist_ref import schedules
from torchdist_ref.schedules import Network, Schedule, Violation, simulate, violations
from torchdist_ref.schedules.cause import cause_of
from torchdist_ref.schedules.schedule import single, slot_name

# Violations that are listed, and slots that are marked.
MAX_SHOWN = 4
MAX_MARKED = 512
# Name -> seconds per message and per byte between ranks, each on a host of its own; 0 on one host.
NETWORKS = {
    "one host": (0.0, 0.0),
    "10 Gbit/s Ethernet": (30e-6, 0.8e-9),
    "1 Gbit/s Ethernet": (50e-6, 8e-9),
    "two continents": (50e-3, 8e-9),
}


def examine(code: str, operation: str, ranks: str, size: str, network: str) -> str:
    """Run code that defines `algorithm(world)`, and return as JSON whether its schedule is right, and the schedule.

    >>> wrong = "from torchdist_ref.schedules import *\\ndef algorithm(world): return Schedule('idle', world, ())"
    >>> json.loads(examine(wrong, "all_reduce", "2", "4", "one host"))["wrong"]
    [['0.0.0', 0], ['1.0.0', 0]]
    """
    world = int(ranks)
    try:
        names: dict[str, Any] = {"__name__": "algorithm"}
        exec(compile(code, "your code", "exec"), names)
        found = names["algorithm"](world)
        if not isinstance(found, Schedule):
            raise TypeError(f"algorithm({world}) returns {type(found).__name__}, not a Schedule")
        wrong = list(islice(violations(found, operation), MAX_MARKED))
        packed = schedule_data.of_schedule(operation, found)
    except Exception as error:
        return json.dumps({"right": False, "said": explained(error), "schedule": None, "wrong": []})
    if wrong:
        more = f"\n… and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        said = "Wrong.\n" + "\n".join(described(found, operation, one) for one in wrong[:MAX_SHOWN]) + more
        marks = [[".".join(map(str, (one.rank, *schedule_data.number(one.slot)))), one.round] for one in wrong]
        return json.dumps({"right": False, "said": said, "schedule": packed, "wrong": marks})
    said = f"Right on {world} ranks.\n{timed(found, operation, int(size), network)}"
    return json.dumps({"right": True, "said": said, "schedule": packed, "wrong": []})


def described(found: Schedule, operation: str, wrong: Violation) -> str:
    """Return a violation with the round and the move that cause it, or with those that wrote the slot last."""
    if wrong.round:
        return str(wrong)
    place = f"{wrong.rule}: rank {wrong.rank}, {slot_name(wrong.slot)}"
    values = f"    expected {wrong.expected}, got {wrong.got}"
    cause = cause_of(found, operation, wrong.rank, wrong.slot) if wrong.rule == "result" else None
    return f"{place}: {cause or last_write(found, wrong)}\n{values}"


def last_write(found: Schedule, wrong: Violation) -> str:
    """Return the last round and move that write the slot of a violation."""
    every = [(number, move) for number, moves in enumerate(found.rounds, 1) for move in single(moves)]
    into = [(number, move) for number, move in every if (move.dst, move.write) == (wrong.rank, wrong.slot)]
    return "round {}, move {}, wrote it last".format(*into[-1]) if into else "no move writes it"


def explained(error: Exception) -> str:
    """Return an error of the reader's code with its line."""
    line, trace = 0, sys.exc_info()[2]
    while trace:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "your code" else line
        trace = trace.tb_next
    where = f"line {line}: " if line else ""
    return f"{where}{type(error).__name__}: {error}"


def timed(found: Schedule, operation: str, size: int, network: str) -> str:
    """Return the simulated time of a schedule and of every algorithm of the catalogue, shortest first."""
    alpha, beta = NETWORKS[network]
    near = Network(hosts=(0,) * found.world)
    simulated = near if network == "one host" else Network(alpha=alpha, beta=beta)
    rows = {f"{name} (catalogue)": schedules.build(operation, name, found.world) for name in names(operation)}
    times = {name: simulate(schedule, size, simulated).total for name, schedule in {"yours": found, **rows}.items()}
    return "\n".join(f"{seconds * 1e6:12.1f} µs  {name}" for name, seconds in sorted(times.items(), key=lambda i: i[1]))


def names(operation: str) -> list[str]:
    """Return the algorithms of an operation that do not depend on hosts."""
    return [name for name in schedules.algorithms(operation) if name != "hierarchical"]
