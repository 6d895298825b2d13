"""Tasks and hooks of `benchmark hooks`: what is trained, and with which communication hooks.

Tasks: handwritten digits, and Python's own source text, character by character. Both are small enough for a notebook
and differ in one respect: the convolutional network has 40 KB of gradients, the transformer 3.8 MB. A task is data
and a model, the same on every rank and in every run. A third task is a class with the same four methods, and a line
in `TASKS`.

Hooks: a line in `CONTESTANTS` registers one, and counts the bytes that it should send in a step. The byte
counts are written from the shapes alone, so that the bytes counted while hooks run can be compared with them. All
have one convention: the bytes that a rank has to send at the least for the hook's calls, 2 (n - 1) / n of a tensor
that is summed over n ranks, n - 1 times a tensor that is gathered.
"""

from __future__ import annotations

import importlib.util
import math
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from torchdist_ref.benchmark.ddp_models import HOOKS, NamedHook

Batch = tuple[Tensor, Tensor]
CONTEXT, WIDTH, HEADS, LAYERS = 64, 192, 4, 2
SYMBOLS = 128
CHARACTERS = 1_000_000
LOCAL_STEPS = 4
# Bytes.
FLOAT, HALF = 4, 2
CHANNEL, SCALE = 512, 8
_DEFAULT, _LEVELS = "default_hooks", "quantization_hooks"
_WRAPPERS = ("fp16_compress_wrapper", "bf16_compress_wrapper")

Bucket = Sequence[torch.Size]
Count = Callable[[Sequence[Bucket], int], float]


class Digits:
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
        return seeded(
            lambda: nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(512, 10),
            )
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Return 32 images for each rank."""
        rows = _draw(step, len(self.labels), self.each, rank, world)
        return self.images[rows], self.labels[rows]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.cross_entropy(outputs, targets)


class Text:
    """A million characters of the standard library's own modules, and a transformer that predicts the next one.

    >>> Text().characters[:3].tolist() == [ord(symbol) for symbol in source()[:3]]
    True
    """

    each = 4

    def __init__(self) -> None:
        self.characters = torch.tensor(list(source().encode("ascii")))

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

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of a character."""
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Transformer(nn.Module):
    """Scores of the next character at every position of a text, from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(TransformerLayer() for _ in range(LAYERS)))
        self.scores = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))

    def forward(self, text: Tensor) -> Tensor:
        """Return scores (batch, position, symbol) for characters (batch, position)."""
        embedded = self.symbol(text) + self.position.weight[: text.size(1)]
        scores: Tensor = self.scores(self.layers(embedded))
        return scores


class TransformerLayer(nn.Module):
    """Causal attention, then a network of two linear layers; both residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mixing = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.mixing = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        heads = self.query_key_value(self.before_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.mixing(self.before_mixing(x))
        return mixed


def source() -> str:
    """Return the text: the standard library's modules in order of their names, as ASCII."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes().decode("ascii", "ignore")
        if len(text) >= CHARACTERS:
            break
    return text[:CHARACTERS]


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Make a model with random numbers of its own, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


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
        return "needs scikit-learn: pip install -e '.[notebook]'"
    return ""


@dataclass(frozen=True)
class Contestant:
    """Hook, and what it should send.

    Attributes:
        name: Name in ``--hooks``.
        hook: The hook.
        nbytes: Function of each bucket's shapes and the number of ranks: bytes that a rank sends in a step.
        every: Number of steps after which the models themselves are averaged; 0 for never.
    """

    name: str
    hook: NamedHook
    nbytes: Count
    every: int = 0


def summed(world: int) -> float:
    """Return the bytes that a rank sends to sum a tensor over all ranks, over the tensor's bytes.

    >>> summed(2), summed(4)
    (1.0, 1.5)
    """
    return 2 * (world - 1) / world


def _dense(width: int, buckets: Sequence[Bucket], world: int) -> float:
    return width * sum(map(_numel, buckets)) * summed(world)


def _nothing(buckets: Sequence[Bucket], world: int) -> float:
    return 0.0


def _factors(rank: int, width: int, buckets: Sequence[Bucket], world: int) -> float:
    """Count an n × m matrix as (n + m) r numbers where that is less than half of n m, all else uncompressed."""
    return width * sum(_factor(shape, rank) for bucket in buckets for shape in bucket) * summed(world)


def _factor(shape: torch.Size, rank: int) -> int:
    n, m = shape[0], shape.numel() // shape[0]
    r = min(n, m, rank)
    return (n + m) * r if len(shape) > 1 and 2 * (n + m) * r < n * m else n * m


def _square(rank: int, buckets: Sequence[Bucket], world: int) -> float:
    """Count a bucket as one square matrix: twice its side, for each rank of the factors."""
    return FLOAT * sum(2 * rank * math.ceil(math.sqrt(_numel(bucket))) for bucket in buckets) * summed(world)


def _levels(width: int, buckets: Sequence[Bucket], world: int) -> float:
    """Count a byte a number, in padded rows of `width` with a scale and a zero each, from every rank to every other."""
    rows = [(math.ceil(_numel(bucket) / (width or _numel(bucket))), width or _numel(bucket)) for bucket in buckets]
    return (world - 1) * sum(count * (each + SCALE) for count, each in rows)


def _every(every: int, buckets: Sequence[Bucket], world: int) -> float:
    return _dense(FLOAT, buckets, world) / every


def _numel(bucket: Bucket) -> int:
    return sum(shape.numel() for shape in bucket)


_ALL = (
    Contestant("none", HOOKS["none"], partial(_dense, FLOAT)),
    Contestant("allreduce", HOOKS["allreduce"], partial(_dense, FLOAT)),
    Contestant("fp16", HOOKS["fp16"], partial(_dense, HALF)),
    Contestant("bf16", HOOKS["bf16"], partial(_dense, HALF)),
    Contestant("powersgd-1", HOOKS["powerSGD 1"], partial(_factors, 1, FLOAT)),
    Contestant("powersgd-2", HOOKS["powerSGD 2"], partial(_factors, 2, FLOAT)),
    Contestant("powersgd-4", HOOKS["powerSGD 4"], partial(_factors, 4, FLOAT)),
    Contestant("fp16-powersgd-2", replace(HOOKS["powerSGD 2"], around=_WRAPPERS[0]), partial(_factors, 2, HALF)),
    Contestant("bf16-powersgd-2", replace(HOOKS["powerSGD 2"], around=_WRAPPERS[1]), partial(_factors, 2, HALF)),
    Contestant("batched-powersgd-1", NamedHook("powerSGD_hook", "batched_powerSGD_hook", 1), partial(_square, 1)),
    Contestant("quantize-tensor", NamedHook(_LEVELS, "quantization_pertensor_hook"), partial(_levels, 0)),
    Contestant("quantize-channel", NamedHook(_LEVELS, "quantization_perchannel_hook"), partial(_levels, CHANNEL)),
    # No gradients are sent, but the models are averaged at times.
    Contestant("local-sgd", NamedHook(_DEFAULT, "post_localSGD_hook"), partial(_every, LOCAL_STEPS), LOCAL_STEPS),
    Contestant("noop", HOOKS["noop"], _nothing),
)
CONTESTANTS = {contestant.name: contestant for contestant in _ALL}
