"""Cells on simulated ranks: ``%%spmd --simulated -n 64`` runs a cell in the notebook's process, on virtual time.

The ranks are those of `torchdist_ref.simulation.run`, so they have a default group already. They see the notebook's
variables, and what they assign ends with the cell. Do not add parsing or printing here: it belongs to `magic`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from io import StringIO
from typing import Any

from torchdist_ref import simulation
from torchdist_ref.notebook import display
from torchdist_ref.notebook.output import Item
from torchdist_ref.notebook.rank import CELL, run_cell
from torchdist_ref.simulation.scheduler import current_task


class _Streams:
    """Standard output during the run: that of ranks is kept for each of them, all other is passed on."""

    def __init__(self, other: Any, outputs: list[list[Item]]) -> None:
        self._other, self._outputs = other, outputs
        self._started = [StringIO() for _ in outputs]

    def write(self, text: str) -> int:
        """Keep or pass on some text."""
        task = current_task()
        if task is None:
            return int(self._other.write(text))
        return self._started[task.owner].write(text)

    def flush(self) -> None:
        """Pass on what the other stream has."""
        if current_task() is None:
            self._other.flush()

    def end_lines(self, rank: int) -> None:
        """Add what a rank has written so far to its output, before a value that it displays, or at the end."""
        text = self._started[rank].getvalue()
        if text:
            self._outputs[rank] += text.removesuffix("\n").split("\n")
            self._started[rank] = StringIO()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def run_on_simulated_ranks(
    source: str,
    world_size: int,
    variables: Mapping[str, Any],
    show: Callable[[int, Item], None],
    seed: int = 0,
    timeout: float | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> simulation.SimulatedRun:
    """Run the text of a cell on simulated ranks, and show the output of each in rank order, also if one fails.

    Args:
        source: The text.
        world_size: Number of ranks.
        variables: Global variables with which each rank begins.
        show: Function that gets a rank, and a line of its output or the representations of a value.
        seed: As for `simulation.run`.
        timeout: As for `simulation.run`.
        progress: As for `simulation.run`.

    Returns:
        The run; its values are None.

    Raises:
        RankError: A rank has failed.

    Example:
        >>> cell = "import torch.distributed as dist; print('begins'); dist.get_rank() * ten"
        >>> run = run_on_simulated_ranks(cell, 2, {"ten": 10}, lambda rank, item: print(rank, item))
        0 begins
        0 {'text/plain': '0'}
        1 begins
        1 {'text/plain': '10'}
    """
    outputs: list[list[Item]] = [[] for _ in range(world_size)]
    streams = _Streams(sys.stdout, outputs)

    def program(rank: int) -> None:
        def show_value(value: Any) -> None:
            streams.end_lines(rank)
            outputs[rank].append(display.bundle_of(value))

        run_cell(source, f"{CELL}on simulated ranks>", dict(variables), show_value)

    # The names of clocks and locks that the notebook has imported are replaced, too.
    program.__module__ = str(variables.get("__name__", "__main__"))
    former, sys.stdout = sys.stdout, streams
    try:
        return simulation.run(program, world_size, seed=seed, timeout=timeout, progress=progress)
    finally:
        sys.stdout = former
        for rank, items in enumerate(outputs):
            streams.end_lines(rank)
            for item in items:
                show(rank, item)
