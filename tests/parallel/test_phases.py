"""The reducer's phases: one iteration enters them in order, and each transition is in the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchdist_ref as dist
from torchdist_ref.parallel.reducer import LEGAL, Phase, Usage
from torchdist_ref.testing import fill, run

OPTIONS: dict[str, tuple[dict[str, bool], list[Usage]]] = {
    "plain": ({}, [Usage.ALL] * 3),
    "unused searched": ({"find_unused_parameters": True}, [Usage.SEARCHED] * 3),
    "static graph": ({"static_graph": True}, [Usage.RECORDING, Usage.RECORDED, Usage.RECORDED]),
    "both": ({"static_graph": True, "find_unused_parameters": True}, [Usage.RECORDING] + [Usage.RECORDED] * 2),
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def step(ddp: Any, rank: int, finalize: Callable[[], Any] = lambda: None) -> list[Phase]:
    """Run one iteration, and return its phases."""
    seen = [ddp.reducer.phase]
    # Not a leaf: autograd adds all gradients that have arrived to the parameters before it goes on to this one.
    inputs = fill(rank, (2, 3)).requires_grad_() * 1
    output = ddp(inputs).square().sum()
    seen.append(ddp.reducer.phase)
    inputs.register_hook(lambda _: seen.append(ddp.reducer.phase))
    output.backward()
    seen.append(ddp.reducer.phase)
    finalize()
    return seen


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("manual", [False, True], ids=["at the end", "by the caller"])
def test_an_iteration_enters_the_phases_in_order(name: str, manual: bool) -> None:
    options, usages = OPTIONS[name]

    def program(rank: int) -> Any:
        ddp = dist.DistributedDataParallel(model(), **options)
        ddp.require_manual_backward_finalization = manual
        found = []
        for _ in usages:
            usage = ddp.reducer.usage
            found.append((usage, step(ddp, rank, ddp.finalize_backward if manual else lambda: None)))
        return found, ddp.reducer.phase

    for found, last in run(program, 2):
        assert [usage for usage, _ in found] == usages and last is Phase.IDLE
        for usage, (before, after_forward, within, after_backward) in found:
            # The gradient of the inputs comes last: with all others ready, the caller may finalize, unless only the end
            # of backward shows which parameters take part.
            early = manual and usage in (Usage.ALL, Usage.RECORDED)
            assert (before, after_forward) == (Phase.IDLE, Phase.FORWARD_DONE)
            assert within is (Phase.AWAITS_CALLER if early else Phase.BACKWARD)
            assert after_backward is (Phase.AWAITS_CALLER if manual else Phase.IDLE)


def failing_once(ddp: Any, where: str) -> None:
    """Let the first exchange of a DDP, or what waits at the end, raise."""
    calls = []

    def fail_once() -> None:
        calls.append(where)
        if len(calls) == 1:
            raise ValueError("no exchange today")

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if where == "launch":
            fail_once()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future.then(lambda done: (fail_once() if where == "wait" else None, done.value())[1])

    ddp.register_comm_hook(None, hook)
    if where == "end":
        ddp.reducer.at_the_end = fail_once


@pytest.mark.parametrize("where", ["launch", "wait", "end"])
def test_a_failed_exchange_lasts_until_the_next_forward_pass(where: str) -> None:
    def program(rank: int) -> Any:
        # Without a search, the next forward pass would rebuild buckets in a group that the failed hook has aborted.
        ddp = dist.DistributedDataParallel(model(), find_unused_parameters=True)
        failing_once(ddp, where)
        with pytest.raises((dist.DistError, ValueError), match="no exchange today"):
            step(ddp, rank)
        failed = ddp.reducer.phase
        ddp(fill(rank, (2, 3)))
        return failed, ddp.reducer.phase

    assert run(program, 1) == [(Phase.FAILED, Phase.FORWARD_DONE)]


def test_a_failed_exchange_cannot_be_finalized() -> None:
    def program(rank: int) -> str:
        ddp = dist.DistributedDataParallel(model())
        ddp.require_manual_backward_finalization = True
        failing_once(ddp, "wait")
        with pytest.raises(dist.DistError, match="no exchange today"):
            step(ddp, rank, ddp.finalize_backward)
        with pytest.raises(dist.DistError) as caught:
            ddp.finalize_backward()
        return str(caught.value)

    assert "the exchange of its gradients failed" in run(program, 1)[0]


def test_every_phase_is_left_and_reached() -> None:
    assert set(LEGAL) == set(Phase)
    for phase in Phase:
        assert LEGAL[phase] - {phase} and any(phase in following for each, following in LEGAL.items() if each != phase)
