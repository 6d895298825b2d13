"""Small models, and a training loop for any DistributedDataParallel: torch's, ours, or none."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchdist_ref.errors import message_of
from torchdist_ref.testing import run

# torch's DDP imports this when it is first built, which takes seconds: once here, not in every forked rank.
import torch._dynamo  # isort: skip


def forked(fn: Callable[..., Any], world: int, *args: Any, **kw: Any) -> list[Any]:
    """Run on processes, which must not inherit garbage: torch's backends, when collected, wait for their threads."""
    gc.collect()
    # 4 s of computation or imports become 30 s where each core has many processes.
    kw.setdefault("timeout", 90.0)
    return run(fn, world, *args, ranks="processes", **kw)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)),
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


class Transformer(nn.Module):
    """One attention layer over four tokens of three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x.view(-1, 4, 3))).mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "convnet": convnet, "transformer": Transformer}


# Ranks that are threads share torch's random numbers.
_one_at_a_time = threading.Lock()


def build(name: str) -> nn.Module:
    with _one_at_a_time, torch.random.fork_rng():
        torch.manual_seed(5)
        return MODELS[name]()


def batch(rank: int, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 12, generator=generator), torch.randint(4, (size,), generator=generator)


def update(model: nn.Module, momenta: list[Tensor], rate: float = 0.1) -> None:
    """SGD with momentum; torch.optim would import its compiler in every forked rank."""
    with torch.no_grad():
        for parameter, momentum in zip(model.parameters(), momenta, strict=True):
            if parameter.grad is not None:
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_(momentum, alpha=rate)


def clear(model: nn.Module, step: int) -> None:
    """Set gradients to None at even steps and to zero at odd ones."""
    for parameter in model.parameters():
        if step % 2 == 0:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def train(wrap: Callable[..., Any], name: str, rank: int, steps: int, **kw: Any) -> tuple[Tensor, Tensor, Any]:
    """Train; return losses of every step, all states at the end, and the wrapped model."""
    model = build(name)
    wrapped = wrap(model, **kw)
    momenta = [torch.zeros_like(p) for p in model.parameters()]
    losses = []
    for step in range(steps):
        clear(model, step)
        inputs, labels = batch(rank, step)
        loss = nn.functional.cross_entropy(wrapped(inputs), labels)
        loss.backward()
        update(model, momenta)
        losses.append(loss.detach())
    return torch.stack(losses), torch.cat([t.detach().flatten().float() for t in model.state_dict().values()]), wrapped


def caught_by_others(call: Callable[[], object], rank: int, told: threading.Event) -> str:
    """Return the text of the error that a call raises. Rank 1, which fails first, lives on until rank 0 has failed."""
    try:
        call()
    except BaseException as error:
        if rank == 0:
            told.set()
        elif not told.wait(10):
            return "rank 0 was not told"
        return message_of(error)
    return "no error"
