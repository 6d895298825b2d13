"""Buffer hooks, compared with torch's DDP: location, arguments, and Futures that end with backward."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation as TorchLocation

import torchdist_ref as dist
from tests.parallel.training import caught_by_others, forked
from tests.torchs_world import start_torch
from torchdist_ref.parallel.distributed_data_parallel import _BufferCommHookLocation as Location
from torchdist_ref.testing import fill, run

DDP = dist.DistributedDataParallel
kept: list[Any] = []


class Counting(nn.Module):
    """Module that counts inputs in buffers of two dtypes, and has a local buffer."""

    seen: Tensor
    often: Tensor
    own: Tensor
    _ddp_params_and_buffers_to_ignore = ("own",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = fill(number, tuple(parameter.shape)) / 8
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("often", torch.zeros((), dtype=torch.int64))
        self.register_buffer("own", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += x.sum(0)
            self.often += 1
            self.own += 1
        return self.layer(x)


def state_of(ddp: Any) -> list[Tensor]:
    return [buffer.clone() for buffer in ddp.module.buffers()]


def hooked(wrap: Any, rank: int, when: str, how: str) -> list[Any]:
    """Run three steps with a hook that sums buffers, or copies rank 0's."""
    library, location = (torch.distributed, TorchLocation) if wrap is TorchDDP else (dist, Location)
    ddp, shown = wrap(Counting()), []

    def hook(state: Any, buffers: dict[str, Tensor]) -> Any:
        shown.append((state, list(buffers), torch.is_grad_enabled()))
        if how == "rank 0's":
            ddp._default_broadcast_coalesced(list(buffers.values()))
            return None
        works = [library.all_reduce(b, group=ddp.process_group, async_op=True) for b in buffers.values()]
        futures = [work.get_future() for work in works]
        return futures if how == "futures" else [future.wait() for future in futures] and None

    ddp._register_buffer_comm_hook("state", hook, location[when])
    found: list[Any] = []
    for step in range(3):
        # The sums of a hook have to be complete before another forward pass.
        if step == 1 and how != "futures":
            with ddp.no_sync():
                ddp(fill(rank + step, (2, 3))).sum().backward()
        loss = ddp(fill(rank + step, (2, 3))).sum()
        found += state_of(ddp) if how != "futures" else []
        loss.backward()
        found += state_of(ddp)
    return [found, shown]


WAYS = [
    ("PRE_FORWARD", "sum"),
    ("POST_FORWARD", "sum"),
    ("POST_FORWARD", "futures"),
    ("PRE_FORWARD", "rank 0's"),
    ("POST_FORWARD", "rank 0's"),
]


def beside(rank: int, path: str) -> list[Any]:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=2)
    kept.append(torch.distributed.group.WORLD)
    found = [(way, hooked(TorchDDP, rank, *way), hooked(DDP, rank, *way)) for way in WAYS]
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_buffer_hooks_equal_torchs(backend: str, tmp_path: Path) -> None:
    for found in forked(beside, 2, str(tmp_path / "meet"), backend=backend):
        for way, (theirs, shown), (ours, ours_shown) in found:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=lambda text, way=way: f"{way}: {text}")
            assert ours_shown == shown, way


@pytest.mark.parametrize("when", ["PRE_FORWARD", "POST_FORWARD"])
def test_join_runs_buffer_hooks_on_a_rank_without_inputs(when: str) -> None:
    def inputs(rank: int, step: int) -> Tensor:
        return fill(rank + step, (2, 3))

    def program(rank: int) -> Tensor:
        ddp = DDP(Counting())

        def hook(state: Any, buffers: dict[str, Tensor]) -> None:
            dist.all_reduce(buffers["seen"])

        ddp._register_buffer_comm_hook(None, hook, Location[when])
        with ddp.join():
            for step in range(1 + rank):
                ddp(inputs(rank, step)).sum().backward()
        return ddp.module.seen.clone()

    both = inputs(0, 0).sum(0) + inputs(1, 0).sum(0)
    expected = (both if when == "PRE_FORWARD" else 2 * both) + inputs(1, 1).sum(0)
    for found in run(program, 2):
        torch.testing.assert_close(found, expected)


def raising(state: Any, buffers: dict[str, Tensor]) -> Any:
    raise KeyError("lost")


def failing(state: Any, buffers: dict[str, Tensor]) -> Any:
    future: Any = Future()
    future.set_exception(KeyError("lost"))
    return [future]


def idle(state: Any, buffers: dict[str, Tensor]) -> Any:
    return [Future()]


WRONG: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "raises": (raising, dist.DistError, "buffer hook 'raising', rank 0 raised KeyError: 'lost'"),
    "a Future fails": (failing, dist.DistError, "buffer hook 'failing', rank 0: a Future ended with KeyError"),
    "a Future stays": (idle, dist.RankStalledError, "buffer hook 'idle', rank 0: a Future that it returned was not"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_error_of_a_buffer_hook_names_it(wrong: str) -> None:
    hook, kind, fault = WRONG[wrong]

    def program(rank: int) -> str:
        ddp = DDP(Counting(), process_group=dist.new_group(timeout=timedelta(seconds=0.2)))
        ddp._register_buffer_comm_hook(None, hook)
        with pytest.raises(kind) as caught:
            ddp(fill(rank, (2, 3))).sum().backward()
        return str(caught.value)

    assert fault in run(program, 1)[0]


@pytest.mark.parametrize("wrong", ["raises", "a Future fails"])
def test_a_buffer_hook_that_fails_on_one_rank_ends_the_others_wait(wrong: str) -> None:
    told = threading.Event()

    def program(rank: int) -> str:
        def hook(state: Any, buffers: dict[str, Tensor]) -> Any:
            return WRONG[wrong][0](state, buffers) if rank == 1 else None

        def iterate() -> None:
            ddp(fill(rank, (2, 3))).sum().backward()
            dist.barrier()

        ddp = DDP(Counting())
        ddp._register_buffer_comm_hook(None, hook)
        return caught_by_others(iterate, rank, told)

    text = run(program, 2, timeout=10)[0]
    assert "GroupAbortedError" in text and "rank 1 aborted" in text and "KeyError: 'lost'" in text


def test_buffer_hook_has_to_be_callable_and_is_not_copied() -> None:
    def program(rank: int) -> None:
        ddp = DDP(Counting())
        with pytest.raises(dist.ArgumentTypeError, match=r"'hook' must be callable, got 'int' \(on rank 0\)"):
            ddp._register_buffer_comm_hook(None, 3)  # type: ignore[arg-type]
        with pytest.raises(dist.ArgumentTypeError, match="'comm_hook_location' must be a member of"):
            ddp._register_buffer_comm_hook(None, raising, "PRE_FORWARD")
        ddp._register_buffer_comm_hook(None, raising)
        copied = copy.deepcopy(ddp)
        copied(fill(rank, (2, 3))).sum().backward()
        assert copied.module.often == 1

    run(program, 1)
