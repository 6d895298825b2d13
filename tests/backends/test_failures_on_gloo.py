"""Survivors on Gloo, whose own errors name no rank, name the one that failed, and keep torch's text."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.backends.failing_ranks import CULPRIT, WORLD, errors_of_survivors
from torchdist_ref.groups.world import current
from torchdist_ref.parallel import DistributedDataParallel


def raise_uncaught() -> None:
    """End as a program does that raises: by the hook for uncaught exceptions, while its sockets are open."""
    error = ValueError("no data on this rank")
    sys.excepthook(type(error), error, None)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_slowly() -> None:
    """End as a program does that exits with its group, in a process that takes longer to end than others look."""
    current().exit()
    signal.pause()


ENDS = {
    "exit": (exit_slowly, "GroupAbortedError", "failed: its program ended without destroying the group"),
    "raise": (raise_uncaught, "GroupAbortedError", "failed: its program ended with ValueError: no data on this rank"),
    "kill": (be_killed, "RankDiedError", "died (pid "),
}


def fail_between_calls(rank: int, end: str, meet: str) -> None:
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD)
    dist.all_reduce(torch.ones(3))
    if rank == CULPRIT:
        ENDS[end][0]()
        os._exit(1)
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("end", ENDS)
def test_survivors_name_the_rank_that_failed(end: str, tmp_path: Path) -> None:
    meet = f"file://{tmp_path / 'store'}"
    for raised in errors_of_survivors(lambda rank: fail_between_calls(rank, end, meet)).values():
        assert raised.kind == ENDS[end][1], raised.trace
        assert f"rank {CULPRIT} {ENDS[end][2]}" in raised.text and "all_reduce" in raised.text, raised.text
        assert "onnection" in raised.text and "The above exception was the direct cause" in raised.trace


def fail_in_a_callback(rank: int, meet: str) -> None:
    """Train with a hook that continues from a future; the culprit is killed before the third step."""
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD)

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0]).then(lambda done: done.value() / WORLD)

    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model.register_comm_hook(None, hook)
    for step in range(3):
        if step == 2 and rank == CULPRIT:
            be_killed()
        model(torch.ones(4)).sum().backward()


def test_callbacks_of_hooks_keep_the_type_of_the_error(tmp_path: Path) -> None:
    meet = f"file://{tmp_path / 'store'}"
    for raised in errors_of_survivors(lambda rank: fail_in_a_callback(rank, meet)).values():
        assert raised.kind == "RankDiedError", raised.trace
        assert f"rank {CULPRIT} died (pid " in raised.text and "all_reduce" in raised.text, raised.text
