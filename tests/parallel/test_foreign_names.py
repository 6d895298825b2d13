"""Private names of torch's DDP that programs use: they do the same on ours, beside torch's on the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from tests.parallel.training import batch, build, forked
from torchdist_ref.testing import run

pytestmark = pytest.mark.filterwarnings(
    "ignore:`TorchScript`:DeprecationWarning", "ignore:`torch.jit:DeprecationWarning"
)
DDP = dist.DistributedDataParallel
SMALL = 0.004
kept: list[Any] = []


def backward(ddp: Any, rank: int, step: int) -> Tensor:
    inputs, labels = batch(rank, step)
    loss = nn.functional.cross_entropy(ddp(inputs), labels)
    loss.backward()
    return loss.detach()


def gradients(module: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


def static(wrap: Any, rank: int) -> Any:
    ddp = wrap(build("mlp"), bucket_cap_mb=SMALL)
    ddp._set_static_graph()
    return [backward(ddp, rank, step) for step in range(4)], gradients(ddp.module), ddp.static_graph


def fused(wrap: Any, rank: int) -> Any:
    ddp = wrap(build("mlp"), bucket_cap_mb=SMALL)
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        ddp.zero_grad()
        losses.append(backward(ddp, rank, step))
    return losses, torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])


def ignored(wrap: Any, rank: int) -> Any:
    model = build("convnet")
    with torch.no_grad():
        model[2].running_mean += rank
    wrap._set_params_and_buffers_to_ignore_for_model(model, ["1.bias", "2.running_mean"])
    ddp = wrap(model, bucket_cap_mb=SMALL)
    backward(ddp, rank, 0)
    return gradients(model), torch.cat([buffer.flatten().float() for buffer in model.buffers()])


def manual(wrap: Any, rank: int) -> Any:
    """Lightning's manual optimization: the reducer is armed after forward, for the loss that is about to be used."""
    ddp = wrap(build("mlp"), bucket_cap_mb=SMALL)
    for step in range(3):
        inputs, labels = batch(rank, step)
        with ddp.no_sync():
            loss = nn.functional.cross_entropy(ddp(inputs), labels)
        ddp.reducer._rebuild_buckets()
        ddp.reducer.prepare_for_backward([])
        loss.backward()
    return (gradients(ddp.module),)


def told(wrap: Any, rank: int) -> Any:
    ddp = wrap(build("mlp"), bucket_cap_mb=SMALL, gradient_as_bucket_view=True)
    backward(ddp, rank, 0)
    statistics = ddp._get_ddp_logging_data()
    same = ("bucket_cap_bytes", "bucket_sizes", "broadcast_buffers", "module_name", "rank", "world_size")
    more = ("num_parameter_tensors", "total_parameter_size_bytes", "gradient_as_bucket_view")
    attributes = ddp.bucket_bytes_cap, ddp.device_type, ddp.forward_sync_buffers, ddp.is_multi_device_module
    return [(name, statistics[name]) for name in (*same, *more)], attributes


PROGRAMS: dict[str, Callable[[Any, int], Any]] = {
    "static": static, "fused": fused, "ignored": ignored, "manual": manual, "told": told,
}  # fmt: skip


def beside(rank: int, path: str) -> dict[str, list[Any]]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    kept.append(torch.distributed.group.WORLD)
    found = {name: [program(wrap, rank) for wrap in (TorchDDP, DDP)] for name, program in PROGRAMS.items()}
    torch.distributed.destroy_process_group()
    return found


def test_programs_that_use_private_names_end_as_with_torch(tmp_path: Path) -> None:
    for found in forked(beside, 2, str(tmp_path / "meet")):
        for name, (theirs, ours) in found.items():
            for one, other in zip(theirs, ours, strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=0) if _of_tensors(one) else _same(name, one, other)


def _of_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and isinstance(value[0], Tensor))


def _same(name: str, one: Any, other: Any) -> None:
    assert one == other, name


def test_a_graph_is_not_made_static_after_it_was_used() -> None:
    def program(rank: int) -> None:
        ddp = DDP(build("mlp"))
        backward(ddp, rank, 0)
        with pytest.raises(dist.DistError, match=r"forward pass already \(on rank 0\)"):
            ddp._set_static_graph()
        ddp = DDP(build("mlp"), static_graph=True)
        backward(ddp, rank, 0)
        ddp._set_static_graph()

    run(program, 1)
