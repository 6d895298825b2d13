"""Models and hooks of `benchmark ddp`, and each side's DDP around them: torch's and ours.

A hook is looked up under one name in torch's modules and in ours, so both sides get the same. To add one, add a line to
`HOOKS`.

Ranks of an older library run this file too: use the library's public API alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

TORCH, REF, GLOO, LOCAL = "torch:gloo", "ref", "gloo", "local"
_PACKAGES = {TORCH: "torch.distributed", REF: "torchdist_ref", GLOO: "torchdist_ref"}
# One bucket: with several, torch's PowerSGD mixes up its calls on Gloo.
_ONE_BUCKET = 1000
# Steps that every hook with a schedule averages exactly; PowerSGD needs two, DDP rebuilds its buckets in the first.
EXACT_STEPS = 2


@dataclass(frozen=True)
class NamedHook:
    """Communication hook, as both sides name it.

    Attributes:
        module: Below ``algorithms.ddp_comm_hooks``; empty for no hook.
        name: Name of the function.
        rank: Rank of PowerSGD's factors.
        around: A wrapper of `default_hooks` that goes around it.
        views: Whether DDP is built with ``gradient_as_bucket_view=True``.
    """

    module: str = ""
    name: str = ""
    rank: int = 0
    around: str = ""
    views: bool = False

    def register(self, model: Any, group: Any, package: str = "torchdist_ref") -> None:
        """Register the hook of one side's package with its DDP."""
        if not self.module:
            return
        hooks = f"{package}.algorithms.ddp_comm_hooks"
        module = import_module(f"{hooks}.{self.module}")
        function, state = getattr(module, self.name), group
        if self.around:
            function = getattr(import_module(f"{hooks}.default_hooks"), self.around)(function)
        if self.rank:
            state = module.PowerSGDState(group, self.rank, start_powerSGD_iter=EXACT_STEPS)
        elif self.name == "post_localSGD_hook":
            state = module.PostLocalSGDState(group, None, EXACT_STEPS, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, function if package == "torchdist_ref" else _renamed(function))


HOOKS = {
    "none": NamedHook(),
    "none, views": NamedHook(views=True),
    "allreduce": NamedHook("default_hooks", "allreduce_hook"),
    "fp16": NamedHook("default_hooks", "fp16_compress_hook"),
    "bf16": NamedHook("default_hooks", "bf16_compress_hook"),
    "fp16 wrapper": NamedHook("default_hooks", "allreduce_hook", around="fp16_compress_wrapper"),
    "bf16 wrapper": NamedHook("default_hooks", "allreduce_hook", around="bf16_compress_wrapper"),
    "noop": NamedHook("debugging_hooks", "noop_hook"),
    "noop, views": NamedHook("debugging_hooks", "noop_hook", views=True),
    "powerSGD 1": NamedHook("powerSGD_hook", "powerSGD_hook", rank=1),
    "powerSGD 2": NamedHook("powerSGD_hook", "powerSGD_hook", rank=2),
    "powerSGD 4": NamedHook("powerSGD_hook", "powerSGD_hook", rank=4),
}


def wrap(model: nn.Module, side: str, group: Any, hook: NamedHook) -> nn.Module:
    """Wrap a model in one side's DDP, on a group of that side's, with the hook; `LOCAL` leaves it bare."""
    if side == LOCAL:
        return model
    package = _PACKAGES[side]
    ddp = import_module("torch.nn.parallel" if side == TORCH else package).DistributedDataParallel
    size = {"bucket_cap_mb": _ONE_BUCKET} if hook.rank else {}
    wrapped: nn.Module = ddp(model, process_group=group, gradient_as_bucket_view=hook.views, **size)
    hook.register(wrapped, group, package)
    return wrapped


def _renamed(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Hide the name of a hook: torch's DDP refuses those named after bf16 on builds for CPU."""
    return (lambda state, bucket: hook(state, bucket)) if "bf16" in hook.__name__ else hook


def mlp() -> tuple[nn.Module, Tensor]:
    """Return a model of 9.3 million parameters, half of whose step is communication; and a batch of 16."""
    widths = [784, 1776, 1776, 1776, 888, 10]
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), torch.randn(16, 784)


def tiny() -> tuple[nn.Module, Tensor]:
    """Return a model of 200 parameters of a few numbers each, to time DDP's own cost of a parameter."""
    layers = [nn.Linear(4, 4) for _ in range(100)]
    return nn.Sequential(*layers), torch.randn(1, 4)


class ResidualBlock(nn.Module):
    """Residual block: two convolutions, and a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        short = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.short = nn.Identity() if before == width else short

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        return torch.relu(self.body(x) + self.short(x))


def resnet18() -> tuple[nn.Module, Tensor]:
    """Return a model of 11.2 million parameters for images of 32 x 32; and a batch of 2."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for width in (64, 128, 256, 512):
        layers += [ResidualBlock(before, width, 1 if before == width else 2), ResidualBlock(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)), torch.randn(2, 3, 32, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"mlp": mlp, "resnet18": resnet18, "tiny": tiny}
