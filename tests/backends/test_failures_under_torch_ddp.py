"""torch's own DDP on `ref`: when a rank fails, every survivor raises our error, and none ends by a signal.

torch's reducer is C++. It reads the value of a failed future as a tensor, and crashed on the exception that
`torch.futures.Future.set_exception` stores there: all survivors of any failure ended by SIGSEGV. Each case forks three
ranks, which takes half a second; a stopped rank is noticed at the time-out of 6 s. Ranks are forks of this process,
which therefore imports what DDP uses.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import torchdist_ref as dist
from tests.backends.failing_ranks import CULPRIT, WORLD, errors_of_survivors
from tests.outcomes import set_timeout
from torchdist_ref.calls import CallScope
from torchdist_ref.work import CallFuture


def average(_, bucket):  # type: ignore[no-untyped-def]
    # torch refuses a hook whose bucket is annotated with another class than its own.
    work: Any = c10d.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(WORLD))


def average_by_ours(_, bucket):  # type: ignore[no-untyped-def]
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / WORLD)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "no hook": lambda ddp: None,
    "a hook in C++": lambda ddp: ddp._register_builtin_comm_hook(c10d.BuiltinCommHookType.ALLREDUCE),
    "a hook in Python": lambda ddp: ddp.register_comm_hook(None, average),
    "torch's fp16 hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
}


def raise_an_error() -> None:
    raise ValueError("the culprit's own error")


FAILURES: dict[str, tuple[Callable[[], Any], str]] = {
    "kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), "RankDiedError"),
    "exit": (lambda: os._exit(0), "RankDiedError"),
    "raise": (raise_an_error, "RankDiedError"),
    "mismatch": (lambda: c10d.all_reduce(torch.ones(3)), "MismatchError"),
    # The first survivor to time out aborts the group, and the other one hears why.
    "stop": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "RankStalledError GroupAbortedError"),
}


def train(rank: int, folder: Path, hook: str, failure: str) -> None:
    """Train three steps; the culprit fails before the third backward pass."""
    meet, timeout = f"file://{folder / 'store'}", timedelta(seconds=20)
    c10d.init_process_group("ref", init_method=meet, rank=rank, world_size=WORLD, timeout=timeout)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    HOOKS[hook](ddp)
    for step in range(3):
        if step == 2 and failure == "stop":
            # Not before the ranks have connected.
            set_timeout(c10d.group.WORLD, 6.0)
        if step == 2 and rank == CULPRIT:
            FAILURES[failure][0]()
        ddp(torch.full((4, 64), rank + 1.5)).sum().backward()


# A stopped rank costs the whole time-out.
CASES = [(hook, failure) for hook in HOOKS for failure in FAILURES if failure != "stop"]
CASES += [pytest.param("no hook", "stop", marks=pytest.mark.long)]


@pytest.mark.parametrize(("hook", "failure"), CASES)
def test_survivors_raise_the_named_error(hook: str, failure: str, tmp_path: Path) -> None:
    for raised in errors_of_survivors(lambda rank: train(rank, tmp_path, hook, failure)).values():
        assert raised.kind in FAILURES[failure][1].split(), raised.trace
        assert f"rank {CULPRIT}" in raised.text and "all_reduce" in raised.text
        assert failure != "stop" or "is stopped: continue it with 'kill -CONT " in raised.text, raised.text


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_hooks_of_ours_on_torchs_ddp_raise_the_named_error(backend: str, tmp_path: Path) -> None:
    def train(rank: int) -> None:
        dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=rank, world_size=WORLD)
        ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
        ddp.register_comm_hook(None, average_by_ours)
        for step in range(3):
            if step == 2 and rank == CULPRIT:
                os.kill(os.getpid(), signal.SIGKILL)
            ddp(torch.ones(8)).sum().backward()

    for raised in errors_of_survivors(train).values():
        assert raised.kind == "RankDiedError", raised.trace
        assert f"rank {CULPRIT} died" in raised.text and "all_reduce" in raised.text


def test_a_failed_future_raises_in_callbacks_and_chains() -> None:
    future = CallFuture(CallScope(1, (0, 0)))
    chained = future.then(lambda done: done.value()).then(lambda done: done.value())
    future.set_exception(KeyError("the reason"))
    for failed in (future, chained):
        for read in (failed.wait, failed.value):
            with pytest.raises(KeyError, match="the reason"):
                read()


def test_a_future_that_succeeds_is_unchanged() -> None:
    future = CallFuture(CallScope(1, (0, 0)))
    doubled = future.then(lambda done: done.value()[0] * 2)
    future.set_result([torch.tensor([1.5, -4.0])])
    assert doubled.wait().tolist() == [3.0, -8.0]
