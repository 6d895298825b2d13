"""torch's modules beside DDP on `ref`: when a rank fails, every survivor raises our error, and none ends by a signal.

Each case forks three ranks, trains two steps and lets one rank fail in the third. The bound is that of a busy machine;
the figure of 100 ms is held by `nox -s soak`.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as c10d
import torch.distributed.pipelining
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.backends.failing_ranks import CULPRIT, WORLD, errors_of_survivors
from tests.outcomes import NEVER, set_timeout

# Each rank is a fork of this process, which therefore imports what ranks use.
pytestmark = pytest.mark.usefixtures("torchs_modules")

# The time-out is 20 s.
SOON = 10.0


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 18), nn.Tanh(), nn.Linear(18, 6))


def inputs(rank: int) -> Tensor:
    return torch.arange(64.0).view(4, 16).sin() * (rank + 1)


def compiled_ddp(rank: int) -> Callable[[], Any]:
    ddp = torch.compile(nn.parallel.DistributedDataParallel(model()), backend="aot_eager")
    return lambda: ddp(inputs(rank)).sum().backward()


def fsdp1(rank: int) -> Callable[[], Any]:
    module = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    return lambda: module(inputs(rank)).sum().backward()


def fsdp2(rank: int) -> Callable[[], Any]:
    module = fully_shard(model(), mesh=init_device_mesh("cpu", (WORLD,)))
    return lambda: module(inputs(rank)).sum().backward()


def dtensor(rank: int) -> Callable[[], Any]:
    mesh = init_device_mesh("cpu", (WORLD,))
    shards = distribute_tensor(torch.arange(18.0).view(6, 3), mesh, [Shard(0)])
    return lambda: shards.redistribute(mesh, [Replicate()]).to_local().sum().item()


def functional(rank: int) -> Callable[[], Any]:
    from torch.distributed import _functional_collectives as functions

    group = c10d.group.WORLD
    return lambda: functions.all_reduce(inputs(rank), "sum", group).sum().item()  # type: ignore[arg-type]


def pipelining(rank: int) -> Callable[[], Any]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(nn.Linear(16, 16), rank, WORLD, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: (output - target).square().mean())
    data = inputs(0)
    if rank == 0:
        return lambda: schedule.step(data)
    return lambda: schedule.step(target=data) if rank == WORLD - 1 else schedule.step()


MODULES = {each.__name__: each for each in (compiled_ddp, fsdp1, fsdp2, dtensor, functional, pipelining)}


def fail_with_an_error() -> None:
    raise ValueError("the culprit's own error")


FAILURES: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leave": lambda: os._exit(0),
    "raise": fail_with_an_error,
    "mismatch": lambda: c10d.all_reduce(torch.ones(3)),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def ends_at_the_timeout(module: str, failure: str) -> bool:
    """Return whether nothing tells a failure from a slow rank; stages wait for messages, not for a collective."""
    return failure == "stop" or (module, failure) == ("pipelining", "mismatch")


def train(rank: int, folder: Path, module: str, failure: str) -> None:
    """Train three steps; the culprit fails before the third."""
    meet = f"file://{folder / 'store'}"
    c10d.init_process_group("ref", init_method=meet, rank=rank, world_size=WORLD, timeout=NEVER)
    step = MODULES[module](rank)
    for _ in range(2):
        step()
    c10d.barrier()
    if ends_at_the_timeout(module, failure):
        # Not before the ranks have connected, and have loaded what their steps use.
        for group in c10d.distributed_c10d._world.pg_map:
            set_timeout(group, 2.0)
    if rank == CULPRIT:
        FAILURES[failure]()
    step()
    # A rank whose own part needed no other learns of it in its next call.
    c10d.barrier()


def send_another_size() -> None:
    """Send the next stage a message that is none of its inputs."""
    c10d.send(torch.ones(3), CULPRIT + 1)


# CI has a death under each module, and where ranks wait for all others, and where for messages, each failure but a
# stopped rank, which costs the whole time-out.
ALL_FAILURES = ("fsdp2", "pipelining")


def in_ci(module: str, failure: str) -> bool:
    return failure == "kill" or (module in ALL_FAILURES and failure != "stop")


CASES = [
    pytest.param(module, failure, marks=[] if in_ci(module, failure) else [pytest.mark.long])
    for module in MODULES
    for failure in FAILURES
]


@pytest.mark.parametrize(("module", "failure"), CASES)
def test_survivors_raise_the_named_error(module: str, failure: str, tmp_path: Path) -> None:
    for raised in errors_of_survivors(lambda rank: train(rank, tmp_path, module, failure)).values():
        kinds = ("RankDiedError", "GroupAbortedError", "MismatchError", "RankStalledError")
        assert raised.kind in kinds, raised.trace
        assert f"rank {CULPRIT}" in raised.text, raised.text


def test_a_stage_that_gets_a_message_of_another_size_names_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAILURES, "another size", send_another_size)
    raised = errors_of_survivors(lambda rank: train(rank, tmp_path, "pipelining", "another size"))
    following = raised[CULPRIT + 1]
    assert following.kind == "MismatchError", following.trace
    assert f"expects a message of 32 x float32, but rank {CULPRIT} sent a message of 3 x float32" in following.text
    # The stage before waits for the culprit, which then fails in the same way, or ends.
    assert raised[0].kind in ("RankDiedError", "GroupAbortedError"), raised[0].trace
    assert f"rank {CULPRIT}" in raised[0].text


def test_ranks_do_not_collect_the_garbage_of_the_tests(tmp_path: Path) -> None:
    """Once a collection in a rank waited for ever for the threads of a group that an earlier test had left."""
    garbage = [c10d.ProcessGroupGloo(c10d.FileStore(str(tmp_path / "store"), 1), 0, 1)]
    garbage.append(garbage)  # type: ignore[arg-type]
    del garbage

    def collect(rank: int) -> None:
        gc.collect()
        raise ValueError(f"rank {rank} has collected")

    gc.disable()
    try:
        texts = {rank: raised.text for rank, raised in errors_of_survivors(collect).items()}
    finally:
        gc.enable()
    assert texts == {rank: f"rank {rank} has collected" for rank in texts} and CULPRIT not in texts
