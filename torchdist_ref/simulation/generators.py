"""The state of torch's default generator, which each simulated rank has for itself.

A rank of a real job is a process, with a generator of its own. Simulated ranks are threads of one process and would
draw from one stream, in the order in which they run: `torch.manual_seed(0)` on all ranks would then not give them equal
models. As only one of them runs at a time, the state changes with the baton. It is copied in less than a microsecond.

Python's `random` and NumPy's global generator stay shared: their states take longer to copy than a turn lasts.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Generators:
    """States of torch's default generator on the CPU, by rank. Each begins with the state that it has now."""

    def __init__(self) -> None:
        self._generator = torch.default_generator
        self._before = self._generator.get_state()
        self._states: dict[int, Tensor] = {}
        self._rank: int | None = None

    def change_to(self, rank: int) -> None:
        """Give the generator to the rank that runs next."""
        if rank == self._rank:
            return
        if self._rank is not None:
            self._states[self._rank] = self._generator.get_state()
        self._generator.set_state(self._states.get(rank, self._before))
        self._rank = rank

    def restore(self) -> None:
        """Give the process its own state back."""
        self._generator.set_state(self._before)
