"""Private names of torch's DDP that programs use, compared with ours on the same ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from tests.parallel.training import batch, build, forked
from tests.torch_versions import needs_torch
from tests.torchs_world import start_torch
from torchdist_ref.testing import run

pytestmark = pytest.mark.filterwarnings(
    "ignore:`TorchScript`:DeprecationWarning",
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:`broadcast_buffers` is deprecated:FutureWarning",
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
    """Run Lightning's manual optimization: it prepares the reducer after forward."""
    ddp = wrap(build("mlp"), bucket_cap_mb=SMALL)
    for step in range(3):
        inputs, labels = batch(rank, step)
        with ddp.no_sync():
            loss = nn.functional.cross_entropy(ddp(inputs), labels)
        ddp.reducer._rebuild_buckets()
        ddp.reducer.prepare_for_backward([])
        loss.backward()
    return (gradients(ddp.module),)


def stepwise(wrap: Any, rank: int) -> Any:
    """Run mmcv's steps around the module, which allow it to call another method of the module."""
    ddp = wrap(build("convnet"), bucket_cap_mb=SMALL)
    for step in range(3):
        inputs, labels = batch(rank, step)
        ddp.reducer._rebuild_buckets()
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_buffers()
        loss = nn.functional.cross_entropy(ddp.module.forward(inputs), labels)
        if ddp._check_sync_bufs_post_fwd():
            ddp._sync_buffers()
        ddp.reducer.prepare_for_backward([])
        loss.backward()
    return gradients(ddp.module), torch.cat([buffer.flatten().float() for buffer in ddp.module.buffers()])


def logging_data(wrap: Any, rank: int) -> Any:
    ddp = wrap(build("mlp"), bucket_cap_mb=SMALL, gradient_as_bucket_view=True)
    backward(ddp, rank, 0)
    statistics = ddp._get_ddp_logging_data()
    same = ("bucket_cap_bytes", "bucket_sizes", "broadcast_buffers", "module_name", "rank", "world_size")
    more = ("num_parameter_tensors", "total_parameter_size_bytes", "gradient_as_bucket_view")
    attributes = ddp.bucket_bytes_cap, ddp.device_type, ddp.is_multi_device_module
    return [(name, statistics[name]) for name in (*same, *more)], attributes


def buffers_setting(wrap: Any, rank: int) -> Any:
    return wrap(build("mlp")).forward_sync_buffers, wrap(build("mlp"), broadcast_buffers=False).forward_sync_buffers


def library(wrap: Any) -> Any:
    return torch.distributed if wrap is TorchDDP else dist


def builtin(wrap: Any, rank: int, kind: str) -> Any:
    ddp = wrap(build("mlp"), bucket_cap_mb=SMALL)
    ddp._register_builtin_comm_hook(getattr(library(wrap).BuiltinCommHookType, kind))
    losses = [backward(ddp, rank, step) for step in range(3)]
    return losses, gradients(ddp.module), ddp._get_ddp_logging_data()["comm_hook"]


def moved(wrap: Any, rank: int) -> Any:
    """Change to another group, to one of rank 0 only, and back."""
    ddp = wrap(build("convnet"), bucket_cap_mb=SMALL)
    whole, pair = ddp.process_group, library(wrap).new_group([0, 1])
    single = library(wrap).new_group([0])
    found = []
    for step, group in enumerate((whole, pair, pair, single, whole, whole, whole)):
        if group is not ddp.process_group:
            ddp._update_process_group(group)
        if rank == 0 or group is not single:
            ddp.zero_grad()
            found.append(backward(ddp, rank, step))
            found.append(gradients(ddp.module))
    return (found,)


def taking_part(wrap: Any, rank: int) -> Any:
    model = build("convnet")
    wrap._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])
    named = dict(wrap._get_data_parallel_params(model, named_params=True))
    # torch does not leave parameters out if names are requested.
    named.pop("1.bias", None)
    return list(named), [parameter.detach() for parameter in wrap._get_data_parallel_params(model)]


PROGRAMS: dict[str, Callable[[Any, int], Any]] = {
    "static": static,
    "fused": fused,
    "ignored": ignored,
    "manual": manual,
    "logging data": logging_data,
    "moved": moved,
    "taking part": taking_part,
    "builtin": partial(builtin, kind="ALLREDUCE"),
    "builtin in half": partial(builtin, kind="FP16_COMPRESS"),
    "stepwise": stepwise,
}


def beside(rank: int, path: str, programs: dict[str, Callable[[Any, int], Any]]) -> dict[str, list[Any]]:
    start_torch(init_method=f"file://{path}", rank=rank, world_size=2)
    kept.append(torch.distributed.group.WORLD)
    found = {name: [program(wrap, rank) for wrap in (TorchDDP, DDP)] for name, program in programs.items()}
    torch.distributed.destroy_process_group()
    return found


def test_private_names_equal_torchs(tmp_path: Path) -> None:
    compare_programs(tmp_path, PROGRAMS)


@needs_torch("2.13", "DistributedDataParallel.forward_sync_buffers")
def test_forward_sync_buffers_is_as_torchs(tmp_path: Path) -> None:
    compare_programs(tmp_path, {"buffers": buffers_setting})


def compare_programs(tmp_path: Path, programs: dict[str, Callable[[Any, int], Any]]) -> None:
    for found in forked(beside, 2, str(tmp_path / "meet"), programs):
        for name, (theirs, ours) in found.items():
            for one, other in zip(theirs, ours, strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=0) if _of_tensors(one) else _same(name, one, other)


def _of_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and isinstance(value[0], Tensor))


def _same(name: str, one: Any, other: Any) -> None:
    assert one == other, name


def test_set_static_graph_raises_after_a_forward_pass() -> None:
    def program(rank: int) -> None:
        ddp = DDP(build("mlp"))
        backward(ddp, rank, 0)
        with pytest.raises(dist.DistError, match=r"forward pass already \(on rank 0\)"):
            ddp._set_static_graph()
        ddp = DDP(build("mlp"), static_graph=True)
        backward(ddp, rank, 0)
        ddp._set_static_graph()

    run(program, 1)


def test_update_process_group_after_a_failed_iteration() -> None:
    def program(rank: int) -> bool:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(12, 4), nn.Linear(12, 4)])
        ddp = DDP(Either(model))
        ddp(batch(rank, 0)[0], [0]).sum().backward()
        with pytest.raises(dist.DistError, match="did not finish"):
            ddp(batch(rank, 0)[0], [0, 1])
        ddp._update_process_group(dist.new_group([0, 1]))
        ddp.zero_grad()
        ddp(batch(rank, 0)[0], [0, 1]).sum().backward()
        expected = (batch(0, 0)[0].sum(0) + batch(1, 0)[0].sum(0)) / 2
        return all(torch.allclose(layer.weight.grad[0], expected) for layer in model)  # type: ignore[index, arg-type]

    assert all(run(program, 2))


class Either(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return torch.stack([self.layers[index](x) for index in chosen]).sum(0)


def test_register_builtin_hook_raises_on_other_types() -> None:
    def program(rank: int) -> None:
        ddp = DDP(build("mlp"))
        with pytest.raises(dist.ArgumentTypeError, match=r"_register_builtin_comm_hook: argument 'comm_hook_type'"):
            ddp._register_builtin_comm_hook(dist.ReduceOp.SUM)
        ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
        with pytest.raises(dist.DistError, match=r"has a hook already, 'BuiltinCommHookType.ALLREDUCE'"):
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    run(program, 1)


def test_the_page_lists_the_private_names_that_only_torch_has() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "differences.md").read_text(encoding="utf-8")
    rest = page.partition("## Private methods of torch's DDP")[2].partition("\n## ")[0].partition("\n- ")[2]
    written = set(re.findall(r"`(\w+)`", rest))
    absent = set(dir(TorchDDP)) - set(dir(nn.Module)) - set(dir(DDP)) - {"broadcast_buffers"}
    assert not written & set(dir(DDP))
    if torch.__version__.startswith("2.13"):
        assert written == absent
