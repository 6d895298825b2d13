"""Our hooks on torch's DDP and torch's hooks on ours, compared with each hook on its own DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from tests.covering import covering
from tests.parallel.training import forked, train
from tests.torchs_world import start_torch
from torchdist_ref.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook

DDP = dist.DistributedDataParallel
Setup = tuple[Callable[[], Any], Any]


def nothing() -> None:
    return None


# torch's DDP refuses the name of this hook on CPU builds, so there it goes under another.
bf16_under_another_name = lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)  # noqa: E731

HOOKS: dict[str, tuple[Setup, Setup]] = {
    "allreduce": ((nothing, default_hooks.allreduce_hook), (nothing, torch_default.allreduce_hook)),
    "fp16": ((nothing, default_hooks.fp16_compress_hook), (nothing, torch_default.fp16_compress_hook)),
    "bf16": ((nothing, bf16_under_another_name), (nothing, torch_default.bf16_compress_hook)),
    "wrapper": (
        (nothing, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        (nothing, torch_default.fp16_compress_wrapper(torch_default.allreduce_hook)),
    ),
    "noop": ((nothing, debugging_hooks.noop_hook), (nothing, torch_debugging.noop_hook)),
    "powerSGD": (
        (lambda: powerSGD_hook.PowerSGDState(None, 1, 2), powerSGD_hook.powerSGD_hook),
        (lambda: torch_powersgd.PowerSGDState(None, 1, 2), torch_powersgd.powerSGD_hook),
    ),
}


# torch's group ends its threads when its last reference goes; if that is in a callback, on one of them, it aborts.
kept: list[Any] = []


def meet(rank: int, world: int, path: str) -> None:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=world)
    kept.append(torch.distributed.group.WORLD)


def trained(wrap: Any, setup: Setup, rank: int, cap: float) -> torch.Tensor:
    def registered(model: Any, **kw: Any) -> Any:
        ddp = wrap(model, **kw)
        ddp.register_comm_hook(setup[0](), setup[1])
        return ddp

    return train(registered, "mlp", rank, 6, bucket_cap_mb=cap)[1]


def crosswise(rank: int, world: int, name: str, cap: float, path: str) -> list[torch.Tensor]:
    """Return weights after training: ours on ours, ours on torch's, torch's on ours."""
    meet(rank, world, path)
    ours, theirs = HOOKS[name]
    states = [trained(DDP, ours, rank, cap), trained(TorchDDP, ours, rank, cap), trained(DDP, theirs, rank, cap)]
    torch.distributed.destroy_process_group()
    return states


# Rounding to 16 bits amplifies a difference in the last bit to a thousandth.
APART = {"fp16": 1e-3, "bf16": 1e-2, "wrapper": 1e-3}


@pytest.mark.parametrize(("name", "world"), covering(list(HOOKS), (2, 3)))
def test_hooks_do_the_same_on_either_ddp(name: str, world: int, tmp_path: Path) -> None:
    """CI has each hook in one of two worlds."""
    # torch's PowerSGD works with one bucket only; ours is tried with more below.
    cap = 25 if name == "powerSGD" else 0.004
    arguments = (world, name, cap, str(tmp_path / "meet"))
    for home, abroad, guest in forked(crosswise, world, *arguments, backend="gloo"):
        tolerance = APART.get(name, 1e-5)
        torch.testing.assert_close(abroad, home, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(guest, home, rtol=tolerance, atol=tolerance)


def powersgd_on_torchs_ddp(rank: int, world: int, path: str) -> torch.Tensor:
    meet(rank, world, path)
    states = trained(TorchDDP, HOOKS["powerSGD"][0], rank, 0.004)
    torch.distributed.destroy_process_group()
    return states


def test_our_powersgd_works_with_several_buckets_on_torchs_ddp(tmp_path: Path) -> None:
    everyone = forked(powersgd_on_torchs_ddp, 3, 3, str(tmp_path / "meet"), init=False)
    assert all(torch.equal(states, everyone[0]) for states in everyone)
    assert torch.isfinite(everyone[0]).all()
