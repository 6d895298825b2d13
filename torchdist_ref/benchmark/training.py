"""Training in the benchmarks: hooks, each side's DDP around a model, and the models and tasks.

`ddp` times steps of models on one random batch; `hooks` lets a model learn a task. A hook is looked up under one name
in torch's modules and in ours, so both sides get the same; to add one, add a line to `HOOKS`.

Tasks: handwritten digits, and Python's own source text, character by character. Both are small enough for a notebook
and differ in one respect: the convolutional network has 40 KB of gradients, the transformer 3.8 MB. A task is data
and a model, the same on every rank and in every run. A third task is a class with the same methods, and a line
in `TASKS`.

Ranks of an older library run this file too: use the library's public API alone.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TORCH, REF, GLOO, LOCAL = "torch:gloo", "ref", "gloo", "local"
_PACKAGES = {TORCH: "torch.distributed", REF: "torchdist_ref", GLOO: "torchdist_ref"}
# One bucket: with several, torch's PowerSGD mixes up its calls on Gloo.
_ONE_BUCKET = 1000
# Steps that every hook with a schedule averages exactly; PowerSGD needs two, DDP rebuilds its buckets in the first.
EXACT_STEPS = 2
LOCAL_STEPS = 4
_DEFAULT, _POWER, _LEVELS = "default_hooks", "powerSGD_hook", "quantization_hooks"
Batch = tuple[Tensor, Tensor]
CONTEXT, WIDTH, HEADS, LAYERS = 64, 192, 4, 2
SYMBOLS = 128
CHARACTERS = 1_000_000


@dataclass(frozen=True)
class NamedHook:
    """Communication hook, as both sides name it.

    Attributes:
        module: Below ``algorithms.ddp_comm_hooks``; empty for no hook.
        name: Name of the function.
        rank: Rank of PowerSGD's factors.
        around: A wrapper of `default_hooks` that goes around it.
        views: Whether DDP is built with ``gradient_as_bucket_view=True``.
        every: Number of steps after which the models themselves are averaged; 0 for never.
    """

    module: str = ""
    name: str = ""
    rank: int = 0
    around: str = ""
    views: bool = False
    every: int = 0

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
        elif self.every:
            state = module.PostLocalSGDState(group, None, EXACT_STEPS, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, function if package == "torchdist_ref" else _renamed(function))


HOOKS = {
    "none": NamedHook(),
    "allreduce": NamedHook(_DEFAULT, "allreduce_hook"),
    "fp16": NamedHook(_DEFAULT, "fp16_compress_hook"),
    "bf16": NamedHook(_DEFAULT, "bf16_compress_hook"),
    "powersgd-1": NamedHook(_POWER, "powerSGD_hook", 1),
    "powersgd-2": NamedHook(_POWER, "powerSGD_hook", 2),
    "powersgd-4": NamedHook(_POWER, "powerSGD_hook", 4),
    "fp16-powersgd-2": NamedHook(_POWER, "powerSGD_hook", 2, "fp16_compress_wrapper"),
    "bf16-powersgd-2": NamedHook(_POWER, "powerSGD_hook", 2, "bf16_compress_wrapper"),
    "batched-powersgd-1": NamedHook(_POWER, "batched_powerSGD_hook", 1),
    "quantize-tensor": NamedHook(_LEVELS, "quantization_pertensor_hook"),
    "quantize-channel": NamedHook(_LEVELS, "quantization_perchannel_hook"),
    # No gradients are sent, but the models are averaged at times.
    "local-sgd": NamedHook(_DEFAULT, "post_localSGD_hook", every=LOCAL_STEPS),
    "noop": NamedHook("debugging_hooks", "noop_hook"),
    "none-views": NamedHook(views=True),
    "noop-views": NamedHook("debugging_hooks", "noop_hook", views=True),
    "fp16-wrapper": NamedHook(_DEFAULT, "allreduce_hook", around="fp16_compress_wrapper"),
    "bf16-wrapper": NamedHook(_DEFAULT, "allreduce_hook", around="bf16_compress_wrapper"),
}


def wrap(model: nn.Module, side: str, group: Any, hook: NamedHook, **options: Any) -> Any:
    """Wrap a model in one side's DDP, on a group of that side's, with the hook; `LOCAL` leaves it bare."""
    if side == LOCAL:
        return model
    package = _PACKAGES[side]
    ddp = import_module("torch.nn.parallel" if side == TORCH else package).DistributedDataParallel
    options = {"bucket_cap_mb": _ONE_BUCKET, **options} if hook.rank else options
    wrapped = ddp(model, process_group=group, gradient_as_bucket_view=hook.views, **options)
    hook.register(wrapped, group, package)
    return wrapped


def _renamed(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Hide the name of a hook: torch's DDP refuses those named after bf16 on builds for CPU."""
    return (lambda state, bucket: hook(state, bucket)) if "bf16" in hook.__name__ else hook


def mlp() -> tuple[nn.Module, Tensor]:
    """Return a model of 9.3 million parameters, half of whose step is communication; and a batch of 16."""
    widths = [784, 1776, 1776, 1776, 888, 10]
    layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(16, 784)


def tiny() -> tuple[nn.Module, Tensor]:
    """Return a model of 200 parameters of a few numbers each, to time DDP's own cost of a parameter."""
    layers = [nn.Linear(4, 4) for _ in range(100)]
    return nn.Sequential(*layers), torch.randn(1, 4)


def convolution(before: int, width: int, size: int, stride: int) -> list[nn.Module]:
    """Return a convolution, which keeps the size of images, and the normalization after it."""
    return [nn.Conv2d(before, width, size, stride, size // 2, bias=False), nn.BatchNorm2d(width)]


class ResidualBlock(nn.Module):
    """Residual block: two convolutions, and a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*convolution(before, width, 3, stride), nn.ReLU(), *convolution(width, width, 3, 1))
        self.short = nn.Sequential(*(convolution(before, width, 1, stride) if before != width else []))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        return torch.relu(self.body(x) + self.short(x))


def resnet18() -> tuple[nn.Module, Tensor]:
    """Return a model of 11.2 million parameters for images of 32 x 32; and a batch of 2."""
    layers = [*convolution(3, 64, 3, 1), nn.ReLU()]
    before = 64
    for width in (64, 128, 256, 512):
        layers += [ResidualBlock(before, width, 1 if before == width else 2), ResidualBlock(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)), torch.randn(2, 3, 32, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"mlp": mlp, "resnet18": resnet18, "tiny": tiny}


class Classification:
    """Classification: of an image, or of each character by those before it."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Digits(Classification):
    """1797 images of 8 × 8 pixels, from scikit-learn, and the tutorial's network of two convolutions.

    >>> sum(parameter.numel() for parameter in Digits().model().parameters())
    9930
    """

    each = 32

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)

    def model(self) -> nn.Module:
        """Return two convolutions and a linear layer."""
        return seeded(convolutions)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Return 32 images for each rank."""
        rows = _draw(step, len(self.labels), self.each, rank, world)
        return self.images[rows], self.labels[rows]


class Text(Classification):
    """A million characters of the standard library's own modules, and a transformer that predicts the next one.

    >>> Text().characters[:3].tolist() == [ord(symbol) for symbol in source()[:3]]
    True
    """

    each = 4

    def __init__(self) -> None:
        self.characters = torch.frombuffer(bytearray(source().encode("ascii")), dtype=torch.uint8).long()

    def model(self) -> nn.Module:
        """Return a transformer of two layers, 192 wide."""
        return seeded(Transformer)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adam, without decay."""
        return torch.optim.Adam(model.parameters(), lr=2e-3)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Return 4 pieces of 64 characters for each rank."""
        starts = _draw(step, len(self.characters) - CONTEXT, self.each, rank, world)
        pieces = self.characters[starts[:, None] + torch.arange(CONTEXT + 1)]
        return pieces[:, :-1], pieces[:, 1:]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model with random numbers of its own, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def convolutions() -> nn.Module:
    """Return two convolutions and a linear layer, for images of 8 x 8."""
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """Scores of the next character at every position of a text, from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        # Each normalizes first, then attends, then has two linear layers of four times the width between them.
        shape: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **shape) for _ in range(LAYERS))
        self.scores = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))

    def forward(self, text: Tensor) -> Tensor:
        """Return scores (batch, position, symbol) for characters (batch, position)."""
        x = self.symbol(text) + self.position.weight[: text.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(text.size(1))
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        scores: Tensor = self.scores(x)
        return scores


def source() -> str:
    """Return the text: the standard library's modules in order of their names, as ASCII."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        # The library has almost five times as many.
        if len(text) >= CHARACTERS:
            break
        text += path.read_bytes().decode("ascii", "ignore")
    return text[:CHARACTERS]


def _draw(step: int, count: int, each: int, rank: int, world: int) -> Tensor:
    """Draw indices below `count` for a step, the same on all ranks, and return this rank's share."""
    drawn = torch.randint(count, (world * each,), generator=torch.Generator().manual_seed(step))
    return drawn[rank::world]


Task = Digits | Text
TASKS: dict[str, type[Task]] = {"digits": Digits, "text": Text}


def missing(name: str) -> str:
    """Return what a task lacks on this machine; empty where it can run.

    >>> missing("text")
    ''
    """
    if name == "digits" and importlib.util.find_spec("sklearn") is None:
        return "needs scikit-learn: pip install 'torchdist_ref[notebook]'"
    return ""
