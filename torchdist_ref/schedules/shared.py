"""Shared: the work of a rooted call is divided among the ranks, chunk by chunk, where all can reach all tensors.

Chunk ``c`` is the business of rank ``c``, wherever it comes from and goes to: in a reduction it adds everybody's into
the root's, in a broadcast it copies the root's to everybody. So all ranks work at once and nothing is moved twice. Only
a backend whose ranks can write into each other's tensors can run it as it is meant (registered buffers).

Steps 1. Bytes handled by a rank: ``(n - 1)/n m`` (``m``: the whole buffer).

Do not add here: schedules whose moves the receiver carries out (`direct`, `two_shot`).
"""

from __future__ import annotations

from torchdist_ref.schedules.direct import others
from torchdist_ref.schedules.schedule import Schedule, carry


def reduce(world: int, root: int = 0) -> Schedule:
    """Rank ``c`` reduces chunk ``c`` of everybody's ``data`` into the root's."""
    peers = others(root, world)
    moves = tuple(carry(peer, root, ("data", chunk), reduce=True) for peer in peers for chunk in range(world))
    return Schedule("shared reduce", world, (moves,) if moves else (), world)


def broadcast(world: int, root: int = 0) -> Schedule:
    """Rank ``c`` copies chunk ``c`` of the root's ``data`` into everybody's."""
    moves = tuple(carry(root, peer, ("data", chunk)) for peer in others(root, world) for chunk in range(world))
    return Schedule("shared broadcast", world, (moves,) if moves else (), world)
