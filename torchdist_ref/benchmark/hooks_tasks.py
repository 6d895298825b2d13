"""What the hook laboratory trains: handwritten digits, and Python's own source text, character by character.

Both are small enough for a notebook and differ in what matters here: the convolutional network has 40 KB of gradients,
the transformer 3.8 MB. A task is data and a model, the same on every rank and in every run; it knows nothing of ranks
but how a batch divides among them. A third task: a class with the same four methods, and a line in `TASKS`.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
_CONTEXT, _WIDTH, _HEADS, _LAYERS = 64, 192, 4, 2
_SYMBOLS = 128
_CHARACTERS = 1_000_000


class Task(Protocol):
    """Data, a model, and how it learns."""

    def model(self) -> nn.Module:
        """A new model, with the same weights every time."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """What moves the weights."""

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """This rank's part of the batch of a step: inputs, and what should come out."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """How wrong the outputs are, on average."""


class Digits:
    """1797 pictures of 8 × 8 pixels, from scikit-learn, and the tutorial's network of two convolutions.

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
        """Two convolutions and a linear layer."""
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
        """Plain, with momentum."""
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """32 pictures for each rank."""
        rows = _draw(step, len(self.labels), self.each, rank, world)
        return self.images[rows], self.labels[rows]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(outputs, targets)


class Text:
    """A million characters of the standard library's own modules, and a transformer that guesses the next one.

    >>> Text().characters[:3].tolist() == [ord(symbol) for symbol in source()[:3]]
    True
    """

    each = 4

    def __init__(self) -> None:
        self.characters = torch.tensor(list(source().encode("ascii")))

    def model(self) -> nn.Module:
        """Two layers, 192 wide."""
        return seeded(Transformer)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adam's, without decay."""
        return torch.optim.Adam(model.parameters(), lr=2e-3)

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """4 pieces of 64 characters for each rank."""
        starts = _draw(step, len(self.characters) - _CONTEXT, self.each, rank, world)
        pieces = self.characters[starts[:, None] + torch.arange(_CONTEXT + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, a character."""
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Transformer(nn.Module):
    """Scores of the next character at every place of a text; each place sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(_SYMBOLS, _WIDTH)
        self.place = nn.Embedding(_CONTEXT, _WIDTH)
        self.layers = nn.Sequential(*(_Layer() for _ in range(_LAYERS)))
        self.scores = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _SYMBOLS))

    def forward(self, text: Tensor) -> Tensor:
        """Scores (batch, place, symbol) for characters (batch, place)."""
        embedded = self.symbol(text) + self.place.weight[: text.size(1)]
        scores: Tensor = self.scores(self.layers(embedded))
        return scores


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mixing = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.questions = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.answer = nn.Linear(_WIDTH, _WIDTH)
        self.mixing = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.questions(self.before_attention(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.answer(seen.transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.mixing(self.before_mixing(x))
        return mixed


def source() -> str:
    """The text: the standard library's modules in order of their names, ASCII, as many characters as are used."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes().decode("ascii", "ignore")
        if len(text) >= _CHARACTERS:
            break
    return text[:_CHARACTERS]


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What is made has the same random numbers every time, and leaves those of others alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _draw(step: int, count: int, each: int, rank: int, world: int) -> Tensor:
    """This rank's share of what a step draws from `count` things. All ranks draw alike, and take different parts."""
    drawn = torch.randint(count, (world * each,), generator=torch.Generator().manual_seed(step))
    return drawn[rank::world]


TASKS: dict[str, type[Digits] | type[Text]] = {"digits": Digits, "text": Text}


def missing(name: str) -> str:
    """What a task lacks on this machine; empty where it can run.

    >>> missing("text")
    ''
    """
    if name == "digits" and importlib.util.find_spec("sklearn") is None:
        return "needs scikit-learn: pip install 'torchdist_ref[notebook]'"
    return ""
