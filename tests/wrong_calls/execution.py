"""Execution of the table of wrong calls: each kind in a world of its own, its rows one after the other.

Ranks are threads unless a row needs processes. After the rows the ranks reduce a tensor, which shows that the wrong
calls have not hurt the group.
"""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

import torchdist_ref as dist
from tests.wrong_calls.table import Kind
from torchdist_ref.testing import fill, run

# No call waits for it. On a busy machine the ranks need some of it.
TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class Attempt:
    """Outcome of one row on one rank.

    Attributes:
        kinds: Class names of the exception and its bases; ``"warning"`` for a warning, nothing for a result.
        message: Its text, or the result's.
        seconds: Time that the call took.
        see: Last line of the exception's traceback.
    """

    kinds: tuple[str, ...]
    message: str
    seconds: float
    see: str = ""


def attempts(kind: Kind, backend: str = "ref") -> list[list[Attempt]]:
    """Execute all rows of a kind, and return for each row what each rank got."""
    if kind.world == "alone":
        return [[attempt] for attempt in _alone(kind)]
    if kind.world == "processes":
        of_ranks = run(_program, 2, kind, None, ranks="processes", backend=backend, timeout=30.0)
    else:
        together = threading.Barrier(2, timeout=20.0)
        of_ranks = run(_on_thread, 2, kind, backend, dist.HashStore(), together, init=False, timeout=30.0)
    return [list(row) for row in zip(*of_ranks, strict=True)]


def _alone(kind: Kind) -> Iterator[Attempt]:
    for row in kind.rows:
        yield attempt(row.call, {}, True)


def _on_thread(rank: int, kind: Kind, backend: str, store: dist.Store, together: threading.Barrier) -> list[Attempt]:
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    try:
        return _program(rank, kind, together)
    finally:
        dist.destroy_process_group()


def _program(rank: int, kind: Kind, together: threading.Barrier | None) -> list[Attempt]:
    group = dist.new_group(timeout=TIMEOUT)
    names = {"rank": rank, "other": 1 - rank, "group": group}
    found = []
    for row in kind.rows:
        if together is not None:
            # A rank that waited in vain in the last row would be late in this one.
            together.wait()
        # The list of recorded warnings belongs to the process, so only ranks that are processes have their own.
        found.append(attempt(row.call, names, kind.world == "processes"))
    total = fill(rank, (3,))
    dist.all_reduce(total)
    assert torch.equal(total, fill(0, (3,)) + fill(1, (3,)))
    return found


def attempt(call: str, names: dict[str, Any], record: bool) -> Attempt:
    """Execute one call, in the names that the error index lists."""
    scope = {
        "dist": dist,
        "torch": torch,
        "timedelta": timedelta,
        "tensor": torch.arange(4.0),
        "two": [torch.zeros(4), torch.zeros(4)],
        **names,
    }
    code, start = compile(call, "<wrong call>", "exec"), time.perf_counter()
    try:
        with warnings.catch_warnings(record=record) as caught:
            warnings.simplefilter("always")
            exec(code, scope)
    except Exception as error:
        bases = tuple(base.__name__ for base in type(error).__mro__)
        last = "".join(traceback.format_exception_only(error)).splitlines()[-1]
        return Attempt(bases, str(error), time.perf_counter() - start, last)
    seconds = time.perf_counter() - start
    if caught:
        return Attempt(("warning",), str(caught[0].message), seconds)
    return Attempt((), "", seconds)
