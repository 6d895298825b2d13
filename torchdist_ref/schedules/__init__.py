"""Algorithms for collective operations, as values: build one, read it, check it, time it, draw it, run it.

>>> schedule = build("all_reduce", "ring", 4)
>>> len(schedule.rounds)
6
"""

from __future__ import annotations

from torchdist_ref.schedules.catalogue import (
    algorithms,
    build,
    choose,
    entry,
    operations,
    overrides,
    register,
    unregister,
)
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
from torchdist_ref.schedules.contract import Contract, contract
from torchdist_ref.schedules.cost import Cost, cost
from torchdist_ref.schedules.drawing import draw, timeline
from torchdist_ref.schedules.network import Network
from torchdist_ref.schedules.schedule import (
    Move,
    Pattern,
    Round,
    Rounds,
    Run,
    Schedule,
    Slot,
    arriving,
    carry,
    carry_run,
)
from torchdist_ref.schedules.simulate import Trace, TraceEvent, simulate
from torchdist_ref.schedules.verify import Violation, verify, violations

__all__ = [
    "Contract",
    "Cost",
    "Move",
    "Network",
    "Pattern",
    "Round",
    "Rounds",
    "Run",
    "Schedule",
    "Slot",
    "Trace",
    "TraceEvent",
    "Violation",
    "algorithms",
    "alongside",
    "arriving",
    "build",
    "carry",
    "carry_run",
    "choose",
    "contract",
    "cost",
    "draw",
    "each",
    "entry",
    "on_ranks",
    "only",
    "operations",
    "overrides",
    "register",
    "renamed",
    "reversed_",
    "rooted",
    "segmented",
    "simulate",
    "then",
    "timeline",
    "unregister",
    "verify",
    "violations",
]
