"""What one rank does under `torchdist_ref.testing.run`: join the group, call the function, leave the group.

The same for thread ranks and process ranks; it knows nothing of how it was started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchdist_ref import groups
from torchdist_ref.groups import world
from torchdist_ref.stores import Store
from torchdist_ref.testing.outcomes import Outcome

# A collective that waits in vain should say so itself, before `run` loses patience and can only show a stack.
_SOONER = 0.8


@dataclass(frozen=True)
class Program:
    """A function to call on every rank, and the group to call it in."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    backend: str | None
    timeout: float
    init: bool

    def __call__(self, rank: int, make_store: Callable[[], Store]) -> Outcome:
        """Be one rank from beginning to end."""
        try:
            if self.init:
                self._join(rank, make_store())
            value = self.fn(rank, *self.args)
            if groups.is_initialized():
                groups.destroy_process_group()
        except BaseException as error:
            outcome = Outcome(rank, error=error)
            # The others may be waiting for this rank, which will not come.
            world.abort(f"rank {rank} {outcome}")
            return outcome
        return Outcome(rank, value)

    def _join(self, rank: int, store: Store) -> None:
        timeout = timedelta(seconds=self.timeout * _SOONER)
        groups.init_process_group(self.backend, store=store, rank=rank, world_size=self.world_size, timeout=timeout)
