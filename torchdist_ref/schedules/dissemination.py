"""Dissemination: in step ``t`` tell the rank ``2^t`` after you that you, and all you heard of, are here.

After step ``t`` a rank has heard, directly or not, of the ``2^(t+1) - 1`` ranks before it: after
``ceil(log2 n)`` steps of everybody, for any world. Steps ``ceil(log2 n)``, no bytes: a barrier's least.
Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.

Do not add here: operations that carry data; a sum would count some ranks twice.
"""

from __future__ import annotations

from torchdist_ref.schedules.direct import TOKEN
from torchdist_ref.schedules.schedule import Move, Schedule, arriving, carry
from torchdist_ref.schedules.tree import steps


def barrier(world: int) -> Schedule:
    """Word from ever further away."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry((rank - (1 << step)) % world, rank, TOKEN)]

    rounds = arriving(world, steps(world), arrivals, period=1)
    return Schedule("dissemination barrier", world, rounds, chunks=0)
