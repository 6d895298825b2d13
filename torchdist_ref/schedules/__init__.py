"""Algorithms for collective operations, as values: build one, read it, check it, clock it, draw it, run it.

>>> schedule = build("all_reduce", "ring", 4)
>>> len(schedule.rounds)
6
"""

from __future__ import annotations

from torchdist_ref.schedules.catalogue import algorithms, build, entry, operations
from torchdist_ref.schedules.choose import choose, overrides
from torchdist_ref.schedules.compose import (
    alongside,
    each,
    on_ranks,
    only,
    renamed,
    reversed_,
    rooted,
    segmented,
    then,
)
from torchdist_ref.schedules.schedule import (
    Copy,
    CopyReduce,
    Move,
    Recv,
    RecvReduce,
    Round,
    Rounds,
    Schedule,
    Send,
    Slot,
    Step,
    arriving,
    carry,
    project,
)

__all__ = [
    "Copy",
    "CopyReduce",
    "Move",
    "Recv",
    "RecvReduce",
    "Round",
    "Rounds",
    "Schedule",
    "Send",
    "Slot",
    "Step",
    "algorithms",
    "alongside",
    "arriving",
    "build",
    "carry",
    "choose",
    "each",
    "entry",
    "on_ranks",
    "only",
    "operations",
    "overrides",
    "project",
    "renamed",
    "reversed_",
    "rooted",
    "segmented",
    "then",
]
