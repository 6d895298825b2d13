"""Collectives of the benchmark, a line of JSON for each result as soon as it is there.

``python -m tests.gpu.collectives EVENTS DEVICE WORLD OPS SIZES BACKEND`` times operations at each size on one backend,
and writes one line of JSON for each. The table on a terminal is ``python -m torchdist_ref.benchmark --device cuda``.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.supervise import Events
from torchdist_ref.benchmark import __main__ as benchmark
from torchdist_ref.benchmark import collectives, ranks
from torchdist_ref.benchmark.rounds import Result
from torchdist_ref.testing import simulated_device
from torchdist_ref.transports.segment import window_for

KEPT = ("op", "size_bytes", "world", "backend", "seconds", "bus_bytes_per_second", "quartiles_seconds")
RUN = ("--repetitions", "5", "--seconds", "0.02")


def main(path: str, device: str, world: str, ops: str, sizes: str, backend: str) -> None:
    """Measure, and record each result as it comes."""
    events = Events(Path(path))
    if device == "sim":
        simulated_device.install()
    wanted = ["--world", world, "--ops", ops, "--sizes", sizes, "--backends", backend, "--device", device]
    settings = benchmark.parse(["collectives", *wanted, *RUN])
    settings.window = window_for(settings.world)

    def record(side: int, event: Any) -> None:
        if isinstance(event, Result):
            for entry in collectives.entries([event]):
                if entry["backend"] == backend:
                    events.write(event="end", **{key: entry[key] for key in KEPT})
            for name, reason in event.more["missing"].items():
                events.write(event="missing", op=event.cell["op"], backend=name, reason=reason)

    ranks.run_ranks(partial(collectives.measure, settings=settings), settings.world, record)


if __name__ == "__main__":
    main(*sys.argv[1:])
