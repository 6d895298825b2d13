"""Pipelined chain: pass the first piece on while the second one arrives.

A chain hands the tensor from rank to rank, which is slow, until it is cut into pieces: then all links work at
the same time, and for a long tensor the time is that of sending it once, whatever the number of ranks.

With ``s`` pieces: steps ``n - 2 + s``, time ``(n - 2 + s)(a + m/s b)``.
Source: van de Geijn, "On global combine operations", 1994; pipelining as in Träff, Ripke, Rougier 2008.

Do not add here: trees.
"""

from __future__ import annotations

from torchdist_ref.schedules.compose import reversed_, rooted, segmented, then
from torchdist_ref.schedules.direct import DATA
from torchdist_ref.schedules.schedule import Rounds, Schedule, carry

PIECES = 8


def broadcast(world: int, root: int = 0, pieces: int = PIECES) -> Schedule:
    """From the root along the ranks, piece after piece (default 8 pieces)."""
    rounds = Rounds(world - 1, lambda step: (carry(step, step + 1, DATA),))
    return rooted(segmented(Schedule("chain broadcast", world, rounds), pieces), root)


def reduce(world: int, root: int = 0, pieces: int = PIECES) -> Schedule:
    """The broadcast backwards."""
    return reversed_(broadcast(world, root, pieces), reduce=True, name="chain reduce")


def all_reduce(world: int) -> Schedule:
    """Towards rank 0, then back."""
    return then(reduce(world), broadcast(world), name="chain all_reduce")
