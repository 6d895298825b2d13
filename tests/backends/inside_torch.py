"""The same program on torch's own groups, once on `ref` and once on Gloo, in the processes of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as c10d

import torchdist_ref  # noqa: F401, it registers ref with torch
from torchdist_ref.testing import run

Program = Callable[[int, int], Any]

# Gloo ends its threads when its last reference goes; if that is in a callback, on one of them, it aborts.
kept: list[Any] = []


def on(backend: str, rank: int, size: int, path: str, program: Program) -> tuple[Any, Counter[str]]:
    """Return the result of a program on torch's default group, and the count of each operation on `ref`."""
    c10d.init_process_group(
        backend, init_method=f"file://{path}.{backend}", rank=rank, world_size=size, timeout=timedelta(seconds=20)
    )
    group = c10d.group.WORLD
    kept.append(group)
    try:
        result = program(rank, size)
        return result, Counter(event.call.op for event in getattr(group, "recorder", ()))
    finally:
        c10d.destroy_process_group()


def on_both(rank: int, size: int, path: str, program: Program) -> tuple[Any, Any, Counter[str]]:
    """Return the results of a program on `ref` and on Gloo, and the count of each operation on `ref`."""
    ours, seen = on("ref", rank, size, path, program)
    theirs, _ = on("gloo", rank, size, path, program)
    return ours, theirs, seen


def compared(program: Program, size: int, path: str, timeout: float = 60.0) -> list[tuple[Any, Any, Counter[str]]]:
    """Run `on_both` on every rank."""
    return run(on_both, size, size, path, program, init=False, ranks="processes", timeout=timeout)
