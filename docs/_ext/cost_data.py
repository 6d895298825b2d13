"""Links, bus bandwidth and recorded times, as JSON for the player and the cost explorer.

Times are not here: `docs/_static/schedules.js` has the clock of `torchdist_ref.schedules.simulate`, and runs it on the
schedules of `schedule_data`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from speed import RECORDED

from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.schedules import Network

# Name for readers -> links within a host and between hosts, of `Network.preset`.
LINKS = {
    "NVLink, 400 Gb/s": ("nvlink", "400gbps"),
    "NVLink, 100 Gb/s": ("nvlink", "100gbps"),
    "PCIe, 100 Gb/s": ("pcie", "100gbps"),
    "PCIe, 25 Gb/s": ("pcie", "25gbps"),
    "shared memory, TCP": ("shared_memory", "tcp"),
}
MEASURED = "shared memory, TCP"
"""Links of the machine on which the recorded times were measured."""
LIBRARIES = (("ref", "ref"), ("gloo", "Gloo"), ("mpich", "MPICH"), ("openmpi", "Open MPI"))


def network(links: str, hosts: tuple[int, ...] | None = None) -> Network:
    """Return the network of some links."""
    return Network.preset(*LINKS[links], hosts=hosts)


def links() -> dict[str, dict[str, Any]]:
    """Return the numbers of each network, without hosts."""
    return {name: {key: value for key, value in asdict(network(name)).items() if key != "hosts"} for name in LINKS}


def benchmark(operation: str) -> str:
    """Return the name of an operation of the schedules in the benchmark."""
    return {"send": "sendrecv"}.get(operation, operation)


def bus_factor(operation: str, world: int) -> float | None:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines it; None where no bytes move.

    >>> bus_factor("all_reduce", 8), bus_factor("barrier", 8)
    (1.75, None)
    """
    found = OPERATIONS[benchmark(operation)]
    return found.factor(world) if found.sized else None


def recorded(operation: str) -> dict[str, list[dict[str, float]]]:
    """Return the recorded seconds of a call on two ranks by size and library, on one host and on two.

    The benchmark sends a message there and back; half of that is a message.
    """
    cells = json.loads(RECORDED.read_text(encoding="utf-8"))["cells"]
    kept = [cell for cell in cells if (cell["op"], cell["world"]) == (benchmark(operation), 2) and cell["bytes"]]
    calls = 2 if operation == "send" else 1
    found: dict[str, list[dict[str, float]]] = {"one host": [], "two hosts": []}
    for cell in sorted(kept, key=lambda cell: int(cell["bytes"])):
        row = {"bytes": cell["bytes"], "ref": cell["seconds"] / calls}
        row |= {name: cell[name] * row["ref"] for name, _ in LIBRARIES[1:] if name in cell}
        found["two hosts" if cell["namespaces"] else "one host"].append(row)
    return found


def of_operation(operation: str, worlds: Any) -> dict[str, Any]:
    """Return all of an operation that the explorer needs besides its schedules."""
    return {"bus": {world: bus_factor(operation, world) for world in worlds}, "recorded": recorded(operation)}
