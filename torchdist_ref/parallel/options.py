"""What the reducer is told: which parameters take part, and how DDP was asked to work. Values only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchdist_ref.parallel.bucketing import Caps


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter that takes part, its name, and whether its gradients are sparse."""

    name: str
    parameter: torch.Tensor
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """How DDP was asked to work; the names are those of its arguments."""

    caps: Caps
    find_unused: bool = False
    pointing: bool = False
    static_graph: bool = False
    skip_unused: bool = False
